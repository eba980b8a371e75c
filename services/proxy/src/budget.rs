//! The retry budget: how much work the proxy may send twice, whatever goes wrong.
//!
//! Retries and hedges help while few things fail, and multiply an outage when many do. So they are paid from what
//! first tries bring in over a sliding window: a share of them, and a little for each second, so that a cluster without
//! traffic can still mend itself. The idea is Finagle's `RetryBudget`.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// How long a first try goes on paying.
const WINDOW: Duration = Duration::from_secs(10);
/// Resolution of the window.
const SLOT: Duration = Duration::from_secs(1);

/// What a budget allows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetryPolicy {
    /// Second tries for each first one. Default 0.2; 0: only what `per_second` allows.
    pub share: f64,
    /// Second tries a second that are allowed without any first one. Default 5; 0: none.
    pub per_second: f64,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self { share: 0.2, per_second: 5.0 }
    }
}

/// A budget that every part of the proxy shares which sends work twice.
#[derive(Debug)]
pub struct RetryBudget {
    policy: RetryPolicy,
    /// By the number of their slot, oldest first; none is older than the window.
    slots: Mutex<VecDeque<Slot>>,
    origin: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    number: u128,
    first_tries: u64,
    spent: u64,
}

impl RetryBudget {
    /// A budget that begins now.
    pub fn new(policy: RetryPolicy) -> Self {
        Self { policy, slots: Mutex::default(), origin: Instant::now() }
    }

    /// Work is sent for the first time.
    pub fn first_try(&self) {
        self.slot(|slot| slot.first_tries += 1);
    }

    /// Takes leave to send work a second time. False: there is none, and the failure at hand is the answer.
    pub fn try_spend(&self) -> bool {
        let policy = self.policy;
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.now(&mut slots);
        let (first_tries, spent) =
            slots.iter().fold((0, 0), |(tries, spent), s| (tries + s.first_tries, spent + s.spent));
        let allowed = first_tries as f64 * policy.share + policy.per_second * WINDOW.as_secs_f64();
        if spent as f64 + 1.0 > allowed {
            return false;
        }
        if let Some(slot) = slots.back_mut().filter(|slot| slot.number == now) {
            slot.spent += 1;
        }
        true
    }

    fn slot(&self, change: impl FnOnce(&mut Slot)) {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        self.now(&mut slots);
        if let Some(slot) = slots.back_mut() {
            change(slot);
        }
    }

    /// Forgets what is out of the window, and makes room for this slot.
    fn now(&self, slots: &mut VecDeque<Slot>) -> u128 {
        let number = self.origin.elapsed().as_millis() / SLOT.as_millis();
        let oldest = (number + 1).saturating_sub(WINDOW.as_millis() / SLOT.as_millis());
        while slots.front().is_some_and(|slot| slot.number < oldest) {
            slots.pop_front();
        }
        if slots.back().is_none_or(|slot| slot.number != number) {
            slots.push_back(Slot { number, first_tries: 0, spent: 0 });
        }
        number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spend_all(budget: &RetryBudget) -> usize {
        (0..1_000_000).take_while(|_| budget.try_spend()).count()
    }

    #[tokio::test(start_paused = true)]
    async fn first_tries_pay_a_share_for_as_long_as_the_window() {
        let budget = RetryBudget::new(RetryPolicy { share: 0.2, per_second: 0.0 });
        assert_eq!(spend_all(&budget), 0);
        (0..100).for_each(|_| budget.first_try());
        assert_eq!(spend_all(&budget), 20);
        (0..4).for_each(|_| budget.first_try());
        assert_eq!(spend_all(&budget), 0, "four tries are not yet one retry");
        budget.first_try();
        assert_eq!(spend_all(&budget), 1);
        tokio::time::advance(WINDOW).await;
        assert_eq!(spend_all(&budget), 0, "they are forgotten, and so is what was spent");
        (0..10).for_each(|_| budget.first_try());
        assert_eq!(spend_all(&budget), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_cluster_without_traffic_has_a_few_each_second() {
        let budget = RetryBudget::new(RetryPolicy { share: 0.2, per_second: 3.0 });
        assert_eq!(spend_all(&budget), 30, "the first re-send of an idle cluster is always paid");
        tokio::time::advance(WINDOW / 2).await;
        assert_eq!(spend_all(&budget), 0);
        tokio::time::advance(WINDOW / 2).await;
        assert_eq!(spend_all(&budget), 30);
    }
}
