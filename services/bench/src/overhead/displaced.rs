//! Compute time that other work displaces: its processor time, context switches, and the caches it leaves cold.
//!
//! One thread for each core computes all the while; what it gets done less is the result.

use crate::error::MeasureError;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Name of the threads.
pub const THREAD: &str = "computing";
/// f32 values that a thread reads again and again: part of an L2 cache, as the tiles of a product are.
const N_VALUES: usize = 64 << 10;
/// Time before and after the work in which the undisturbed rate is measured.
const ALONE: Duration = Duration::from_millis(60);

/// Threads that compute until they are dropped.
pub struct ComputeLoad {
    done: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl ComputeLoad {
    /// Starts one thread for each core that this process may use, but for `n_free` of them.
    ///
    /// # Errors
    /// [`MeasureError::Failed`] if a thread cannot be started.
    pub fn start(n_free: usize) -> Result<Self, MeasureError> {
        let n = std::thread::available_parallelism().map_or(1, usize::from).saturating_sub(n_free);
        let mut load = Self { done: Arc::default(), stop: Arc::default(), threads: Vec::new() };
        for _ in 0..n {
            let done = Arc::clone(&load.done);
            let stop = Arc::clone(&load.stop);
            let thread = std::thread::Builder::new().name(THREAD.into()).spawn(move || {
                let values = vec![1.0f32; N_VALUES];
                while !stop.load(Ordering::Relaxed) {
                    black_box(black_box(&values).chunks_exact(16).fold([0.0f32; 16], add));
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
            load.threads.push(thread.map_err(|e| MeasureError::failed("cannot start a compute thread", &e))?);
        }
        Ok(load)
    }

    /// Core time that the threads lose to `work`, in microseconds.
    ///
    /// # Errors
    /// The error of `work`.
    pub async fn displaced_us<E>(&self, work: impl Future<Output = Result<(), E>>) -> Result<f64, E> {
        let before = self.alone().await;
        let start = Instant::now();
        let done = self.done.load(Ordering::Relaxed);
        work.await?;
        let took = start.elapsed().as_secs_f64();
        let done = self.done.load(Ordering::Relaxed) - done;
        let alone = (before + self.alone().await) / 2.0;
        Ok(lost(done as f64, alone, took) * self.threads.len() as f64 * 1e6)
    }

    /// Undisturbed rate, in passes a second.
    async fn alone(&self) -> f64 {
        let start = Instant::now();
        let done = self.done.load(Ordering::Relaxed);
        tokio::time::sleep(ALONE).await;
        (self.done.load(Ordering::Relaxed) - done) as f64 / start.elapsed().as_secs_f64()
    }
}

/// Seconds of `took` that are lost if `done` passes were made where `alone` a second were possible.
fn lost(done: f64, alone: f64, took: f64) -> f64 {
    if alone > 0.0 { took - done / alone } else { 0.0 }
}

fn add(mut sums: [f32; 16], values: &[f32]) -> [f32; 16] {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
    sums
}

impl Drop for ComputeLoad {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // One that panicked has stopped too.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_time_is_the_share_of_missing_passes() {
        assert_eq!(lost(500.0, 1000.0, 1.0), 0.5);
        assert_eq!(lost(3000.0, 1000.0, 3.0), 0.0);
        assert_eq!(lost(0.0, 0.0, 1.0), 0.0);
    }

    #[tokio::test]
    async fn threads_compute_until_they_are_dropped() {
        let load = ComputeLoad::start(0).unwrap();
        let done = Arc::clone(&load.done);
        while done.load(Ordering::Relaxed) == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let found = load.displaced_us(async { Ok::<_, ()>(()) }).await;
        assert!(found.is_ok_and(f64::is_finite));
        assert_eq!(load.displaced_us(async { Err("broken") }).await, Err("broken"));
        drop(load);
        assert_eq!(Arc::strong_count(&done), 1);
    }
}
