//! NEON, the vectors of aarch64: each method one or a few instructions.
//!
//! The three sets differ in the dot product of bytes alone ([`Dot`]). [`Neon`] is made only here, by [`Entries`],
//! which the caller may enter only on a machine that has the set. That is what every `SAFETY` line below leans on.
//!
//! Checked against the oracle under emulation (QEMU; `kernels/tests/conformance/main.rs` has the commands); its speed has not
//! been measured on such a machine.
//!
//! Dot products and prefetches are single instructions in `asm!`, since their intrinsics are not stable.

use std::arch::aarch64::*;
use std::arch::asm;
use std::marker::PhantomData;

use super::vector::{Kernel, Simd};

/// Entries to a kernel, each a function of its own that is compiled for a set, in the codegen unit of the module that the
/// kernel is declared in.
pub(super) trait Entries: Kernel {
    /// Runs the kernel with NEON.
    ///
    /// # Safety
    /// The machine must have NEON.
    unsafe fn run_neon(self);
    /// Runs the kernel with NEON and its dot product of signed bytes.
    ///
    /// # Safety
    /// The machine must have NEON and `FEAT_DotProd`.
    unsafe fn run_neondot(self);
    /// Runs the kernel with NEON and its dot product of unsigned by signed bytes.
    ///
    /// # Safety
    /// The machine must have NEON and `FEAT_I8MM`.
    unsafe fn run_neoni8mm(self);
}

impl<K: Kernel> Entries for K {
    #[inline(never)]
    #[target_feature(enable = "neon")]
    unsafe fn run_neon(self) {
        self.run(Neon::<Words>(PhantomData));
    }

    #[inline(never)]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn run_neondot(self) {
        self.run(Neon::<Sdot>(PhantomData));
    }

    #[inline(never)]
    #[target_feature(enable = "neon,i8mm")]
    unsafe fn run_neoni8mm(self) {
        self.run(Neon::<Usdot>(PhantomData));
    }
}

/// NEON with a dot product of bytes.
#[derive(Clone, Copy, Debug)]
struct Neon<D>(PhantomData<D>);

/// Products of bytes: the two of [`Simd`], as bits of registers.
trait Dot: Copy {
    /// [`Simd::dot_bytes`].
    ///
    /// # Safety
    /// The machine must have the set that the implementation is for.
    unsafe fn unsigned_by(acc: float32x4_t, a: u32, b: float32x4_t) -> float32x4_t;
    /// [`Simd::dot_signed_bytes`].
    ///
    /// # Safety
    /// The machine must have the set that the implementation is for.
    unsafe fn signed_by(acc: float32x4_t, a: u32, b: float32x4_t) -> float32x4_t;
    /// [`Simd::call`].
    ///
    /// # Safety
    /// The machine must have the set that the implementation is for.
    unsafe fn run<K: Kernel>(kernel: K);
}

/// As products of words, which every machine has.
#[derive(Clone, Copy, Debug)]
struct Words;

/// By the dot product of signed bytes: with 128 less for each unsigned one, and −128 times the signed ones taken off. That
/// is the same for all rows of a tile, or for all its columns, and computed once.
#[derive(Clone, Copy, Debug)]
struct Sdot;

/// By the dot products that have the signs already.
#[derive(Clone, Copy, Debug)]
struct Usdot;

impl Dot for Words {
    #[inline(always)]
    unsafe fn run<K: Kernel>(kernel: K) {
        // SAFETY: the caller's, which is the same.
        unsafe { kernel.run_neon() }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn unsigned_by(acc: float32x4_t, a: u32, b: float32x4_t) -> float32x4_t {
        dot_words(acc, vdupq_n_u32(a), vreinterpretq_s16_f32(b))
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn signed_by(acc: float32x4_t, a: u32, b: float32x4_t) -> float32x4_t {
        dot_words(acc, vreinterpretq_u32_f32(b), vreinterpretq_s16_u32(vdupq_n_u32(a)))
    }
}

impl Dot for Sdot {
    #[inline(always)]
    unsafe fn run<K: Kernel>(kernel: K) {
        // SAFETY: the caller's, which is the same.
        unsafe { kernel.run_neondot() }
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn unsigned_by(acc: float32x4_t, a: u32, b: float32x4_t) -> float32x4_t {
        less(sdot(acc, b, a ^ TOP_BITS), sdot(vdupq_n_f32(0.0), b, TOP_BITS))
    }

    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn signed_by(acc: float32x4_t, a: u32, b: float32x4_t) -> float32x4_t {
        let top_bits = vreinterpretq_f32_u32(vdupq_n_u32(TOP_BITS));
        less(sdot(acc, shift_bytes(b), a), sdot(vdupq_n_f32(0.0), top_bits, a))
    }
}

impl Dot for Usdot {
    #[inline(always)]
    unsafe fn run<K: Kernel>(kernel: K) {
        // SAFETY: the caller's, which is the same.
        unsafe { kernel.run_neoni8mm() }
    }

    #[inline]
    #[target_feature(enable = "neon,i8mm")]
    unsafe fn unsigned_by(acc: float32x4_t, a: u32, b: float32x4_t) -> float32x4_t {
        sudot(acc, b, a)
    }

    #[inline]
    #[target_feature(enable = "neon,i8mm")]
    unsafe fn signed_by(acc: float32x4_t, a: u32, b: float32x4_t) -> float32x4_t {
        usdot(acc, b, a)
    }
}

/// The top bit of each byte of a lane: −128 as a signed byte.
const TOP_BITS: u32 = 0x8080_8080;

/// Bytes of even and of odd places. Their products are −32640 to 32385, which a word holds; a sum of two may not be.
#[inline]
#[target_feature(enable = "neon")]
fn dot_words(acc: float32x4_t, unsigned: uint32x4_t, signed: int16x8_t) -> float32x4_t {
    let unsigned = vreinterpretq_u16_u32(unsigned);
    let even = vshrq_n_s16::<8>(vshlq_n_s16::<8>(signed));
    let even = vmulq_s16(vreinterpretq_s16_u16(vandq_u16(unsigned, vdupq_n_u16(0xff))), even);
    let odd = vshrq_n_s16::<8>(signed);
    let odd = vmulq_s16(vreinterpretq_s16_u16(vshrq_n_u16::<8>(unsigned)), odd);
    vreinterpretq_f32_s32(vpadalq_s16(vpadalq_s16(vreinterpretq_s32_f32(acc), even), odd))
}

/// `a − b` of bits of i32, which wraps.
#[inline]
#[target_feature(enable = "neon")]
fn less(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    vreinterpretq_f32_s32(vsubq_s32(vreinterpretq_s32_f32(a), vreinterpretq_s32_f32(b)))
}

/// Functions that are a dot product: `acc + Σ bytesᵢ · sharedᵢ` over the four bytes of each lane.
macro_rules! dot_products {
    ($($name:ident($feature:literal) = $instruction:literal;)+) => {$(
        #[inline]
        #[target_feature(enable = $feature)]
        fn $name(mut acc: float32x4_t, bytes: float32x4_t, shared: u32) -> float32x4_t {
            // SAFETY: the function has the feature, and the instruction reads and writes these registers alone.
            unsafe {
                asm!(
                    concat!($instruction, " {acc:v}.4s, {bytes:v}.16b, {shared:v}.4b[0]"),
                    acc = inout(vreg) acc,
                    bytes = in(vreg) bytes,
                    shared = in(vreg) f32::from_bits(shared),
                    options(pure, nomem, nostack, preserves_flags),
                );
            }
            acc
        }
    )+};
}

dot_products! {
    sdot("neon,dotprod") = "sdot";
    sudot("neon,i8mm") = "sudot";
    usdot("neon,i8mm") = "usdot";
}

/// Methods that are a function of registers alone.
macro_rules! instructions {
    ($($name:ident($($arg:ident),+) = $function:ident;)+) => {$(
        #[inline(always)]
        fn $name(self, $($arg: float32x4_t),+) -> float32x4_t {
            // SAFETY: `self` exists only where the set does.
            unsafe { $function($($arg),+) }
        }
    )+};
}

impl<D: Dot> Simd for Neon<D> {
    type V = float32x4_t;
    const LANES: usize = 4;
    // Sixteen sums hide the latency of four units that take four cycles each, and leave sixteen registers for what words
    // are taken apart into.
    const HEIGHTS: &[usize] = &[8, 6, 4, 2, 1];

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) {
        // SAFETY: `self` exists only where the set does.
        unsafe { D::run(kernel) }
    }

    instructions! {
        add(a, b) = vaddq_f32;
        sub(a, b) = vsubq_f32;
        mul(a, b) = vmulq_f32;
        div(a, b) = vdivq_f32;
        max(a, b) = larger;
        min(a, b) = smaller;
        round(a) = vrndnq_f32;
        scale_by_power(a, n) = scale_by_power;
        low_halves(pairs) = low_halves;
        high_halves(pairs) = high_halves;
        round_to_bf16(v) = round_to_bf16;
        shift_bytes(bytes) = shift_bytes;
        low_nibbles(bytes) = low_nibbles;
        high_nibbles(bytes) = high_nibbles;
        whole(v) = whole;
    }

    #[inline(always)]
    fn splat(self, x: f32) -> float32x4_t {
        // SAFETY: `self` exists only where the set does.
        unsafe { vdupq_n_f32(x) }
    }

    #[inline(always)]
    unsafe fn load_ptr(self, from: *const f32) -> float32x4_t {
        // SAFETY: `self` exists only where the set does; the pointer is the caller's obligation.
        unsafe { vld1q_f32(from) }
    }

    #[inline(always)]
    unsafe fn store_ptr(self, to: *mut f32, v: float32x4_t) {
        // SAFETY: `self` exists only where the set does; the pointer is the caller's obligation.
        unsafe { vst1q_f32(to, v) }
    }

    #[inline(always)]
    fn fma(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: `self` exists only where the set does.
        unsafe { vfmaq_f32(c, a, b) }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: every machine of this kind has it, and it reads nothing.
        unsafe { asm!("prfm pldl2keep, [{}]", in(reg) at.addr(), options(nomem, nostack, preserves_flags)) }
    }

    #[inline(always)]
    fn signed_bytes(self, quads: float32x4_t, part: usize) -> float32x4_t {
        // SAFETY: `self` exists only where the set does.
        unsafe { signed_bytes(quads, part) }
    }

    #[inline(always)]
    fn dot_bytes(self, acc: float32x4_t, a: u32, b: float32x4_t) -> float32x4_t {
        // SAFETY: `self` exists only where the set does.
        unsafe { D::unsigned_by(acc, a, b) }
    }

    #[inline(always)]
    fn dot_signed_bytes(self, acc: float32x4_t, a: u32, b: float32x4_t) -> float32x4_t {
        // SAFETY: `self` exists only where the set does.
        unsafe { D::signed_by(acc, a, b) }
    }

    #[inline(always)]
    fn store_low_bytes(self, to: &mut [u8; 16], v: float32x4_t) {
        // SAFETY: `self` exists only where the set does.
        let bytes = unsafe { low_bytes(v) };
        to[..4].copy_from_slice(&bytes.to_le_bytes());
    }

    #[inline(always)]
    fn store_high_halves(self, to: &mut [u16; 16], v: float32x4_t) {
        // SAFETY: `self` exists only where the set does; an array of 16 words has room for 4 lanes.
        unsafe { vst1_u16(to.as_mut_ptr(), vshrn_n_u32::<16>(vreinterpretq_u32_f32(v))) }
    }

    #[inline(always)]
    fn sum(self, v: float32x4_t) -> f32 {
        // SAFETY: `self` exists only where the set does.
        unsafe { sum(v) }
    }

    #[inline(always)]
    fn largest(self, v: float32x4_t) -> f32 {
        // SAFETY: `self` exists only where the set does.
        unsafe { vmaxnmvq_f32(v) }
    }
}

/// The larger. The instruction for it would give what is not a number, on either side.
#[inline]
#[target_feature(enable = "neon")]
fn larger(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    vbslq_f32(vcgtq_f32(a, b), a, b)
}

/// As [`larger`].
#[inline]
#[target_feature(enable = "neon")]
fn smaller(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    vbslq_f32(vcltq_f32(a, b), a, b)
}

/// `a · 2ⁿ` in two factors, since 2ⁿ itself may not be a normal number.
#[inline]
#[target_feature(enable = "neon")]
fn scale_by_power(a: float32x4_t, n: float32x4_t) -> float32x4_t {
    let n = vcvtq_s32_f32(n);
    let half = vshrq_n_s32::<1>(n);
    let rest = vsubq_s32(n, half);
    vmulq_f32(vmulq_f32(a, power_of_two(half)), power_of_two(rest))
}

/// `2ⁿ` in each lane, `n` in −126 ..= 127.
#[inline]
#[target_feature(enable = "neon")]
fn power_of_two(n: int32x4_t) -> float32x4_t {
    vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127))))
}

/// Moved to the upper half, where a bf16 is an f32.
#[inline]
#[target_feature(enable = "neon")]
fn low_halves(pairs: float32x4_t) -> float32x4_t {
    vreinterpretq_f32_u32(vshlq_n_u32::<16>(vreinterpretq_u32_f32(pairs)))
}

/// Without the lower half.
#[inline]
#[target_feature(enable = "neon")]
fn high_halves(pairs: float32x4_t) -> float32x4_t {
    vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(pairs), vdupq_n_u32(0xffff_0000)))
}

/// Half of the last place that stays is added, less one where that place is even; what is not a number stays none.
#[inline]
#[target_feature(enable = "neon")]
fn round_to_bf16(v: float32x4_t) -> float32x4_t {
    let bits = vreinterpretq_u32_f32(v);
    let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
    let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
    let rounded = vbslq_u32(vceqq_f32(v, v), rounded, quiet);
    vreinterpretq_f32_u32(vandq_u32(rounded, vdupq_n_u32(0xffff_0000)))
}

#[inline]
#[target_feature(enable = "neon")]
fn shift_bytes(bytes: float32x4_t) -> float32x4_t {
    vreinterpretq_f32_u8(veorq_u8(vreinterpretq_u8_f32(bytes), vdupq_n_u8(0x80)))
}

#[inline]
#[target_feature(enable = "neon")]
fn low_nibbles(bytes: float32x4_t) -> float32x4_t {
    vreinterpretq_f32_u8(vandq_u8(vreinterpretq_u8_f32(bytes), vdupq_n_u8(0x0f)))
}

#[inline]
#[target_feature(enable = "neon")]
fn high_nibbles(bytes: float32x4_t) -> float32x4_t {
    vreinterpretq_f32_u8(vshrq_n_u8::<4>(vreinterpretq_u8_f32(bytes)))
}

#[inline]
#[target_feature(enable = "neon")]
fn whole(v: float32x4_t) -> float32x4_t {
    vcvtq_f32_s32(vreinterpretq_s32_f32(v))
}

/// A signed byte of each lane as f32: moved to the top, and down again with its sign.
#[inline]
#[target_feature(enable = "neon")]
fn signed_bytes(quads: float32x4_t, part: usize) -> float32x4_t {
    let quads = vreinterpretq_s32_f32(quads);
    let top = match part {
        0 => vshlq_n_s32::<24>(quads),
        1 => vshlq_n_s32::<16>(quads),
        2 => vshlq_n_s32::<8>(quads),
        _ => quads,
    };
    vcvtq_f32_s32(vshrq_n_s32::<24>(top))
}

/// The lowest byte of each lane, the first lane's lowest.
#[inline]
#[target_feature(enable = "neon")]
fn low_bytes(v: float32x4_t) -> u32 {
    let words = vmovn_u32(vreinterpretq_u32_f32(v));
    let bytes = vmovn_u16(vcombine_u16(words, words));
    vget_lane_u32::<0>(vreinterpret_u32_u8(bytes))
}

/// Sum of the lanes: the upper half of the register is added to the lower.
#[inline]
#[target_feature(enable = "neon")]
fn sum(v: float32x4_t) -> f32 {
    vpadds_f32(vadd_f32(vget_low_f32(v), vget_high_f32(v)))
}
