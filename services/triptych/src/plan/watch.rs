//! `triptych plan --watch`: flags of the autoscaler, and its lines.

use super::output::print;
use super::question::QuestionArgs;
use crate::error::CliError;
use clap::Args;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use triptych_bench::error::MeasureError;
use triptych_plan::online::apply::{ApplyTo, CommandTemplate, Pools, ReplicaTarget};
use triptych_plan::online::roles::RoleChanges;
use triptych_plan::online::watch::{WatchSettings, watch};
use triptych_plan::online::{Replicas, Rules};

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
    /// Current encoder workers; with --apply, Kubernetes reports them
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub encoders: usize,
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
    /// Workers of each kind, at least
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub min: usize,
    /// Workers of each kind, at most
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
    /// Deployment of the encoder workers, and what {pool} is for them; empty: there is none, workers of --pd-deployment hold both
    #[arg(long, value_name = "NAME", default_value = "encoder")]
    pub encoder_deployment: String,
    /// Deployment of the PD workers, and what {pool} is for them
    #[arg(long, value_name = "NAME", default_value = "pd")]
    pub pd_deployment: String,
}

fn at_least_one(text: &str) -> Result<f64, String> {
    let read = text.parse().ok().filter(|x: &f64| (1.0..=10.0).contains(x));
    read.ok_or_else(|| "allowed are numbers from 1 to 10".to_owned())
}

impl WatchArgs {
    fn rules(&self) -> Result<Rules, CliError> {
        if self.min > self.max || self.max == 0 {
            return Err(CliError::Setting(format!(
                "--min {} and --max {}: the minimum must not exceed the maximum, and the maximum is 1 or more",
                self.min, self.max
            )));
        }
        let each = |n| self.of_pools(Replicas { encoders: n, pds: n });
        Ok(Rules {
            min_change: f64::from(self.min_change) / 1e2,
            observations: self.for_observations,
            max_step: self.max_step.max(1),
            cooldown: Duration::from_secs(self.cooldown_s),
            least: each(self.min),
            most: each(self.max),
        })
    }

    /// The same without encoder workers where there is no pool of them.
    fn of_pools(&self, replicas: Replicas) -> Replicas {
        match self.encoder_deployment.as_str() {
            "" => Replicas { encoders: 0, ..replicas },
            _ => replicas,
        }
    }

    fn target(&self) -> Result<ReplicaTarget, CliError> {
        let encoders = Some(self.encoder_deployment.clone()).filter(|name| !name.is_empty());
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

/// Watches until it is stopped.
///
/// # Errors
/// [`CliError::Setting`] for settings that cannot work. Later trouble is reported, and the watch goes on.
pub async fn run(args: &WatchArgs, question: &QuestionArgs, json: bool) -> Result<(), CliError> {
    let settings = WatchSettings {
        url: args.watch.clone().unwrap_or_default(),
        token: args.token()?,
        roles: args.role_changes(),
        interval: Duration::from_secs(args.interval_s),
        n_observations: Some(args.observations).filter(|n| *n > 0),
        headroom: args.headroom,
        replicas: args.of_pools(Replicas { encoders: args.encoders, pds: args.pds }),
        most: Replicas { encoders: args.max, pds: args.max },
        rules: args.rules()?,
    };
    let report = |text: &str, fields: &serde_json::Value| {
        if json { print::<MeasureError>(&format!("{fields}\n")) } else { print(&format!("{text}\n")) }
    };
    let question = question.clone();
    let inputs = Arc::new(move || question.read().map_err(MeasureError::from));
    Ok(watch(settings, inputs, args.target()?, &report).await?)
}
