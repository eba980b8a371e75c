//! AVX2 and AVX-512: each method one or a few instructions.
//!
//! The types are private to their constructors here, [`run_avx2`] and its like, which the caller may enter
//! only on a machine that has the set. That is what every `SAFETY` line below leans on.

use std::arch::x86_64::*;

use super::{Kernel, Simd};

/// Runs a kernel with AVX2.
///
/// # Safety
/// The machine must have AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn run_avx2<K: Kernel>(kernel: K) {
    kernel.run(Avx2(()));
}

/// Runs a kernel with AVX-512.
///
/// # Safety
/// The machine must have AVX2, FMA and AVX-512 F, BW and VL.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn run_avx512<K: Kernel>(kernel: K) {
    kernel.run(Avx512(()));
}

/// Runs a kernel with AVX-512 and its dot product of bytes.
///
/// # Safety
/// The machine must have AVX2, FMA and AVX-512 F, BW, VL and VNNI.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn run_avx512vnni<K: Kernel>(kernel: K) {
    kernel.run(Avx512Vnni(()));
}

/// Runs a kernel with AVX-512 and both its dot products.
///
/// # Safety
/// The machine must have AVX2, FMA and AVX-512 F, BW, VL, VNNI and BF16.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16")]
pub(super) unsafe fn run_avx512bf16<K: Kernel>(kernel: K) {
    kernel.run(Avx512Bf16(()));
}

/// AVX2 and FMA.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx2(());

/// AVX-512 F, BW, VL.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx512(());

/// AVX-512 F, BW, VL, VNNI.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx512Vnni(());

/// AVX-512 F, BW, VL, VNNI, BF16.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx512Bf16(());

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
            // SAFETY: `self` exists only where the set does; the pointer is the caller's promise.
            unsafe { $load(from) }
        }

        #[inline(always)]
        unsafe fn store_ptr(self, to: *mut f32, v: Self::V) {
            // SAFETY: `self` exists only where the set does; the pointer is the caller's promise.
            unsafe { $store(to, v) }
        }

        #[inline(always)]
        fn prefetch(self, at: *const u8) {
            // SAFETY: every machine of this kind has it, and it reads nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
        }
    };
}

impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const ROWS: usize = 6;

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
    fn dot_pair(self, acc: __m256, a: u32, b: __m256) -> __m256 {
        // SAFETY: `self` exists only where the set does.
        unsafe { avx2_dot_pair(acc, a, b) }
    }

    #[inline(always)]
    fn dot_quad(self, acc: __m256, a: u32, b: __m256) -> __m256 {
        // SAFETY: `self` exists only where the set does.
        unsafe { avx2_dot_quad(acc, a, b) }
    }

    #[inline(always)]
    fn centre(self, sum: __m256, zero: i32, column: __m256) -> __m256 {
        // SAFETY: `self` exists only where the set does.
        unsafe { avx2_centre(sum, zero, column) }
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

/// The dot product of pairs, each value widened to f32.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn avx2_dot_pair(acc: __m256, a: u32, b: __m256) -> __m256 {
    // The pair comes from memory to all lanes at once; taken apart before, each half would go there by itself.
    let a = _mm256_set1_epi32(a as i32);
    let upper = _mm256_castsi256_ps(_mm256_set1_epi32(-0x1_0000));
    let a0 = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(a));
    let a1 = _mm256_and_ps(_mm256_castsi256_ps(a), upper);
    let low = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(b)));
    let high = _mm256_and_ps(b, upper);
    _mm256_fmadd_ps(a1, high, _mm256_fmadd_ps(a0, low, acc))
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

/// `sum − zero · column` as f32.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn avx2_centre(sum: __m256, zero: i32, column: __m256) -> __m256 {
    let offset = _mm256_mullo_epi32(_mm256_set1_epi32(zero), _mm256_castps_si256(column));
    _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_castps_si256(sum), offset))
}

/// What the AVX-512 types share.
macro_rules! avx512 {
    () => {
        type V = __m512;
        const LANES: usize = 16;
        const ROWS: usize = 14;

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
        fn centre(self, sum: __m512, zero: i32, column: __m512) -> __m512 {
            // SAFETY: `self` exists only where the set does.
            unsafe { avx512_centre(sum, zero, column) }
        }
    };
}

/// A dot product in a set that lacks one of the instructions.
macro_rules! avx512_emulated {
    ($name:ident = $function:ident) => {
        #[inline(always)]
        fn $name(self, acc: __m512, a: u32, b: __m512) -> __m512 {
            // SAFETY: `self` exists only where the set does.
            unsafe { $function(acc, a, b) }
        }
    };
}

/// The dot product of bytes where there is one.
macro_rules! avx512_vnni {
    () => {
        #[inline(always)]
        fn dot_quad(self, acc: __m512, a: u32, b: __m512) -> __m512 {
            // SAFETY: `self` exists only where the set does.
            unsafe { avx512_dot_quad_vnni(acc, a, b) }
        }
    };
}

impl Simd for Avx512 {
    avx512!();
    avx512_emulated!(dot_pair = avx512_dot_pair);
    avx512_emulated!(dot_quad = avx512_dot_quad);
}

impl Simd for Avx512Vnni {
    avx512!();
    avx512_emulated!(dot_pair = avx512_dot_pair);
    avx512_vnni!();
}

/// The dot product of pairs, each value widened to f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn avx512_dot_pair(acc: __m512, a: u32, b: __m512) -> __m512 {
    let (a, bits, upper) =
        (_mm512_set1_epi32(a as i32), _mm512_castps_si512(b), _mm512_set1_epi32(-0x1_0000));
    let a0 = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(a));
    let a1 = _mm512_castsi512_ps(_mm512_and_si512(a, upper));
    let low = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits));
    let high = _mm512_castsi512_ps(_mm512_and_si512(bits, upper));
    _mm512_fmadd_ps(a1, high, _mm512_fmadd_ps(a0, low, acc))
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

/// `sum − zero · column` as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn avx512_centre(sum: __m512, zero: i32, column: __m512) -> __m512 {
    let offset = _mm512_mullo_epi32(_mm512_set1_epi32(zero), _mm512_castps_si512(column));
    _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_castps_si512(sum), offset))
}

impl Simd for Avx512Bf16 {
    avx512!();
    avx512_vnni!();

    #[inline(always)]
    fn dot_pair(self, acc: __m512, a: u32, b: __m512) -> __m512 {
        let pairs = self.splat(f32::from_bits(a));
        // SAFETY: both are 64 bytes, and any bits are a vector of bf16.
        let [a, b]: [__m512bh; 2] = unsafe { std::mem::transmute([pairs, b]) };
        // SAFETY: `self` exists only where the set does.
        unsafe { _mm512_dpbf16_ps(acc, a, b) }
    }
}
