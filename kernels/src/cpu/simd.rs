//! The vector trait, and the instruction sets behind it.
//!
//! A kernel is written once over [`Simd`] and runs through [`Isa::run`], which enters a function compiled for
//! the instruction set; everything below it is `#[inline(always)]`, so that it is compiled there too. The idea
//! is memchr's (`src/vector.rs`). A value of a [`Simd`] type is proof that the machine has the set: it is
//! made only by [`Isa::run`], of an [`Isa`] that was found on this machine.

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use super::cell::{bf16_bits, halves};
use crate::ops::{KernelError, Result};

/// An instruction set to run kernels on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust, four lanes; multiplies and adds apart.
    Portable,
    /// AVX2 and FMA, eight lanes.
    Avx2,
    /// AVX-512 F, BW and VL, sixteen lanes; bf16 is widened.
    Avx512,
    /// The same with the dot product of bytes.
    Avx512Vnni,
    /// The same with the bf16 dot product too.
    Avx512Bf16,
}

impl Isa {
    /// Every set this crate knows, slowest first.
    pub const ALL: [Self; 5] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Vnni, Self::Avx512Bf16];

    /// The name used in settings and errors.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512vnni",
            Self::Avx512Bf16 => "avx512bf16",
        }
    }

    /// Whether this machine has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => Self::Avx512.is_available() && is_x86_feature_detected!("avx512vnni"),
            #[cfg(target_arch = "x86_64")]
            // Every machine with the one dot product has the other.
            Self::Avx512Bf16 => Self::Avx512Vnni.is_available() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The sets of this machine, slowest first, except that [`Self::fastest`] may come before the last.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// The set that kernels run on where none is asked for.
    ///
    /// On Intel's machines the bf16 dot product is left out: it multiplies half as much in a cycle there (16 pairs every
    /// other one, measured on Emerald Rapids) as widened values do. On AMD's it is twice as fast.
    pub fn fastest() -> Self {
        let is_slow = |isa: &Self| *isa == Self::Avx512Bf16 && is_intel();
        Self::available().filter(|isa| !is_slow(isa)).last().unwrap_or(Self::Portable)
    }
}

/// Whether Intel made the processor.
fn is_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let id = std::arch::x86_64::__cpuid(0);
        [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// An [`Isa`] found on this machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FoundIsa(Isa);

impl FoundIsa {
    /// The set asked for, or the fastest there is.
    ///
    /// # Errors
    /// [`KernelError::Isa`] if the machine lacks the set asked for.
    pub(crate) fn new(forced: Option<Isa>) -> Result<Self> {
        match forced {
            Some(isa) if !isa.is_available() => Err(KernelError::Isa(isa.as_str())),
            Some(isa) => Ok(Self(isa)),
            None => Ok(Self(Isa::fastest())),
        }
    }

    /// The set.
    pub(crate) fn get(self) -> Isa {
        self.0
    }

    /// Runs a kernel without dot products compiled for the set: those that differ in nothing else share the code.
    pub(crate) fn run<K: Kernel>(self, kernel: K) {
        match self.0 {
            Isa::Portable => kernel.run(portable::Portable),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the field is private and `new` checked that this machine has the set.
            Isa::Avx2 => unsafe { x86::run_avx2(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above; each of these sets holds the first.
            Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 => unsafe { x86::run_avx512(kernel) },
            #[cfg(not(target_arch = "x86_64"))]
            _ => kernel.run(portable::Portable),
        }
    }

    /// The same for a kernel with dot products of pairs.
    pub(crate) fn run_pairs<K: Kernel>(self, kernel: K) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Isa::Avx512Bf16 => unsafe { x86::run_avx512bf16(kernel) },
            _ => self.run(kernel),
        }
    }

    /// The same for a kernel with dot products of quads.
    pub(crate) fn run_quads<K: Kernel>(self, kernel: K) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`; the second set holds the first.
            Isa::Avx512Vnni | Isa::Avx512Bf16 => unsafe { x86::run_avx512vnni(kernel) },
            _ => self.run(kernel),
        }
    }

    /// The same for a kernel that is meant for such sets alone; elsewhere plain Rust does the same, slowly.
    pub(crate) fn run_quads_alone<K: Kernel>(self, kernel: K) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run_quads`.
            Isa::Avx512Vnni | Isa::Avx512Bf16 => unsafe { x86::run_avx512vnni(kernel) },
            _ => kernel.run(portable::Portable),
        }
    }

    /// Whether the set has the dot product of pairs of bf16; elsewhere pairs are taken apart.
    pub(crate) fn has_pairs(self) -> bool {
        self.0 == Isa::Avx512Bf16
    }

    /// Whether the set has the dot product of quads of bytes as one instruction.
    pub(crate) fn has_quads(self) -> bool {
        matches!(self.0, Isa::Avx512Vnni | Isa::Avx512Bf16)
    }

    /// Rows of the largest register tile of the set.
    pub(crate) fn tile_rows(self) -> usize {
        match self.0 {
            Isa::Portable | Isa::Avx2 => 6,
            Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 => 14,
        }
    }
}

/// Work to be compiled for each instruction set: arguments as fields, `run` as body.
pub(crate) trait Kernel {
    /// The body. Implementations and what they call must be `#[inline(always)]`, without closures in hot
    /// loops: only what is inlined into the entry of the set is compiled for it.
    fn run<S: Simd>(self, simd: S);
}

/// Vectors of f32 of an instruction set.
///
/// Every operation but `sum` and `largest` works on each lane alone, so that a value does not depend on the lane it is
/// computed in, and all but `ratio` round as IEEE says. Sets differ in `fma` (the portable one rounds twice), in
/// `dot_pair`, in `ratio` and in the order of `sum`.
pub(crate) trait Simd: Copy {
    /// A register.
    type V: Copy;
    /// Lanes of a register; divides 16.
    const LANES: usize;
    /// Rows of the largest register tile.
    const ROWS: usize;

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
    /// To the nearest whole number.
    fn round(self, a: Self::V) -> Self::V;
    /// `a · 2ⁿ` for whole `n` in −200 ..= 200, correct down to denormals and zero and up to infinity.
    fn scale_by_power(self, a: Self::V, n: Self::V) -> Self::V;
    /// Asks for the line at an address, which need not be valid, to be brought into the second cache.
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
    /// `acc + a₀·b₀ + a₁·b₁` for pairs of bf16 in each lane, the first in the low half: `a` the same pair for
    /// all lanes, `b` the bits of a register.
    #[inline(always)]
    fn dot_pair(self, acc: Self::V, a: u32, b: Self::V) -> Self::V {
        let [first, second] = halves(a);
        let sum = self.fma(self.splat(first), self.low_halves(b), acc);
        self.fma(self.splat(second), self.high_halves(b), sum)
    }
    /// `acc + Σ aᵢ·bᵢ` over the four bytes of each lane, lowest first: `a` the same unsigned bytes for all lanes,
    /// `b` the bits of a register of signed ones, `acc` and the result the bits of i32, which wraps.
    fn dot_quad(self, acc: Self::V, a: u32, b: Self::V) -> Self::V;
    /// The same with the signs the other way: `a` the same signed bytes for all lanes, `b` unsigned ones. Slow, except where
    /// it is an instruction.
    #[inline(always)]
    fn dot_signed_quad(self, acc: Self::V, a: u32, b: Self::V) -> Self::V {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_set_that_is_taken_is_one_of_this_machine_and_no_slow_one() {
        let taken = Isa::fastest();
        assert!(taken.is_available(), "{taken:?}");
        assert!(!(is_intel() && taken == Isa::Avx512Bf16));
        let faster = Isa::available().skip_while(|isa| *isa != taken).skip(1).count();
        assert!(faster <= usize::from(is_intel()), "{taken:?}");
    }

    /// Products of quads with both signs, and halves of bytes.
    struct Quads<'a> {
        a: u32,
        b: [u32; 16],
        out: &'a mut [[u32; 16]; 4],
        lanes: &'a mut usize,
    }

    impl Kernel for Quads<'_> {
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let start = s.splat(f32::from_bits(7));
            let b = s.load_bits(&self.b);
            let shifted = s.shift_bytes(b);
            let results = [
                s.dot_quad(start, self.a, b),
                s.dot_signed_quad(start, self.a, shifted),
                s.low_nibbles(b),
                s.high_nibbles(b),
            ];
            for (out, result) in self.out.iter_mut().zip(results) {
                let mut lanes = [0.0; 16];
                s.store(&mut lanes, result);
                *out = lanes.map(f32::to_bits);
            }
            *self.lanes = S::LANES;
        }
    }

    #[test]
    fn bytes_are_multiplied_and_taken_apart_alike_on_every_set() {
        let b: [u32; 16] = std::array::from_fn(|i| (i as u32).wrapping_mul(0x9e37_79b9) ^ 0x80ff_017f);
        for a in [0_u32, 0xffff_ffff, 0x8001_7fff, 0x1234_5678] {
            let expected = |lane: usize, product: fn(u8, u8) -> i32| {
                let bytes = a.to_le_bytes().into_iter().zip(b[lane].to_le_bytes());
                (7 + bytes.map(|(a, b)| product(a, b)).sum::<i32>()) as u32
            };
            for isa in Isa::available() {
                let (mut out, mut lanes) = ([[0; 16]; 4], 0);
                let found = FoundIsa::new(Some(isa)).expect("an available set");
                found.run_quads(Quads { a, b, out: &mut out, lanes: &mut lanes });
                for lane in 0..lanes {
                    let unsigned_by_signed = |a: u8, b: u8| i32::from(a) * i32::from(b as i8);
                    let signed_by_shifted = |a: u8, b: u8| i32::from(a as i8) * i32::from(b ^ 0x80);
                    let place = format!("{a:x} {} lane {lane}", isa.as_str());
                    assert_eq!(out[0][lane], expected(lane, unsigned_by_signed), "{place}");
                    assert_eq!(out[1][lane], expected(lane, signed_by_shifted), "{place}");
                    assert_eq!(out[2][lane], b[lane] & 0x0f0f_0f0f, "{place}");
                    assert_eq!(out[3][lane], b[lane] >> 4 & 0x0f0f_0f0f, "{place}");
                }
            }
        }
    }
}
