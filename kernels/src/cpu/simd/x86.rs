//! AVX2 and AVX-512: each method one or a few instructions.
//!
//! The types are private to their constructors here, [`Entries`], which the caller may enter only on a machine that has
//! the set. That is what every `SAFETY` line below leans on.
//!
//! One file over 600 lines: the methods of each set stand in the order of the trait, so that the sets are read side by side.

use std::arch::x86_64::*;

use super::vector::{Kernel, Simd};

/// Entries to a kernel, each a function of its own that is compiled for a set.
///
/// An entry is compiled in the codegen unit of the module that its kernel is declared in, so that units are as even as
/// modules are.
pub(super) trait Entries: Kernel {
    /// Runs the kernel with AVX2.
    ///
    /// # Safety
    /// The machine must have AVX2 and FMA.
    unsafe fn run_avx2(self);
    /// Runs the kernel with AVX2 and its dot product of bytes.
    ///
    /// # Safety
    /// The machine must have AVX2, FMA and AVX-VNNI.
    unsafe fn run_avxvnni(self);
    /// Runs the kernel with AVX-512.
    ///
    /// # Safety
    /// The machine must have AVX2, FMA and AVX-512 F, BW, DQ and VL.
    unsafe fn run_avx512(self);
    /// Runs the kernel with AVX-512 and its dot product of bytes.
    ///
    /// # Safety
    /// The machine must have AVX2, FMA and AVX-512 F, BW, DQ, VL and VNNI.
    unsafe fn run_avx512vnni(self);
    /// Runs the kernel with AVX-512 and both its dot products.
    ///
    /// # Safety
    /// The machine must have AVX2, FMA and AVX-512 F, BW, DQ, VL, VNNI and BF16.
    unsafe fn run_avx512bf16(self);
}

impl<K: Kernel> Entries for K {
    #[inline(never)]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn run_avx2(self) {
        self.run(Avx2(()));
    }

    #[inline(never)]
    #[target_feature(enable = "avx2,fma,avxvnni")]
    unsafe fn run_avxvnni(self) {
        self.run(AvxVnni(()));
    }

    #[inline(never)]
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn run_avx512(self) {
        self.run(Avx512(()));
    }

    #[inline(never)]
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn run_avx512vnni(self) {
        self.run(Avx512Vnni(()));
    }

    #[inline(never)]
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")]
    unsafe fn run_avx512bf16(self) {
        self.run(Avx512Bf16(()));
    }
}

/// AVX2 and FMA.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx2(());

/// AVX2, FMA, AVX-VNNI.
#[derive(Clone, Copy, Debug)]
pub(super) struct AvxVnni(());

/// AVX-512 F, BW, DQ, VL.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx512(());

/// AVX-512 F, BW, DQ, VL, VNNI.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx512Vnni(());

/// AVX-512 F, BW, DQ, VL, VNNI, BF16.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx512Bf16(());

/// The upper half of a lane.
const UPPER: i32 = -0x1_0000;

/// The bit of what is not a number that says that it may be computed with, in the half that stays.
const QUIET: i32 = 0x0040_0000;

/// The top bit of each byte of a lane.
const TOP_BITS: i32 = i32::from_le_bytes([0x80; 4]);

/// The low half of each byte of a lane.
const NIBBLES: i32 = 0x0f0f_0f0f;

/// Methods that are one instruction without memory.
macro_rules! instructions {
    ($($name:ident($($arg:ident),+) = $intrinsic:ident;)+) => {$(
        #[inline(always)]
        fn $name(self, $($arg: Self::V),+) -> Self::V {
            // SAFETY: `self` exists only where the set does.
            unsafe { $intrinsic($($arg),+) }
        }
    )+};
}

/// The way into a function of its own.
macro_rules! call {
    ($entry:ident) => {
        #[inline(always)]
        fn call<K: Kernel>(self, kernel: K) {
            // SAFETY: `self` exists only where the set does.
            unsafe { kernel.$entry() }
        }
    };
}

/// Methods that read and write memory.
macro_rules! memory {
    ($splat:ident, $load:ident, $store:ident) => {
        #[inline(always)]
        fn splat(self, x: f32) -> Self::V {
            // SAFETY: `self` exists only where the set does.
            unsafe { $splat(x) }
        }

        #[inline(always)]
        unsafe fn load_ptr(self, from: *const f32) -> Self::V {
            // SAFETY: `self` exists only where the set does; the pointer is the caller's obligation.
            unsafe { $load(from) }
        }

        #[inline(always)]
        unsafe fn store_ptr(self, to: *mut f32, v: Self::V) {
            // SAFETY: `self` exists only where the set does; the pointer is the caller's obligation.
            unsafe { $store(to, v) }
        }

        #[inline(always)]
        fn prefetch(self, at: *const u8) {
            // SAFETY: every machine of this kind has it, and it reads nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
        }
    };
}

/// Methods that the sets of 256 bits share.
macro_rules! avx2 {
    () => {
        type V = __m256;
        const LANES: usize = 8;
        const HEIGHTS: &[usize] = &[6, 4, 2, 1];

        memory!(_mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps);
        instructions! {
            add(a, b) = _mm256_add_ps;
            sub(a, b) = _mm256_sub_ps;
            mul(a, b) = _mm256_mul_ps;
            div(a, b) = _mm256_div_ps;
            max(a, b) = _mm256_max_ps;
            min(a, b) = _mm256_min_ps;
            fma(a, b, c) = _mm256_fmadd_ps;
        }

        #[inline(always)]
        fn round(self, a: __m256) -> __m256 {
            // SAFETY: `self` exists only where the set does.
            unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
        }

        #[inline(always)]
        fn scale_by_power(self, a: __m256, n: __m256) -> __m256 {
            // SAFETY: `self` exists only where the set does.
            unsafe { avx2_scale_by_power(a, n) }
        }

        #[inline(always)]
        fn low_halves(self, pairs: __m256) -> __m256 {
            // SAFETY: `self` exists only where the set does.
            unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(pairs))) }
        }

        #[inline(always)]
        fn high_halves(self, pairs: __m256) -> __m256 {
            // SAFETY: `self` exists only where the set does.
            unsafe { _mm256_and_ps(pairs, _mm256_castsi256_ps(_mm256_set1_epi32(UPPER))) }
        }

        #[inline(always)]
        fn shift_bytes(self, bytes: __m256) -> __m256 {
            // SAFETY: `self` exists only where the set does.
            unsafe {
                _mm256_castsi256_ps(_mm256_xor_si256(_mm256_castps_si256(bytes), _mm256_set1_epi32(TOP_BITS)))
            }
        }

        #[inline(always)]
        fn low_nibbles(self, bytes: __m256) -> __m256 {
            // SAFETY: `self` exists only where the set does.
            unsafe {
                _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(bytes), _mm256_set1_epi32(NIBBLES)))
            }
        }

        #[inline(always)]
        fn high_nibbles(self, bytes: __m256) -> __m256 {
            // SAFETY: `self` exists only where the set does.
            let down = unsafe { _mm256_srli_epi32::<4>(_mm256_castps_si256(bytes)) };
            // SAFETY: as above.
            self.low_nibbles(unsafe { _mm256_castsi256_ps(down) })
        }

        #[inline(always)]
        fn signed_bytes(self, quads: __m256, part: usize) -> __m256 {
            // SAFETY: `self` exists only where the set does.
            unsafe { avx2_signed_bytes(quads, part) }
        }

        #[inline(always)]
        fn store_low_bytes(self, to: &mut [u8; 16], v: __m256) {
            // SAFETY: `self` exists only where the set does.
            let (low, high) = unsafe { avx2_low_bytes(v) };
            to[..4].copy_from_slice(&low.to_le_bytes());
            to[4..8].copy_from_slice(&high.to_le_bytes());
        }

        #[inline(always)]
        fn round_to_bf16(self, v: __m256) -> __m256 {
            // SAFETY: `self` exists only where the set does.
            unsafe { avx2_round_to_bf16(v) }
        }

        #[inline(always)]
        fn store_high_halves(self, to: &mut [u16; 16], v: __m256) {
            // SAFETY: `self` exists only where the set does; an array of 16 words has room for 8 lanes.
            unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), avx2_high_halves(v)) }
        }

        #[inline(always)]
        fn whole(self, v: __m256) -> __m256 {
            // SAFETY: `self` exists only where the set does.
            unsafe { _mm256_cvtepi32_ps(_mm256_castps_si256(v)) }
        }

        #[inline(always)]
        fn sum(self, v: __m256) -> f32 {
            // SAFETY: `self` exists only where the set does.
            unsafe { avx2_sum(v) }
        }

        #[inline(always)]
        fn largest(self, v: __m256) -> f32 {
            // SAFETY: `self` exists only where the set does.
            unsafe { avx2_largest(v) }
        }
    };
}

impl Simd for Avx2 {
    avx2!();
    call!(run_avx2);

    #[inline(always)]
    fn dot_bytes(self, acc: __m256, a: u32, b: __m256) -> __m256 {
        // SAFETY: `self` exists only where the set does.
        unsafe { avx2_dot_quad(acc, a, b) }
    }
}

impl Simd for AvxVnni {
    avx2!();
    call!(run_avxvnni);

    #[inline(always)]
    fn dot_bytes(self, acc: __m256, a: u32, b: __m256) -> __m256 {
        // SAFETY: `self` exists only where the set does.
        unsafe { avxvnni_dot_quad(acc, a, b) }
    }

    #[inline(always)]
    fn dot_signed_bytes(self, acc: __m256, a: u32, b: __m256) -> __m256 {
        // SAFETY: `self` exists only where the set does.
        unsafe { avxvnni_dot_signed_quad(acc, a, b) }
    }
}

/// `a · 2ⁿ` in two factors, since 2ⁿ itself may not be a normal number.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn avx2_scale_by_power(a: __m256, n: __m256) -> __m256 {
    let n = _mm256_cvtps_epi32(n);
    let half = _mm256_srai_epi32::<1>(n);
    let rest = _mm256_sub_epi32(n, half);
    _mm256_mul_ps(_mm256_mul_ps(a, avx2_power_of_two(half)), avx2_power_of_two(rest))
}

/// `2ⁿ` in each lane, `n` in −126 ..= 127.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn avx2_power_of_two(n: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))))
}

/// Bytes of even and of odd places, as words. `vpmaddubsw` would be shorter and saturates.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn avx2_dot_quad(acc: __m256, a: u32, b: __m256) -> __m256 {
    let b = _mm256_castps_si256(b);
    let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(b));
    let odd = _mm256_srai_epi16::<8>(b);
    let (a, low) = (_mm256_set1_epi32(a as i32), _mm256_set1_epi32(0x00ff_00ff));
    let even = _mm256_madd_epi16(_mm256_and_si256(a, low), even);
    let odd = _mm256_madd_epi16(_mm256_and_si256(_mm256_srli_epi32::<8>(a), low), odd);
    let sum = _mm256_add_epi32(_mm256_castps_si256(acc), _mm256_add_epi32(even, odd));
    _mm256_castsi256_ps(sum)
}

/// The same as one instruction.
#[inline]
#[target_feature(enable = "avx2,avxvnni")]
fn avxvnni_dot_quad(acc: __m256, a: u32, b: __m256) -> __m256 {
    let (acc, b) = (_mm256_castps_si256(acc), _mm256_castps_si256(b));
    _mm256_castsi256_ps(_mm256_dpbusd_avx_epi32(acc, _mm256_set1_epi32(a as i32), b))
}

/// The same instruction with what all lanes share as the signed side.
#[inline]
#[target_feature(enable = "avx2,avxvnni")]
fn avxvnni_dot_signed_quad(acc: __m256, a: u32, b: __m256) -> __m256 {
    let (acc, b) = (_mm256_castps_si256(acc), _mm256_castps_si256(b));
    _mm256_castsi256_ps(_mm256_dpbusd_avx_epi32(acc, b, _mm256_set1_epi32(a as i32)))
}

/// A signed byte of each lane as f32: moved to the top, and down again with its sign.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn avx2_signed_bytes(quads: __m256, part: usize) -> __m256 {
    let quads = _mm256_castps_si256(quads);
    let top = match part {
        0 => _mm256_slli_epi32::<24>(quads),
        1 => _mm256_slli_epi32::<16>(quads),
        2 => _mm256_slli_epi32::<8>(quads),
        _ => quads,
    };
    _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(top))
}

/// The lowest byte of each lane, four lanes to a number.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn avx2_low_bytes(v: __m256) -> (i32, i32) {
    let bytes = _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0xff));
    let words = _mm256_packus_epi32(bytes, bytes);
    // Packing goes on in each half of the register by itself.
    let packed = _mm256_packus_epi16(words, words);
    (_mm256_extract_epi32::<0>(packed), _mm256_extract_epi32::<4>(packed))
}

/// Half of the last place that stays is added, less one where that place is even; what is not a number stays none.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn avx2_round_to_bf16(v: __m256) -> __m256 {
    let bits = _mm256_castps_si256(v);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(QUIET));
    let is_odd = _mm256_cmp_ps::<_CMP_UNORD_Q>(v, v);
    let rounded = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), is_odd);
    _mm256_and_ps(rounded, _mm256_castsi256_ps(_mm256_set1_epi32(UPPER)))
}

/// The high half of each lane's bits.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn avx2_high_halves(v: __m256) -> __m128i {
    let halves = _mm256_srli_epi32::<16>(_mm256_castps_si256(v));
    _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves))
}

/// Sum of the lanes: the upper half of the register is added to the lower, and so on.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn avx2_sum(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}

/// Largest lane: by the larger of the two halves of the register, and so on.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn avx2_largest(v: __m256) -> f32 {
    let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
}

/// Methods that the AVX-512 types share.
macro_rules! avx512 {
    () => {
        type V = __m512;
        const LANES: usize = 16;
        const HEIGHTS: &[usize] = &[14, 8, 6, 4, 2, 1];

        memory!(_mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps);
        instructions! {
            add(a, b) = _mm512_add_ps;
            sub(a, b) = _mm512_sub_ps;
            mul(a, b) = _mm512_mul_ps;
            div(a, b) = _mm512_div_ps;
            max(a, b) = _mm512_max_ps;
            min(a, b) = _mm512_min_ps;
            fma(a, b, c) = _mm512_fmadd_ps;
            scale_by_power(a, n) = _mm512_scalef_ps;
        }

        #[inline(always)]
        fn round(self, a: __m512) -> __m512 {
            // SAFETY: `self` exists only where the set does.
            unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
        }

        #[inline(always)]
        fn ratio(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` exists only where the set does.
            unsafe { avx512_ratio(a, b) }
        }

        #[inline(always)]
        fn low_halves(self, pairs: __m512) -> __m512 {
            // SAFETY: `self` exists only where the set does.
            unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(pairs))) }
        }

        #[inline(always)]
        fn high_halves(self, pairs: __m512) -> __m512 {
            // SAFETY: `self` exists only where the set does.
            unsafe {
                _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32(UPPER)))
            }
        }

        #[inline(always)]
        fn shift_bytes(self, bytes: __m512) -> __m512 {
            // SAFETY: `self` exists only where the set does.
            unsafe {
                _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(bytes), _mm512_set1_epi32(TOP_BITS)))
            }
        }

        #[inline(always)]
        fn low_nibbles(self, bytes: __m512) -> __m512 {
            // SAFETY: `self` exists only where the set does.
            unsafe {
                _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(bytes), _mm512_set1_epi32(NIBBLES)))
            }
        }

        #[inline(always)]
        fn high_nibbles(self, bytes: __m512) -> __m512 {
            // SAFETY: `self` exists only where the set does.
            let down = unsafe { _mm512_srli_epi32::<4>(_mm512_castps_si512(bytes)) };
            // SAFETY: as above.
            self.low_nibbles(unsafe { _mm512_castsi512_ps(down) })
        }

        #[inline(always)]
        fn signed_bytes(self, quads: __m512, part: usize) -> __m512 {
            // SAFETY: `self` exists only where the set does.
            unsafe { avx512_signed_bytes(quads, part) }
        }

        #[inline(always)]
        fn store_low_bytes(self, to: &mut [u8; 16], v: __m512) {
            // SAFETY: `self` exists only where the set does; an array of 16 bytes has room for 16 lanes.
            unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(_mm512_castps_si512(v))) }
        }

        #[inline(always)]
        fn round_to_bf16(self, v: __m512) -> __m512 {
            // SAFETY: `self` exists only where the set does.
            unsafe { avx512_round_to_bf16(v) }
        }

        #[inline(always)]
        fn store_high_halves(self, to: &mut [u16; 16], v: __m512) {
            // SAFETY: `self` exists only where the set does; an array of 16 words has room for 16 lanes.
            unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), avx512_high_halves(v)) }
        }

        #[inline(always)]
        fn whole(self, v: __m512) -> __m512 {
            // SAFETY: `self` exists only where the set does.
            unsafe { _mm512_cvtepi32_ps(_mm512_castps_si512(v)) }
        }

        #[inline(always)]
        fn sum(self, v: __m512) -> f32 {
            // SAFETY: `self` exists only where the set does.
            unsafe { _mm512_reduce_add_ps(v) }
        }

        #[inline(always)]
        fn largest(self, v: __m512) -> f32 {
            // SAFETY: `self` exists only where the set does.
            unsafe { _mm512_reduce_max_ps(v) }
        }

        #[inline(always)]
        fn largest_of_four(self, v: [__m512; 4]) -> [f32; 4] {
            // SAFETY: `self` exists only where the set does.
            unsafe { avx512_largest_of_four(v) }
        }

        #[inline(always)]
        fn exp2_coarse(self, x: __m512) -> __m512 {
            // SAFETY: `self` exists only where the set does.
            unsafe { avx512_exp2_coarse(x) }
        }
    };
}

/// The dot product of bytes where there is one.
macro_rules! avx512_vnni {
    () => {
        #[inline(always)]
        fn dot_bytes(self, acc: __m512, a: u32, b: __m512) -> __m512 {
            // SAFETY: `self` exists only where the set does.
            unsafe { avx512_dot_quad_vnni(acc, a, b) }
        }

        #[inline(always)]
        fn dot_signed_bytes(self, acc: __m512, a: u32, b: __m512) -> __m512 {
            // SAFETY: `self` exists only where the set does.
            unsafe { avx512_dot_signed_quad(acc, a, b) }
        }
    };
}

impl Simd for Avx512 {
    avx512!();
    call!(run_avx512);

    #[inline(always)]
    fn dot_bytes(self, acc: __m512, a: u32, b: __m512) -> __m512 {
        // SAFETY: `self` exists only where the set does.
        unsafe { avx512_dot_quad(acc, a, b) }
    }
}

impl Simd for Avx512Vnni {
    avx512!();
    call!(run_avx512vnni);
    avx512_vnni!();
}

/// The machine's estimate of `1 / b`, good to 14 bits, and a step of Newton's.
#[inline]
#[target_feature(enable = "avx512f")]
fn avx512_ratio(a: __m512, b: __m512) -> __m512 {
    let estimate = _mm512_rcp14_ps(b);
    let error = _mm512_fnmadd_ps(b, estimate, _mm512_set1_ps(1.0));
    _mm512_mul_ps(a, _mm512_fmadd_ps(estimate, error, estimate))
}

/// A cubic of the part of `x` above the integer below it, times two to that integer. An infinite `x` has no such part.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn avx512_exp2_coarse(x: __m512) -> __m512 {
    let r = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(x);
    // The least largest relative error of 2ʳ from 0 to 1 that a cubic has.
    let y = _mm512_fmadd_ps(_mm512_set1_ps(0.078_024_52), r, _mm512_set1_ps(0.226_067_15));
    let y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.695_833_55));
    let y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.999_925_2));
    _mm512_scalef_ps(y, x)
}

/// The larger of two halves of each register until four lanes are left: one of each of them.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
fn avx512_largest_of_four([a, b, c, d]: [__m512; 4]) -> [f32; 4] {
    let ab = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let cd = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    let [ab, cd] = [_mm512_castps_pd(ab), _mm512_castps_pd(cd)];
    let halves = [_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd)];
    let v = _mm512_max_ps(_mm512_castpd_ps(halves[0]), _mm512_castpd_ps(halves[1]));
    let v = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
    let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let mut largest = [0.0; 4];
    // SAFETY: the array has room for four lanes.
    unsafe { _mm_storeu_ps(largest.as_mut_ptr(), v) };
    largest
}

/// As [`avx2_round_to_bf16`]. The instruction that rounds takes small values for zero.
#[inline]
#[target_feature(enable = "avx512f")]
fn avx512_round_to_bf16(v: __m512) -> __m512 {
    let bits = _mm512_castps_si512(v);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    let is_odd = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
    let rounded = _mm512_mask_or_epi32(rounded, is_odd, bits, _mm512_set1_epi32(QUIET));
    _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(UPPER)))
}

/// As [`avx2_high_halves`].
#[inline]
#[target_feature(enable = "avx512f")]
fn avx512_high_halves(v: __m512) -> __m256i {
    _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(v)))
}

/// As [`avx2_signed_bytes`].
#[inline]
#[target_feature(enable = "avx512f")]
fn avx512_signed_bytes(quads: __m512, part: usize) -> __m512 {
    let quads = _mm512_castps_si512(quads);
    let top = match part {
        0 => _mm512_slli_epi32::<24>(quads),
        1 => _mm512_slli_epi32::<16>(quads),
        2 => _mm512_slli_epi32::<8>(quads),
        _ => quads,
    };
    _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(top))
}

/// As [`avx2_dot_quad`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn avx512_dot_quad(acc: __m512, a: u32, b: __m512) -> __m512 {
    let b = _mm512_castps_si512(b);
    let even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(b));
    let odd = _mm512_srai_epi16::<8>(b);
    let (a, low) = (_mm512_set1_epi32(a as i32), _mm512_set1_epi32(0x00ff_00ff));
    let even = _mm512_madd_epi16(_mm512_and_si512(a, low), even);
    let odd = _mm512_madd_epi16(_mm512_and_si512(_mm512_srli_epi32::<8>(a), low), odd);
    let sum = _mm512_add_epi32(_mm512_castps_si512(acc), _mm512_add_epi32(even, odd));
    _mm512_castsi512_ps(sum)
}

/// The same as one instruction.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn avx512_dot_quad_vnni(acc: __m512, a: u32, b: __m512) -> __m512 {
    let (acc, b) = (_mm512_castps_si512(acc), _mm512_castps_si512(b));
    _mm512_castsi512_ps(_mm512_dpbusd_epi32(acc, _mm512_set1_epi32(a as i32), b))
}

/// The same instruction with what all lanes share as the signed side.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn avx512_dot_signed_quad(acc: __m512, a: u32, b: __m512) -> __m512 {
    let (acc, b) = (_mm512_castps_si512(acc), _mm512_castps_si512(b));
    _mm512_castsi512_ps(_mm512_dpbusd_epi32(acc, b, _mm512_set1_epi32(a as i32)))
}

impl Simd for Avx512Bf16 {
    avx512!();
    call!(run_avx512bf16);
    avx512_vnni!();

    #[inline(always)]
    fn store_bf16(self, to: &mut [u16; 16], v: __m512) {
        // SAFETY: `self` exists only where the set does.
        let halves: __m256i = unsafe { std::mem::transmute(_mm512_cvtneps_pbh(v)) };
        // SAFETY: an array of 16 words has room for 16 lanes.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), halves) }
    }

    #[inline(always)]
    fn dot_bf16(self, acc: __m512, a: u32, b: __m512) -> __m512 {
        let pairs = self.splat(f32::from_bits(a));
        // SAFETY: both are 64 bytes, and any bits are a vector of bf16.
        let [a, b]: [__m512bh; 2] = unsafe { std::mem::transmute([pairs, b]) };
        // SAFETY: `self` exists only where the set does.
        unsafe { _mm512_dpbf16_ps(acc, a, b) }
    }
}
