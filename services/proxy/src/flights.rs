//! Single-flight: work that several requests need at the same moment is done once.
//!
//! A flight belongs to whoever waits for it. A waiter that goes away takes nothing from the others; when the last one
//! goes the work is dropped. It runs inside the waiters, without a task of its own: a [`Shared`] future.

use futures::FutureExt;
use futures::future::{BoxFuture, Shared, WeakShared};
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The work of one flight.
type Work<T> = BoxFuture<'static, T>;

/// Flights by key.
pub struct Flights<K, T: Clone>(Arc<Mutex<Board<K, T>>>);

struct Board<K, T: Clone> {
    in_flight: HashMap<K, (u64, WeakShared<Work<T>>)>,
    /// Tells a flight from a later one under the same key.
    next_number: u64,
}

/// How a waiter came to its flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Boarding {
    /// It began the flight.
    Led,
    /// It found the flight under way.
    Joined,
}

impl<K, T> Flights<K, T>
where
    K: Clone + Eq + Hash + Send + 'static,
    T: Clone + Send + Sync + 'static,
{
    /// No flights.
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(Board { in_flight: HashMap::new(), next_number: 0 })))
    }

    /// Joins the flight under `key`, or begins it with `work`.
    pub fn board(
        &self,
        key: K,
        work: impl Future<Output = T> + Send + 'static,
    ) -> (Shared<Work<T>>, Boarding) {
        let mut board = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let under_way = board.in_flight.get(&key).and_then(|(_, flight)| flight.upgrade());
        if let Some(flight) = under_way.filter(|flight| flight.peek().is_none()) {
            return (flight, Boarding::Joined);
        }
        let number = board.next_number;
        board.next_number += 1;
        let landing = Landing { board: Arc::downgrade(&self.0), key: key.clone(), number };
        let flight = async move {
            let _landing = landing;
            work.await
        };
        let flight = flight.boxed().shared();
        if let Some(weak) = flight.downgrade() {
            board.in_flight.insert(key, (number, weak));
        }
        (flight, Boarding::Led)
    }
}

/// Takes its flight off the board when the work has ended or was dropped.
struct Landing<K: Eq + Hash, T: Clone> {
    board: Weak<Mutex<Board<K, T>>>,
    key: K,
    number: u64,
}

impl<K: Eq + Hash, T: Clone> Drop for Landing<K, T> {
    fn drop(&mut self) {
        let Some(board) = self.board.upgrade() else { return };
        let mut board = board.lock().unwrap_or_else(PoisonError::into_inner);
        if board.in_flight.get(&self.key).is_some_and(|(number, _)| *number == self.number) {
            board.in_flight.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::sync::Notify;

    struct Counted {
        started: AtomicUsize,
        dropped: AtomicUsize,
        go: Notify,
    }

    struct OnDrop(Arc<Counted>);

    impl Drop for OnDrop {
        fn drop(&mut self) {
            self.0.dropped.fetch_add(1, Ordering::SeqCst);
        }
    }

    async fn work(counted: Arc<Counted>) -> usize {
        let _on_drop = OnDrop(Arc::clone(&counted));
        counted.started.fetch_add(1, Ordering::SeqCst);
        counted.go.notified().await;
        7
    }

    fn counted() -> Arc<Counted> {
        Arc::new(Counted { started: 0.into(), dropped: 0.into(), go: Notify::new() })
    }

    fn n_in_flight(flights: &Flights<&'static str, usize>) -> usize {
        flights.0.lock().unwrap().in_flight.len()
    }

    #[tokio::test]
    async fn waiters_share_one_flight_and_the_leader_may_leave() {
        let (flights, counted) = (Flights::new(), counted());
        let (mut first, led) = flights.board("k", work(Arc::clone(&counted)));
        let (second, joined) = flights.board("k", work(Arc::clone(&counted)));
        assert_eq!((led, joined), (Boarding::Led, Boarding::Joined));
        assert!(futures::poll!(&mut first).is_pending());
        drop(first);
        counted.go.notify_one();
        assert_eq!(second.await, 7);
        assert_eq!(counted.started.load(Ordering::SeqCst), 1);
        assert_eq!(n_in_flight(&flights), 0);
    }

    #[tokio::test]
    async fn the_work_is_dropped_with_its_last_waiter_and_begins_anew() {
        let (flights, counted) = (Flights::new(), counted());
        let (mut first, _) = flights.board("k", work(Arc::clone(&counted)));
        let (second, _) = flights.board("k", work(Arc::clone(&counted)));
        assert!(futures::poll!(&mut first).is_pending());
        drop((first, second));
        assert_eq!(counted.dropped.load(Ordering::SeqCst), 1);
        assert_eq!(n_in_flight(&flights), 0);
        let (_again, boarding) = flights.board("k", work(Arc::clone(&counted)));
        assert_eq!(boarding, Boarding::Led);
    }
}
