//! A cluster that the planner compares.

use super::question::Question;
use super::towers::TowerWorkers;
use crate::curves::{ApiEncoders, CostCurves};
use crate::simulator::ClusterSpec;
use crate::simulator::spec::{EncoderSpec, PdSpec, PoolRole, PoolSpec};
use serde::{Serialize, Serializer};
use std::sync::Arc;
use std::time::Duration;
use triptych_bench::slo::Slo;
use triptych_core::TowerIdx;
use triptych_encoder::BatchLimits;
use triptych_pd::EngineSettings;
use triptych_proxy::Roles;
use triptych_runtime::compute_arbiter::EncoderBudget;

/// Workers before which a proxy of their own stands, in large fleets.
const WORKERS_OF_A_PROXY: usize = 64;

/// Workers of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// Encoders, and PD workers without.
    Split {
        /// Encoder workers.
        encoders: usize,
        /// PD workers.
        pds: usize,
    },
    /// Encoders of each tower of a model in which several read the same item, and PD workers without.
    Towers {
        /// Encoder workers of each tower, in the model's order.
        encoders: TowerWorkers,
        /// PD workers.
        pds: usize,
    },
    /// Workers with both.
    Replicated {
        /// Number of workers.
        workers: usize,
    },
    /// One worker with both, on all cores.
    Colocated,
    /// Workers with both, among which the proxy shifts encodes: roles are elastic.
    Elastic {
        /// Number of workers.
        workers: usize,
    },
}

impl Shape {
    /// True if encoders are separate workers.
    pub fn is_split(self) -> bool {
        matches!(self, Self::Split { .. } | Self::Towers { .. })
    }

    /// Encoders for each PD worker, if encoders are separate workers.
    pub fn encoders_per_pd(self) -> Option<f64> {
        match self {
            Self::Split { encoders, pds } => Some(encoders as f64 / pds as f64),
            Self::Towers { encoders, pds } => Some(encoders.total() as f64 / pds as f64),
            Self::Replicated { .. } | Self::Colocated | Self::Elastic { .. } => None,
        }
    }

    /// Division of encodes by the proxy.
    pub fn roles(self) -> Roles {
        if matches!(self, Self::Elastic { .. }) { Roles::Auto } else { Roles::Fixed }
    }

    /// Kinds of workers: of two clusters that serve as much the one with fewer is the simpler.
    pub fn n_kinds(self) -> usize {
        match self {
            Self::Replicated { .. } | Self::Colocated | Self::Elastic { .. } => 1,
            Self::Split { .. } => 2,
            Self::Towers { encoders, .. } => encoders.counts().len() + 1,
        }
    }

    /// The bench's name of the topology.
    pub fn name(self) -> String {
        match self {
            Self::Split { encoders, pds } => {
                let n = |n: usize| if n == 1 { String::from("1") } else { n.to_string() };
                format!("{}e{}pd", n(encoders), n(pds))
            }
            Self::Towers { encoders, pds } => format!("{encoders}e{pds}pd"),
            Self::Replicated { workers } => format!("dp{workers}"),
            Self::Colocated => "colocated".to_owned(),
            Self::Elastic { workers } => format!("elastic{workers}"),
        }
    }
}

/// Settings of the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WorkerSettings {
    /// Token rows of an engine step.
    pub token_budget: usize,
    /// Sequences of an engine that run at once.
    pub max_sequences: usize,
    /// Percent of the time for decode while prompts are prefilled.
    pub decode_share: u8,
    /// TPOT SLO that engines are told.
    pub tpot_slo: Option<Duration>,
    /// Output tokens of an encoder batch.
    pub batch_tokens: usize,
    /// Items of an encoder batch.
    pub batch_items: usize,
    /// Encoder tokens between two steps while sequences decode, for workers with both.
    #[serde(serialize_with = "as_flag")]
    pub encoder_budget: EncoderBudget,
}

impl Default for WorkerSettings {
    fn default() -> Self {
        let engine = EngineSettings::default();
        let batch = BatchLimits::default();
        Self {
            token_budget: engine.token_budget,
            max_sequences: engine.max_sequences,
            decode_share: engine.decode_share,
            tpot_slo: engine.tpot_slo,
            batch_tokens: batch.max_tokens,
            batch_items: batch.max_items,
            encoder_budget: EncoderBudget::Automatic,
        }
    }
}

impl WorkerSettings {
    /// Settings of workers that are told this SLO; other engines cannot be.
    pub fn with_slo(slo: &Slo, curves: &CostCurves) -> Self {
        let tpot_slo = slo.tpot.filter(|_| curves.api.is_none());
        Self { tpot_slo, ..Self::default() }
    }
}

/// A cluster to simulate.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Its workers.
    pub shape: Shape,
    /// Cost curves of each worker.
    pub curves: Arc<CostCurves>,
    /// Their settings.
    pub settings: WorkerSettings,
}

fn as_flag<S: Serializer>(budget: &EncoderBudget, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(budget)
}

impl Candidate {
    /// Shape, threads of a worker, and a setting that is not the default.
    pub fn name(&self) -> String {
        let turns = match (self.shape.is_split(), self.settings.encoder_budget) {
            (true, _) | (false, EncoderBudget::Automatic) => String::new(),
            (false, budget) => format!(", encoder token budget {budget}"),
        };
        let threads = self.curves.threads;
        let engine = match &self.curves.api {
            None => String::new(),
            Some(api) if api.encoders == ApiEncoders::Ours => format!(", our encoders before {}", api.name()),
            Some(api) => format!(", {}", api.name()),
        };
        format!(
            "{} ({threads} {}{}{engine})",
            self.shape.name(),
            if threads == 1 { "core each" } else { "cores each" },
            if self.curves.api.is_some() { "" } else { &turns },
        )
    }

    /// True if it is the same cluster with the same settings.
    pub fn is_same(&self, other: &Self) -> bool {
        self.shape == other.shape
            && self.settings == other.settings
            && self.curves.threads == other.curves.threads
            && self.curves.api == other.curves.api
    }

    /// Workers of both kinds.
    pub fn n_workers(&self) -> usize {
        match self.shape {
            Shape::Split { encoders, pds } => encoders + pds,
            Shape::Towers { encoders, pds } => encoders.total() + pds,
            Shape::Replicated { workers } | Shape::Elastic { workers } => workers,
            Shape::Colocated => 1,
        }
    }

    /// Proxies before them.
    pub fn n_proxies(&self) -> usize {
        self.n_workers().div_ceil(WORKERS_OF_A_PROXY)
    }

    /// Specification for the simulator.
    pub fn spec(&self, question: &Question<'_>) -> ClusterSpec {
        let settings = self.settings;
        let engine = EngineSettings {
            token_budget: settings.token_budget,
            max_sequences: settings.max_sequences,
            decode_share: settings.decode_share,
            tpot_slo: settings.tpot_slo,
            ..EngineSettings::default()
        };
        let kv = &self.curves.kv;
        let engine = match (kv.capacity_tokens, kv.device_bytes) {
            (Some(n), _) => {
                EngineSettings { self_kv_bytes: Some(n.saturating_mul(kv.token_bytes)), ..engine }
            }
            (None, Some(free)) => engine.on_device(free, 1, &kv.decoder()),
            (None, None) => engine,
        };
        // An engine behind an API sends each token.
        let stream_interval = match self.curves.api {
            Some(_) => Duration::ZERO,
            None => engine.stream_interval,
        };
        let pd = PdSpec { engine: EngineSettings { stream_interval, ..engine }, ..PdSpec::default() };
        let batch = BatchLimits {
            max_tokens: settings.batch_tokens,
            max_items: settings.batch_items,
            ..BatchLimits::default()
        };
        let encoder = EncoderSpec { batch, ..EncoderSpec::default() };
        let pool = |name: &str, workers, role| PoolSpec {
            name: name.to_owned(),
            workers,
            role,
            curves: Arc::clone(&self.curves),
            lent: question.lent_to(&self.curves),
        };
        let both = PoolRole::Both { pd, encoder, encoder_budget: settings.encoder_budget };
        let pools = match self.shape {
            Shape::Split { encoders, pds } => {
                vec![pool("encoder", encoders, PoolRole::Encoder(encoder)), pool("pd", pds, PoolRole::Pd(pd))]
            }
            Shape::Towers { encoders, pds } => {
                let of_towers = encoders.counts().iter().zip(self.curves.encoders()).zip(0..);
                let of_towers = of_towers.map(|((n, curves), tower)| {
                    let encoder = EncoderSpec { tower: Some(TowerIdx(tower)), ..encoder };
                    pool(&format!("encoder-{}", curves.name), *n, PoolRole::Encoder(encoder))
                });
                of_towers.chain([pool("pd", pds, PoolRole::Pd(pd))]).collect()
            }
            Shape::Replicated { workers } | Shape::Elastic { workers } => vec![pool("both", workers, both)],
            Shape::Colocated => vec![pool("both", 1, both)],
        };
        let mut spec = ClusterSpec::new(pools);
        spec.proxy.cores = question.front;
        spec.proxy.roles = self.shape.roles();
        // Large fleets have several proxies; the one that is simulated lets in what all of them would.
        spec.proxy.max_in_flight *= self.n_proxies();
        spec.prompt = question.prompt;
        spec
    }
}
