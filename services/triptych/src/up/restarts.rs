//! Restart rule of a child that ended, without a clock, a process or a log.

use std::time::Duration;

const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A child that lived this long starts again as if it had never failed.
const HEALTHY_LIFE: Duration = Duration::from_secs(30);
/// Failed starts before the cluster was ever ready, after which it will not become ready.
const MAX_FAILED_STARTS: u32 = 3;

/// Decision about a child that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestartDecision {
    /// Start it again after a pause.
    Again(Duration),
    /// It cannot start.
    GiveUp,
}

/// End of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It said that its settings are wrong.
    WrongSetting,
    /// Anything else.
    Other,
}

/// Phase of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not all children were ready at the same time yet.
    Starting,
    /// All children were ready once: from now on every child is restarted.
    Running,
}

/// The record of one child.
#[derive(Clone, Copy, Debug)]
pub struct Restarts {
    pause: Duration,
    failed_starts: u32,
}

impl Restarts {
    /// A child that never failed.
    pub const fn new() -> Self {
        Self { pause: FIRST_PAUSE, failed_starts: 0 }
    }

    /// Counts an end. `lived`: from its start to its end.
    pub fn after(&mut self, end: End, lived: Duration, phase: Phase) -> RestartDecision {
        if phase == Phase::Starting {
            self.failed_starts += 1;
            if end == End::WrongSetting || self.failed_starts >= MAX_FAILED_STARTS {
                return RestartDecision::GiveUp;
            }
        }
        if lived >= HEALTHY_LIFE {
            self.pause = FIRST_PAUSE;
        }
        let pause = self.pause;
        self.pause = (pause * 2).min(LONGEST_PAUSE);
        RestartDecision::Again(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Duration = Duration::from_millis(5);

    #[test]
    fn pauses_double_up_to_a_limit_and_a_long_life_forgives() {
        let mut restarts = Restarts::new();
        let mut pauses = Vec::new();
        for _ in 0..7 {
            let RestartDecision::Again(pause) = restarts.after(End::Other, QUICK, Phase::Running) else {
                panic!()
            };
            pauses.push(pause.as_millis());
        }
        assert_eq!(pauses, [200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(
            restarts.after(End::Other, HEALTHY_LIFE, Phase::Running),
            RestartDecision::Again(FIRST_PAUSE)
        );
    }

    #[test]
    fn a_child_that_cannot_start_is_given_up() {
        let mut restarts = Restarts::new();
        assert!(matches!(restarts.after(End::Other, QUICK, Phase::Starting), RestartDecision::Again(_)));
        assert!(matches!(restarts.after(End::Other, QUICK, Phase::Starting), RestartDecision::Again(_)));
        assert_eq!(restarts.after(End::Other, QUICK, Phase::Starting), RestartDecision::GiveUp);
        assert_eq!(Restarts::new().after(End::WrongSetting, QUICK, Phase::Starting), RestartDecision::GiveUp);
    }

    #[test]
    fn a_cluster_that_ran_never_gives_a_child_up() {
        let mut restarts = Restarts::new();
        for end in [End::WrongSetting, End::Other].into_iter().cycle().take(100) {
            assert!(matches!(restarts.after(end, QUICK, Phase::Running), RestartDecision::Again(_)));
        }
    }
}
