//! Decides when replicas change. A load fluctuates, and a worker that starts loads its model first, so the controller is slow
//! on purpose: several consecutive observations must agree, a step is bounded, and a cooldown follows. Time is an argument.

use std::time::{Duration, Instant};

/// Workers of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replicas {
    /// Encoder workers.
    pub encoders: usize,
    /// PD workers.
    pub pds: usize,
}

/// Rules of a change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// Smallest relative change of a pool: 0.1 is 10 %.
    pub min_change: f64,
    /// Consecutive observations that must need a change in the same direction.
    pub observations: u32,
    /// The most workers by which a pool changes at once.
    pub max_step: usize,
    /// Time after a change without another.
    pub cooldown: Duration,
    /// Minimum replicas.
    pub least: Replicas,
    /// Maximum replicas.
    pub most: Replicas,
}

/// Decision about one observation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Keep the replicas.
    Keep {
        /// Reason.
        why: String,
    },
    /// Change the replicas.
    Change {
        /// New replicas.
        to: Replicas,
        /// Reason.
        why: String,
    },
}

/// State between observations.
#[derive(Clone, Debug)]
pub struct Controller {
    rules: Rules,
    /// Consecutive observations that needed more workers of each pool; negative: fewer.
    n_needed: [i64; 2],
    changed: Option<Instant>,
}

impl Controller {
    /// A controller without observations.
    pub fn new(rules: Rules) -> Self {
        Self { rules, n_needed: [0; 2], changed: None }
    }

    /// Decides about current and needed replicas.
    pub fn observe(&mut self, now: Instant, current: Replicas, needed: Replicas) -> Decision {
        let rules = self.rules;
        let least = rules.least.array();
        let most = rules.most.array();
        let wanted: Vec<usize> =
            (0..2).map(|i| needed.array()[i].clamp(least[i], most[i].max(least[i]))).collect();
        let current = current.array();
        for i in 0..2 {
            let towards = self.direction(current[i], wanted[i], least[i]);
            self.n_needed[i] = match towards {
                0 => 0,
                // Another direction begins anew.
                sign if sign * self.n_needed[i] < 0 => sign,
                sign => self.n_needed[i] + sign,
            };
        }
        if let Some(left) =
            self.changed.and_then(|at| rules.cooldown.checked_sub(now.saturating_duration_since(at)))
            && !left.is_zero()
        {
            return keep(format!("in the cooldown of the last change for {} s more", left.as_secs()));
        }
        let long = |i: &usize| self.n_needed[*i].unsigned_abs() >= u64::from(rules.observations.max(1));
        let ripe: Vec<usize> = (0..2).filter(long).collect();
        if ripe.is_empty() {
            return keep(match self.n_needed {
                [0, 0] => "the workers fit the load".to_owned(),
                n_needed => format!(
                    "{} consecutive observations need a change, {} are required",
                    n_needed.iter().map(|n| n.unsigned_abs()).max().unwrap_or(0),
                    rules.observations
                ),
            });
        }
        let mut to = current;
        for &i in &ripe {
            let (low, high) =
                (current[i].saturating_sub(rules.max_step.max(1)), current[i] + rules.max_step.max(1));
            to[i] = wanted[i].clamp(low, high);
            self.n_needed[i] = 0;
        }
        self.changed = Some(now);
        let [encoders, pds] = to;
        let why = format!("the load needs {} encoders and {} PD workers", wanted[0], wanted[1]);
        Decision::Change { to: Replicas { encoders, pds }, why }
    }

    /// 1 for more, -1 for fewer, 0 for a change that is not worth it.
    fn direction(&self, current: usize, wanted: usize, least: usize) -> i64 {
        let part = current.abs_diff(wanted) as f64 / current.max(1) as f64;
        if current == wanted || (part <= self.rules.min_change && current >= least) {
            return 0;
        }
        if wanted > current { 1 } else { -1 }
    }
}

impl Replicas {
    fn array(self) -> [usize; 2] {
        [self.encoders, self.pds]
    }
}

fn keep(why: String) -> Decision {
    Decision::Keep { why }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replicas(encoders: usize, pds: usize) -> Replicas {
        Replicas { encoders, pds }
    }

    fn rules() -> Rules {
        Rules {
            min_change: 0.1,
            observations: 3,
            max_step: 2,
            cooldown: Duration::from_secs(300),
            least: replicas(1, 1),
            most: replicas(64, 64),
        }
    }

    /// Decisions about observations at intervals of a minute.
    fn decisions(rules: Rules, mut current: Replicas, needed: &[Replicas]) -> Vec<Option<Replicas>> {
        let start = Instant::now();
        let mut controller = Controller::new(rules);
        let decide = |(i, needed): (u32, &Replicas)| match controller.observe(
            start + Duration::from_secs(60) * i,
            current,
            *needed,
        ) {
            Decision::Keep { .. } => None,
            Decision::Change { to, .. } => {
                current = to;
                Some(to)
            }
        };
        (0..).zip(needed).map(decide).collect()
    }

    #[test]
    fn a_change_waits_for_enough_consecutive_observations() {
        let needed = vec![replicas(2, 2); 4];
        assert_eq!(decisions(rules(), replicas(1, 2), &needed), [None, None, Some(replicas(2, 2)), None]);
    }

    #[test]
    fn a_fluctuating_load_changes_nothing() {
        let needed = [3, 1, 3, 1, 3, 1, 3, 1].map(|n| replicas(n, 2));
        assert!(decisions(rules(), replicas(2, 2), &needed).iter().all(Option::is_none));
    }

    #[test]
    fn a_small_relative_change_is_not_made_and_a_large_one_is() {
        let small = vec![replicas(21, 1); 6];
        assert!(decisions(rules(), replicas(20, 1), &small).iter().all(Option::is_none));
        assert!(decisions(rules(), replicas(2, 1), &[replicas(3, 1); 3])[2].is_some());
    }

    #[test]
    fn a_step_is_bounded_and_the_next_one_waits_for_the_cooldown() {
        let needed = vec![replicas(10, 2); 9];
        let found = decisions(rules(), replicas(1, 2), &needed);
        // Needed at 0, 60, 120: a step. In the cooldown until 420, and needed since then.
        let mut expected = vec![None; 9];
        expected[2] = Some(replicas(3, 2));
        expected[7] = Some(replicas(5, 2));
        assert_eq!(found, expected);
    }

    #[test]
    fn replicas_stay_between_the_minimum_and_the_maximum() {
        let rules = Rules { least: replicas(2, 2), most: replicas(3, 3), max_step: 9, ..rules() };
        assert_eq!(decisions(rules, replicas(3, 3), &[replicas(0, 0); 3])[2], Some(replicas(2, 2)));
        assert_eq!(decisions(rules, replicas(2, 2), &[replicas(50, 2); 3])[2], Some(replicas(3, 2)));
        assert_eq!(decisions(rules, replicas(1, 2), &[replicas(0, 2); 3])[2], Some(replicas(2, 2)));
    }

    #[test]
    fn one_pool_may_grow_while_the_other_shrinks() {
        let found = decisions(rules(), replicas(1, 4), &[replicas(2, 3); 3]);
        assert_eq!(found[2], Some(replicas(2, 3)));
    }
}
