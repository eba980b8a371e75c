//! When a change of replicas is worth making. A load goes up and down, and a worker that starts loads its model first, so
//! the controller is slow on purpose: it waits until several looks in a row say the same, goes a bounded step, and then
//! rests. Time is an argument.

use std::time::{Duration, Instant};

/// Workers of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replicas {
    /// Encoder workers.
    pub encoders: usize,
    /// PD workers.
    pub pds: usize,
}

/// When to change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// A change of one pool by a smaller part of it is not worth it: 0.1 is 10 %.
    pub worth: f64,
    /// Looks in a row that have to ask for a change in the same direction.
    pub looks: u32,
    /// The most workers by which a pool changes at once.
    pub max_step: usize,
    /// How long after a change nothing changes.
    pub cooldown: Duration,
    /// Never fewer.
    pub least: Replicas,
    /// Never more.
    pub most: Replicas,
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing.
    Keep {
        /// Why.
        why: String,
    },
    /// Change to so many.
    Change {
        /// From now on.
        to: Replicas,
        /// Why.
        why: String,
    },
}

/// What it remembers.
#[derive(Clone, Debug)]
pub struct Controller {
    rules: Rules,
    /// Looks in a row that asked for more (or less) of each pool; negative is less.
    asked: [i64; 2],
    changed: Option<Instant>,
}

impl Controller {
    /// Remembers nothing yet.
    pub fn new(rules: Rules) -> Self {
        Self { rules, asked: [0; 2], changed: None }
    }

    /// One look: what there is, and what the load needs.
    pub fn look(&mut self, now: Instant, current: Replicas, needed: Replicas) -> Decision {
        let rules = self.rules;
        let (least, most) = (rules.least.array(), rules.most.array());
        let wanted: Vec<usize> =
            (0..2).map(|i| needed.array()[i].clamp(least[i], most[i].max(least[i]))).collect();
        let current = current.array();
        for i in 0..2 {
            let towards = self.direction(current[i], wanted[i], least[i]);
            self.asked[i] = match towards {
                0 => 0,
                // Another direction begins anew.
                sign if sign * self.asked[i] < 0 => sign,
                sign => self.asked[i] + sign,
            };
        }
        if let Some(left) =
            self.changed.and_then(|at| rules.cooldown.checked_sub(now.saturating_duration_since(at)))
            && !left.is_zero()
        {
            return keep(format!("changed a moment ago, rests for {} s more", left.as_secs()));
        }
        let long = |i: &usize| self.asked[*i].unsigned_abs() >= u64::from(rules.looks.max(1));
        let ripe: Vec<usize> = (0..2).filter(long).collect();
        if ripe.is_empty() {
            return keep(match self.asked {
                [0, 0] => "what there is fits".to_owned(),
                asked => format!(
                    "asked for another number {} times in a row, {} are needed",
                    asked.iter().map(|n| n.unsigned_abs()).max().unwrap_or(0),
                    rules.looks
                ),
            });
        }
        let mut to = current;
        for &i in &ripe {
            let (low, high) =
                (current[i].saturating_sub(rules.max_step.max(1)), current[i] + rules.max_step.max(1));
            to[i] = wanted[i].clamp(low, high);
            self.asked[i] = 0;
        }
        self.changed = Some(now);
        let [encoders, pds] = to;
        let why = format!("the load needs {} encoders and {} PD workers", wanted[0], wanted[1]);
        Decision::Change { to: Replicas { encoders, pds }, why }
    }

    /// 1 for more, -1 for fewer, 0 for a change that is not worth it.
    fn direction(&self, current: usize, wanted: usize, least: usize) -> i64 {
        let part = current.abs_diff(wanted) as f64 / current.max(1) as f64;
        if current == wanted || (part <= self.rules.worth && current >= least) {
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
            worth: 0.1,
            looks: 3,
            max_step: 2,
            cooldown: Duration::from_secs(300),
            least: replicas(1, 1),
            most: replicas(64, 64),
        }
    }

    /// Looks a minute apart, and what each decided.
    fn decisions(rules: Rules, mut current: Replicas, needed: &[Replicas]) -> Vec<Option<Replicas>> {
        let (start, mut controller) = (Instant::now(), Controller::new(rules));
        let look = |(i, needed): (u32, &Replicas)| match controller.look(
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
        (0..).zip(needed).map(look).collect()
    }

    #[test]
    fn a_change_waits_until_it_was_asked_for_often_enough() {
        let needed = vec![replicas(2, 2); 4];
        assert_eq!(decisions(rules(), replicas(1, 2), &needed), [None, None, Some(replicas(2, 2)), None]);
    }

    #[test]
    fn a_load_that_goes_up_and_down_changes_nothing() {
        let needed = [3, 1, 3, 1, 3, 1, 3, 1].map(|n| replicas(n, 2));
        assert!(decisions(rules(), replicas(2, 2), &needed).iter().all(Option::is_none));
    }

    #[test]
    fn a_small_change_of_many_is_not_worth_it_and_a_small_change_of_few_is() {
        let small = vec![replicas(21, 1); 6];
        assert!(decisions(rules(), replicas(20, 1), &small).iter().all(Option::is_none));
        assert!(decisions(rules(), replicas(2, 1), &[replicas(3, 1); 3])[2].is_some());
    }

    #[test]
    fn a_step_is_bounded_and_the_next_one_waits_for_the_pause() {
        let needed = vec![replicas(10, 2); 9];
        let found = decisions(rules(), replicas(1, 2), &needed);
        // Asked at 0, 60, 120: a step. At rest until 420, and asked for since then.
        let mut expected = vec![None; 9];
        expected[2] = Some(replicas(3, 2));
        expected[7] = Some(replicas(5, 2));
        assert_eq!(found, expected);
    }

    #[test]
    fn it_never_goes_below_the_least_or_above_the_most() {
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
