//! Neighbours of a measurement: threads that compute or copy memory until they are dropped, on the cores that the measured
//! worker does not have, or on its own.

use super::error::ProfileError;
use super::host;
use std::hint::black_box;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use triptych_bench::topology::affinity;

/// Bytes that are copied to and fro: more than a last-level cache holds.
const COPIED_BYTES: usize = 128 << 20;
/// Bytes of a pass of copying.
const PASS_BYTES: usize = 1 << 20;
/// f32 values of a pass of computing: part of an L2 cache.
const COMPUTED_VALUES: usize = 64 << 10;
/// Limit for a neighbour's first pass.
const START: Duration = Duration::from_secs(120);

/// The cores that a worker of so many threads leaves to others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherCores {
    /// Their number.
    pub n: usize,
    /// Their list, if this process is bound to its own.
    list: Option<String>,
}

impl OtherCores {
    /// Cores beside those of this process, or beside its threads if it may use all.
    pub fn beside(threads: usize) -> Self {
        let n_all = host::machine_cores();
        let own: Vec<usize> = affinity::own_cores().map(|list| list.iter().collect()).unwrap_or_default();
        match own.len() < n_all && !own.is_empty() {
            false => Self { n: n_all.saturating_sub(threads), list: None },
            true => {
                let others: Vec<String> =
                    (0..n_all).filter(|core| !own.contains(core)).map(|core| core.to_string()).collect();
                Self { n: others.len(), list: Some(others.join(",")) }
            }
        }
    }

    /// Threads by which the worker's own cores have one too many.
    pub fn n_crowding(&self) -> usize {
        // An unbound thread would go to a core that is free.
        if self.list.is_some() { 1 } else { self.n + 1 }
    }

    /// Binds the calling thread, and those that it starts, to these cores. False if the system refuses.
    fn take_thread(&self) -> bool {
        let Some(list) = &self.list else { return true };
        let Ok(thread) = std::fs::read_link("/proc/thread-self") else { return false };
        let Some(id) = thread.file_name().and_then(|id| id.to_str()) else { return false };
        let mut taskset = Command::new("taskset");
        taskset.args(["-c", "-p", list, id]).stdout(Stdio::null()).stderr(Stdio::null());
        taskset.status().is_ok_and(|status| status.success())
    }
}

/// A pass of a neighbour's work.
pub type Pass = Box<dyn FnMut() -> Result<(), ProfileError>>;

/// Running neighbours.
pub struct Neighbours {
    passes: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Neighbours {
    /// Starts a thread for each maker of work; `cores`: where, `None` for the caller's. Returns once each had a pass;
    /// `None` if one could not be placed there, or its work failed.
    pub fn start<M>(cores: Option<&OtherCores>, makers: Vec<M>) -> Option<Self>
    where
        M: FnOnce() -> Result<Pass, ProfileError> + Send + 'static,
    {
        let mut neighbours = Self { passes: Arc::default(), stop: Arc::default(), threads: Vec::new() };
        let (ready, is_ready) = std::sync::mpsc::channel();
        let n = makers.len();
        for make in makers {
            let (passes, stop) = (Arc::clone(&neighbours.passes), Arc::clone(&neighbours.stop));
            let (cores, ready) = (cores.cloned(), ready.clone());
            let run = move || {
                let is_placed = cores.is_none_or(|cores| cores.take_thread());
                let Some(mut pass) = is_placed.then(make).and_then(Result::ok) else { return };
                let mut is_first = true;
                while pass().is_ok() && !stop.load(Ordering::Relaxed) {
                    passes.fetch_add(1, Ordering::Relaxed);
                    if std::mem::take(&mut is_first) {
                        // The starter may have given up.
                        let _ = ready.send(());
                    }
                }
            };
            let thread = std::thread::Builder::new().name("neighbour".into()).spawn(run);
            neighbours.threads.push(thread.ok()?);
        }
        drop(ready);
        let all_ready = (0..n).all(|_| is_ready.recv_timeout(START).is_ok());
        all_ready.then_some(neighbours)
    }

    /// Passes a second while `work` runs.
    pub fn rate_during<E>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<f64, E> {
        let (start, before) = (Instant::now(), self.passes.load(Ordering::Relaxed));
        work()?;
        let n = self.passes.load(Ordering::Relaxed) - before;
        Ok(n as f64 / start.elapsed().as_secs_f64().max(1e-9))
    }
}

impl Drop for Neighbours {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // One that panicked has stopped too.
            let _ = thread.join();
        }
    }
}

/// Copies between two halves of a buffer that no cache holds.
pub fn copies() -> Pass {
    let mut buffer = vec![1u8; COPIED_BYTES];
    let mut at = 0;
    Box::new(move || {
        let (from, to) = buffer.split_at_mut(COPIED_BYTES / 2);
        to[at..at + PASS_BYTES].copy_from_slice(&from[at..at + PASS_BYTES]);
        black_box(&mut *to);
        at = (at + PASS_BYTES) % (COPIED_BYTES / 2);
        Ok(())
    })
}

/// Sums of values in a cache.
pub fn sums() -> Pass {
    let values = vec![1.0f32; COMPUTED_VALUES];
    Box::new(move || {
        let add = |mut sums: [f32; 16], values: &[f32]| {
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            sums
        };
        black_box(black_box(&values).chunks_exact(16).fold([0.0f32; 16], add));
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    type Maker = fn() -> Result<Pass, ProfileError>;

    #[test]
    fn neighbours_work_until_they_are_dropped() {
        let neighbours = Neighbours::start(None, vec![(|| Ok(copies())) as Maker, || Ok(sums())]).unwrap();
        let enough = neighbours.passes.load(Ordering::Relaxed) + 20;
        let rate = neighbours.rate_during(|| {
            while neighbours.passes.load(Ordering::Relaxed) < enough {
                std::thread::yield_now();
            }
            Ok::<_, ()>(())
        });
        assert!(rate.unwrap() > 0.0);
        let passes = Arc::clone(&neighbours.passes);
        drop(neighbours);
        assert_eq!(Arc::strong_count(&passes), 1);
    }

    #[test]
    fn one_that_cannot_be_placed_or_fails_is_none() {
        let nowhere = OtherCores { n: 1, list: Some("99999".into()) };
        assert!(Neighbours::start(Some(&nowhere), vec![(|| Ok(sums())) as Maker]).is_none());
        let broken: Maker = || Ok(Box::new(|| Err(ProfileError::Panicked)));
        assert!(Neighbours::start(None, vec![broken]).is_none());
    }

    #[test]
    fn other_cores_are_those_that_are_left() {
        let n_all = host::machine_cores();
        let all = OtherCores::beside(n_all);
        if all.list.is_none() {
            assert_eq!((all.n, all.n_crowding()), (0, 1));
            assert_eq!(OtherCores::beside(0).n_crowding(), n_all + 1);
        }
    }
}
