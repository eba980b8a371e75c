//! Cores of a process that shares a host's with others, as its computing threads learn of them.
//!
//! Before an op a thread asks how many threads this process may use and on which cores other processes compute. An engine step
//! may take half a second on one core; who asked between steps alone would leave cores idle, or take those of others, for as
//! long. How often the answer changes is up to who gives it.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::cores;

/// Cores that a process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cores {
    /// Threads that compute, at least 1.
    pub n_threads: usize,
    /// Cores that the asking thread should not be on until it is told otherwise.
    pub avoided: Vec<usize>,
}

struct Question {
    ask: Box<dyn FnMut(usize) -> Option<Cores>>,
    /// Cores that the thread may not be on.
    avoided: Vec<usize>,
}

impl Question {
    /// Avoids them anew although it did before: a thread that was moved since may be on any core.
    fn avoid(&mut self, avoided: Vec<usize>) {
        if !(avoided.is_empty() && self.avoided.is_empty()) {
            cores::avoid(&avoided);
        }
        self.avoided = avoided;
    }
}

/// Most threads of an op in this process.
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

thread_local!(static QUESTION: RefCell<Option<Question>> = const { RefCell::new(None) });

/// From now on ops that the calling thread begins ask for the cores of this process, by the number of the core that the thread is
/// on; `None`: what was answered before holds. The threads hold for ops of all back ends of the process, their callers included.
/// Results do not depend on it. Replaces what was asked before.
pub fn share_cores(ask: impl FnMut(usize) -> Option<Cores> + 'static) {
    stop_sharing_cores();
    QUESTION.set(Some(Question { ask: Box::new(ask), avoided: Vec::new() }));
}

/// Ops of the calling thread ask no more, and it may be on any core of the process.
pub fn stop_sharing_cores() {
    if let Some(mut question) = QUESTION.take() {
        question.avoid(Vec::new());
    }
}

/// Asks, if the calling thread should.
pub(super) fn ask() {
    QUESTION.with_borrow_mut(|question| {
        let Some(question) = question else { return };
        if let Some(Cores { n_threads, avoided }) = (question.ask)(cores::current_core()) {
            question.avoid(avoided);
            LIMIT.store(n_threads.max(1), Ordering::Relaxed);
        }
    });
}

/// Most threads of an op that begins now.
pub(super) fn max_threads() -> usize {
    LIMIT.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::super::Pool;
    use super::*;
    use parking_lot::Mutex;
    use std::cell::Cell;
    use std::rc::Rc;
    use std::sync::Barrier;
    use std::thread;

    #[test]
    fn ops_of_a_thread_ask_until_it_stops() {
        let pool = Pool::new(1).expect("a pool");
        let asked = Rc::new(Cell::new(0));
        let count = asked.clone();
        share_cores(move |_| {
            count.set(count.get() + 1);
            None
        });
        let op = |cost_ns| pool.run(2, cost_ns, |_| ());
        op(1_000_000);
        op(1_000_000);
        assert_eq!(asked.get(), 2);
        op(1);
        assert_eq!(asked.get(), 2, "small work does not");
        let in_other_thread = thread::spawn(|| Pool::new(1).expect("a pool").run(2, 1_000_000, |_| ()));
        in_other_thread.join().expect("no panic");
        stop_sharing_cores();
        op(1_000_000);
        assert_eq!((asked.get(), Rc::strong_count(&asked)), (2, 1), "the question is dropped");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_thread_avoids_cores_until_it_stops() {
        thread::spawn(|| {
            let n_allowed = || rustix::thread::sched_getaffinity(None).expect("cores of the thread").count();
            let (n_cores, core) = (n_allowed(), cores::current_core());
            share_cores(move |_| Some(Cores { n_threads: usize::MAX, avoided: vec![core] }));
            ask();
            assert!(n_cores == 1 || cores::current_core() != core);
            cores::avoid(&[]);
            ask();
            assert_eq!(n_allowed(), (n_cores - 1).max(1), "a thread that was moved");
            let pool = Pool::new(2).expect("a pool");
            let (allowed, both) = (Mutex::new(Vec::new()), Barrier::new(2));
            // Each thread has one of the tasks, and none waits for the other one in the pool, which might move it.
            let leader = thread::current().id();
            pool.run(2, 1_000_000, |_| {
                both.wait();
                if thread::current().id() != leader {
                    allowed.lock().push(n_allowed());
                }
                both.wait();
            });
            assert_eq!(*allowed.lock(), [n_cores], "a thread that starts here avoids none");
            stop_sharing_cores();
            assert_eq!(n_allowed(), n_cores);
        })
        .join()
        .expect("no panic");
    }
}
