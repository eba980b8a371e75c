//! Pixels of images on the way to an encoder: the passes of a resize, and normalised planes.
//!
//! Results are integers or one rounding after the other, so they have the same bits on every instruction set.

use super::simd::{FoundIsa, Kernel, Simd};

/// Bits of a weight behind the point.
pub const WEIGHT_BITS: u32 = 22;

/// Half of a byte's unit: sums are rounded, not cut.
const HALF: i32 = 1 << (WEIGHT_BITS - 1);

/// Neighbouring bytes of a vector of sums.
const LANES: usize = 16;

/// Vectors of sums that are under way at once. Of 2, 3, 4, 6 and 8 the only ones whose sums the compiler keeps in registers of
/// every set are 2 and 3.
const VECTORS: usize = 3;

/// The rows that one row of a result is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowWindow {
    /// The first row.
    pub first: usize,
    /// Weights of it and of those behind it, in units of 2⁻²². The sum of their magnitudes is below 2, so that sums of bytes
    /// fit an `i32`.
    pub weights: Vec<i32>,
}

/// Weighted sums of `rows`, `[n_rows, width]`, as rounded bytes `[windows.len(), width]`, cut to 0 ..= 255.
///
/// # Panics
/// If a window ends behind the last row, or `out` has another size.
pub fn sum_rows(rows: &[u8], width: usize, windows: &[RowWindow], out: &mut [u8]) {
    assert_eq!(out.len(), windows.len() * width, "bytes of the result");
    let n_rows = rows.len().checked_div(width).unwrap_or(0);
    let fits = |w: &RowWindow| w.first.checked_add(w.weights.len()).is_some_and(|end| end <= n_rows);
    assert!(width == 0 || windows.iter().all(fits), "windows end behind the {n_rows} rows");
    FoundIsa::fastest().run(SumRows { rows, width, windows, out });
}

/// Normalisation of the values of a channel: `(value · rescale − mean) / std`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PixelNorm {
    /// Factor of all channels.
    pub rescale: f32,
    /// Subtracted, by channel.
    pub mean: [f32; 3],
    /// Divided by, by channel.
    pub std: [f32; 3],
}

/// Normalised values of pixels `[n, 3]`, by channel: the first `n` of each plane.
///
/// # Panics
/// If a plane has fewer values than there are pixels.
pub fn normalise_planes(pixels: &[[u8; 3]], norm: PixelNorm, planes: [&mut [f32]; 3]) {
    let planes = planes.map(|plane| &mut plane[..pixels.len()]);
    FoundIsa::fastest().run(NormalisePlanes { pixels, norm, planes });
}

/// A vector for `n` values, in large pages if it has some megabytes: else each four kilobytes of it cost a page fault.
pub fn large_vec(n: usize) -> Vec<f32> {
    let mut values = Vec::with_capacity(n);
    super::panels::advise_large_pages(values.spare_capacity_mut());
    values
}

/// The kernel of [`sum_rows`].
struct SumRows<'a> {
    rows: &'a [u8],
    width: usize,
    windows: &'a [RowWindow],
    out: &'a mut [u8],
}

impl Kernel for SumRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { rows, width, windows, out } = self;
        for (out, RowWindow { first, weights }) in out.chunks_exact_mut(width.max(1)).zip(windows) {
            let rows = &rows[first * width..];
            let (vectors, rest) = out.as_chunks_mut::<LANES>();
            let (groups, single) = vectors.as_chunks_mut::<VECTORS>();
            let mut at = 0;
            for group in groups {
                sum_vectors(&rows[at..], width, weights, group);
                at += LANES * VECTORS;
            }
            for vector in single {
                sum_vectors(&rows[at..], width, weights, std::array::from_mut(vector));
                at += LANES;
            }
            for byte in rest {
                let mut sum = HALF;
                for (row, weight) in rows[at..].chunks(width).zip(weights) {
                    sum = sum.wrapping_add(weight.wrapping_mul(i32::from(row[0])));
                }
                *byte = rounded(sum);
                at += 1;
            }
        }
    }
}

/// Neighbouring sums: of the first bytes of each row, which `stride` bytes are apart.
#[inline(always)]
fn sum_vectors<const N: usize>(rows: &[u8], stride: usize, weights: &[i32], out: &mut [[u8; LANES]; N]) {
    let mut sums = [[HALF; LANES]; N];
    for (i, weight) in weights.iter().enumerate() {
        let row = &rows[i * stride..][..LANES * N];
        for (sums, values) in sums.iter_mut().zip(row.as_chunks::<LANES>().0) {
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum = sum.wrapping_add(weight.wrapping_mul(i32::from(*value)));
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        for (byte, sum) in out.iter_mut().zip(sums) {
            *byte = rounded(sum);
        }
    }
}

#[inline(always)]
fn rounded(sum: i32) -> u8 {
    (sum >> WEIGHT_BITS).clamp(0, 255) as u8
}

/// The kernel of [`normalise_planes`]; planes have as many values as there are pixels.
struct NormalisePlanes<'a> {
    pixels: &'a [[u8; 3]],
    norm: PixelNorm,
    planes: [&'a mut [f32]; 3],
}

impl Kernel for NormalisePlanes<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let PixelNorm { rescale, mean, std } = self.norm;
        let [red, green, blue] = self.planes;
        for (((pixel, red), green), blue) in self.pixels.iter().zip(red).zip(green).zip(blue) {
            *red = (f32::from(pixel[0]) * rescale - mean[0]) / std[0];
            *green = (f32::from(pixel[1]) * rescale - mean[1]) / std[1];
            *blue = (f32::from(pixel[2]) * rescale - mean[2]) / std[2];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::Isa;

    /// Bytes of a linear congruential generator.
    fn noise(n: usize) -> Vec<u8> {
        let mut state = n as u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..n).map(|_| next()).collect()
    }

    /// Every set of this machine.
    fn sets() -> impl Iterator<Item = FoundIsa> {
        Isa::available().map(|isa| FoundIsa::new(Some(isa)).expect("a set of this machine"))
    }

    #[test]
    fn sums_are_those_of_integers_on_every_set() {
        let one = 1 << WEIGHT_BITS;
        let windows = [
            RowWindow { first: 0, weights: vec![one] },
            RowWindow { first: 1, weights: vec![one / 3, one / 3, one - 2 * (one / 3)] },
            // Sums below 0 and above 255.
            RowWindow { first: 2, weights: vec![-one / 4, one + one / 2, -one / 4] },
            RowWindow { first: 4, weights: vec![] },
        ];
        for width in [1, 3, 15, 16, 17, 47, 48, 49, 64, 113, 144, 200] {
            let rows = noise(5 * width);
            let mut expected = Vec::new();
            for RowWindow { first, weights } in &windows {
                for i in 0..width {
                    let value = |k: usize| i64::from(rows[(first + k) * width + i]);
                    let sum: i64 = weights.iter().enumerate().map(|(k, w)| i64::from(*w) * value(k)).sum();
                    expected.push(((sum + i64::from(HALF)) >> WEIGHT_BITS).clamp(0, 255) as u8);
                }
            }
            for isa in sets() {
                let mut out = vec![7; expected.len()];
                isa.run(SumRows { rows: &rows, width, windows: &windows, out: &mut out });
                assert_eq!(out, expected, "{width} {isa:?}");
            }
            let mut out = vec![7; expected.len()];
            sum_rows(&rows, width, &windows, &mut out);
            assert_eq!(out, expected, "{width}");
        }
    }

    #[test]
    #[should_panic(expected = "windows end behind the 2 rows")]
    fn windows_behind_the_last_row_are_refused() {
        sum_rows(&[1, 2, 3, 4], 2, &[RowWindow { first: 1, weights: vec![1, 1] }], &mut [0, 0]);
    }

    #[test]
    fn planes_have_the_same_bits_on_every_set() {
        let norm = PixelNorm { rescale: 1.0 / 255.0, mean: [0.48, 0.45, 0.40], std: [0.26, 0.27, 0.28] };
        for n in [0, 1, 7, 8, 15, 16, 17, 33, 300] {
            let bytes = noise(3 * n);
            let pixels = bytes.as_chunks::<3>().0;
            let value = |c: usize| {
                let values = pixels.iter().map(move |p| f32::from(p[c]));
                values.map(move |v| (v * norm.rescale - norm.mean[c]) / norm.std[c])
            };
            let expected: Vec<u32> = (0..3).flat_map(|c| value(c).map(f32::to_bits)).collect();
            for isa in sets() {
                let (mut red, mut green, mut blue) = (vec![0.0; n], vec![0.0; n], vec![0.0; n]);
                let planes = [&mut red[..], &mut green[..], &mut blue[..]];
                isa.run(NormalisePlanes { pixels, norm, planes });
                let got: Vec<u32> = [red, green, blue].concat().into_iter().map(f32::to_bits).collect();
                assert_eq!(got, expected, "{n} {isa:?}");
            }
        }
    }
}
