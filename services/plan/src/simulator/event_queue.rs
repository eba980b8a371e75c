//! The event queue: events by their time, and of those at one moment in the order in which they were put in.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Nanoseconds after the start of the run.
pub(super) type Nanos = u64;

/// Events to come, and the time that it is.
#[derive(Debug)]
pub(super) struct EventQueue<E> {
    heap: BinaryHeap<Entry<E>>,
    now: Nanos,
    n_put: u64,
    n_taken: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at: Nanos,
    number: u64,
    event: E,
}

impl<E> EventQueue<E> {
    /// Nothing, at the start.
    pub(super) fn new() -> Self {
        Self { heap: BinaryHeap::new(), now: 0, n_put: 0, n_taken: 0 }
    }

    /// Now.
    pub(super) fn now(&self) -> Nanos {
        self.now
    }

    /// Events that were taken.
    pub(super) fn n_taken(&self) -> u64 {
        self.n_taken
    }

    /// Something happens at a time; what should have happened before happens now.
    pub(super) fn at(&mut self, at: Nanos, event: E) {
        let number = self.n_put;
        self.n_put += 1;
        self.heap.push(Entry { at: at.max(self.now), number, event });
    }

    /// Something happens so much later.
    pub(super) fn after(&mut self, pause: Nanos, event: E) {
        self.at(self.now.saturating_add(pause), event);
    }

    /// The next event, whose time it then is; `None` when there is none before `end`.
    pub(super) fn next_before(&mut self, end: Nanos) -> Option<E> {
        if self.heap.peek().is_none_or(|entry| entry.at >= end) {
            return None;
        }
        let entry = self.heap.pop()?;
        self.now = entry.at;
        self.n_taken += 1;
        Some(entry.event)
    }
}

impl<E> Ord for Entry<E> {
    /// The earliest is the greatest, since a heap gives the greatest.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for Entry<E> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_by_their_time_then_in_order_and_never_in_the_past() {
        let mut queue = EventQueue::new();
        for (at, event) in [(5, 'c'), (1, 'a'), (5, 'd'), (2, 'b')] {
            queue.at(at, event);
        }
        let mut seen = Vec::new();
        while let Some(event) = queue.next_before(6) {
            if event == 'b' {
                queue.at(0, 'x');
                queue.after(4, 'z');
            }
            seen.push((queue.now(), event));
        }
        assert_eq!(seen, [(1, 'a'), (2, 'b'), (2, 'x'), (5, 'c'), (5, 'd')]);
        assert_eq!((queue.next_before(7), queue.now(), queue.n_taken()), (Some('z'), 6, 6));
    }
}
