//! The threads beside the caller, which take work from a queue of jobs.
//!
//! A caller posts a job, works on it itself, takes it off the queue when no task is left, and waits for the threads that
//! are still in a task of it: never for a thread that has not begun, which is what keeps an op from being as slow as
//! the latest wake-up on a busy machine. Jobs of several callers stand side by side. A thread without work looks
//! for more during [`SPIN`] turns, a few microseconds, as the ops of a step follow each other; then it sleeps. A caller that
//! waits sleeps too: the core that it leaves is where the system can go on with a thread that it had put off. It looks
//! anew after [`NAP`], and moves a thread of the job that has no core to its own ([`cores`]). A thread that finds itself on the
//! caller's core goes to another one. Where others take cores away, as many threads compute as are fastest
//! ([`throttle`](super::throttle)).
//!
//! A task that panics does not end its thread; the panic is passed on to the caller.

use std::cell::Cell;
use std::collections::VecDeque;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::cores::{self, ThreadId};
use super::throttle::{Op, Received, Throttle};
use crate::ops::{KernelError, Result};

/// Turns of an idle loop before a thread sleeps.
const SPIN: usize = 1500;
/// First sleep of a thread that waits for others to end their tasks; the next ones are twice as long each.
const NAP: Duration = Duration::from_micros(300);
/// Longest of these sleeps.
const LONGEST_NAP: Duration = Duration::from_millis(10);
/// Shortest time from one move of a thread off the caller's core to the next.
const BETWEEN_MOVES: Duration = Duration::from_millis(1);

/// Threads and their queue.
#[derive(Debug)]
pub(super) struct Workers {
    queue: Arc<JobQueue>,
    throttle: Mutex<Throttle>,
    threads: Vec<JoinHandle<()>>,
}

/// Jobs that wait for threads.
#[derive(Debug, Default)]
struct JobQueue {
    /// Changes with every post, under the lock; a thread that spins sees it without.
    posted: AtomicUsize,
    state: Mutex<State>,
    wake: Condvar,
    /// All threads of the workers that have begun.
    helpers: Mutex<Vec<Arc<Helper>>>,
}

/// A thread of the workers as others see it.
#[derive(Debug)]
struct Helper {
    id: ThreadId,
    /// [`address`] of the job that it is inside, 0 if none.
    inside: AtomicUsize,
}

/// Address of a job, which no other has while it lives.
fn address(job: &Arc<Job>) -> usize {
    Arc::as_ptr(job).addr()
}

#[derive(Debug, Default)]
struct State {
    /// Jobs that may have tasks left.
    jobs: VecDeque<Arc<Job>>,
    n_asleep: usize,
    stopped: bool,
}

/// One call of [`Workers::run`].
#[derive(Debug)]
struct Job {
    task: TaskPtr,
    n_tasks: usize,
    /// Most threads of the workers that may be inside at a time.
    n_helpers: usize,
    next: AtomicUsize,
    /// Threads of the workers that may still call the task. Grows only while the job is in the queue, under its lock.
    n_inside: AtomicUsize,
    panicked: AtomicBool,
    caller: Thread,
    caller_id: ThreadId,
    /// Core of the caller when it posted the job.
    caller_core: usize,
    /// `true` while the caller takes tasks.
    is_caller_inside: AtomicBool,
}

/// The caller's task without its lifetime.
#[derive(Clone, Copy, Debug)]
struct TaskPtr(*const (dyn Fn(usize) + Sync));

// SAFETY: the task is Sync, so any thread may call it.
unsafe impl Send for TaskPtr {}
// SAFETY: as above.
unsafe impl Sync for TaskPtr {}

impl Workers {
    /// Starts threads.
    pub(super) fn new(n_threads: usize) -> Result<Self> {
        let throttle = Mutex::new(Throttle::new(n_threads + 1));
        let mut workers = Self { queue: Arc::default(), throttle, threads: Vec::new() };
        for i in 0..n_threads {
            let queue = workers.queue.clone();
            let started = thread::Builder::new().name(format!("kernels-{i}")).spawn(move || queue.serve());
            let started = started
                .map_err(|error| KernelError::Library { op: "thread pool", message: error.to_string() })?;
            workers.threads.push(started);
        }
        Ok(workers)
    }

    /// Calls `task` for each number below `n_tasks`, with at most `n_helpers` threads beside the caller. All of them take about
    /// `cost_ns` on one thread.
    ///
    /// # Panics
    /// If a task does.
    pub(super) fn run(
        &self,
        n_tasks: usize,
        n_helpers: usize,
        cost_ns: usize,
        task: &(dyn Fn(usize) + Sync),
    ) {
        let start = Instant::now();
        let n_possible = n_helpers + 1;
        let n_threads = n_possible.min(self.throttle.lock().n_threads());
        if n_threads == 1 {
            (0..n_tasks).for_each(task);
        } else {
            self.share(n_tasks, n_threads - 1, task);
        }
        let now = Instant::now();
        let op = Op { n_possible, n_threads, n_tasks, cost: cost_ns, took: now - start };
        let received = || Received {
            thread: cores::current_thread(),
            n_preemptions: cores::preemptions(),
            processor_time: cores::processor_time_of_process(),
        };
        self.throttle.lock().record(op, now, received);
    }

    /// [`run`](Self::run) with threads beside the caller.
    fn share(&self, n_tasks: usize, n_helpers: usize, task: &(dyn Fn(usize) + Sync)) {
        let erased: *const (dyn Fn(usize) + Sync + '_) = task;
        // SAFETY: only the lifetime changes, and no one calls it after `Posted` is dropped, before `task` ends.
        let task_ptr = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(erased)
        };
        let job = Arc::new(Job {
            task: TaskPtr(task_ptr),
            n_tasks,
            n_helpers,
            next: AtomicUsize::new(0),
            n_inside: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            caller: thread::current(),
            caller_id: cores::current_thread(),
            caller_core: cores::current_core(),
            is_caller_inside: AtomicBool::new(true),
        });
        let posted = self.queue.post(job.clone());
        while let Some(i) = job.take() {
            task(i);
        }
        posted.wait();
        drop(posted);
        assert!(!job.panicked.load(Ordering::Relaxed), "a task of a kernel panicked; its message is above");
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let mut state = self.queue.lock();
        state.stopped = true;
        self.queue.posted.fetch_add(1, Ordering::Release);
        drop(state);
        self.queue.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A thread ends only by returning: panics of tasks are caught.
            let _ = thread.join();
        }
    }
}

/// A job in the queue. Once this is dropped, also by a panic of the caller's own task, the job is off the queue and no thread
/// is inside.
struct Posted<'a> {
    queue: &'a JobQueue,
    job: Arc<Job>,
    is_over: Cell<bool>,
}

impl Posted<'_> {
    /// Takes the job off the queue and waits until no thread is inside.
    fn wait(&self) {
        if self.is_over.replace(true) {
            return;
        }
        self.job.is_caller_inside.store(false, Ordering::Release);
        self.queue.lock().jobs.retain(|job| !Arc::ptr_eq(job, &self.job));
        let is_busy = || self.job.n_inside.load(Ordering::Acquire) > 0;
        for _ in 0..SPIN {
            if !is_busy() {
                return;
            }
            spin_loop();
        }
        let mut nap = NAP;
        while is_busy() {
            cores::pull(self.queue.threads_inside(&self.job));
            thread::park_timeout(nap);
            nap = (2 * nap).min(LONGEST_NAP);
        }
    }
}

impl Drop for Posted<'_> {
    fn drop(&mut self) {
        self.wait();
    }
}

impl Job {
    /// The next task that no thread has taken.
    fn take(&self) -> Option<usize> {
        let i = self.next.fetch_add(1, Ordering::Relaxed);
        (i < self.n_tasks).then_some(i)
    }

    /// `true` while another thread is of use. Holds as long as the queue is locked.
    fn wants_help(&self) -> bool {
        self.next.load(Ordering::Relaxed) < self.n_tasks
            && self.n_inside.load(Ordering::Relaxed) < self.n_helpers
    }

    /// Runs tasks until none is left. The calling thread counts as inside until this returns.
    fn help(&self) {
        while let Some(i) = self.take() {
            // SAFETY: this thread is counted as inside, so the caller is in `run` and the task alive.
            let task = unsafe { &*self.task.0 };
            if catch_unwind(AssertUnwindSafe(|| task(i))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
        }
        if self.n_inside.fetch_sub(1, Ordering::Release) == 1 {
            self.caller.unpark();
        }
    }
}

impl JobQueue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Puts a job into the queue and wakes as many threads as it may have.
    fn post(&self, job: Arc<Job>) -> Posted<'_> {
        let mut state = self.lock();
        state.jobs.push_back(job.clone());
        let n_wakes = state.n_asleep.min(job.n_helpers);
        self.posted.fetch_add(1, Ordering::Release);
        drop(state);
        for _ in 0..n_wakes {
            self.wake.notify_one();
        }
        Posted { queue: self, job, is_over: Cell::new(false) }
    }

    /// Threads of the workers that are inside a job.
    fn threads_inside(&self, job: &Arc<Job>) -> Vec<ThreadId> {
        let is_inside = |helper: &&Arc<Helper>| helper.inside.load(Ordering::Acquire) == address(job);
        self.helpers.lock().iter().filter(is_inside).map(|helper| helper.id).collect()
    }

    /// Main loop of a worker thread.
    fn serve(&self) {
        // A thread begins with the cores of the one that started it, which may avoid some.
        cores::avoid(&[]);
        let me = Arc::new(Helper { id: cores::current_thread(), inside: AtomicUsize::new(0) });
        self.helpers.lock().push(me.clone());
        let (mut last, mut nap, mut moved_at) = (None::<Arc<Job>>, NAP, None::<Instant>);
        loop {
            let seen = self.posted.load(Ordering::Acquire);
            let state = self.lock();
            if state.stopped {
                return;
            }
            if let Some(job) = state.jobs.iter().find(|job| job.wants_help()).cloned() {
                let may_move = || moved_at.is_none_or(|at| at.elapsed() > BETWEEN_MOVES);
                if job.caller_core == cores::current_core() && may_move() {
                    // Not inside yet: the caller does not wait for a thread that has to find a core.
                    drop(state);
                    cores::leave(job.caller_core);
                    moved_at = Some(Instant::now());
                    continue;
                }
                job.n_inside.fetch_add(1, Ordering::Relaxed);
                drop(state);
                me.inside.store(address(&job), Ordering::Release);
                job.help();
                me.inside.store(0, Ordering::Release);
                (last, nap) = (Some(job), NAP);
                continue;
            }
            drop(state);
            if self.spin(seen) {
                continue;
            }
            last = last.filter(|job| job.is_caller_inside.load(Ordering::Acquire));
            if let Some(job) = &last {
                cores::pull([job.caller_id]);
            }
            self.sleep(seen, last.as_ref().map(|_| nap));
            nap = (2 * nap).min(LONGEST_NAP);
        }
    }

    /// Sleeps until a job is posted, unless one was since `seen`; for `at_most` this long.
    fn sleep(&self, seen: usize, at_most: Option<Duration>) {
        let mut state = self.lock();
        // A caller that posts later finds this thread asleep and wakes it.
        if self.posted.load(Ordering::Acquire) != seen || state.stopped {
            return;
        }
        state.n_asleep += 1;
        match at_most {
            Some(nap) => _ = self.wake.wait_for(&mut state, nap),
            None => self.wake.wait(&mut state),
        }
        state.n_asleep -= 1;
    }

    /// `true` if a job was posted during a short wait.
    fn spin(&self, seen: usize) -> bool {
        for _ in 0..SPIN {
            if self.posted.load(Ordering::Acquire) != seen {
                return true;
            }
            spin_loop();
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(n: usize) -> Vec<AtomicUsize> {
        (0..n).map(|_| AtomicUsize::new(0)).collect()
    }

    #[test]
    fn every_task_runs_once_for_several_callers_at_a_time() {
        let workers = Workers::new(3).expect("threads");
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for n in 2..200 {
                        let done = counts(n);
                        workers.run(n, 3, 0, &|i| {
                            done[i].fetch_add(1, Ordering::Relaxed);
                        });
                        assert!(done.iter().all(|n| n.load(Ordering::Relaxed) == 1));
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_of_a_task_reaches_the_caller_and_no_thread_is_lost() {
        let workers = Workers::new(2).expect("threads");
        for bad in 0..20 {
            let done = counts(20);
            let ran = catch_unwind(AssertUnwindSafe(|| {
                workers.run(20, 2, 0, &|i| {
                    assert_ne!(i, bad, "on purpose");
                    done[i].fetch_add(1, Ordering::Relaxed);
                });
            }));
            assert!(ran.is_err());
        }
        let done = counts(50);
        workers.run(50, 2, 0, &|i| {
            done[i].fetch_add(1, Ordering::Relaxed);
        });
        assert!(done.iter().all(|n| n.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn no_more_threads_help_than_a_job_may_have() {
        let workers = Workers::new(3).expect("threads");
        for n_helpers in 1..=3 {
            let (inside, most, done) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
            workers.run(200, n_helpers, 0, &|_| {
                let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
                most.fetch_max(now, Ordering::SeqCst);
                thread::yield_now();
                done.fetch_add(1, Ordering::Relaxed);
                inside.fetch_sub(1, Ordering::SeqCst);
            });
            assert_eq!(done.load(Ordering::Relaxed), 200);
            assert!(most.load(Ordering::SeqCst) <= n_helpers + 1);
        }
    }
}
