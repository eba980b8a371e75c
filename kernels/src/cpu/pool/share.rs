//! Cores of a process that shares a host's with others, as its computing threads learn of them.
//!
//! Between two ops a thread asks, at most once in [`PAUSE`], how many threads this process may use and on which cores other
//! processes compute. An engine step or the layer of an encoder may take half a second on one core; who asked between
//! those alone would leave cores idle, or take those of others, for as long.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use super::{cores, limit_threads};

/// Shortest time from one question to the next.
const PAUSE: Duration = Duration::from_millis(5);

/// Cores that a process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cores {
    /// Threads that compute, at least 1.
    pub n_threads: usize,
    /// Cores that the asking thread should not be on until it asks again.
    pub avoided: Vec<usize>,
}

struct Question {
    ask: Box<dyn FnMut(usize) -> Cores>,
    asked_at: Option<Instant>,
    /// Cores that the thread may not be on.
    avoided: Vec<usize>,
}

impl Question {
    fn avoid(&mut self, avoided: Vec<usize>) {
        if avoided != self.avoided {
            cores::avoid(&avoided);
            self.avoided = avoided;
        }
    }
}

thread_local!(static QUESTION: RefCell<Option<Question>> = const { RefCell::new(None) });

/// From now on ops that the calling thread begins ask for the cores of this process, by the number of the core that the thread is
/// on. Replaces what was asked before.
pub fn share_cores(ask: impl FnMut(usize) -> Cores + 'static) {
    stop_sharing_cores();
    QUESTION.set(Some(Question { ask: Box::new(ask), asked_at: None, avoided: Vec::new() }));
}

/// Ops of the calling thread ask no more, and it may be on any core of the process.
pub fn stop_sharing_cores() {
    if let Some(mut question) = QUESTION.take() {
        question.avoid(Vec::new());
    }
}

/// Asks, if it is time.
pub(super) fn ask() {
    QUESTION.with_borrow_mut(|question| {
        let Some(question) = question else { return };
        let now = Instant::now();
        if question.asked_at.is_some_and(|at| now < at + PAUSE) {
            return;
        }
        question.asked_at = Some(now);
        let Cores { n_threads, avoided } = (question.ask)(cores::current_core());
        question.avoid(avoided);
        limit_threads(n_threads);
    });
}

#[cfg(test)]
mod tests {
    use super::super::Pool;
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;
    use std::thread;

    #[test]
    fn ops_of_a_thread_ask_now_and_then_until_it_stops() {
        let pool = Pool::new(1).expect("a pool");
        let asked = Rc::new(Cell::new(0));
        let count = asked.clone();
        share_cores(move |_| {
            count.set(count.get() + 1);
            Cores { n_threads: usize::MAX, avoided: Vec::new() }
        });
        let op = || pool.run(2, 1_000_000, |_| ());
        op();
        assert_eq!(asked.get(), 1, "the first op asks");
        let (start, mut n_ops) = (Instant::now(), 0);
        while asked.get() == 1 {
            op();
            n_ops += 1;
        }
        assert!(start.elapsed() >= PAUSE / 2 && n_ops > 1, "{n_ops} ops");
        pool.run(2, 1, |_| ());
        let in_other_thread = thread::spawn(|| Pool::new(1).expect("a pool").run(2, 1_000_000, |_| ()));
        in_other_thread.join().expect("no panic");
        let before = asked.get();
        stop_sharing_cores();
        thread::sleep(PAUSE);
        op();
        assert_eq!((asked.get(), Rc::strong_count(&asked)), (before, 1), "the question is dropped");
    }

    #[test]
    fn a_thread_avoids_cores_until_it_stops() {
        thread::spawn(|| {
            let n_allowed = || thread::available_parallelism().map_or(1, usize::from);
            let (n_cores, core) = (n_allowed(), cores::current_core());
            share_cores(move |_| Cores { n_threads: usize::MAX, avoided: vec![core] });
            ask();
            assert!(n_cores == 1 || cores::current_core() != core);
            stop_sharing_cores();
            assert_eq!(n_allowed(), n_cores);
        })
        .join()
        .expect("no panic");
    }
}
