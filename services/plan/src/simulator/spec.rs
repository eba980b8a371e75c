//! The specification of a cluster: pools of workers, the store between them, the proxy before them.

use crate::curves::CostCurves;
pub use crate::curves::{ItemsAt, PromptSpec};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use triptych_core::TowerIdx;
use triptych_encoder::BatchLimits;
use triptych_engine::scheduler::AdmissionOrder;
use triptych_pd::EngineSettings;
use triptych_proxy::{EncodePolicy, Roles};
use triptych_runtime::compute_arbiter::EncoderBudget;

/// A cluster.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    /// Its workers, at least one of which decodes.
    pub pools: Vec<PoolSpec>,
    /// The store between them.
    pub store: StoreSpec,
    /// The proxy.
    pub proxy: ProxySpec,
    /// Layout of a request's prompt.
    pub prompt: PromptSpec,
    /// From one process to another and not back.
    pub hop: Duration,
    /// The longest time of a request. Default two minutes, as the product's.
    pub request_time: Duration,
    /// Time after the last arrival for which open requests are waited for; then they are
    /// [`End::Unended`](triptych_bench::outcome::End::Unended).
    pub patience: Duration,
    /// Between two places of the timeline.
    pub sample_every: Duration,
    /// Keep every span of compute, for a [trace](super::trace).
    pub records_spans: bool,
}

/// Workers that are alike.
#[derive(Clone, Debug)]
pub struct PoolSpec {
    /// In results, and in a plan.
    pub name: String,
    /// Number of workers.
    pub workers: usize,
    /// Role of each.
    pub role: PoolRole,
    /// Their cost curves. Each has the cores that were measured with, [`CostCurves::threads`].
    pub curves: Arc<CostCurves>,
    /// Curves of a worker with all cores of the host, which it has for as long as no other worker there computes
    /// (`--core-share-file`, as `triptych up` sets it); `None`: its cores are its own.
    pub lent: Option<Arc<CostCurves>>,
}

/// The role of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolRole {
    /// Encodes items.
    Encoder(EncoderSpec),
    /// Reads prompts and writes answers.
    Pd(PdSpec),
    /// Both, on the same cores: `triptych pd --with-encoder`.
    Both {
        /// Its engine.
        pd: PdSpec,
        /// Its encoder.
        encoder: EncoderSpec,
        /// Encoder output tokens that may be computed between two engine steps while sequences decode.
        encoder_budget: EncoderBudget,
    },
}

/// Settings of an encoder worker, as its flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncoderSpec {
    /// Bounds of a batch.
    pub batch: BatchLimits,
    /// Jobs admitted at once, waiting ones included.
    pub max_jobs: usize,
    /// Items preprocessed at once. 0: as many as [`CostCurves::preprocess_threads`].
    pub preprocess_threads: usize,
    /// Rows that are kept after they were published, in bytes.
    pub rows_budget_bytes: usize,
    /// True if PD workers read from its memory; the store then has an output a little after its job is done.
    pub advertise: bool,
    /// The one tower that it holds, of models in which several read the same item; `None`: all.
    pub tower: Option<TowerIdx>,
}

impl Default for EncoderSpec {
    fn default() -> Self {
        Self {
            batch: BatchLimits::default(),
            max_jobs: 256,
            preprocess_threads: 0,
            rows_budget_bytes: 256 << 20,
            advertise: false,
            tower: None,
        }
    }
}

/// Settings of a PD worker, as its flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PdSpec {
    /// Sizes of its engine.
    pub engine: EngineSettings,
    /// Rows of encoder outputs that are kept after their last use, in bytes.
    pub rows_budget_bytes: usize,
    /// Outputs loaded at once.
    pub max_loads: usize,
    /// Order of admission. Workers of ours have the default.
    pub order: AdmissionOrder,
}

impl Default for PdSpec {
    fn default() -> Self {
        Self {
            engine: EngineSettings::default(),
            rows_budget_bytes: 1 << 30,
            max_loads: 8,
            order: AdmissionOrder::default(),
        }
    }
}

/// The EC store. What publishing and loading take is in the workers' curves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoreSpec {
    /// Transfers that run at their full speed at once; more share it. Infinite: they do not share anything, as in a
    /// slab of memory on each host.
    pub parallel: f64,
    /// Asking what it holds, for all items of a request at once.
    pub probe: Duration,
    /// Capacity; the least recently used output goes first.
    pub capacity_bytes: u64,
    /// Part of the items, from 0 to 1, whose outputs are in the store before the first request, and which requests name by
    /// them: nobody encodes those.
    pub named: f64,
}

impl Default for StoreSpec {
    fn default() -> Self {
        Self {
            parallel: f64::INFINITY,
            probe: Duration::from_micros(300),
            capacity_bytes: u64::MAX,
            named: 0.0,
        }
    }
}

/// The proxy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProxySpec {
    /// Requests worked on at once.
    pub max_in_flight: usize,
    /// The longest wait of an item for its encode to end; `None`: until its deadline.
    pub encode_slo: Option<Duration>,
    /// Rules by which items are encoded.
    pub encodes: EncodePolicy,
    /// Division of encodes among the workers.
    pub roles: Roles,
    /// Whose cores proxy, store and clients use.
    pub cores: FrontCores,
}

impl Default for ProxySpec {
    fn default() -> Self {
        Self {
            max_in_flight: 512,
            encode_slo: None,
            encodes: EncodePolicy::default(),
            roles: Roles::default(),
            cores: FrontCores::Own,
        }
    }
}

/// Whose cores the parts before the workers use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FrontCores {
    /// Their own: they add to latency, and take nothing from workers.
    #[default]
    Own,
    /// Those of the workers: the whole cluster is on one machine.
    Workers,
}

/// A cluster that cannot run.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum SpecError {
    /// Nobody answers.
    #[error("no pool of the cluster has a worker that decodes")]
    NoPd,
    /// Items are read by a tower that nobody holds.
    #[error("no pool of the cluster has workers that hold tower {tower:?}")]
    NoTower {
        /// Its name.
        tower: String,
    },
    /// A curve cannot be used.
    #[error("pool {pool:?}: {what}")]
    Curves {
        /// The pool.
        pool: String,
        /// Every mistake.
        what: String,
    },
    /// An engine cannot be made.
    #[error("pool {pool:?}: {what}")]
    Engine {
        /// The pool.
        pool: String,
        /// The cause.
        what: String,
    },
}

impl PoolSpec {
    /// Its encoder, if it has one.
    pub fn encoder(&self) -> Option<&EncoderSpec> {
        match &self.role {
            PoolRole::Encoder(encoder) | PoolRole::Both { encoder, .. } => Some(encoder),
            PoolRole::Pd(_) => None,
        }
    }

    /// Its engine, if it has one.
    pub fn pd(&self) -> Option<&PdSpec> {
        match &self.role {
            PoolRole::Pd(pd) | PoolRole::Both { pd, .. } => Some(pd),
            PoolRole::Encoder(_) => None,
        }
    }
}

impl ClusterSpec {
    /// A cluster of these pools, with the product's defaults for all else.
    pub fn new(pools: Vec<PoolSpec>) -> Self {
        Self {
            pools,
            store: StoreSpec::default(),
            proxy: ProxySpec::default(),
            prompt: PromptSpec::default(),
            hop: Duration::from_micros(100),
            request_time: Duration::from_secs(120),
            patience: Duration::from_secs(60),
            sample_every: Duration::from_millis(250),
            records_spans: false,
        }
    }

    /// True if it can run.
    ///
    /// # Errors
    /// [`SpecError`] with the first mistake.
    pub fn check(&self) -> Result<(), SpecError> {
        if !self.pools.iter().any(|pool| pool.workers > 0 && pool.pd().is_some()) {
            return Err(SpecError::NoPd);
        }
        for pool in &self.pools {
            let lent = pool.lent.iter().flat_map(|curves| curves.mistakes());
            let mistakes: Vec<String> = pool.curves.mistakes().into_iter().chain(lent).collect();
            if !mistakes.is_empty() {
                return Err(SpecError::Curves { pool: pool.name.clone(), what: mistakes.join("; ") });
            }
        }
        self.check_towers()
    }

    /// Each tower of a model is held by somebody, and curves of the pools are of the same towers.
    fn check_towers(&self) -> Result<(), SpecError> {
        let names = |pool: &PoolSpec| pool.curves.encoders().map(|e| e.name.to_owned()).collect::<Vec<_>>();
        let towers = self.pools.first().map(names).unwrap_or_default();
        if let Some(pool) = self.pools.iter().find(|pool| names(pool) != towers) {
            let what =
                format!("its curves are of the towers {:?}, those of others of {towers:?}", names(pool));
            return Err(SpecError::Curves { pool: pool.name.clone(), what });
        }
        let holds = |pool: &PoolSpec, tower| {
            pool.workers > 0
                && pool.encoder().is_some_and(|encoder| encoder.tower.is_none_or(|held| held == tower))
        };
        for (tower, name) in
            (0..TowerIdx::LIMIT).map(TowerIdx).zip(towers.into_iter().filter(|name| !name.is_empty()))
        {
            if !self.pools.iter().any(|pool| holds(pool, tower)) {
                return Err(SpecError::NoTower { tower: name });
            }
        }
        Ok(())
    }
}
