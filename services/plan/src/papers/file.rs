//! A file of published figures.

use crate::curves::CostCurves;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use triptych_bench::error::MeasureError;
use triptych_bench::slo::Slo;
use triptych_bench::topology::{Topology, Workers};
use triptych_bench::workload::Workload;
use triptych_proxy::Roles;
use triptych_runtime::compute_arbiter::EncoderBudget;

/// Most requests of a run.
const MAX_REQUESTS: usize = 100_000;
/// Most rates of a search.
const MAX_RATES: usize = 1000;

/// A publication.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Paper {
    /// Heading.
    pub title: String,
    /// Address of the publication, pinned.
    pub source: String,
    /// The measurement, in a sentence or two.
    pub lead: String,
    /// SLO of the goodput.
    pub slo: String,
    /// Requests of a run.
    pub n_requests: usize,
    /// Rates that were tried, ascending, in requests a second: goodput is the highest before the first that fails.
    pub rates: Vec<f64>,
    /// Settings of the servers.
    pub server: ServerSettings,
    /// Clusters; ratios are of the first one to the second.
    pub clusters: Vec<PaperCluster>,
    /// Loads, and what was found.
    pub workloads: Vec<PaperWorkload>,
    /// Facts that the publication does not tell, and those that were taken instead.
    pub untold: Vec<String>,
    /// Reading of the comparison, written by hand.
    pub reading: Vec<String>,
}

/// Settings of the servers that were measured.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerSettings {
    /// Rows of an engine step.
    pub token_budget: usize,
    /// Sequences that run at once.
    pub max_sequences: usize,
    /// GiB of the KV cache.
    pub kv_gib: usize,
    /// Percent of the engine's time for decode-only steps.
    pub decode_share: u8,
    /// Output tokens of an encoder batch.
    pub batch_tokens: usize,
}

/// A cluster that was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PaperCluster {
    /// Name in the table.
    pub name: String,
    /// Its workers, as the bench names them.
    pub topology: Topology,
    /// File of curves of PD workers, beside this file.
    pub curves: PathBuf,
    /// File of curves of encoder workers, if it is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoder_curves: Option<PathBuf>,
}

/// A load, and what was found with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PaperWorkload {
    /// The load, as the bench takes it.
    pub workload: String,
    /// Figures.
    pub figures: Vec<Figure>,
}

/// A published figure of each cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// Quantity.
    pub metric: Metric,
    /// Requests a second; not of goodput.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// By the name of the cluster; one without a value was not published.
    pub published: BTreeMap<String, f64>,
    /// Least and most of the first cluster's value over the second's, where only that was published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio: Option<[f64; 2]>,
}

/// A quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Highest rate within the SLO, in requests a second.
    Goodput,
    /// Requests a second that ended.
    Throughput,
    /// 99th percentile of TTFT, in milliseconds.
    TtftP99Ms,
    /// Mean TTFT, in milliseconds.
    TtftMeanMs,
    /// 99th percentile of TPOT, in milliseconds.
    TpotP99Ms,
    /// Mean TPOT, in milliseconds.
    TpotMeanMs,
}

impl Metric {
    /// Name with its unit.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Goodput => "goodput, requests/s",
            Self::Throughput => "throughput, requests/s",
            Self::TtftP99Ms => "TTFT p99, ms",
            Self::TtftMeanMs => "TTFT mean, ms",
            Self::TpotP99Ms => "TPOT p99, ms",
            Self::TpotMeanMs => "TPOT mean, ms",
        }
    }
}

/// A publication that was read, with the curves of its clusters.
#[derive(Clone, Debug)]
pub struct ReadPaper {
    /// The file's content.
    pub paper: Paper,
    /// The SLO.
    pub slo: Slo,
    /// Curves of encoder and PD workers of each cluster.
    pub curves: Vec<[Arc<CostCurves>; 2]>,
    /// The loads.
    pub workloads: Vec<Workload>,
}

impl ReadPaper {
    /// Reads a file, and the files of curves that it names.
    ///
    /// # Errors
    /// [`MeasureError::Setting`] that names the file and what is wrong with it.
    pub fn read(file: &Path) -> Result<Self, MeasureError> {
        let wrong = |e: &dyn std::error::Error| MeasureError::setting(file.display(), e);
        let text = std::fs::read_to_string(file).map_err(|e| wrong(&e))?;
        let paper: Paper = serde_json::from_str(&text).map_err(|e| wrong(&e))?;
        paper.check().map_err(|what| MeasureError::Setting(format!("{}: {what}", file.display())))?;
        let slo = paper.slo.parse().map_err(|e| wrong(&e))?;
        let workloads = paper.workloads.iter().map(|w| Workload::parse(&w.workload));
        let workloads = workloads.collect::<Result<_, _>>().map_err(|e| wrong(&e))?;
        let dir = file.parent().unwrap_or(Path::new("."));
        let curves = |name: &Path| {
            let path = dir.join(name);
            let wrong = |e: &dyn std::error::Error| MeasureError::setting(path.display(), e);
            let text = std::fs::read_to_string(&path).map_err(|e| wrong(&e))?;
            CostCurves::read(&text).map(Arc::new).map_err(|e| wrong(&e))
        };
        let both = |cluster: &PaperCluster| {
            let pd = curves(&cluster.curves)?;
            let encoder = cluster.encoder_curves.as_deref().map(curves).transpose()?;
            Ok::<_, MeasureError>([encoder.unwrap_or_else(|| Arc::clone(&pd)), pd])
        };
        let curves = paper.clusters.iter().map(both).collect::<Result<_, _>>()?;
        Ok(Self { paper, slo, curves, workloads })
    }
}

impl Paper {
    fn check(&self) -> Result<(), String> {
        let names: Vec<&str> = self.clusters.iter().map(|c| c.name.as_str()).collect();
        if names.len() < 2 {
            return Err("clusters: there are fewer than two to compare".to_owned());
        }
        if !(1..=MAX_REQUESTS).contains(&self.n_requests) {
            return Err(format!("n_requests is {}, allowed is 1 to {MAX_REQUESTS}", self.n_requests));
        }
        let is_rate = |rate: &f64| rate.is_finite() && *rate > 0.0;
        if self.rates.is_empty() || self.rates.len() > MAX_RATES || !self.rates.iter().all(is_rate) {
            return Err(format!("rates: allowed are 1 to {MAX_RATES} positive numbers"));
        }
        if !self.rates.is_sorted() {
            return Err("rates: they do not ascend".to_owned());
        }
        for cluster in &self.clusters {
            cluster.encoder_budget().map_err(|e| format!("clusters: {}: {e}", cluster.name))?;
        }
        for load in &self.workloads {
            for figure in &load.figures {
                figure.check(&names).map_err(|e| format!("{}: {e}", load.workload))?;
            }
        }
        Ok(())
    }
}

impl PaperCluster {
    /// Encoder tokens between two steps of workers with both.
    ///
    /// # Errors
    /// Text that is none.
    pub fn encoder_budget(&self) -> Result<EncoderBudget, String> {
        self.topology.budget.as_deref().map_or(Ok(EncoderBudget::Automatic), str::parse)
    }

    /// Division of encodes by the proxy: no server that was measured has elastic roles, unless a cluster is one of ours.
    pub fn roles(&self) -> Roles {
        if matches!(self.topology.workers, Workers::Elastic { .. }) { Roles::Auto } else { Roles::Fixed }
    }

    /// Encoders and PD workers; no encoders where each worker has both.
    pub fn workers(&self) -> (usize, usize) {
        match self.topology.workers {
            Workers::Disaggregated { n_encoders, n_pds } => (n_encoders, n_pds),
            Workers::Colocated { n } | Workers::Elastic { n } => (0, n),
        }
    }
}

impl Figure {
    fn check(&self, clusters: &[&str]) -> Result<(), String> {
        let metric = self.metric.as_str();
        match (self.metric, self.rate) {
            (Metric::Goodput, Some(_)) => return Err(format!("{metric} has no rate")),
            (Metric::Goodput, None) => {}
            (_, Some(rate)) if rate.is_finite() && rate > 0.0 => {}
            (_, rate) => return Err(format!("{metric}: rate is {rate:?}, allowed is more than 0")),
        }
        for (name, value) in &self.published {
            if !clusters.contains(&name.as_str()) {
                return Err(format!("{metric}: there is no cluster {name:?}, only {}", clusters.join(", ")));
            }
            if !(value.is_finite() && *value > 0.0) {
                return Err(format!("{metric}: {name} is {value}, allowed is more than 0"));
            }
        }
        Ok(())
    }
}
