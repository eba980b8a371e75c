//! Workers of a cluster and the cores of each: equal totals for all clusters that are compared.
//!
//! Names: `1e1pd`, `2e1pd`, … (disaggregated encoder and PD workers); `dp2`, `dp3`, … (so many workers that hold encoder
//! and decoder, the cores shared out among them); `elastic2`, … (the same workers, among which the proxy shifts encodes:
//! `--roles auto`); `colocated` (one such worker with all cores). `:budget=N` behind a name
//! with both in one process is its `--encoder-token-budget`. It starts nothing: the binary does.

pub mod affinity;
mod cores;
pub mod quota;

pub use cores::{CoreList, CoreShare, NoShare};

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The most workers of a kind.
const MAX_WORKERS: usize = 64;

/// A cluster's workers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Topology {
    /// Number and kind of the workers.
    pub workers: Workers,
    /// `--encoder-token-budget` of workers with both; `None`: the worker's own choice.
    pub budget: Option<String>,
}

/// Placement of encoders and decoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Workers {
    /// Separate processes.
    Disaggregated {
        /// Encoder workers.
        n_encoders: usize,
        /// PD workers.
        n_pds: usize,
    },
    /// Both in each process.
    Colocated {
        /// Processes.
        n: usize,
    },
    /// Both in each process, with a proxy that shifts encodes among them.
    Elastic {
        /// Processes.
        n: usize,
    },
}

/// Role of a worker process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WorkerKind {
    /// `triptych encoder`.
    Encoder,
    /// `triptych pd`.
    Pd,
    /// `triptych pd --with-encoder`.
    Both,
}

impl WorkerKind {
    /// Its name in logs and reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Encoder => "encoder",
            Self::Pd => "pd",
            Self::Both => "worker",
        }
    }
}

impl Topology {
    /// The workers, encoders first.
    pub fn kinds(&self) -> Vec<WorkerKind> {
        match self.workers {
            Workers::Disaggregated { n_encoders, n_pds } => {
                [vec![WorkerKind::Encoder; n_encoders], vec![WorkerKind::Pd; n_pds]].concat()
            }
            Workers::Colocated { n } | Workers::Elastic { n } => vec![WorkerKind::Both; n],
        }
    }

    /// `--roles` of the proxy: what is compared with elastic roles has fixed ones.
    pub const fn roles(&self) -> &'static str {
        if matches!(self.workers, Workers::Elastic { .. }) { "auto" } else { "fixed" }
    }

    /// Cores of each worker, in the order of [`Self::kinds`].
    ///
    /// # Errors
    /// [`NoShare`] if there are more workers than cores, and cores cannot be divided.
    pub fn shares(&self, cores: &CoreList, divisible: bool) -> Result<Vec<CoreShare>, NoShare> {
        cores.share(self.kinds().len(), divisible)
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.workers {
            Workers::Disaggregated { n_encoders, n_pds } => write!(f, "{n_encoders}e{n_pds}pd")?,
            Workers::Colocated { n: 1 } => f.write_str("colocated")?,
            Workers::Colocated { n } => write!(f, "dp{n}")?,
            Workers::Elastic { n } => write!(f, "elastic{n}")?,
        }
        match &self.budget {
            Some(budget) => write!(f, ":budget={budget}"),
            None => Ok(()),
        }
    }
}

/// Text that names no topology.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no topology: 1e1pd (any NeMpd), dp2 (any dpN), elastic2 (any elasticN) and colocated are, the last three also \
     with :budget=N"
)]
pub struct NotATopology(String);

impl FromStr for Topology {
    type Err = NotATopology;

    fn from_str(text: &str) -> Result<Self, NotATopology> {
        let wrong = || NotATopology(text.to_owned());
        let (name, budget) = match text.split_once(":budget=") {
            Some((name, budget)) => (name, Some(budget.to_owned())),
            None => (text, None),
        };
        let workers = workers(name).ok_or_else(wrong)?;
        let can_have = matches!(workers, Workers::Colocated { .. } | Workers::Elastic { .. });
        let is_budget = |b: &String| matches!(b.as_str(), "auto" | "none") || b.parse::<u64>().is_ok();
        match &budget {
            Some(budget) if !can_have || !is_budget(budget) => Err(wrong()),
            _ => Ok(Self { workers, budget }),
        }
    }
}

fn workers(name: &str) -> Option<Workers> {
    let count = |text: &str| text.parse().ok().filter(|n| (1..=MAX_WORKERS).contains(n));
    if name == "colocated" {
        return Some(Workers::Colocated { n: 1 });
    }
    if let Some(n) = name.strip_prefix("dp") {
        return count(n).map(|n| Workers::Colocated { n });
    }
    if let Some(n) = name.strip_prefix("elastic") {
        return count(n).map(|n| Workers::Elastic { n });
    }
    let (encoders, pds) = name.strip_suffix("pd")?.split_once('e')?;
    Some(Workers::Disaggregated { n_encoders: count(encoders)?, n_pds: count(pds)? })
}

impl TryFrom<String> for Topology {
    type Error = NotATopology;

    fn try_from(text: String) -> Result<Self, NotATopology> {
        text.parse()
    }
}

impl From<Topology> for String {
    fn from(topology: Topology) -> Self {
        topology.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        let disaggregated = |n_encoders, n_pds| Workers::Disaggregated { n_encoders, n_pds };
        for (name, workers, budget) in [
            ("1e1pd", disaggregated(1, 1), None),
            ("3e12pd", disaggregated(3, 12), None),
            ("dp2", Workers::Colocated { n: 2 }, None),
            ("colocated", Workers::Colocated { n: 1 }, None),
            ("colocated:budget=64", Workers::Colocated { n: 1 }, Some("64")),
            ("elastic2", Workers::Elastic { n: 2 }, None),
            ("elastic3:budget=auto", Workers::Elastic { n: 3 }, Some("auto")),
            ("dp2:budget=none", Workers::Colocated { n: 2 }, Some("none")),
        ] {
            let topology: Topology = name.parse().unwrap();
            assert_eq!((topology.workers, topology.budget.as_deref()), (workers, budget), "{name}");
            assert_eq!(topology.to_string(), name);
            let json = serde_json::to_string(&topology).unwrap();
            assert_eq!(serde_json::from_str::<Topology>(&json).unwrap(), topology);
        }
        assert_eq!("dp1".parse::<Topology>().unwrap().to_string(), "colocated", "one of each is the same");
    }

    #[test]
    fn what_is_no_topology_is_refused_with_what_is() {
        for name in [
            "",
            "e1pd",
            "0e1pd",
            "1e0pd",
            "1e1",
            "dp0",
            "dp65",
            "dp",
            "elastic",
            "elastic0",
            "1e1pd:budget=3",
            "dp2:budget=x",
        ] {
            let error = name.parse::<Topology>().unwrap_err().to_string();
            assert!(error.contains("1e1pd") && error.contains("colocated"), "{name}: {error}");
        }
    }

    #[test]
    fn all_topologies_get_the_same_total() {
        let cores: CoreList = "0-3".parse().unwrap();
        for name in ["1e1pd", "dp2", "colocated", "2e2pd", "1e2pd", "4e4pd", "dp3", "elastic2"] {
            let shares = name.parse::<Topology>().unwrap().shares(&cores, true).unwrap();
            let total: f64 = shares.iter().map(CoreShare::n_cores).sum();
            assert!((total - 4.0).abs() < 1e-9, "{name}: {total}");
        }
    }
}
