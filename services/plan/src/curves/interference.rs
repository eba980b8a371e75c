//! Interference: how much longer a stage takes while other threads use the same host. Neighbours on other cores share its
//! caches, memory and power; a thread on its own cores takes time from it, and an op of several threads waits for the one
//! that was put off.
//!
//! The idea of pairwise slowdowns that are measured and then added up is that of Bubble-Up (Mars et al., MICRO 2011).

use serde::{Deserialize, Serialize};

/// A stage of a worker's compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Reading and resizing an item.
    Preprocess,
    /// A forward of the encoder.
    Encode,
    /// An engine step that reads prompt tokens.
    Prefill,
    /// An engine step that only writes tokens.
    Decode,
}

impl Stage {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Preprocess, Self::Encode, Self::Prefill, Self::Decode];

    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Preprocess => "preprocess",
            Self::Encode => "encode",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Times of each stage alone and beside neighbours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interference {
    /// Cores that the neighbours used, of those that the measured worker does not have; 0: there were none.
    pub neighbour_cores: usize,
    /// Reading and resizing an item.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preprocess: Option<StageInterference>,
    /// A forward of the encoder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encode: Option<StageInterference>,
    /// A step that reads a chunk of a prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<StageInterference>,
    /// A step in which sequences write a token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode: Option<StageInterference>,
}

/// Median times of one piece of work, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageInterference {
    /// With the rest of the machine idle.
    pub alone_us: f64,
    /// While other cores compute; `None`: there are no others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside_compute_us: Option<f64>,
    /// While other cores copy memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside_copies_us: Option<f64>,
    /// While one thread more computes on the stage's own cores.
    pub shared_us: f64,
    /// Threads of the stage.
    pub threads: usize,
    /// Loss of copies on another core beside this stage, as a share of their loss beside further copies: 0 for a stage that
    /// stays in its caches.
    pub traffic: f64,
}

impl StageInterference {
    /// A stage of one thread that nobody slows down but by sharing its core.
    pub fn of_alone(us: f64) -> Self {
        Self {
            alone_us: us,
            beside_compute_us: None,
            beside_copies_us: None,
            shared_us: us * 2.0,
            threads: 1,
            traffic: 0.0,
        }
    }

    /// Factor beside a core that computes all the time and moves so much memory, from 0 to 1.
    pub fn beside(&self, traffic: f64) -> f64 {
        let over = |us: Option<f64>| us.map_or(1.0, |us| (us / self.alone_us).max(1.0));
        let compute = over(self.beside_compute_us);
        let copies = over(self.beside_copies_us);
        compute + traffic.clamp(0.0, 1.0) * (copies - compute).max(0.0)
    }

    /// Factor with one thread too many on its cores, beyond what its share of their time explains.
    pub fn beyond_share(&self) -> f64 {
        let threads = self.threads.max(1) as f64;
        let fair = (threads + 1.0) / threads;
        (self.shared_us / self.alone_us / fair).max(1.0)
    }
}

impl Interference {
    /// The times of a stage.
    pub fn of(&self, stage: Stage) -> Option<&StageInterference> {
        match stage {
            Stage::Preprocess => self.preprocess.as_ref(),
            Stage::Encode => self.encode.as_ref(),
            Stage::Prefill => self.prefill.as_ref(),
            Stage::Decode => self.decode.as_ref(),
        }
    }

    /// The measured stages.
    pub fn stages(&self) -> impl Iterator<Item = (Stage, &StageInterference)> {
        Stage::ALL.into_iter().filter_map(|stage| Some((stage, self.of(stage)?)))
    }

    /// Factor on the time of a stage beside others on other cores: for each the cores that it uses, and its stage; without
    /// one it only computes. Cores beyond those that were measured with slow nobody further.
    pub fn factor(&self, stage: Stage, neighbours: impl IntoIterator<Item = (f64, Option<Stage>)>) -> f64 {
        let (Some(own), n_cores) = (self.of(stage), self.neighbour_cores) else { return 1.0 };
        if n_cores == 0 {
            return 1.0;
        }
        let (mut busy, mut extra) = (0.0, 0.0);
        for (cores, other) in neighbours {
            let traffic = other.and_then(|other| self.of(other)).map_or(0.0, |other| other.traffic);
            busy += cores;
            extra += cores * (own.beside(traffic) - 1.0);
        }
        1.0 + extra / busy.max(n_cores as f64)
    }

    /// Everything that cannot be.
    pub(super) fn mistakes(&self, found: &mut Vec<String>) {
        for (stage, times) in self.stages() {
            let beside = [times.beside_compute_us, times.beside_copies_us].into_iter().flatten();
            let mut all = [times.alone_us, times.shared_us].into_iter().chain(beside);
            if !all.all(|us| us.is_finite() && us > 0.0) {
                found.push(format!("interference.{}: a time is not more than 0", stage.as_str()));
            }
            if !(0.0..=1.0).contains(&times.traffic) {
                let traffic = times.traffic;
                found.push(format!(
                    "interference.{}: traffic is {traffic}, allowed is 0 to 1",
                    stage.as_str()
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(compute: f64, copies: f64, shared: f64) -> StageInterference {
        StageInterference {
            alone_us: 100.0,
            beside_compute_us: Some(compute),
            beside_copies_us: Some(copies),
            shared_us: shared,
            threads: 1,
            traffic: 0.0,
        }
    }

    #[test]
    fn a_neighbour_slows_by_its_share_and_by_the_memory_that_it_moves() {
        let decode = StageInterference { traffic: 0.5, ..times(110.0, 150.0, 210.0) };
        let found = Interference {
            neighbour_cores: 1,
            encode: Some(times(120.0, 140.0, 200.0)),
            decode: Some(decode),
            ..Interference::default()
        };
        let near = |actual: f64, expect: f64| assert!((actual - expect).abs() < 1e-9, "{actual}");
        near(found.factor(Stage::Encode, []), 1.0);
        near(found.factor(Stage::Encode, [(1.0, None)]), 1.2);
        near(found.factor(Stage::Encode, [(0.5, None)]), 1.1);
        near(found.factor(Stage::Encode, [(1.0, Some(Stage::Decode))]), 1.3);
        near(found.factor(Stage::Decode, [(1.0, Some(Stage::Encode))]), 1.1);
        near(found.factor(Stage::Encode, [(1.0, None), (1.0, None)]), 1.2);
        near(found.factor(Stage::Prefill, [(1.0, None)]), 1.0);
        near(decode.beyond_share(), 1.05);
        near(StageInterference { threads: 2, ..times(100.0, 100.0, 200.0) }.beyond_share(), 2.0 / 1.5);
    }

    #[test]
    fn without_other_cores_nobody_is_slowed_from_there() {
        let alone =
            StageInterference { beside_compute_us: None, beside_copies_us: None, ..times(1.0, 1.0, 150.0) };
        let found = Interference { encode: Some(alone), ..Interference::default() };
        assert_eq!(found.factor(Stage::Encode, [(1.0, None)]), 1.0);
        assert_eq!(alone.beside(1.0), 1.0);
    }
}
