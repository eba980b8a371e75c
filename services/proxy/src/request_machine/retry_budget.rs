//! The account of the retry budget: what was sent once and twice in the latest seconds, on time that it is handed.
//!
//! Retries and hedges help while few things fail, and multiply an outage when many do. So they are paid from what
//! first tries bring in over a sliding window: a share of them, and a little for each second, so that a cluster without
//! traffic can still mend itself. The idea is Finagle's `RetryBudget`.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time for which a first try goes on paying.
const WINDOW: Duration = Duration::from_secs(10);
/// Resolution of the window.
const SLOT: Duration = Duration::from_secs(1);

/// Limits of a budget.
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

/// First and second tries of the latest seconds.
#[derive(Clone, Debug)]
pub struct RetryWindow {
    policy: RetryPolicy,
    origin: Instant,
    /// By the number of their slot, oldest first; none is older than the window.
    slots: VecDeque<Slot>,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    number: u128,
    first_tries: u64,
    spent: u64,
}

impl RetryWindow {
    /// A window that begins at `origin`, before anything was sent.
    pub fn new(policy: RetryPolicy, origin: Instant) -> Self {
        Self { policy, origin, slots: VecDeque::new() }
    }

    /// Counts work that is sent for the first time.
    pub fn first_try(&mut self, now: Instant) {
        self.slot(now).first_tries += 1;
    }

    /// Pays for sending work a second time. False: there is nothing to pay with, and the failure at hand stands.
    pub fn try_spend(&mut self, now: Instant) -> bool {
        self.slot(now);
        let (first_tries, spent) =
            self.slots.iter().fold((0, 0), |(tries, spent), s| (tries + s.first_tries, spent + s.spent));
        let allowed = first_tries as f64 * self.policy.share + self.policy.per_second * WINDOW.as_secs_f64();
        let is_allowed = spent as f64 + 1.0 <= allowed;
        if is_allowed {
            self.slot(now).spent += 1;
        }
        is_allowed
    }

    /// Forgets what is out of the window; the slot of this moment.
    fn slot(&mut self, now: Instant) -> &mut Slot {
        let number = now.saturating_duration_since(self.origin).as_millis() / SLOT.as_millis();
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

    fn spend_all(window: &mut RetryWindow, now: Instant) -> usize {
        (0..1_000_000).take_while(|_| window.try_spend(now)).count()
    }

    #[test]
    fn first_tries_pay_a_share_for_as_long_as_the_window() {
        let start = Instant::now();
        let mut window = RetryWindow::new(RetryPolicy { share: 0.2, per_second: 0.0 }, start);
        assert_eq!(spend_all(&mut window, start), 0);
        (0..100).for_each(|_| window.first_try(start));
        assert_eq!(spend_all(&mut window, start), 20);
        (0..4).for_each(|_| window.first_try(start));
        assert_eq!(spend_all(&mut window, start), 0, "four tries are not yet one retry");
        window.first_try(start);
        assert_eq!(spend_all(&mut window, start), 1);
        let later = start + WINDOW;
        assert_eq!(spend_all(&mut window, later), 0, "they are forgotten, and so is what was spent");
        (0..10).for_each(|_| window.first_try(later));
        assert_eq!(spend_all(&mut window, later), 2);
    }

    #[test]
    fn a_cluster_without_traffic_has_a_few_each_second() {
        let start = Instant::now();
        let mut window = RetryWindow::new(RetryPolicy { share: 0.2, per_second: 3.0 }, start);
        assert_eq!(spend_all(&mut window, start), 30, "the first re-send of an idle cluster is always paid");
        assert_eq!(spend_all(&mut window, start + WINDOW / 2), 0);
        assert_eq!(spend_all(&mut window, start + WINDOW), 30);
    }
}
