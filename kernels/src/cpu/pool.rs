//! Threads of a back end: fork, join, and memory that tasks write in disjoint parts.
//!
//! The caller of an op is one of the threads; small work never leaves it. Tasks are taken from a shared
//! counter, so which thread does what is left to chance: a task must compute the same on any. The caller does what
//! threads that are late would have done and never waits for one that has not begun ([`workers`]).
//!
//! A process that shares its cores with others computes with fewer threads while they compute ([`share_cores`]).

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use crate::ops::Result;

mod cores;
mod share;
mod throttle;
mod workers;

pub use share::{Cores, share_cores, stop_sharing_cores};
use workers::Workers;

/// Work below this many nanoseconds stays on the calling thread: sharing it costs about as much.
const MIN_PARALLEL_NS: usize = 12_000;

/// A fixed number of threads, the caller of each op among them.
#[derive(Clone, Debug)]
pub(super) struct Pool {
    /// The threads besides the caller; none if it is alone.
    workers: Option<Arc<Workers>>,
    n_threads: usize,
}

impl Pool {
    /// A pool of `n_threads`; zero means one for each core.
    pub(super) fn new(n_threads: usize) -> Result<Self> {
        let n_cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let n_threads = if n_threads == 0 { n_cores() } else { n_threads };
        let workers = if n_threads == 1 { None } else { Some(Arc::new(Workers::new(n_threads - 1)?)) };
        Ok(Self { workers, n_threads })
    }

    /// Threads that an op may use now, the caller included.
    pub(super) fn n_threads(&self) -> usize {
        self.n_threads.min(share::max_threads())
    }

    /// Calls `task` for each number below `n_tasks`, which together take about `cost_ns` on one thread.
    pub(super) fn run(&self, n_tasks: usize, cost_ns: usize, task: impl Fn(usize) + Sync) {
        if cost_ns >= MIN_PARALLEL_NS {
            share::ask();
        }
        let n_helpers = self.n_threads().min(n_tasks).saturating_sub(1);
        match &self.workers {
            Some(workers) if n_helpers > 0 && cost_ns >= MIN_PARALLEL_NS => {
                workers.run(n_tasks, n_helpers, cost_ns, &task);
            }
            _ => (0..n_tasks).for_each(task),
        }
    }

    /// Cuts `out`, `[n_rows, width]`, into runs of rows and calls `task(first_row, rows)` for each; a row takes
    /// about `row_ns`.
    pub(super) fn rows<T: Send>(
        &self,
        out: &mut [T],
        width: usize,
        row_ns: usize,
        task: impl Fn(usize, &mut [T]) + Sync,
    ) {
        if out.is_empty() {
            return;
        }
        let n_rows = out.len() / width;
        // A run is a fraction of a thread's share, and long enough to be worth fetching.
        let run = n_rows.div_ceil(4 * self.n_threads()).max(5_000 / row_ns.max(1)).max(1);
        let out = Shared::new(out);
        self.run(n_rows.div_ceil(run), n_rows.saturating_mul(row_ns), |i| {
            let rows = i * run..n_rows.min((i + 1) * run);
            // SAFETY: runs of rows do not overlap, and each is one task.
            let slice = unsafe { out.slice(rows.start * width..rows.end * width) };
            task(rows.start, slice);
        });
    }
}

/// A slice that several tasks write, each its own parts.
#[derive(Debug)]
pub(super) struct Shared<'a, T> {
    first: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: parts go to one task each (the contract of `slice`), and T may be sent.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// Borrows a slice.
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        Self { first: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// A part of it.
    ///
    /// # Safety
    /// While the result lives, no other part may be taken that overlaps it.
    ///
    /// # Panics
    /// If the range is not in the slice.
    #[expect(clippy::mut_from_ref, reason = "that parts are disjoint is the caller's obligation")]
    #[inline(always)]
    pub(super) unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "a task writes inside the result");
        // SAFETY: the range is inside the slice, which the assert above checked.
        let first = unsafe { self.first.add(range.start) };
        // SAFETY: as above, and that no other task has these elements is the caller's obligation.
        unsafe { std::slice::from_raw_parts_mut(first, range.len()) }
    }
}
