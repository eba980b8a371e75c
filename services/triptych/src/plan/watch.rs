//! `triptych plan --watch`: flags of the autoscaler, and its lines.

use super::output::print;
use super::question::QuestionArgs;
use crate::error::CliError;
use crate::up::encoders::{EncoderWorkers, NotEncoderWorkers};
use clap::Args;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use triptych_bench::error::MeasureError;
use triptych_plan::online::apply::{ApplyTo, CommandTemplate, Pools, ReplicaTarget};
use triptych_plan::online::roles::RoleChanges;
use triptych_plan::online::watch::{WatchSettings, watch};
use triptych_plan::online::{Replicas, Rules};
use triptych_plan::planner::TowerWorkers;

/// Flags of `--watch`.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Beside a running cluster")]
pub struct WatchArgs {
    /// URL of the proxy's metrics, as in http://127.0.0.1:8080/metrics: report at each interval how many workers there should
    /// be. If a name has several addresses, each is a proxy, and their counters are added
    #[arg(long, value_name = "URL")]
    pub watch: Option<String>,
    /// Seconds between two observations
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub interval_s: u64,
    /// Number of observations; 0: no limit
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub observations: u64,
    /// Current encoder workers: a number, or one for each tower whose workers are a pool of their own, as in low:2,high:1; with
    /// --apply, Kubernetes reports them
    #[arg(long, value_name = "N|TOWERS", default_value_t = EncoderWorkers::Alike(1), value_parser = encoders)]
    pub encoders: EncoderWorkers,
    /// Current PD workers; with --apply, Kubernetes reports them
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub pds: usize,
    /// Factor on the observed rate: 1.25 leaves a fifth of each worker free
    #[arg(long, value_name = "X", default_value_t = 1.25, value_parser = at_least_one)]
    pub headroom: f64,
    /// Smallest change of a pool, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 10, value_parser = clap::value_parser!(u32).range(..=1000))]
    pub min_change: u32,
    /// Consecutive observations that must need a change
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub for_observations: u32,
    /// Largest change of a pool at once, in workers
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub max_step: usize,
    /// Seconds after a change in which nothing changes
    #[arg(long, value_name = "S", default_value_t = 300)]
    pub cooldown_s: u64,
    /// Workers of each pool, at least
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub min: usize,
    /// Workers of each pool, at most
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max: usize,
    /// Apply changes. kubernetes:NAMESPACE: set the replicas, from a pod whose account may get and patch deployments/scale, and the
    /// roles of workers that hold encoder and decoder; roles: these alone, through the admin API at the port of --watch
    #[arg(long, value_name = "TARGET", requires = "watch", conflicts_with = "apply_command")]
    pub apply: Option<ApplyTo>,
    /// Set the replicas by a command, as in './scale.sh {pool} {replicas}'
    #[arg(long, value_name = "COMMAND", requires = "watch")]
    pub apply_command: Option<CommandTemplate>,
    /// File with the token of the proxies' admin API
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_ADMIN_TOKEN_FILE")]
    pub admin_token_file: Option<PathBuf>,
    /// Deployment of the encoder workers, and what {pool} is for them; of towers with pools of their own TOWER=NAME,…, otherwise
    /// NAME-TOWER; empty: there is none, workers of --pd-deployment hold both
    #[arg(long, value_name = "NAME", default_value = "encoder", value_delimiter = ',')]
    pub encoder_deployment: Vec<String>,
    /// Deployment of the PD workers, and what {pool} is for them
    #[arg(long, value_name = "NAME", default_value = "pd")]
    pub pd_deployment: String,
}

fn at_least_one(text: &str) -> Result<f64, String> {
    let read = text.parse().ok().filter(|x: &f64| (1.0..=10.0).contains(x));
    read.ok_or_else(|| "allowed are numbers from 1 to 10".to_owned())
}

fn encoders(text: &str) -> Result<EncoderWorkers, NotEncoderWorkers> {
    EncoderWorkers::within(u16::MAX, text)
}

/// The pools of encoder workers.
#[derive(Debug, PartialEq, Eq)]
struct EncoderPools {
    /// The tower of each; none: one pool has all, or there is none.
    towers: Vec<String>,
    /// Current workers of each.
    workers: Vec<usize>,
    /// Deployment of each.
    deployments: Vec<String>,
}

impl WatchArgs {
    /// The pools of encoder workers, of a model with these towers, in their order.
    fn encoder_pools(&self, towers: &[&str]) -> Result<EncoderPools, CliError> {
        let (of_towers, plain): (Vec<_>, Vec<_>) =
            self.encoder_deployment.iter().partition(|name| name.contains('='));
        let base = plain.first().map_or("encoder", |name| name.as_str());
        let of_towers: Vec<_> = of_towers.iter().filter_map(|name| name.split_once('=')).collect();
        let alike = match &self.encoders {
            EncoderWorkers::Alike(_) if base.is_empty() => {
                return Ok(EncoderPools { towers: Vec::new(), workers: Vec::new(), deployments: Vec::new() });
            }
            EncoderWorkers::Alike(n) if of_towers.is_empty() => {
                return Ok(EncoderPools {
                    towers: Vec::new(),
                    workers: vec![usize::from(*n)],
                    deployments: vec![base.to_owned()],
                });
            }
            EncoderWorkers::Alike(n) => usize::from(*n),
            EncoderWorkers::ByTower(_) => 0,
        };
        let unknown = of_towers.iter().find(|(tower, _)| !towers.contains(tower));
        let fault = match (towers, unknown) {
            ([] | [_], _) => Some("the curves are of one encoder: give a number and a NAME".to_owned()),
            (_, Some((tower, _))) => {
                Some(format!("no tower is named {tower:?}, they are {}", towers.join(" and ")))
            }
            (_, None) => self.encoders.fault_of(towers),
        };
        if let Some(fault) = fault {
            let named = self.encoder_deployment.join(",");
            return Err(CliError::Setting(format!(
                "--encoders {} --encoder-deployment {named}: {fault}",
                self.encoders
            )));
        }
        let workers = |tower: &&str| match &self.encoders {
            EncoderWorkers::Alike(_) => alike,
            EncoderWorkers::ByTower(of) => {
                of.iter().find(|(name, _)| name == tower).map_or(0, |(_, n)| usize::from(*n))
            }
        };
        let deployment = |tower: &&str| {
            let named = of_towers.iter().find(|(name, _)| name == tower);
            named.map_or_else(|| format!("{base}-{tower}"), |(_, name)| (*name).to_owned())
        };
        Ok(EncoderPools {
            towers: towers.iter().map(|&tower| tower.to_owned()).collect(),
            workers: towers.iter().map(workers).collect(),
            deployments: towers.iter().map(deployment).collect(),
        })
    }

    fn rules(&self, n_encoder_pools: usize) -> Result<Rules, CliError> {
        if self.min > self.max || self.max == 0 {
            return Err(CliError::Setting(format!(
                "--min {} and --max {}: the minimum must not exceed the maximum, and the maximum is 1 or more",
                self.min, self.max
            )));
        }
        let each = |n| Replicas::each(n, n_encoder_pools);
        Ok(Rules {
            min_change: f64::from(self.min_change) / 1e2,
            observations: self.for_observations,
            max_step: self.max_step.max(1),
            cooldown: Duration::from_secs(self.cooldown_s),
            least: each(self.min),
            most: each(self.max),
        })
    }

    fn target(&self, encoders: Vec<String>) -> Result<ReplicaTarget, CliError> {
        let pools = Pools { encoders, pds: self.pd_deployment.clone() };
        match (&self.apply, &self.apply_command) {
            (Some(ApplyTo::Kubernetes { namespace }), _) => Ok(ReplicaTarget::kubernetes(namespace, pools)?),
            (Some(ApplyTo::Roles), _) => Ok(ReplicaTarget::Nowhere),
            (None, Some(template)) => Ok(ReplicaTarget::Command(template.clone(), pools)),
            (None, None) => Ok(ReplicaTarget::Nowhere),
        }
    }

    fn role_changes(&self) -> RoleChanges {
        match (&self.apply, &self.apply_command) {
            (None, None) => RoleChanges::Reported,
            (Some(_), _) | (None, Some(_)) => RoleChanges::Applied,
        }
    }

    fn token(&self) -> Result<Option<String>, CliError> {
        let Some(file) = &self.admin_token_file else { return Ok(None) };
        let read = std::fs::read_to_string(file).map(|text| text.trim().to_owned());
        read.map(Some).map_err(|e| CliError::setting(format!("--admin-token-file {}", file.display()), &e))
    }
}

/// The pools of encoder workers, of the model that the curves are of.
fn pools_of_curves(args: &WatchArgs, question: &QuestionArgs) -> Result<EncoderPools, CliError> {
    let inputs = question.read()?;
    let encoders = inputs.curves.first().into_iter().flat_map(|curves| curves.encoders());
    args.encoder_pools(&encoders.map(|encoder| encoder.name).collect::<Vec<_>>())
}

/// Watches until it is stopped.
///
/// # Errors
/// [`CliError::Setting`] for settings that cannot work. Later trouble is reported, and the watch goes on.
pub async fn run(args: &WatchArgs, question: &QuestionArgs, json: bool) -> Result<(), CliError> {
    args.rules(1)?;
    let EncoderPools { towers, workers, deployments } = pools_of_curves(args, question)?;
    let settings = WatchSettings {
        url: args.watch.clone().unwrap_or_default(),
        token: args.token()?,
        roles: args.role_changes(),
        interval: Duration::from_secs(args.interval_s),
        n_observations: Some(args.observations).filter(|n| *n > 0),
        headroom: args.headroom,
        replicas: Replicas { encoders: TowerWorkers::new(&workers), pds: args.pds },
        most: Replicas::each(args.max, workers.len().max(1)),
        rules: args.rules(workers.len())?,
        towers,
    };
    let report = |text: &str, fields: &serde_json::Value| {
        if json { print::<MeasureError>(&format!("{fields}\n")) } else { print(&format!("{text}\n")) }
    };
    let question = question.clone();
    let inputs = Arc::new(move || question.read().map_err(MeasureError::from));
    Ok(watch(settings, inputs, args.target(deployments)?, &report).await?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        watch: WatchArgs,
    }

    fn pools(flags: &[&str], towers: &[&str]) -> Result<EncoderPools, String> {
        let flags = [&["x", "--watch", "http://x"], flags].concat();
        Flags::parse_from(flags).watch.encoder_pools(towers).map_err(|e| e.to_string())
    }

    #[test]
    fn encoders_are_one_pool_or_one_of_each_tower_in_the_order_of_the_model() {
        let check = |flags: &[&str], expect: (&[&str], &[usize], &[&str])| {
            let found = pools(flags, &["low", "high"]).expect("pools");
            let names = |names: &[String]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
            assert_eq!(names(&found.towers), expect.0, "{flags:?}");
            assert_eq!(found.workers, expect.1, "{flags:?}");
            assert_eq!(names(&found.deployments), expect.2, "{flags:?}");
        };
        check(&["--encoders", "3"], (&[], &[3], &["encoder"]));
        check(&["--encoder-deployment", "vl"], (&[], &[1], &["vl"]));
        check(&["--encoder-deployment", ""], (&[], &[], &[]));
        let apart = (&["low", "high"][..], &[2, 1][..], &["vl-low", "vl-high"][..]);
        check(&["--encoders", "high:1,low:2", "--encoder-deployment", "vl"], apart);
        check(&["--encoder-deployment", "high=b,low=a"], (&["low", "high"], &[1, 1], &["a", "b"]));
    }

    #[test]
    fn towers_that_are_not_there_are_named() {
        let fault = |flags: &[&str], towers: &[&str]| pools(flags, towers).expect_err("a mistake");
        let both = ["low", "high"];
        assert!(fault(&["--encoders", "low:1"], &both).contains("no worker would hold tower high"));
        assert!(fault(&["--encoder-deployment", "deep=d"], &both).contains("no tower is named \"deep\""));
        assert!(fault(&["--encoders", "low:1,high:1"], &[""]).contains("the curves are of one encoder"));
    }
}
