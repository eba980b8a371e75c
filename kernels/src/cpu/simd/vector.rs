//! The two traits that kernels are written with: the kernel itself, and the vectors of an instruction set.

use crate::cpu::bf16::{bf16_bits, unpack_pair};

/// Work to be compiled for each instruction set: arguments as fields, `run` as body.
///
/// A kernel is one function of the binary for each set, and what it calls is inlined into it. Code that is large and
/// needed in several places, as a register tile is, is a kernel of its own that the others [`call`](Simd::call).
pub(crate) trait Kernel: Sized {
    /// The body. Implementations and what they call must be `#[inline(always)]`, without closures in hot
    /// loops: only what is inlined into the entry of the set is compiled for it.
    fn run<S: Simd>(self, simd: S);
}

/// Vectors of f32 of an instruction set.
///
/// Every operation but `sum` and `largest` works on each lane alone, so that a value does not depend on the lane it is
/// computed in, and all but `ratio` and `exp2_coarse` round as IEEE says. Sets differ in `fma` (the portable one rounds
/// twice), in `dot_bf16`, in these two, in small values of `store_bf16` and in the order of `sum`.
pub(crate) trait Simd: Copy {
    /// A register.
    type V: Copy;
    /// Lanes of a register; divides 16.
    const LANES: usize;
    /// Rows of the register tiles that are compiled for the set, largest first; of 14, 8, 6, 4, 2 and 1, with 1.
    const HEIGHTS: &[usize];
    /// Rows of the largest register tile.
    const ROWS: usize = Self::HEIGHTS[0];

    /// Runs a kernel as a function of its own, compiled for the set. A call costs some ten cycles, and passes no vectors.
    fn call<K: Kernel>(self, kernel: K);

    /// `LANES` times `x`.
    fn splat(self, x: f32) -> Self::V;
    /// Reads `LANES` values from unaligned memory.
    ///
    /// # Safety
    /// `from` must be valid for reading `LANES` values of four bytes.
    unsafe fn load_ptr(self, from: *const f32) -> Self::V;
    /// Writes `LANES` values to unaligned memory.
    ///
    /// # Safety
    /// `to` must be valid for writing `LANES` values.
    unsafe fn store_ptr(self, to: *mut f32, v: Self::V);

    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a − b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a · b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b` within two units in the last place, for `b` of a size from 2⁻¹⁰⁰ to 2¹⁰⁰: a division takes as long as
    /// thirty other operations where registers are wide.
    #[inline(always)]
    fn ratio(self, a: Self::V, b: Self::V) -> Self::V {
        self.div(a, b)
    }
    /// The larger; `b` if either is not a number.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` if either is not a number.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a · b + c`.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// To the nearest integer.
    fn round(self, a: Self::V) -> Self::V;
    /// `a · 2ⁿ` for an integer `n` in −200 ..= 200, correct down to denormals and zero and up to infinity.
    fn scale_by_power(self, a: Self::V, n: Self::V) -> Self::V;
    /// `2ˣ` within 8e-5 of itself for `x` up to 127, exactly 0 from −160 down, not a number for what is none.
    #[inline(always)]
    fn exp2_coarse(self, x: Self::V) -> Self::V {
        // A bound first, so that a lane that is not a number stays one.
        let x = self.max(self.splat(-160.0), x);
        let n = self.round(x);
        let r = self.sub(x, n);
        // The least largest relative error of 2ʳ from −½ to ½ that a cubic has.
        let y = self.fma(self.splat(0.055_171_67), r, self.splat(0.242_611_12));
        let y = self.fma(y, r, self.splat(0.693_260_99));
        let y = self.fma(y, r, self.splat(0.999_928_07));
        self.scale_by_power(y, n)
    }
    /// Asks for the line at an address, which need not be valid, to be brought into the L2 cache.
    fn prefetch(self, _at: *const u8) {}
    /// The bf16 in the low half of each lane, as f32.
    fn low_halves(self, pairs: Self::V) -> Self::V;
    /// The bf16 in the high half of each lane, as f32.
    fn high_halves(self, pairs: Self::V) -> Self::V;
    /// The signed byte `part` of each lane's bits, the lowest being 0, as f32.
    fn signed_bytes(self, quads: Self::V, part: usize) -> Self::V;
    /// Each lane rounded to bf16 as [`bf16_bits`] does.
    #[inline(always)]
    fn round_to_bf16(self, v: Self::V) -> Self::V {
        let mut lanes = [0.0; 16];
        self.store(&mut lanes, v);
        for lane in &mut lanes {
            *lane = f32::from_bits(bf16_bits(*lane) << 16);
        }
        self.load(&lanes)
    }
    /// Writes the high half of each lane's bits, the first lane first, and leaves the rest as it is.
    #[inline(always)]
    fn store_high_halves(self, to: &mut [u16; 16], v: Self::V) {
        let mut lanes = [0.0; 16];
        self.store(&mut lanes, v);
        for (to, lane) in to.iter_mut().zip(lanes).take(Self::LANES) {
            *to = (lane.to_bits() >> 16) as u16;
        }
    }
    /// Writes each lane rounded to bf16, the first lane first, and leaves the rest as it is. What is smaller than any normal
    /// number may become zero.
    #[inline(always)]
    fn store_bf16(self, to: &mut [u16; 16], v: Self::V) {
        self.store_high_halves(to, self.round_to_bf16(v));
    }
    /// `acc + a₀·b₀ + a₁·b₁` for pairs of bf16 in each lane, the first in the low half: `a` the same pair for
    /// all lanes, `b` the bits of a register.
    #[inline(always)]
    fn dot_bf16(self, acc: Self::V, a: u32, b: Self::V) -> Self::V {
        let [first, second] = unpack_pair(a);
        let sum = self.fma(self.splat(first), self.low_halves(b), acc);
        self.fma(self.splat(second), self.high_halves(b), sum)
    }
    /// `acc + Σ aᵢ·bᵢ` over the four bytes of each lane, lowest first: `a` the same unsigned bytes for all lanes,
    /// `b` the bits of a register of signed ones, `acc` and the result the bits of i32, which wraps.
    fn dot_bytes(self, acc: Self::V, a: u32, b: Self::V) -> Self::V;
    /// The same with the signs the other way: `a` the same signed bytes for all lanes, `b` unsigned ones. Slow, except where
    /// it is an instruction.
    #[inline(always)]
    fn dot_signed_bytes(self, acc: Self::V, a: u32, b: Self::V) -> Self::V {
        let (mut sums, mut quads) = ([0.0; 16], [0.0; 16]);
        self.store(&mut sums, acc);
        self.store(&mut quads, b);
        for (sum, quad) in sums.iter_mut().zip(quads).take(Self::LANES) {
            let mut total = sum.to_bits();
            for (a, b) in a.to_le_bytes().into_iter().zip(quad.to_bits().to_le_bytes()) {
                total = total.wrapping_add((i32::from(a as i8) * i32::from(b)) as u32);
            }
            *sum = f32::from_bits(total);
        }
        self.load(&sums)
    }
    /// Each byte of each lane's bits with its top bit turned: signed bytes as unsigned ones that are 128 more.
    fn shift_bytes(self, bytes: Self::V) -> Self::V;
    /// The low half of each byte of each lane's bits.
    fn low_nibbles(self, bytes: Self::V) -> Self::V;
    /// The high half of each byte of each lane's bits, moved down.
    fn high_nibbles(self, bytes: Self::V) -> Self::V;
    /// Writes the lowest byte of each lane's bits, the first lane first, and leaves the rest as it is.
    fn store_low_bytes(self, to: &mut [u8; 16], v: Self::V);
    /// The i32 whose bits each lane has, as f32.
    fn whole(self, v: Self::V) -> Self::V;

    /// Prefetches the cache lines of a slice, but for a last one that it shares with what is behind it.
    #[inline(always)]
    fn prefetch_all<T>(self, of: &[T]) {
        for line in of.chunks(64 / size_of::<T>().max(1)) {
            self.prefetch(line.as_ptr().cast());
        }
    }

    /// Reads the first `LANES` values of a slice.
    #[inline(always)]
    fn load(self, from: &[f32]) -> Self::V {
        let from = &from[..Self::LANES];
        // SAFETY: the slice was just cut to LANES values.
        unsafe { self.load_ptr(from.as_ptr()) }
    }

    /// The same of values that are bits.
    #[inline(always)]
    fn load_bits(self, from: &[u32]) -> Self::V {
        let from = &from[..Self::LANES];
        // SAFETY: the slice was just cut to LANES values of four bytes.
        unsafe { self.load_ptr(from.as_ptr().cast()) }
    }

    /// Writes the first `LANES` values of a slice.
    #[inline(always)]
    fn store(self, to: &mut [f32], v: Self::V) {
        let to = &mut to[..Self::LANES];
        // SAFETY: the slice was just cut to LANES values.
        unsafe { self.store_ptr(to.as_mut_ptr(), v) }
    }

    /// Reads up to `LANES` values; `fill` in the lanes past the end.
    #[inline(always)]
    fn load_or(self, from: &[f32], fill: f32) -> Self::V {
        if from.len() >= Self::LANES {
            return self.load(from);
        }
        let mut lanes = [fill; 16];
        lanes[..from.len()].copy_from_slice(from);
        self.load(&lanes)
    }

    /// Writes up to `LANES` values, as many as there is room for.
    #[inline(always)]
    fn store_some(self, to: &mut [f32], v: Self::V) {
        if to.len() >= Self::LANES {
            return self.store(to, v);
        }
        let mut lanes = [0.0; 16];
        self.store(&mut lanes, v);
        to.copy_from_slice(&lanes[..to.len()]);
    }

    /// Sum of the lanes.
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let mut lanes = [0.0; 16];
        self.store(&mut lanes, v);
        let mut n = Self::LANES;
        while n > 1 {
            n /= 2;
            for i in 0..n {
                lanes[i] += lanes[i + n];
            }
        }
        lanes[0]
    }

    /// Largest lane.
    #[inline(always)]
    fn largest(self, v: Self::V) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; 16];
        self.store(&mut lanes, v);
        let mut n = Self::LANES;
        while n > 1 {
            n /= 2;
            for i in 0..n {
                lanes[i] = lanes[i].max(lanes[i + n]);
            }
        }
        lanes[0]
    }

    /// Largest lane of each of four registers: together they take half of the operations.
    #[inline(always)]
    fn largest_of_four(self, v: [Self::V; 4]) -> [f32; 4] {
        let [a, b, c, d] = v;
        [self.largest(a), self.largest(b), self.largest(c), self.largest(d)]
    }
}
