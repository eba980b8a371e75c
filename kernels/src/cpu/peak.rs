//! Peak rates of the machine with a back end's threads and instruction set, measured: kernels are reported as shares of
//! them (Williams, Waterman and Patterson 2009, "Roofline").

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use super::CpuBackend;
use super::cell::{Bf16Dot, Bf16Fma, F32Fma, Math, Word};
use super::simd::{Kernel, Simd};
use crate::precision::Precision;

/// Sums that are under way at once: enough to hide the latency of one, and fewer than there are registers.
const CHAINS: usize = 12;
/// Steps of each chain between two readings of the clock.
const STEPS: usize = 1 << 20;
/// Bytes that are read through: more than any last cache of two cores' share.
const BYTES: usize = 256 << 20;
/// Times that each is measured; the best counts.
const REPEATS: usize = 5;

/// Limits of the machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peak {
    /// Multiply-adds a second of all threads, in the precision of the back end.
    pub multiply_adds_per_s: f64,
    /// Bytes a second that all threads read from memory.
    pub bytes_per_s: f64,
}

impl CpuBackend {
    /// Measures the limits, in about a second.
    pub fn peak(&self) -> Peak {
        let multiply = match self.context.precision {
            Precision::F32 => self.multiply_adds::<F32Fma>(),
            Precision::Bf16 if self.context.isa.has_bf16_dot() => self.multiply_adds::<Bf16Dot>(),
            Precision::Bf16 => self.multiply_adds::<Bf16Fma>(),
            // Nibbles are multiplied as bytes.
            Precision::Int8 | Precision::Int4 => self.multiply_adds::<super::linear::Int8Dot>(),
        };
        Peak { multiply_adds_per_s: multiply, bytes_per_s: self.bytes() }
    }

    fn multiply_adds<M: Math>(&self) -> f64 {
        let n = self.context.pool.n_threads();
        let lanes = AtomicUsize::new(0);
        let mut best = f64::INFINITY;
        for _ in 0..REPEATS {
            let start = Instant::now();
            self.context.pool.run(n, usize::MAX, |_| {
                M::run(self.context.isa, Chains::<M> { row: black_box(M::Row::default()), lanes: &lanes });
            });
            best = best.min(start.elapsed().as_secs_f64());
        }
        (n * STEPS * CHAINS * lanes.into_inner() * M::Word::STEPS) as f64 / best
    }

    fn bytes(&self) -> f64 {
        let data = vec![1.0_f32; BYTES / size_of::<f32>()];
        let parts: Vec<&[f32]> = data.chunks(64 << 10).collect();
        let mut best = f64::INFINITY;
        for _ in 0..REPEATS {
            let start = Instant::now();
            self.context.pool.run(parts.len(), usize::MAX, |i| {
                let mut sum = 0.0;
                self.context.isa.run(Read { from: parts[i], sum: &mut sum });
                black_box(sum);
            });
            best = best.min(start.elapsed().as_secs_f64());
        }
        BYTES as f64 / best
    }
}

/// Multiply-adds that wait for nothing but themselves.
struct Chains<'a, M: Math> {
    row: M::Row,
    /// Lanes of a register, set by the kernel.
    lanes: &'a AtomicUsize,
}

impl<M: Math> Kernel for Chains<'_, M> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let b = s.splat(black_box(0.0));
        let mut sums = [b; CHAINS];
        for _ in 0..STEPS {
            // Another one each step, for all that is known here: a set that multiplies by several instructions does all of
            // them again.
            let row = black_box(self.row);
            for part in 0..M::PARTS {
                for sum in &mut sums {
                    *sum = M::multiply_add(s, row, part, b, *sum);
                }
            }
        }
        let mut out = [0.0; 16];
        for sum in sums {
            s.store(&mut out, sum);
            black_box(&mut out);
        }
        self.lanes.store(S::LANES, Ordering::Relaxed);
    }
}

/// A sum over memory.
struct Read<'a> {
    from: &'a [f32],
    sum: &'a mut f32,
}

impl Kernel for Read<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sums = [s.splat(0.0); 8];
        for values in self.from.chunks_exact(8 * S::LANES) {
            for (sum, values) in sums.iter_mut().zip(values.chunks_exact(S::LANES)) {
                *sum = s.add(*sum, s.load(values));
            }
        }
        *self.sum = sums.into_iter().map(|sum| s.sum(sum)).sum();
    }
}
