//! Flags of the commands that start clusters to compare them.

use crate::args::engine::TPOT_SLO;
use crate::args::{EcArg, ModelArgs};
use crate::error::{CliError, chain};
use crate::shared_dir::SharedDir;
use clap::Args;
use std::path::{Path, PathBuf};
use std::time::Duration;
use triptych_bench::topology::{CoreList, Topology, affinity};
use triptych_core::limits::Limits;

/// The flag of curves that workers take their time from.
pub(super) const TIMED_BY: &str = "--timed-by";

/// Flags of whatever starts clusters to compare them.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Clusters that are started to be compared")]
pub struct TopologyArgs {
    /// Clusters to start and compare, each with the same cores: `1e1pd` (any `NeMpd`), `dp2` (any `dpN`: workers with
    /// encoder and decoder), `elastic2` (any `elasticN`: the same, and the proxy shifts encodes among them), `colocated` (one such worker); `colocated:budget=N` sets its --encoder-token-budget
    #[arg(long = "topology", value_name = "NAME,…", env = "TRIPTYCH_TOPOLOGY", value_delimiter = ',')]
    pub topologies: Vec<Topology>,
    /// Cores of the workers of each cluster, as in `0-3`. Default: all that this process may use
    #[arg(long, value_name = "CORES", env = "TRIPTYCH_CORES")]
    pub cores: Option<CoreList>,
    /// Cores of proxy, store and load generator, which are the same for all. Default: all that this process may use
    #[arg(long, value_name = "CORES", env = "TRIPTYCH_SIDE_CORES")]
    pub side_cores: Option<CoreList>,
    /// Store of encoder outputs of each cluster; in `shm`, the default, and `disk:DIR` each has a place of its own
    #[arg(long = "ec", value_name = "STORE", default_value = "shm", env = crate::args::EC_VARIABLE, hide_env_values = true)]
    pub ec: EcArg,
    /// Folder for the workers' logs. Default: one that is removed at the end
    #[arg(long, value_name = "DIR", env = "TRIPTYCH_BENCH_LOGS")]
    pub worker_logs: Option<PathBuf>,
    /// More flags for every encoder and PD worker, as in `--worker-flags "--kv-mib 256"`
    #[arg(long, value_name = "FLAGS", default_value = "", allow_hyphen_values = true)]
    pub worker_flags: String,
    /// TPOT SLO that PD workers are told, unless the flags above say so; `None`: none
    #[arg(skip)]
    pub tpot_slo: Option<Duration>,
    /// File for the workers' timelines; `None`: none
    #[arg(skip)]
    pub timeline: Option<PathBuf>,
    /// Models and computation
    #[command(flatten)]
    pub models: ModelArgs,
}

impl TopologyArgs {
    /// Cores of workers, and of everything else.
    ///
    /// # Errors
    /// [`CliError::Setting`] for cores that this process may not use.
    pub fn core_lists(&self) -> Result<(CoreList, CoreList), CliError> {
        let own = affinity::own_cores()?;
        let checked = |flag: &str, given: &Option<CoreList>| {
            let Some(given) = given else { return Ok(own.clone()) };
            match given.iter().find(|core| own.iter().all(|own| own != *core)) {
                None => Ok(given.clone()),
                Some(core) => Err(CliError::Setting(format!(
                    "{flag} {given}: this process may not use core {core}, only {own}"
                ))),
            }
        };
        Ok((checked("--cores", &self.cores)?, checked("--side-cores", &self.side_cores)?))
    }

    /// TPOT SLO that PD workers are told; `None` where `--worker-flags` have one of their own.
    pub fn told(&self) -> Option<Duration> {
        self.tpot_slo.filter(|_| !self.worker_flags.contains(TPOT_SLO))
    }

    /// Flags of all workers as results record them: those given, and the curves that workers are timed by.
    pub fn recorded_flags(&self) -> String {
        let timed = self.models.compute.timed_by.as_ref();
        let timed = timed.map(|timed| format!("{TIMED_BY} {}", timed.file.display()));
        [self.worker_flags.clone(), timed.unwrap_or_default()].join(" ").trim().to_owned()
    }

    /// Puts this process, the load generator, on its cores.
    ///
    /// # Errors
    /// Those of [`Self::core_lists`].
    pub fn pin_self(&self) -> Result<(), CliError> {
        let (_, side) = self.core_lists()?;
        Ok(affinity::set_own(&side)?)
    }

    /// The store of one cluster, of several, and its directory in shared memory if it has one.
    ///
    /// # Errors
    /// [`CliError::Setting`] for a store that would be shared, [`CliError::Failed`] if its directory cannot be made.
    pub(super) fn store_of(&self, name: &str, dir: &Path) -> Result<(EcArg, Option<SharedDir>), CliError> {
        let shared = (self.ec.text == "shm").then(|| SharedDir::new("triptych-bench-")).transpose();
        let shared = shared.map_err(|e| CliError::failed("cannot make a directory in shared memory", &e))?;
        let own = match (&shared, self.ec.text.as_str()) {
            (Some(shared), _) => Some(format!("shm:{}?mib=512", shared.path().join("slab").display())),
            (None, "disk") => Some(format!("disk:{}", dir.join(format!("{name}-ec")).display())),
            (None, text) if text.starts_with("memory") => Some(text.to_owned()),
            (None, _) => None,
        };
        let own = match own {
            Some(own) => own,
            None if self.topologies.len() > 1 => {
                return Err(CliError::Setting(format!(
                    "--ec {}: clusters that are compared must not share outputs; `shm`, `disk` and `memory` give each a store of its own",
                    self.ec.setting
                )));
            }
            None => self.ec.text.clone(),
        };
        let own = own.parse().map_err(|e: triptych_ec::EcError| CliError::Setting(chain(&e)))?;
        Ok((own, shared))
    }
}

/// Opens the store once, so that a wrong setting fails before a worker starts.
pub(super) async fn check_store(ec: &EcArg) -> Result<(), CliError> {
    if ec.setting.scope() == triptych_ec::Scope::Process {
        return Ok(());
    }
    triptych_ec::open(&ec.setting, &Limits::default()).await.map_err(|e| CliError::Setting(chain(&e)))?;
    Ok(())
}
