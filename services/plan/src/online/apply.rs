//! Sets replicas: the scale of a Deployment in Kubernetes, or a command of the operator's.

use super::controller::Replicas;
use crate::planner::TowerWorkers;
use std::fmt;
use std::process::Stdio;
use std::str::FromStr;
use std::time::Duration;
use tokio::process::Command;
use tokio::time::timeout;
use triptych_bench::error::{MeasureError, chain};
use triptych_runtime::discovery::kubernetes::{ApiServer, Scaler};

/// Limit for the operator's command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(120);

/// Target of changes, as in `kubernetes:NAMESPACE` or `roles`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApplyTo {
    /// Deployments in a namespace of Kubernetes, and roles.
    Kubernetes {
        /// Kubernetes namespace.
        namespace: String,
    },
    /// Roles of workers that hold encoder and decoder, and no replicas.
    Roles,
}

impl FromStr for ApplyTo {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("kubernetes:") {
            Some(namespace) if !namespace.is_empty() => {
                Ok(Self::Kubernetes { namespace: namespace.to_owned() })
            }
            _ if text == "roles" => Ok(Self::Roles),
            _ => Err("allowed are kubernetes:NAMESPACE and roles; elsewhere use --apply-command".to_owned()),
        }
    }
}

/// A command with placeholders `{pool}` and `{replicas}`; words are separated by spaces, no shell reads them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandTemplate(Vec<String>);

impl FromStr for CommandTemplate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        let has = |placeholder: &str| words.iter().any(|word| word.contains(placeholder));
        match has("{pool}") && has("{replicas}") && !words[0].contains('{') {
            true => Ok(Self(words)),
            false => Err("needed is a program, and {pool} and {replicas} among its words".to_owned()),
        }
    }
}

impl CommandTemplate {
    fn filled(&self, pool: &str, replicas: usize) -> Vec<String> {
        let fill = |word: &String| word.replace("{pool}", pool).replace("{replicas}", &replicas.to_string());
        self.0.iter().map(fill).collect()
    }
}

/// Names of the pools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pools {
    /// Names of the encoder pools: of one, or of one for each tower; none: workers of the PD pool encode too.
    pub encoders: Vec<String>,
    /// Name of the PD pool.
    pub pds: String,
}

/// Kinds of pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolKinds {
    /// One of encoder workers and one of PD workers.
    Two,
    /// One of workers that hold both.
    One,
}

impl PoolKinds {
    /// Replicas of the pools that have so many encoders and PD workers together.
    pub fn of(self, replicas: Replicas) -> Replicas {
        match self {
            Self::Two => replicas,
            Self::One => Replicas::each(replicas.total(), 0),
        }
    }
}

/// Receiver of replica changes.
pub enum ReplicaTarget {
    /// Changes are only reported.
    Nowhere,
    /// Deployments of Kubernetes.
    Kubernetes(Scaler, Pools),
    /// A command.
    Command(CommandTemplate, Pools),
}

impl fmt::Debug for ReplicaTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nowhere => "Nowhere",
            Self::Kubernetes(..) => "Kubernetes",
            Self::Command(..) => "Command",
        })
    }
}

impl ReplicaTarget {
    /// Deployments in a namespace of the cluster that this process runs in.
    ///
    /// # Errors
    /// [`MeasureError::Setting`] outside of Kubernetes.
    pub fn kubernetes(namespace: &str, pools: Pools) -> Result<Self, MeasureError> {
        let wrong = |e: &dyn std::error::Error| MeasureError::setting("--apply", e);
        let server = ApiServer::in_cluster().map_err(|e| wrong(&e))?;
        let scaler = Scaler::new(server, namespace).map_err(|e| wrong(&e))?;
        Ok(Self::Kubernetes(scaler, pools))
    }

    /// True if it sets replicas.
    pub fn sets_replicas(&self) -> bool {
        !matches!(self, Self::Nowhere)
    }

    /// Its pools.
    pub fn pools(&self) -> PoolKinds {
        match self {
            Self::Kubernetes(_, pools) | Self::Command(_, pools) if pools.encoders.is_empty() => {
                PoolKinds::One
            }
            Self::Kubernetes(..) | Self::Command(..) | Self::Nowhere => PoolKinds::Two,
        }
    }

    /// Current replicas; `None` if the target does not report them.
    ///
    /// # Errors
    /// [`MeasureError::Failed`] if the API server does not answer.
    pub async fn current(&self) -> Result<Option<Replicas>, MeasureError> {
        let Self::Kubernetes(scaler, pools) = self else { return Ok(None) };
        let ask = async |name: &str| {
            let replicas = scaler.replicas(name).await;
            let n = replicas.map_err(|e| MeasureError::Failed(chain(&e)))?;
            Ok::<_, MeasureError>(usize::try_from(n).unwrap_or(usize::MAX))
        };
        let mut encoders = Vec::new();
        for name in &pools.encoders {
            encoders.push(ask(name).await?);
        }
        Ok(Some(Replicas { encoders: TowerWorkers::new(&encoders), pds: ask(&pools.pds).await? }))
    }

    /// Sets the replicas that differ.
    ///
    /// # Errors
    /// [`MeasureError::Failed`] if it was not set; some of it may have been.
    pub async fn set(&self, from: Replicas, to: Replicas) -> Result<(), MeasureError> {
        let pools = match self {
            Self::Nowhere => return Ok(()),
            Self::Kubernetes(_, pools) | Self::Command(_, pools) => pools,
        };
        let names = pools.encoders.iter().chain([&pools.pds]);
        for ((pool, from), to) in names.zip(from.pools()).zip(to.pools()) {
            if from != to {
                self.set_one(pool, to).await?;
            }
        }
        Ok(())
    }

    async fn set_one(&self, pool: &str, replicas: usize) -> Result<(), MeasureError> {
        match self {
            Self::Nowhere => Ok(()),
            Self::Kubernetes(scaler, _) => {
                let n = u32::try_from(replicas).unwrap_or(u32::MAX);
                scaler.set(pool, n).await.map(drop).map_err(|e| MeasureError::Failed(chain(&e)))
            }
            Self::Command(template, _) => command(&template.filled(pool, replicas)).await,
        }
    }
}

async fn command(words: &[String]) -> Result<(), MeasureError> {
    let shown = words.join(" ");
    let failed = |what: String| MeasureError::Failed(format!("--apply-command {shown}: {what}"));
    let (program, args) = words.split_first().ok_or_else(|| failed("no program".into()))?;
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).kill_on_drop(true);
    let ended = timeout(COMMAND_TIMEOUT, command.status()).await;
    let ended = ended.map_err(|_| failed(format!("did not end within {COMMAND_TIMEOUT:?}")))?;
    match ended {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(failed(status.to_string())),
        Err(e) => Err(failed(e.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_targets_are_parsed_and_mistakes_are_named() {
        let template: CommandTemplate = "./scale.sh --pool={pool} {replicas}".parse().unwrap();
        assert_eq!(template.filled("pd", 3), ["./scale.sh", "--pool=pd", "3"]);
        for bad in ["", "scale {pool}", "scale {replicas}", "{pool} {replicas}"] {
            assert!(bad.parse::<CommandTemplate>().unwrap_err().contains("{pool} and {replicas}"), "{bad}");
        }
        assert_eq!("kubernetes:prod".parse(), Ok(ApplyTo::Kubernetes { namespace: "prod".into() }));
        assert_eq!("roles".parse(), Ok(ApplyTo::Roles));
        assert!("docker:x".parse::<ApplyTo>().unwrap_err().contains("kubernetes:NAMESPACE"));
    }

    #[tokio::test]
    async fn a_command_runs_for_each_pool_that_changes_and_its_failure_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("{pool}-{replicas}");
        let pools = Pools { encoders: vec!["low".into(), "high".into()], pds: "p".into() };
        let touch: CommandTemplate = format!("touch {}", file.display()).parse().unwrap();
        let target = ReplicaTarget::Command(touch.clone(), pools.clone());
        let at = |low, high, pds| Replicas { encoders: TowerWorkers::new(&[low, high]), pds };
        target.set(at(1, 1, 2), at(1, 3, 2)).await.unwrap();
        let is_set = |name: &str| dir.path().join(name).exists();
        assert!(is_set("high-3") && !is_set("low-1") && !is_set("p-2"));
        // One pool of workers with both: its workers are those of both kinds.
        let one = ReplicaTarget::Command(touch, Pools { encoders: Vec::new(), pds: "both".into() });
        one.set(Replicas::each(2, 0), one.pools().of(Replicas::new(1, 3))).await.unwrap();
        assert!(is_set("both-4"));
        let target = ReplicaTarget::Command("false {pool} {replicas}".parse().unwrap(), pools);
        let error = target.set(at(1, 1, 2), at(1, 1, 3)).await.unwrap_err().to_string();
        assert!(error.contains("false p 3"), "{error}");
    }
}
