//! Replicas, where they are set: a Deployment's scale in Kubernetes, or a command of the operator's.

use crate::error::{CliError, chain};
use std::fmt;
use std::process::Stdio;
use std::str::FromStr;
use std::time::Duration;
use tokio::process::Command;
use tokio::time::timeout;
use triptych_plan::online::Replicas;
use triptych_runtime::discovery::kubernetes::{ApiServer, Scaler};

/// How long the operator's command may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// `--apply`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApplyTo {
    /// Of Kubernetes.
    pub namespace: String,
}

impl FromStr for ApplyTo {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("kubernetes:") {
            Some(namespace) if !namespace.is_empty() => Ok(Self { namespace: namespace.to_owned() }),
            _ => Err("allowed is kubernetes:NAMESPACE; elsewhere use --apply-command".to_owned()),
        }
    }
}

/// A command with places for `{pool}` and `{replicas}`; words are separated by spaces, no shell reads them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template(Vec<String>);

impl FromStr for Template {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        let has = |place: &str| words.iter().any(|word| word.contains(place));
        match has("{pool}") && has("{replicas}") && !words[0].contains('{') {
            true => Ok(Self(words)),
            false => Err("needed is a program, and {pool} and {replicas} among its words".to_owned()),
        }
    }
}

impl Template {
    fn filled(&self, pool: &str, replicas: usize) -> Vec<String> {
        let fill = |word: &String| word.replace("{pool}", pool).replace("{replicas}", &replicas.to_string());
        self.0.iter().map(fill).collect()
    }
}

/// Names of the pools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pools {
    /// Of encoder workers.
    pub encoders: String,
    /// Of PD workers.
    pub pds: String,
}

/// Where replicas are set.
pub enum Target {
    /// Nowhere: it is only told.
    Nowhere,
    /// By Kubernetes.
    Kubernetes(Scaler, Pools),
    /// By a command.
    Command(Template, Pools),
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nowhere => "Nowhere",
            Self::Kubernetes(..) => "Kubernetes",
            Self::Command(..) => "Command",
        })
    }
}

impl Target {
    /// In the namespace of the cluster that this process runs in.
    ///
    /// # Errors
    /// [`CliError::Setting`] outside of Kubernetes.
    pub fn kubernetes(to: &ApplyTo, pools: Pools) -> Result<Self, CliError> {
        let wrong = |e: &dyn std::error::Error| CliError::setting("--apply", e);
        let server = ApiServer::in_cluster().map_err(|e| wrong(&e))?;
        let scaler = Scaler::new(server, &to.namespace).map_err(|e| wrong(&e))?;
        Ok(Self::Kubernetes(scaler, pools))
    }

    /// What there is, where that can be asked.
    ///
    /// # Errors
    /// [`CliError::Failed`] if the API server does not tell.
    pub async fn current(&self) -> Result<Option<Replicas>, CliError> {
        let Self::Kubernetes(scaler, pools) = self else { return Ok(None) };
        let ask = async |name: &str| {
            let replicas = scaler.replicas(name).await;
            let n = replicas.map_err(|e| CliError::Failed(chain(&e)))?;
            Ok::<_, CliError>(usize::try_from(n).unwrap_or(usize::MAX))
        };
        Ok(Some(Replicas { encoders: ask(&pools.encoders).await?, pds: ask(&pools.pds).await? }))
    }

    /// Sets what differs.
    ///
    /// # Errors
    /// [`CliError::Failed`] if it was not set; some of it may have been.
    pub async fn set(&self, from: Replicas, to: Replicas) -> Result<(), CliError> {
        let pools = match self {
            Self::Nowhere => return Ok(()),
            Self::Kubernetes(_, pools) | Self::Command(_, pools) => pools,
        };
        for (pool, from, to) in
            [(&pools.encoders, from.encoders, to.encoders), (&pools.pds, from.pds, to.pds)]
        {
            if from != to {
                self.set_one(pool, to).await?;
            }
        }
        Ok(())
    }

    async fn set_one(&self, pool: &str, replicas: usize) -> Result<(), CliError> {
        match self {
            Self::Nowhere => Ok(()),
            Self::Kubernetes(scaler, _) => {
                let n = u32::try_from(replicas).unwrap_or(u32::MAX);
                scaler.set(pool, n).await.map(drop).map_err(|e| CliError::Failed(chain(&e)))
            }
            Self::Command(template, _) => command(&template.filled(pool, replicas)).await,
        }
    }
}

async fn command(words: &[String]) -> Result<(), CliError> {
    let shown = words.join(" ");
    let failed = |what: String| CliError::Failed(format!("--apply-command {shown}: {what}"));
    let (program, args) = words.split_first().ok_or_else(|| failed("no program".into()))?;
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).kill_on_drop(true);
    let ended = timeout(PATIENCE, command.status()).await;
    let ended = ended.map_err(|_| failed(format!("did not end within {PATIENCE:?}")))?;
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
    fn commands_and_targets_are_read_and_what_is_neither_is_told() {
        let template: Template = "./scale.sh --pool={pool} {replicas}".parse().unwrap();
        assert_eq!(template.filled("pd", 3), ["./scale.sh", "--pool=pd", "3"]);
        for bad in ["", "scale {pool}", "scale {replicas}", "{pool} {replicas}"] {
            assert!(bad.parse::<Template>().unwrap_err().contains("{pool} and {replicas}"), "{bad}");
        }
        assert_eq!("kubernetes:prod".parse(), Ok(ApplyTo { namespace: "prod".into() }));
        assert!("docker:x".parse::<ApplyTo>().unwrap_err().contains("kubernetes:NAMESPACE"));
    }

    #[tokio::test]
    async fn a_command_is_run_for_each_pool_that_changes_and_its_failure_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("{pool}-{replicas}");
        let pools = Pools { encoders: "e".into(), pds: "p".into() };
        let touch: Template = format!("touch {}", file.display()).parse().unwrap();
        let target = Target::Command(touch, pools.clone());
        let at = |encoders, pds| Replicas { encoders, pds };
        target.set(at(1, 2), at(3, 2)).await.unwrap();
        assert!(dir.path().join("e-3").exists() && !dir.path().join("p-2").exists());
        let target = Target::Command("false {pool} {replicas}".parse().unwrap(), pools);
        let told = target.set(at(1, 2), at(1, 3)).await.unwrap_err().to_string();
        assert!(told.contains("false p 3"), "{told}");
    }
}
