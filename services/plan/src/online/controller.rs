//! Decides when replicas change. A load fluctuates, and a worker that starts loads its model first, so the controller is slow
//! on purpose: several consecutive observations must agree, a step is bounded, and a cooldown follows. Time is an argument.

use crate::planner::TowerWorkers;
use std::time::{Duration, Instant};

/// Workers of each pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replicas {
    /// Encoder workers: of one pool, or of each tower where those of a model have pools of their own.
    pub encoders: TowerWorkers,
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
    n_needed: Vec<i64>,
    changed: Option<Instant>,
}

impl Controller {
    /// A controller without observations.
    pub fn new(rules: Rules) -> Self {
        Self { rules, n_needed: Vec::new(), changed: None }
    }

    /// Decides about current and needed replicas.
    pub fn observe(&mut self, now: Instant, current: Replicas, needed: Replicas) -> Decision {
        let rules = self.rules;
        let [current, wanted, least, most] = [current, needed, rules.least, rules.most].map(Replicas::pools);
        let between =
            |((n, least), most): ((&usize, &usize), &usize)| (*n).clamp(*least, (*most).max(*least));
        let wanted: Vec<usize> = wanted.iter().zip(&least).zip(&most).map(between).collect();
        self.n_needed.resize(current.len(), 0);
        let pools = current.iter().zip(&wanted).zip(&least);
        let towards: Vec<i64> =
            pools.map(|((current, wanted), least)| self.direction(*current, *wanted, *least)).collect();
        for (n_needed, towards) in self.n_needed.iter_mut().zip(towards) {
            *n_needed = match towards {
                0 => 0,
                // Another direction begins anew.
                sign if sign * *n_needed < 0 => sign,
                sign => *n_needed + sign,
            };
        }
        if let Some(left) =
            self.changed.and_then(|at| rules.cooldown.checked_sub(now.saturating_duration_since(at)))
            && !left.is_zero()
        {
            return keep(format!("in the cooldown of the last change for {} s more", left.as_secs()));
        }
        let longest = self.n_needed.iter().map(|n| n.unsigned_abs()).max().unwrap_or(0);
        if longest < u64::from(rules.observations.max(1)) {
            return keep(match longest {
                0 => "the workers fit the load".to_owned(),
                n => {
                    format!("{n} consecutive observations need a change, {} are required", rules.observations)
                }
            });
        }
        let to = self.stepped(&current, &wanted);
        self.changed = Some(now);
        let Replicas { encoders, pds } = Replicas::of_pools(&wanted);
        let why = format!("the load needs {encoders} encoders and {pds} PD workers");
        Decision::Change { to: Replicas::of_pools(&to), why }
    }

    /// Current workers of each pool, and a step further of those that needed it long enough.
    fn stepped(&mut self, current: &[usize], wanted: &[usize]) -> Vec<usize> {
        let (step, least) = (self.rules.max_step.max(1), u64::from(self.rules.observations.max(1)));
        let pools = current.iter().zip(wanted).zip(&mut self.n_needed);
        let one = |((current, wanted), n_needed): ((&usize, &usize), &mut i64)| {
            if n_needed.unsigned_abs() < least {
                return *current;
            }
            *n_needed = 0;
            (*wanted).clamp(current.saturating_sub(step), current.saturating_add(step))
        };
        pools.map(one).collect()
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
    /// Workers of one pool of encoders, and PD workers.
    pub fn new(encoders: usize, pds: usize) -> Self {
        Self { encoders: TowerWorkers::new(&[encoders]), pds }
    }

    /// As many workers of each pool.
    pub fn each(n: usize, n_encoder_pools: usize) -> Self {
        Self { encoders: TowerWorkers::new(&vec![n; n_encoder_pools]), pds: n }
    }

    /// Workers of all pools.
    pub fn total(self) -> usize {
        self.encoders.total().saturating_add(self.pds)
    }

    /// Workers of each pool: those of encoders, and the last is that of PD workers.
    pub fn pools(self) -> Vec<usize> {
        self.encoders.counts().iter().copied().chain([self.pds]).collect()
    }

    /// From the workers of each pool, in that order.
    pub(super) fn of_pools(pools: &[usize]) -> Self {
        let (pds, encoders) = pools.split_last().unwrap_or((&0, &[]));
        Self { encoders: TowerWorkers::new(encoders), pds: *pds }
    }
}

fn keep(why: String) -> Decision {
    Decision::Keep { why }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replicas(encoders: usize, pds: usize) -> Replicas {
        Replicas::new(encoders, pds)
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

    #[test]
    fn the_pools_of_towers_change_each_for_itself() {
        let towers = |low, high, pds| Replicas { encoders: TowerWorkers::new(&[low, high]), pds };
        let rules = Rules { least: Replicas::each(1, 2), most: Replicas::each(4, 2), max_step: 9, ..rules() };
        let found = decisions(rules, towers(2, 2, 1), &[towers(6, 1, 1); 3]);
        assert_eq!(found, [None, None, Some(towers(4, 1, 1))]);
        // One pool is needed for three observations, the other for two.
        let needed = [towers(3, 2, 1), towers(3, 1, 1), towers(3, 1, 1)];
        assert_eq!(decisions(rules, towers(2, 2, 1), &needed)[2], Some(towers(3, 2, 1)));
    }
}
