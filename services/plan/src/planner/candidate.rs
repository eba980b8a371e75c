//! Clusters that fit a budget.

use super::Question;
use super::bound::Means;
use crate::curves::CostCurves;
use crate::simulator::ClusterSpec;
use crate::simulator::spec::{EncoderSpec, PdSpec, PoolRole, PoolSpec};
use serde::{Serialize, Serializer};
use std::collections::BTreeSet;
use std::sync::Arc;
use triptych_encoder::BatchLimits;
use triptych_pd::EngineSettings;
use triptych_runtime::compute_arbiter::EncoderBudget;

/// Workers before which a proxy of their own stands, in large fleets.
const WORKERS_OF_A_PROXY: usize = 64;

/// Which workers there are.
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
    /// Workers with both.
    Replicated {
        /// How many.
        workers: usize,
    },
    /// One worker with both, and everything there is.
    Colocated,
}

impl Shape {
    /// Whether encoders are workers of their own.
    pub fn is_split(self) -> bool {
        matches!(self, Self::Split { .. })
    }

    /// As the bench names it.
    pub fn name(self) -> String {
        match self {
            Self::Split { encoders, pds } => {
                let n = |n: usize| if n == 1 { String::from("1") } else { n.to_string() };
                format!("{}e{}pd", n(encoders), n(pds))
            }
            Self::Replicated { workers } => format!("dp{workers}"),
            Self::Colocated => "colocated".to_owned(),
        }
    }
}

/// What can be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Settings {
    /// Token rows of an engine step.
    pub token_budget: usize,
    /// Sequences of an engine that run at once.
    pub max_sequences: usize,
    /// Output tokens of an encoder batch.
    pub batch_tokens: usize,
    /// Items of an encoder batch.
    pub batch_items: usize,
    /// What is encoded between two steps while sequences decode, for workers with both.
    #[serde(serialize_with = "as_flag")]
    pub encoder_budget: EncoderBudget,
}

impl Default for Settings {
    fn default() -> Self {
        let (engine, batch) = (EngineSettings::default(), BatchLimits::default());
        Self {
            token_budget: engine.token_budget,
            max_sequences: engine.max_sequences,
            batch_tokens: batch.max_tokens,
            batch_items: batch.max_items,
            encoder_budget: EncoderBudget::Automatic,
        }
    }
}

/// A cluster to look at.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Its workers.
    pub shape: Shape,
    /// What each of them costs; they are alike.
    pub curves: Arc<CostCurves>,
    /// Their settings.
    pub settings: Settings,
}

/// Up to so many workers every ratio is looked at; above, those around the one that the means ask for.
const ALL_RATIOS: usize = 10;
/// Shares of encoders around the balanced one.
const AROUND: [f64; 9] = [0.4, 0.6, 0.75, 0.87, 1.0, 1.15, 1.3, 1.6, 2.2];
/// Encoder token budgets of workers with both; the first is theirs if nothing is said.
pub const TURNS: [EncoderBudget; 3] =
    [EncoderBudget::Automatic, EncoderBudget::Tokens(256), EncoderBudget::Unlimited];

fn as_flag<S: Serializer>(budget: &EncoderBudget, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(budget)
}

/// All that fit.
pub fn all(question: &Question<'_>, means: &Means) -> Vec<Candidate> {
    let mut all = Vec::new();
    for curves in &question.curves {
        let workers = question.budget.workers(curves.threads);
        let candidate = |shape, settings| Candidate { shape, curves: Arc::clone(curves), settings };
        let both = match workers {
            0 => continue,
            1 => Shape::Colocated,
            workers => Shape::Replicated { workers },
        };
        let turns = if means.items > 0.0 { &TURNS[..] } else { &TURNS[..1] };
        all.extend(
            turns
                .iter()
                .map(|&encoder_budget| candidate(both, Settings { encoder_budget, ..Settings::default() })),
        );
        all.extend(ratios(workers, curves, means).into_iter().map(|encoders| {
            let pds = workers - encoders;
            candidate(Shape::Split { encoders, pds }, Settings::default())
        }));
    }
    all
}

/// Encoders of so many workers, ascending.
fn ratios(workers: usize, curves: &Arc<CostCurves>, means: &Means) -> BTreeSet<usize> {
    if workers < 2 {
        return BTreeSet::new();
    }
    if workers <= ALL_RATIOS {
        return (1..workers).collect();
    }
    let one = |shape| Candidate { shape, curves: Arc::clone(curves), settings: Settings::default() };
    let bound = super::bound::of(&one(Shape::Colocated), means);
    let share = bound.encode_s / (bound.encode_s + bound.decode_s).max(f64::MIN_POSITIVE);
    let balanced = share * workers as f64;
    AROUND.iter().map(|part| ((balanced * part).round() as usize).clamp(1, workers - 1)).collect()
}

impl Candidate {
    /// Shape, threads of a worker, and what sets it apart.
    pub fn name(&self) -> String {
        let turns = match (self.shape.is_split(), self.settings.encoder_budget) {
            (true, _) | (false, EncoderBudget::Automatic) => String::new(),
            (false, budget) => format!(", encoder token budget {budget}"),
        };
        let threads = self.curves.threads;
        format!(
            "{} ({threads} {}{turns})",
            self.shape.name(),
            if threads == 1 { "core each" } else { "cores each" }
        )
    }

    /// Workers of both kinds.
    pub fn n_workers(&self) -> usize {
        match self.shape {
            Shape::Split { encoders, pds } => encoders + pds,
            Shape::Replicated { workers } => workers,
            Shape::Colocated => 1,
        }
    }

    /// Proxies before them.
    pub fn n_proxies(&self) -> usize {
        self.n_workers().div_ceil(WORKERS_OF_A_PROXY)
    }

    /// As the simulator takes it.
    pub fn spec(&self, question: &Question<'_>) -> ClusterSpec {
        let settings = self.settings;
        let engine = EngineSettings {
            token_budget: settings.token_budget,
            max_sequences: settings.max_sequences,
            ..EngineSettings::default()
        };
        let pd = PdSpec { engine, ..PdSpec::default() };
        let batch = BatchLimits { max_tokens: settings.batch_tokens, max_items: settings.batch_items };
        let encoder = EncoderSpec { batch, ..EncoderSpec::default() };
        let pool = |name: &str, workers, role| PoolSpec {
            name: name.to_owned(),
            workers,
            role,
            curves: Arc::clone(&self.curves),
        };
        let both = PoolRole::Both { pd, encoder, encoder_budget: settings.encoder_budget };
        let pools = match self.shape {
            Shape::Split { encoders, pds } => {
                vec![pool("encoder", encoders, PoolRole::Encoder(encoder)), pool("pd", pds, PoolRole::Pd(pd))]
            }
            Shape::Replicated { workers } => vec![pool("both", workers, both)],
            Shape::Colocated => vec![pool("both", 1, both)],
        };
        let mut spec = ClusterSpec::new(pools);
        spec.proxy.cores = question.front;
        // Large fleets have several proxies; the one that is simulated lets in what all of them would.
        spec.proxy.max_in_flight *= self.n_proxies();
        spec.prompt = question.prompt;
        spec
    }
}
