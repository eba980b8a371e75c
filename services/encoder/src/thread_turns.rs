//! Turns of waiting jobs at the threads that preprocess: a thread that is free goes to the job that is first in the order of
//! [`crate::order`] at that moment, whenever it came.
//!
//! It knows no items and starts no threads. What waits is bounded by the jobs that are admitted; one whose caller goes away
//! leaves at once.

use crate::load::{JobLoad, LoadTracker};
use crate::order::{JobOrder, take_next};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::sync::oneshot;
use triptych_core::Failure;

/// The threads. Clones share them.
#[derive(Clone)]
pub struct ThreadTurns(Arc<Threads>);

struct Threads {
    order: JobOrder,
    load: LoadTracker,
    queue: Mutex<TurnQueue>,
}

/// Threads and jobs that wait for each other: only one kind does.
struct TurnQueue {
    n_free: usize,
    waiting: VecDeque<WaitingTurn>,
}

struct WaitingTurn {
    job: u64,
    turn: oneshot::Sender<ThreadTurn>,
}

/// A job's turn at a thread, which the next has when it is dropped.
pub struct ThreadTurn(Arc<Threads>);

/// A job's place among those that wait.
struct WaitingPlace<'a> {
    threads: &'a Threads,
    job: u64,
}

impl ThreadTurns {
    /// Turns at so many threads, in an order of the jobs of `load`.
    pub fn new(n_threads: usize, order: JobOrder, load: LoadTracker) -> Self {
        let queue = TurnQueue { n_free: n_threads.max(1), waiting: VecDeque::new() };
        Self(Arc::new(Threads { order, load, queue: Mutex::new(queue) }))
    }

    /// Waits for a thread.
    ///
    /// # Errors
    /// Unavailable when the worker stops.
    pub async fn take(&self, job: &JobLoad) -> Result<ThreadTurn, Failure> {
        let receiver = {
            let mut queue = self.0.queue.lock();
            if queue.n_free > 0 {
                queue.n_free -= 1;
                return Ok(ThreadTurn(Arc::clone(&self.0)));
            }
            let (turn, receiver) = oneshot::channel();
            queue.waiting.push_back(WaitingTurn { job: job.id(), turn });
            receiver
        };
        let _place = WaitingPlace { threads: &self.0, job: job.id() };
        receiver.await.map_err(|_| Failure::unavailable("the encoder is stopping"))
    }
}

impl Drop for ThreadTurn {
    fn drop(&mut self) {
        let Threads { order, load, queue } = &*self.0;
        let unheard = {
            let mut queue = queue.lock();
            let ranks = load.ranks(*order);
            match take_next(&mut queue.waiting, |one| ranks.of_id(one.job)) {
                Some(next) => next.turn.send(Self(Arc::clone(&self.0))).err(),
                None => {
                    queue.n_free += 1;
                    None
                }
            }
        };
        // The caller went away just then. Another has the turn once the lock is free.
        drop(unheard);
    }
}

impl Drop for WaitingPlace<'_> {
    fn drop(&mut self) {
        self.threads.queue.lock().waiting.retain(|one| one.job != self.job);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::JobOwner;
    use std::future::Future;
    use std::pin::Pin;
    use std::time::Duration;
    use triptych_core::{Modality, RequestId};

    /// A job: request, arrival in milliseconds, bytes.
    type Job = (u128, u64, usize);

    fn admit(load: &LoadTracker, (request, arrived_ms, bytes): Job) -> JobLoad {
        let request = Some(RequestId::from_bits(request));
        let owner = JobOwner { request, priority: 0, arrived: Duration::from_millis(arrived_ms) };
        load.admit("m", Modality::Image, bytes, owner)
    }

    type Wait<'a> = Pin<Box<dyn Future<Output = Result<ThreadTurn, Failure>> + 'a>>;

    /// Lets one turn after the other end; returns the jobs that had them, in order.
    async fn served(first: ThreadTurn, waits: &mut [Option<Wait<'_>>]) -> Vec<usize> {
        let (mut order, mut turn) = (Vec::new(), Some(first));
        while turn.take().is_some() {
            for (i, wait) in waits.iter_mut().enumerate() {
                let Some(future) = wait else { continue };
                if let std::task::Poll::Ready(taken) = futures::poll!(future) {
                    assert!(turn.is_none(), "one thread, one turn");
                    turn = taken.ok();
                    order.push(i);
                    *wait = None;
                }
            }
        }
        order
    }

    #[tokio::test]
    async fn a_free_thread_goes_to_the_request_with_the_least_work_left() {
        // A job that nobody has measured is predicted to take 10 ms, and is weighed four times.
        let cases: [(&str, JobOrder, &[Job], &[usize]); 5] = [
            (
                "one item passes three",
                JobOrder::LeastWorkLeft,
                &[(1, 0, 9), (1, 0, 9), (1, 0, 9), (2, 1, 9)],
                &[3, 0, 1, 2],
            ),
            (
                "three that waited do not starve",
                JobOrder::LeastWorkLeft,
                &[(1, 0, 9), (1, 0, 9), (1, 0, 9), (2, 90, 9)],
                &[0, 1, 2, 3],
            ),
            (
                "items of a request together",
                JobOrder::LeastWorkLeft,
                &[(1, 0, 9), (2, 0, 9), (1, 0, 9), (2, 0, 9)],
                &[0, 2, 1, 3],
            ),
            (
                "a small file passes a large one",
                JobOrder::LeastWorkLeft,
                &[(1, 0, 9_000_000), (2, 1, 9)],
                &[1, 0],
            ),
            (
                "in order of arrival",
                JobOrder::Arrival,
                &[(1, 0, 9_000_000), (1, 0, 9), (2, 1, 9)],
                &[0, 1, 2],
            ),
        ];
        for (what, order, jobs, expect) in cases {
            let load = LoadTracker::unmetered(8);
            let turns = ThreadTurns::new(1, order, load.clone());
            let running = admit(&load, (9, 0, 9));
            let first = turns.take(&running).await.expect("a free thread");
            running.started();
            let jobs: Vec<_> = jobs.iter().map(|job| admit(&load, *job)).collect();
            let mut waits: Vec<Option<Wait<'_>>> =
                jobs.iter().map(|job| Some(Box::pin(turns.take(job)) as Wait<'_>)).collect();
            for wait in waits.iter_mut().flatten() {
                assert!(futures::poll!(wait).is_pending(), "{what}");
            }
            assert_eq!(served(first, &mut waits).await, expect, "{what}");
            assert_eq!(turns.0.queue.lock().n_free, 1, "{what}");
        }
    }

    #[tokio::test]
    async fn a_caller_that_goes_away_leaves_no_place_and_takes_no_thread_with_it() {
        let load = LoadTracker::unmetered(8);
        let turns = ThreadTurns::new(1, JobOrder::default(), load.clone());
        let jobs = [1, 2, 3].map(|request| admit(&load, (request, 0, 9)));
        let first = turns.take(&jobs[0]).await.expect("a free thread");
        let mut waits = [1, 2].map(|i| Some(Box::pin(turns.take(&jobs[i])) as Wait<'_>));
        for wait in waits.iter_mut().flatten() {
            assert!(futures::poll!(wait).is_pending());
        }
        waits[1] = None;
        assert_eq!(turns.0.queue.lock().waiting.len(), 1);
        // Its turn is on the way when it goes.
        drop(first);
        waits[0] = None;
        let queue = turns.0.queue.lock();
        assert_eq!((queue.n_free, queue.waiting.len()), (1, 0));
    }
}
