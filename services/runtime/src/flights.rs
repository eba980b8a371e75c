//! Single-flight: work that several callers need at the same moment is done once, in a task of its own.
//!
//! A flight belongs to whoever has a [`Seat`]. One that leaves takes nothing from the others; when the last one leaves,
//! the work is dropped. What is seen of it is a state that its work changes as it goes on. The idea is Go's
//! `singleflight`; the difference is that this one knows when nobody waits any more.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

/// Flights by key. Clones share them.
pub struct Flights<K, S> {
    board: Arc<Mutex<Board<K, S>>>,
    tasks: TaskTracker,
}

struct Board<K, S> {
    /// A flight's number tells it from a later one under the same key.
    under_way: HashMap<K, (u64, Weak<Flight<S>>)>,
    next_number: u64,
}

/// One flight, for as long as anyone has a seat.
struct Flight<S> {
    state: watch::Receiver<S>,
    task: AbortHandle,
}

impl<S> Drop for Flight<S> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// How a caller came to its flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Boarding {
    /// It began the flight.
    Led,
    /// It found the flight under way.
    Joined,
}

impl<K, S> Clone for Flights<K, S> {
    fn clone(&self) -> Self {
        Self { board: Arc::clone(&self.board), tasks: self.tasks.clone() }
    }
}

impl<K, S> Flights<K, S>
where
    K: Clone + Eq + Hash + Send + 'static,
    S: Send + Sync + 'static,
{
    /// No flights; their tasks will be among `tasks`.
    pub fn new(tasks: TaskTracker) -> Self {
        let board = Board { under_way: HashMap::new(), next_number: 0 };
        Self { board: Arc::new(Mutex::new(board)), tasks }
    }

    /// Joins the flight under `key`, or begins it: `begin` is given the state, `initial` at first, and makes the work.
    /// Must be called inside a tokio runtime.
    pub fn board<W>(
        &self,
        key: K,
        initial: S,
        begin: impl FnOnce(watch::Sender<S>) -> W,
    ) -> (Seat<S>, Boarding)
    where
        W: Future<Output = ()> + Send + 'static,
    {
        let mut board = self.board.lock().unwrap_or_else(PoisonError::into_inner);
        let under_way = board.under_way.get(&key).and_then(|(_, flight)| flight.upgrade());
        // A sender that is gone: the work has ended, and its seats are only being read.
        if let Some(flight) = under_way.filter(|flight| flight.state.has_changed().is_ok()) {
            return (self.seat(flight), Boarding::Joined);
        }
        let number = board.next_number;
        board.next_number += 1;
        let (sender, state) = watch::channel(initial);
        let landing = Landing { board: Arc::downgrade(&self.board), key: key.clone(), number };
        let work = begin(sender);
        let work = async move {
            // Off the board at the end, and also when the work panics or is dropped.
            let _landing = landing;
            work.await;
        };
        let task = self.tasks.spawn(work.in_current_span()).abort_handle();
        let flight = Arc::new(Flight { state, task });
        board.under_way.insert(key, (number, Arc::downgrade(&flight)));
        (self.seat(flight), Boarding::Led)
    }

    /// Flights under way.
    pub fn len(&self) -> usize {
        self.board.lock().unwrap_or_else(PoisonError::into_inner).under_way.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn seat(&self, flight: Arc<Flight<S>>) -> Seat<S> {
        Seat { state: flight.state.clone(), flight, tasks: self.tasks.clone() }
    }
}

/// A place in a flight. Dropping it leaves.
pub struct Seat<S> {
    flight: Arc<Flight<S>>,
    state: watch::Receiver<S>,
    tasks: TaskTracker,
}

impl<S: Clone + Send + Sync + 'static> Seat<S> {
    /// The state as soon as `so` holds of it; `None` if the work ended without.
    pub async fn until(&mut self, so: impl FnMut(&S) -> bool) -> Option<S> {
        self.state.wait_for(so).await.ok().map(|state| state.clone())
    }

    /// The state as it is.
    pub fn now(&self) -> S {
        self.state.borrow().clone()
    }

    /// Leaves, and has the work go on all the same, to its end or until `limit` ends.
    pub fn let_go_on(mut self, limit: impl Future<Output = ()> + Send + 'static) {
        let tasks = self.tasks.clone();
        tasks.spawn(async move {
            tokio::select! {
                _ = self.until(|_| false) => {}
                () = limit => {}
            }
            drop(self.flight);
        });
    }
}

/// Takes its flight off the board.
struct Landing<K: Eq + Hash, S> {
    board: Weak<Mutex<Board<K, S>>>,
    key: K,
    number: u64,
}

impl<K: Eq + Hash, S> Drop for Landing<K, S> {
    fn drop(&mut self) {
        let Some(board) = self.board.upgrade() else { return };
        let mut board = board.lock().unwrap_or_else(PoisonError::into_inner);
        if board.under_way.get(&self.key).is_some_and(|(number, _)| *number == self.number) {
            board.under_way.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::sync::Notify;

    #[derive(Default)]
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

    fn board(flights: &Flights<&'static str, u32>, counted: &Arc<Counted>) -> (Seat<u32>, Boarding) {
        let counted = Arc::clone(counted);
        flights.board("k", 0, |state| async move {
            let _on_drop = OnDrop(Arc::clone(&counted));
            counted.started.fetch_add(1, Ordering::SeqCst);
            state.send_replace(1);
            counted.go.notified().await;
            state.send_replace(2);
        })
    }

    async fn started(counted: &Counted, n: usize) {
        while counted.started.load(Ordering::SeqCst) < n {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn callers_share_one_flight_see_it_go_on_and_the_leader_may_leave() {
        let (flights, counted) = (Flights::new(TaskTracker::new()), Arc::default());
        let (first, led) = board(&flights, &counted);
        let (mut second, joined) = board(&flights, &counted);
        assert_eq!((led, joined), (Boarding::Led, Boarding::Joined));
        assert_eq!(second.until(|s| *s >= 1).await, Some(1));
        drop(first);
        counted.go.notify_one();
        assert_eq!(second.until(|s| *s == 2).await, Some(2));
        assert_eq!(second.until(|s| *s == 3).await, None, "it ended");
        assert_eq!(second.now(), 2);
        assert_eq!(counted.started.load(Ordering::SeqCst), 1);
        flights.tasks.close();
        flights.tasks.wait().await;
        assert!(flights.is_empty());
    }

    #[tokio::test]
    async fn the_work_is_dropped_with_its_last_seat_and_begins_anew() {
        let (flights, counted) = (Flights::new(TaskTracker::new()), Arc::default());
        let (first, _) = board(&flights, &counted);
        let (second, _) = board(&flights, &counted);
        started(&counted, 1).await;
        drop((first, second));
        let (mut third, boarding) = board(&flights, &counted);
        assert_eq!(boarding, Boarding::Led, "what nobody waits for is joined by nobody");
        counted.go.notify_one();
        assert_eq!(third.until(|s| *s == 2).await, Some(2));
        assert_eq!(counted.dropped.load(Ordering::SeqCst), 2);
        assert_eq!(counted.started.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn work_that_was_let_go_on_ends_without_a_seat() {
        let (flights, counted) = (Flights::new(TaskTracker::new()), Arc::default());
        let (seat, _) = board(&flights, &counted);
        started(&counted, 1).await;
        seat.let_go_on(std::future::pending());
        counted.go.notify_one();
        flights.tasks.close();
        flights.tasks.wait().await;
        assert_eq!(counted.dropped.load(Ordering::SeqCst), 1);
        assert!(flights.is_empty());
    }

    #[tokio::test]
    async fn work_that_panics_leaves_no_one_waiting() {
        let flights: Flights<&str, u32> = Flights::new(TaskTracker::new());
        let (mut seat, _) = flights.board("k", 0, |_state| async { panic!("our bug") });
        assert_eq!(seat.until(|s| *s == 1).await, None);
    }
}
