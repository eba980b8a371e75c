//! The vector trait, and the instruction sets behind it.
//!
//! A kernel is written once over [`Simd`] and runs through [`FoundIsa::run`], which enters a function compiled for
//! the instruction set; everything below it is `#[inline(always)]`, so that it is compiled there too, or entered
//! through [`Simd::call`]. The idea is memchr's (`src/vector.rs`). A value of a [`Simd`] type is proof that the machine
//! has the set: it is made only by [`FoundIsa::run`] and its like, of an [`Isa`] that was found on this machine.

#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
use neon::Entries;
use portable::Entry;
#[cfg(target_arch = "x86_64")]
use x86::Entries;

use super::cell::{bf16_bits, halves};
use crate::ops::{KernelError, Result};

/// An instruction set to run kernels on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust, four lanes; multiplies and adds apart.
    Portable,
    /// AVX2 and FMA, eight lanes.
    Avx2,
    /// The same with the dot product of bytes.
    AvxVnni,
    /// AVX-512 F, BW and VL, sixteen lanes; bf16 is widened.
    Avx512,
    /// The same with the dot product of bytes.
    Avx512Vnni,
    /// The same with the bf16 dot product too.
    Avx512Bf16,
    /// NEON, four lanes; bytes are multiplied as words.
    Neon,
    /// The same with the dot product of signed bytes, of which unsigned ones are made by a subtraction.
    NeonDot,
    /// The same with the dot product of unsigned by signed bytes.
    NeonI8mm,
}

impl Isa {
    /// Every set this crate knows, on every machine; those of one machine slowest first.
    pub const ALL: [Self; 9] = [
        Self::Portable,
        Self::Avx2,
        Self::AvxVnni,
        Self::Avx512,
        Self::Avx512Vnni,
        Self::Avx512Bf16,
        Self::Neon,
        Self::NeonDot,
        Self::NeonI8mm,
    ];

    /// The name used in settings and errors.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avxvnni",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512vnni",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Neon => "neon",
            Self::NeonDot => "neondot",
            Self::NeonI8mm => "neoni8mm",
        }
    }

    /// Whether this machine has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => Self::Avx2.is_available() && is_x86_feature_detected!("avxvnni"),
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
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(target_arch = "aarch64")]
            Self::NeonDot => Self::Neon.is_available() && std::arch::is_aarch64_feature_detected!("dotprod"),
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm => Self::NeonDot.is_available() && std::arch::is_aarch64_feature_detected!("i8mm"),
            // Of another architecture.
            _ => false,
        }
    }

    /// The sets of this machine, slowest first, except that [`Self::fastest`] may come before the last.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// The set of this name, of those that this machine has.
    ///
    /// # Errors
    /// [`NoSuchIsa`] for any other name.
    pub fn named(name: &str) -> std::result::Result<Self, NoSuchIsa> {
        Self::available().find(|isa| isa.as_str() == name).ok_or_else(|| NoSuchIsa(name.to_owned()))
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

/// A name that is of no set of this machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no instruction set of this machine, which has {names}", names = names_of_available())]
pub struct NoSuchIsa(String);

fn names_of_available() -> String {
    Isa::available().map(Isa::as_str).collect::<Vec<_>>().join(", ")
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
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the field is private and `new` checked that this machine has the set; the second holds the first.
            Isa::Avx2 | Isa::AvxVnni => unsafe { kernel.run_avx2() },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above; each of these sets holds the first.
            Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 => unsafe { kernel.run_avx512() },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above.
            Isa::Neon | Isa::NeonDot | Isa::NeonI8mm => unsafe { kernel.run_neon() },
            // The portable set; those of another architecture are never found.
            _ => kernel.run_portable(),
        }
    }

    /// Runs a kernel with dot products of pairs of bf16.
    ///
    /// # Panics
    /// Unless the set [has](Self::has_pairs) them: nothing is compiled for others.
    pub(crate) fn run_pairs<K: Kernel>(self, kernel: K) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Isa::Avx512Bf16 => unsafe { kernel.run_avx512bf16() },
            _ => {
                drop(kernel);
                unreachable!("{} has no dot product of pairs", self.0.as_str())
            }
        }
    }

    /// Runs a kernel with dot products of quads of bytes, on sets that have none by other instructions.
    pub(crate) fn run_quads<K: Kernel>(self, kernel: K) {
        if self.has_quads() { self.run_quads_alone(kernel) } else { self.run(kernel) }
    }

    /// The same for a kernel that is meant for such sets alone.
    ///
    /// # Panics
    /// Unless the set [has](Self::has_quads) them: nothing is compiled for others.
    pub(crate) fn run_quads_alone<K: Kernel>(self, kernel: K) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Isa::AvxVnni => unsafe { kernel.run_avxvnni() },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`; the second set holds the first.
            Isa::Avx512Vnni | Isa::Avx512Bf16 => unsafe { kernel.run_avx512vnni() },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as in `run`.
            Isa::NeonDot => unsafe { kernel.run_neondot() },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as in `run`.
            Isa::NeonI8mm => unsafe { kernel.run_neoni8mm() },
            _ => {
                drop(kernel);
                unreachable!("{} has no dot product of quads", self.0.as_str())
            }
        }
    }

    /// Whether the set has the dot product of pairs of bf16; elsewhere pairs are taken apart.
    pub(crate) fn has_pairs(self) -> bool {
        self.0 == Isa::Avx512Bf16
    }

    /// Whether the set has a dot product of quads of bytes.
    pub(crate) fn has_quads(self) -> bool {
        matches!(self.0, Isa::AvxVnni | Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::NeonDot | Isa::NeonI8mm)
    }

    /// Rows of the largest register tile of the set.
    pub(crate) fn tile_rows(self) -> usize {
        match self.0 {
            Isa::Portable | Isa::Avx2 | Isa::AvxVnni => 6,
            Isa::Neon | Isa::NeonDot | Isa::NeonI8mm => 8,
            Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 => 14,
        }
    }
}

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
/// computed in, and all but `ratio` round as IEEE says. Sets differ in `fma` (the portable one rounds twice), in
/// `dot_pair`, in `ratio` and in the order of `sum`.
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
mod tests;
