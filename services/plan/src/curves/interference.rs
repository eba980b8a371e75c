//! Interference: how much longer a stage takes while other threads use the same host. Neighbours on other cores share its
//! caches, memory and power; a thread on its own cores takes time from it, and an op of several threads waits for the one
//! that was put off.
//!
//! The idea of pairwise slowdowns that are measured and then added up is that of Bubble-Up (Mars et al., MICRO 2011).

use serde::{Deserialize, Serialize};
use triptych_core::TowerIdx;

/// A stage of a worker's compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Reading and resizing an item for a tower, as a rule the only one.
    Preprocess(TowerIdx),
    /// A forward of a tower.
    Encode(TowerIdx),
    /// An engine step that reads prompt tokens.
    Prefill,
    /// An engine step that only writes tokens.
    Decode,
}

impl Stage {
    /// Its name, without its tower.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Preprocess(_) => "preprocess",
            Self::Encode(_) => "encode",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    /// Its tower; `None`: a stage of the engine.
    pub fn tower(self) -> Option<TowerIdx> {
        match self {
            Self::Preprocess(tower) | Self::Encode(tower) => Some(tower),
            Self::Prefill | Self::Decode => None,
        }
    }
}

/// Times of each stage alone and beside neighbours. Those of an encoder are the first tower's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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
    /// Stages of the other towers, in the model's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub more_towers: Vec<TowerInterference>,
}

/// Times of the stages of a tower beside the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TowerInterference {
    /// Reading and resizing an item for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preprocess: Option<StageInterference>,
    /// A forward of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encode: Option<StageInterference>,
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
    /// The times of a stage. Where a tower has none of its own, those of the first stand for it.
    pub fn of(&self, stage: Stage) -> Option<&StageInterference> {
        let more =
            |tower: TowerIdx| usize::from(tower.0).checked_sub(1).and_then(|i| self.more_towers.get(i));
        match stage {
            Stage::Preprocess(tower) => more(tower).map_or(&self.preprocess, |own| &own.preprocess).as_ref(),
            Stage::Encode(tower) => more(tower).map_or(&self.encode, |own| &own.encode).as_ref(),
            Stage::Prefill => self.prefill.as_ref(),
            Stage::Decode => self.decode.as_ref(),
        }
    }

    /// Sets the times of a stage.
    pub fn set(&mut self, stage: Stage, times: StageInterference) {
        let i = stage.tower().and_then(|tower| usize::from(tower.0).checked_sub(1));
        if let Some(i) = i
            && self.more_towers.len() <= i
        {
            self.more_towers.resize(i + 1, TowerInterference::default());
        }
        let more = i.and_then(|i| self.more_towers.get_mut(i));
        *match (stage, more) {
            (Stage::Preprocess(_), Some(own)) => &mut own.preprocess,
            (Stage::Encode(_), Some(own)) => &mut own.encode,
            (Stage::Preprocess(_), None) => &mut self.preprocess,
            (Stage::Encode(_), None) => &mut self.encode,
            (Stage::Prefill, _) => &mut self.prefill,
            (Stage::Decode, _) => &mut self.decode,
        } = Some(times);
    }

    /// The measured stages: those of each tower, then the engine's.
    pub fn stages(&self) -> impl Iterator<Item = (Stage, &StageInterference)> {
        let towers = (0..TowerIdx::LIMIT).map(TowerIdx).take(1 + self.more_towers.len());
        let encodes = towers.flat_map(|tower| [Stage::Preprocess(tower), Stage::Encode(tower)]);
        let all = encodes.chain([Stage::Prefill, Stage::Decode]);
        all.filter_map(|stage| Some((stage, self.of(stage)?)))
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

    /// Everything that cannot be, in curves of so many towers.
    pub(super) fn mistakes(&self, n_towers: usize, found: &mut Vec<String>) {
        if self.more_towers.len() >= n_towers {
            let n = self.more_towers.len();
            found.push(format!("interference.more_towers has {n}, the curves have {} more", n_towers - 1));
        }
        for (stage, times) in self.stages() {
            let place = match stage.tower() {
                Some(TowerIdx(n @ 1..)) => format!("more_towers[{}].{}", n - 1, stage.as_str()),
                _ => stage.as_str().to_owned(),
            };
            let beside = [times.beside_compute_us, times.beside_copies_us].into_iter().flatten();
            let mut all = [times.alone_us, times.shared_us].into_iter().chain(beside);
            if !all.all(|us| us.is_finite() && us > 0.0) {
                found.push(format!("interference.{place}: a time is not more than 0"));
            }
            if !(0.0..=1.0).contains(&times.traffic) {
                let traffic = times.traffic;
                found.push(format!("interference.{place}: traffic is {traffic}, allowed is 0 to 1"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENCODE: Stage = Stage::Encode(TowerIdx(0));

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
        near(found.factor(ENCODE, []), 1.0);
        near(found.factor(ENCODE, [(1.0, None)]), 1.2);
        near(found.factor(ENCODE, [(0.5, None)]), 1.1);
        near(found.factor(ENCODE, [(1.0, Some(Stage::Decode))]), 1.3);
        near(found.factor(Stage::Decode, [(1.0, Some(ENCODE))]), 1.1);
        near(found.factor(ENCODE, [(1.0, None), (1.0, None)]), 1.2);
        near(found.factor(Stage::Prefill, [(1.0, None)]), 1.0);
        near(decode.beyond_share(), 1.05);
        near(StageInterference { threads: 2, ..times(100.0, 100.0, 200.0) }.beyond_share(), 2.0 / 1.5);
    }

    #[test]
    fn towers_have_times_of_their_own_and_those_of_the_first_where_they_were_not_measured() {
        let mut found = Interference {
            neighbour_cores: 1,
            encode: Some(times(120.0, 120.0, 200.0)),
            preprocess: Some(times(105.0, 105.0, 200.0)),
            ..Interference::default()
        };
        let second = Stage::Encode(TowerIdx(1));
        assert_eq!(found.of(second), found.of(ENCODE));
        assert_eq!(found.stages().count(), 2);
        let encode = StageInterference { traffic: 1.0, ..times(150.0, 150.0, 200.0) };
        found.set(second, encode);
        assert!((found.factor(second, [(1.0, None)]) - 1.5).abs() < 1e-9);
        assert!((found.factor(ENCODE, [(1.0, Some(second))]) - 1.2).abs() < 1e-9);
        assert_eq!(found.of(Stage::Preprocess(TowerIdx(1))), None, "it was measured, and has none");
        let stages: Vec<_> = found.stages().map(|(stage, _)| stage).collect();
        assert_eq!(stages, [Stage::Preprocess(TowerIdx(0)), ENCODE, second]);
        let mut mistakes = Vec::new();
        found.more_towers[0].encode = Some(StageInterference { traffic: 2.0, ..encode });
        found.mistakes(1, &mut mistakes);
        assert!(mistakes[0].contains("more_towers has 1, the curves have 0 more"), "{mistakes:?}");
        assert!(mistakes[1].contains("interference.more_towers[0].encode: traffic is 2"), "{mistakes:?}");
    }

    #[test]
    fn without_other_cores_nobody_is_slowed_from_there() {
        let alone =
            StageInterference { beside_compute_us: None, beside_copies_us: None, ..times(1.0, 1.0, 150.0) };
        let found = Interference { encode: Some(alone), ..Interference::default() };
        assert_eq!(found.factor(ENCODE, [(1.0, None)]), 1.0);
        assert_eq!(alone.beside(1.0), 1.0);
    }
}
