//! The retry budget: how much work the proxy may send twice, whatever goes wrong.
//!
//! Retries and hedges help while few things fail, and multiply an outage when many do. So they are paid from what
//! first tries bring in over a sliding window: a share of them, and a little for each second, so that a cluster without
//! traffic can still mend itself. The idea is Finagle's `RetryBudget`. The account is a [`Window`], which is handed its
//! time.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
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
    window: Mutex<Window>,
    origin: Instant,
}

impl RetryBudget {
    /// A budget that begins now.
    pub fn new(policy: RetryPolicy) -> Self {
        Self { window: Mutex::new(Window::new(policy)), origin: Instant::now() }
    }

    /// Work is sent for the first time.
    pub fn first_try(&self) {
        self.window().first_try(self.origin.elapsed());
    }

    /// Takes leave to send work a second time. False: there is none, and the failure at hand is the answer.
    pub fn try_spend(&self) -> bool {
        self.window().try_spend(self.origin.elapsed())
    }

    fn window(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What was sent once and twice in the latest seconds.
#[derive(Clone, Debug)]
pub struct Window {
    policy: RetryPolicy,
    /// By the number of their slot, oldest first; none is older than the window.
    slots: VecDeque<Slot>,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    number: u128,
    first_tries: u64,
    spent: u64,
}

impl Window {
    /// Nothing was sent yet.
    pub fn new(policy: RetryPolicy) -> Self {
        Self { policy, slots: VecDeque::new() }
    }

    /// Work is sent for the first time, so long after the start.
    pub fn first_try(&mut self, at: Duration) {
        self.slot(at).first_tries += 1;
    }

    /// Takes leave to send work a second time.
    pub fn try_spend(&mut self, at: Duration) -> bool {
        self.slot(at);
        let (first_tries, spent) =
            self.slots.iter().fold((0, 0), |(tries, spent), s| (tries + s.first_tries, spent + s.spent));
        let allowed = first_tries as f64 * self.policy.share + self.policy.per_second * WINDOW.as_secs_f64();
        let is_allowed = spent as f64 + 1.0 <= allowed;
        if is_allowed {
            self.slot(at).spent += 1;
        }
        is_allowed
    }

    /// Forgets what is out of the window; the slot of this moment.
    fn slot(&mut self, at: Duration) -> &mut Slot {
        let number = at.as_millis() / SLOT.as_millis();
        let oldest = (number + 1).saturating_sub(WINDOW.as_millis() / SLOT.as_millis());
        while self.slots.front().is_some_and(|slot| slot.number < oldest) {
            self.slots.pop_front();
        }
        if self.slots.back().is_none_or(|slot| slot.number != number) {
            self.slots.push_back(Slot { number, first_tries: 0, spent: 0 });
        }
        let latest = self.slots.len() - 1;
        &mut self.slots[latest]
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
