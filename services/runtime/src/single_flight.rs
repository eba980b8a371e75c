//! Single-flight: work that several callers need at the same moment runs once, in a task of its own.
//!
//! A call lives as long as it has a [`Subscription`]. Dropping one does not affect the others; dropping the last one
//! cancels the work. Subscribers see a state that the work updates. The idea is Go's `singleflight`; the difference is
//! the cancellation.

use crate::status::process_ends;
use futures::FutureExt;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::Hash;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::{Arc, Weak};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio_util::task::TaskTracker;
use tracing::Instrument;
use triptych_core::Failure;

/// Calls in flight, by key. Clones share them.
pub struct SingleFlight<K, S> {
    calls: Arc<Mutex<Calls<K, S>>>,
    tasks: TaskTracker,
}

struct Calls<K, S> {
    /// The number distinguishes a call from a later one under the same key.
    in_flight: HashMap<K, (u64, Weak<Call<S>>)>,
    next_number: u64,
}

/// One call, alive as long as it has subscriptions.
struct Call<S> {
    state: watch::Receiver<S>,
    /// True once the work has returned or panicked; closed without it if the work was dropped.
    returned: watch::Receiver<bool>,
    task: AbortHandle,
}

impl<S> Drop for Call<S> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Role of a caller in its call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallRole {
    /// It started the call.
    Leader,
    /// It joined a call in flight.
    Follower,
}

impl<K, S> Clone for SingleFlight<K, S> {
    fn clone(&self) -> Self {
        Self { calls: Arc::clone(&self.calls), tasks: self.tasks.clone() }
    }
}

impl<K, S> SingleFlight<K, S>
where
    K: Clone + Eq + Hash + Send + 'static,
    S: Send + Sync + 'static,
{
    /// No calls; their tasks will be spawned on `tasks`.
    pub fn new(tasks: TaskTracker) -> Self {
        let calls = Calls { in_flight: HashMap::new(), next_number: 0 };
        Self { calls: Arc::new(Mutex::new(calls)), tasks }
    }

    /// Joins the call in flight under `key`, or starts one: `start` receives the sender of the state, which is
    /// `initial` at first, and returns the work. Atomic: of concurrent callers exactly one is the leader. Must be
    /// called inside a tokio runtime.
    pub fn subscribe<W>(
        &self,
        key: K,
        initial: S,
        start: impl FnOnce(watch::Sender<S>) -> W,
    ) -> (Subscription<S>, CallRole)
    where
        W: Future<Output = ()> + Send + 'static,
    {
        let mut calls = self.calls.lock();
        let in_flight = calls.in_flight.get(&key).and_then(|(_, call)| call.upgrade());
        // If the sender is gone, the work has ended and its subscribers only read the last state.
        if let Some(call) = in_flight.filter(|call| call.state.has_changed().is_ok()) {
            return (self.subscription(call), CallRole::Follower);
        }
        let number = calls.next_number;
        calls.next_number += 1;
        let (sender, state) = watch::channel(initial);
        let (returns, returned) = watch::channel(false);
        let removal = RemoveOnDrop { calls: Arc::downgrade(&self.calls), key: key.clone(), number };
        let work = start(sender);
        let work = async move {
            // Removes the call at its end, and also when the work panics or is dropped.
            let _removal = removal;
            let outcome = AssertUnwindSafe(work).catch_unwind().await;
            returns.send_replace(true);
            outcome.unwrap_or_else(|panic| resume_unwind(panic));
        };
        let task = self.tasks.spawn(work.in_current_span()).abort_handle();
        let call = Arc::new(Call { state, returned, task });
        calls.in_flight.insert(key, (number, Arc::downgrade(&call)));
        (self.subscription(call), CallRole::Leader)
    }

    /// Number of calls in flight.
    pub fn len(&self) -> usize {
        self.calls.lock().in_flight.len()
    }

    /// True if no call is in flight.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn subscription(&self, call: Arc<Call<S>>) -> Subscription<S> {
        Subscription { state: call.state.clone(), call, tasks: self.tasks.clone() }
    }
}

/// A subscription to a call. Dropping it unsubscribes.
pub struct Subscription<S> {
    call: Arc<Call<S>>,
    state: watch::Receiver<S>,
    tasks: TaskTracker,
}

impl<S: Clone + Send + Sync + 'static> Subscription<S> {
    /// The state as soon as it satisfies `predicate`; `None` if the work ends before that. Cancel safe.
    pub async fn until(&mut self, predicate: impl FnMut(&S) -> bool) -> Option<S> {
        self.state.wait_for(predicate).await.ok().map(|state| state.clone())
    }

    /// The failure for a state that [`until`](Self::until) did not find: the work is at its end or near it. Work that returned or
    /// panicked has a bug; work that was dropped ends with its process, and can be tried elsewhere.
    pub async fn lost(&self, what: &str) -> Failure {
        match self.call.returned.clone().wait_for(|returned| *returned).await {
            Ok(_) => Failure::internal(format!("{what} ended without a result")),
            Err(_) => process_ends(format!("{what} was dropped")),
        }
    }

    /// The current state.
    pub fn now(&self) -> S {
        self.state.borrow().clone()
    }

    /// Unsubscribes, but keeps the work running to its end or until `limit` completes.
    pub fn detach_until(mut self, limit: impl Future<Output = ()> + Send + 'static) {
        let tasks = self.tasks.clone();
        tasks.spawn(async move {
            tokio::select! {
                _ = self.until(|_| false) => {}
                () = limit => {}
            }
            drop(self.call);
        });
    }
}

/// Removes its call from those in flight.
struct RemoveOnDrop<K: Eq + Hash, S> {
    calls: Weak<Mutex<Calls<K, S>>>,
    key: K,
    number: u64,
}

impl<K: Eq + Hash, S> Drop for RemoveOnDrop<K, S> {
    fn drop(&mut self) {
        let Some(calls) = self.calls.upgrade() else { return };
        let mut calls = calls.lock();
        if calls.in_flight.get(&self.key).is_some_and(|(number, _)| *number == self.number) {
            calls.in_flight.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::sync::Notify;
    use triptych_core::FailureClass;

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

    fn subscribe(
        calls: &SingleFlight<&'static str, u32>,
        counted: &Arc<Counted>,
    ) -> (Subscription<u32>, CallRole) {
        let counted = Arc::clone(counted);
        calls.subscribe("k", 0, |state| async move {
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
    async fn callers_share_one_call_and_the_leader_may_unsubscribe() {
        let (calls, counted) = (SingleFlight::new(TaskTracker::new()), Arc::default());
        let (first, leads) = subscribe(&calls, &counted);
        let (mut second, follows) = subscribe(&calls, &counted);
        assert_eq!((leads, follows), (CallRole::Leader, CallRole::Follower));
        assert_eq!(second.until(|s| *s >= 1).await, Some(1));
        drop(first);
        counted.go.notify_one();
        assert_eq!(second.until(|s| *s == 2).await, Some(2));
        assert_eq!(second.until(|s| *s == 3).await, None, "it ended");
        assert_eq!(second.now(), 2);
        assert_eq!(counted.started.load(Ordering::SeqCst), 1);
        calls.tasks.close();
        calls.tasks.wait().await;
        assert!(calls.is_empty());
    }

    #[tokio::test]
    async fn work_is_cancelled_with_its_last_subscription_and_starts_anew() {
        let (calls, counted) = (SingleFlight::new(TaskTracker::new()), Arc::default());
        let (first, _) = subscribe(&calls, &counted);
        let (second, _) = subscribe(&calls, &counted);
        started(&counted, 1).await;
        drop((first, second));
        let (mut third, role) = subscribe(&calls, &counted);
        assert_eq!(role, CallRole::Leader, "a cancelled call is not joined");
        counted.go.notify_one();
        assert_eq!(third.until(|s| *s == 2).await, Some(2));
        assert_eq!(counted.dropped.load(Ordering::SeqCst), 2);
        assert_eq!(counted.started.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn detached_work_ends_without_a_subscription() {
        let (calls, counted) = (SingleFlight::new(TaskTracker::new()), Arc::default());
        let (subscription, _) = subscribe(&calls, &counted);
        started(&counted, 1).await;
        subscription.detach_until(std::future::pending());
        counted.go.notify_one();
        calls.tasks.close();
        calls.tasks.wait().await;
        assert_eq!(counted.dropped.load(Ordering::SeqCst), 1);
        assert!(calls.is_empty());
    }

    #[tokio::test]
    async fn work_that_panics_wakes_its_subscribers() {
        let calls: SingleFlight<&str, u32> = SingleFlight::new(TaskTracker::new());
        let (mut subscription, _) = calls.subscribe("k", 0, |_state| async { panic!("our bug") });
        assert_eq!(subscription.until(|s| *s == 1).await, None);
        assert_eq!(subscription.lost("work").await.class, FailureClass::Internal);
    }

    #[tokio::test]
    async fn work_that_returns_without_the_state_has_a_bug() {
        let calls: SingleFlight<&str, u32> = SingleFlight::new(TaskTracker::new());
        let (mut subscription, _) = calls.subscribe("k", 0, |state| async move { drop(state) });
        assert_eq!(subscription.until(|s| *s == 1).await, None);
        assert_eq!(subscription.lost("work").await.class, FailureClass::Internal);
    }

    #[test]
    fn work_that_ends_with_its_runtime_can_be_tried_elsewhere() {
        let calls: SingleFlight<&str, u32> = SingleFlight::new(TaskTracker::new());
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let (mut subscription, _) = runtime.block_on(async {
            calls.subscribe("k", 0, |state| async move {
                std::future::pending::<()>().await;
                drop(state);
            })
        });
        runtime.shutdown_background();
        let lost = async {
            assert_eq!(subscription.until(|s| *s == 1).await, None);
            subscription.lost("work").await.class
        };
        let other = tokio::runtime::Runtime::new().expect("a runtime");
        assert_eq!(other.block_on(lost), FailureClass::Unavailable);
    }
}
