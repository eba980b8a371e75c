//! Resampling of RGB images in Pillow's fixed-point arithmetic, to the bit.
//!
//! A filter is widened by the scale where the image shrinks; the weights of a window are divided by their sum and
//! rounded to 22 bits; each of two passes rounds its sums to bytes
//! (<https://github.com/python-pillow/Pillow/blob/12.0.0/src/libImaging/Resample.c>).
//!
//! **Order of the passes**: across, then down, for every size. So did every Pillow up to 12.1, with which published
//! checkpoints were trained, and so does torchvision. Pillow 12.2 goes down first where the height is more than a hundred
//! times the width, and Pillow 13 where the height loses more than twice the pixels that the width loses. That is a matter
//! of speed, not of a checkpoint, so no setting of a processor selects it. It shows in values of hard edges, since bytes
//! are cut between the passes: `tests/golden/preprocess/resize.json` counts them.
//!
//! torchvision, the back end that transformers 5 prefers, has the same windows with weights of 16 bits, or floats, as the
//! machine has it. Its values are up to 2 of 255 away, and not the same everywhere, so it is not the reference here.

use super::pixels::{ImageSize, RgbPixels};
use super::settings::ResizeFilter;
use std::f64::consts::PI;
use triptych_kernels::cpu::pixels::{RowWindow, WEIGHT_BITS, sum_rows};

/// Image rows that the pass across turns into columns, so that its loops run over neighbouring values.
const STRIP_ROWS: usize = 16;

/// Values of such a column: three for each row.
const COLUMN: usize = 3 * STRIP_ROWS;

/// Windows that are made at once where each is used once.
const WINDOWS: usize = 64;

/// The image at another size. A side that keeps its length is left as it is, whatever the filter.
///
/// `target` has pixels. O(pixels · weights of a window), where a window has as many pixels as the scale makes it.
pub(in crate::preprocess) fn resample(
    image: RgbPixels,
    target: ImageSize,
    filter: ResizeFilter,
) -> RgbPixels {
    let Some(kernel) = Kernel::of(filter) else { return nearest(&image, target) };
    let image = if image.size.width == target.width { image } else { across(&image, target.width, kernel) };
    if image.size.height == target.height { image } else { down(&image, target.height, kernel) }
}

/// Values of the image at another size, `[height, width, 3]`, 0 to 255 and not rounded, as of processors that resize values. No
/// pass is left out; one that keeps its length changes nothing.
///
/// `target` has pixels. O(pixels · weights of a window).
pub(super) fn resample_values(image: &RgbPixels, target: ImageSize, filter: ResizeFilter) -> Vec<f32> {
    let Some(kernel) = Kernel::of(filter).filter(|_| image.size != target) else {
        let same = if image.size == target { image.clone() } else { nearest(image, target) };
        return same.rgb.into_iter().map(f32::from).collect();
    };
    let ImageSize { width, height } = image.size;
    let across = Side { from: width, to: target.width, kernel };
    let windows: Vec<(usize, Vec<f64>)> = (0..target.width).map(|x| across.weights(x)).collect();
    let mut wide = Vec::with_capacity(height as usize * windows.len() * 3);
    for row in image.rgb.chunks(width as usize * 3) {
        for (first, weights) in &windows {
            wide.extend((0..3).map(|channel| {
                let values = row[first * 3 + channel..].iter().step_by(3);
                values.zip(weights).map(|(value, weight)| f64::from(*value) * weight).sum::<f64>() as f32
            }));
        }
    }
    let down = Side { from: height, to: target.height, kernel };
    let stride = windows.len() * 3;
    let mut out = Vec::with_capacity(target.height as usize * stride);
    for y in 0..target.height {
        let (first, weights) = down.weights(y);
        let mut sums = vec![0.0; stride];
        for (row, weight) in wide[first * stride..].chunks(stride).zip(&weights) {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += f64::from(*value) * weight;
            }
        }
        out.extend(sums.into_iter().map(|sum| sum as f32));
    }
    out
}

/// A square grid of rows `[from · from, width]` at another size, `[to · to, width]`: the bicubic filter in f32, which torch's
/// `interpolate` with `antialias` has too.
pub(crate) fn resample_grid(rows: &[f32], [from, to]: [usize; 2], width: usize) -> Vec<f32> {
    let kernel = Kernel { support: 2.0, at: bicubic };
    let side = Side { from: from as u32, to: to as u32, kernel };
    let windows: Vec<(usize, Vec<f64>)> = (0..side.to).map(|i| side.weights(i)).collect();
    // Along the axis whose places are `stride` values apart, for each start of a line.
    let along = |values: &[f32], starts: &[usize], stride: usize| -> Vec<f32> {
        let mut out = Vec::with_capacity(starts.len() * to * width);
        for start in starts {
            for (first, weights) in &windows {
                let mut sums = vec![0.0; width];
                for (i, weight) in weights.iter().enumerate() {
                    let row = values.get(start + (first + i) * stride..).unwrap_or_default();
                    sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += *weight as f32 * value);
                }
                out.extend(sums);
            }
        }
        out
    };
    let lines: Vec<usize> = (0..from).map(|y| y * from * width).collect();
    let across = along(rows, &lines, width);
    let columns: Vec<usize> = (0..to).map(|x| x * width).collect();
    // Column by column: `[to (x), to (y), width]`.
    let down = along(&across, &columns, to * width);
    let places = (0..to).flat_map(|y| (0..to).map(move |x| (x * to + y) * width));
    places.flat_map(|start| down[start..start + width].iter().copied()).collect()
}

/// A filter as a function of the distance, in pixels of the smaller scale.
#[derive(Clone, Copy)]
struct Kernel {
    /// Distance from which on it is 0.
    support: f64,
    at: fn(f64) -> f64,
}

impl Kernel {
    /// `None` for the nearest pixel, which weighs nothing.
    fn of(filter: ResizeFilter) -> Option<Self> {
        Some(match filter {
            ResizeFilter::Nearest => return None,
            ResizeFilter::Box => Self { support: 0.5, at: mean },
            ResizeFilter::Bilinear => Self { support: 1.0, at: triangle },
            ResizeFilter::Hamming => Self { support: 1.0, at: hamming },
            ResizeFilter::Bicubic => Self { support: 2.0, at: bicubic },
            ResizeFilter::Lanczos => Self { support: 3.0, at: lanczos },
        })
    }
}

fn mean(x: f64) -> f64 {
    if x > -0.5 && x <= 0.5 { 1.0 } else { 0.0 }
}

fn triangle(x: f64) -> f64 {
    (1.0 - x.abs()).max(0.0)
}

/// A raised cosine over a sinc. Its two constants are single precision in the reference.
fn hamming(x: f64) -> f64 {
    let x = x.abs();
    if x >= 1.0 {
        return 0.0;
    }
    sinc(x) * (f64::from(0.54_f32) + f64::from(0.46_f32) * (x * PI).cos())
}

/// Cubic convolution with a = −0.5.
fn bicubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

/// A sinc under the middle of one three times as wide.
fn lanczos(x: f64) -> f64 {
    if (-3.0..3.0).contains(&x) { sinc(x) * sinc(x / 3.0) } else { 0.0 }
}

fn sinc(x: f64) -> f64 {
    if x == 0.0 { 1.0 } else { (x * PI).sin() / (x * PI) }
}

/// A side before and after a pass.
#[derive(Clone, Copy)]
struct Side {
    from: u32,
    to: u32,
    kernel: Kernel,
}

impl Side {
    /// The first pixel of the window of pixel `i` of the result, and weights whose sum is 1.
    fn weights(self, i: u32) -> (usize, Vec<f64>) {
        let scale = f64::from(self.from) / f64::from(self.to);
        let widened = scale.max(1.0);
        let support = self.kernel.support * widened;
        let per_pixel = 1.0 / widened;
        let center = (f64::from(i) + 0.5) * scale;
        // A conversion cuts towards 0, and what is below 0 becomes 0.
        let end = ((center + support + 0.5) as usize).min(self.from as usize);
        let first = ((center - support + 0.5) as usize).min(end);
        let weight = |x: usize| (self.kernel.at)((x as f64 - center + 0.5) * per_pixel);
        let sum: f64 = (first..end).map(weight).sum();
        let sum = if sum == 0.0 { 1.0 } else { sum };
        (first, (first..end).map(|x| weight(x) / sum).collect())
    }

    /// The window of pixel `i` of the result.
    fn window(self, i: u32) -> RowWindow {
        let fixed = |weight: f64| {
            let scaled = weight * f64::from(1 << WEIGHT_BITS);
            (if scaled < 0.0 { scaled - 0.5 } else { scaled + 0.5 }) as i32
        };
        let (first, weights) = self.weights(i);
        RowWindow { first, weights: weights.into_iter().map(fixed).collect() }
    }

    /// The windows of all pixels of the result.
    fn windows(self) -> impl Iterator<Item = RowWindow> {
        (0..self.to).map(move |i| self.window(i))
    }

    /// The same, [`WINDOWS`] at a time, each with the number of its first: all of a long side may take more memory than the image.
    fn windows_in_parts(self) -> impl Iterator<Item = (usize, Vec<RowWindow>)> {
        let starts = (0..self.to).step_by(WINDOWS);
        starts.map(move |start| {
            let part = start..self.to.min(start + WINDOWS as u32);
            (start as usize, part.map(|i| self.window(i)).collect())
        })
    }
}

/// `[height, width, 3]` of another width.
fn across(image: &RgbPixels, width: u32, kernel: Kernel) -> RgbPixels {
    let ImageSize { width: from, height } = image.size;
    let side = Side { from, to: width, kernel };
    let before = from as usize * 3;
    let after = width as usize * 3;
    let mut rgb = vec![0; after * height as usize];
    let Some(last) = (height as usize).checked_sub(STRIP_ROWS) else {
        for (start, windows) in side.windows_in_parts() {
            for (row_before, row) in image.rgb.chunks(before).zip(rgb.chunks_mut(after)) {
                sum_rows(row_before, 3, &windows, &mut row[start * 3..][..windows.len() * 3]);
            }
        }
        return RgbPixels { size: ImageSize { width, height }, rgb };
    };
    // At most as many bytes as the strip has.
    let windows: Vec<RowWindow> = side.windows().collect();
    let mut columns = vec![[0; COLUMN]; from as usize];
    let mut columns_after = vec![[0; COLUMN]; width as usize];
    for strip in 0..(height as usize).div_ceil(STRIP_ROWS) {
        // The last strip is a whole one too, and has some rows again.
        let top = last.min(strip * STRIP_ROWS);
        turn(&image.rgb[top * before..][..STRIP_ROWS * before], &mut columns);
        sum_rows(columns.as_flattened(), COLUMN, &windows, columns_after.as_flattened_mut());
        turn_back(&columns_after, &mut rgb[top * after..][..STRIP_ROWS * after]);
    }
    RgbPixels { size: ImageSize { width, height }, rgb }
}

/// `[STRIP_ROWS, columns.len(), 3]` to `[columns.len(), STRIP_ROWS, 3]`.
fn turn(strip: &[u8], columns: &mut [[u8; COLUMN]]) {
    for (y, row) in strip.chunks(columns.len() * 3).enumerate() {
        for (pixel, column) in row.as_chunks::<3>().0.iter().zip(columns.iter_mut()) {
            column[y * 3..][..3].copy_from_slice(pixel);
        }
    }
}

/// `[columns.len(), STRIP_ROWS, 3]` to `[STRIP_ROWS, columns.len(), 3]`.
fn turn_back(columns: &[[u8; COLUMN]], strip: &mut [u8]) {
    for (y, row) in strip.chunks_mut(columns.len() * 3).enumerate() {
        for (pixel, column) in row.as_chunks_mut::<3>().0.iter_mut().zip(columns) {
            pixel.copy_from_slice(&column[y * 3..][..3]);
        }
    }
}

/// `[height, width, 3]` of another height.
fn down(image: &RgbPixels, height: u32, kernel: Kernel) -> RgbPixels {
    let ImageSize { width, height: from } = image.size;
    let stride = width as usize * 3;
    let mut rgb = vec![0; stride * height as usize];
    for (start, windows) in (Side { from, to: height, kernel }).windows_in_parts() {
        sum_rows(&image.rgb, stride, &windows, &mut rgb[start * stride..][..windows.len() * stride]);
    }
    RgbPixels { size: ImageSize { width, height }, rgb }
}

/// The pixel under the middle of each pixel of the result. Positions are summed up, as in the reference.
fn nearest(image: &RgbPixels, target: ImageSize) -> RgbPixels {
    let positions = |from: u32, to: u32| -> Vec<usize> {
        let step = f64::from(from) / f64::from(to);
        let middles = std::iter::successors(Some(step * 0.5), |at| Some(at + step));
        middles.take(to as usize).map(|at| (at as usize).min(from.saturating_sub(1) as usize)).collect()
    };
    let columns = positions(image.size.width, target.width);
    let mut rgb = Vec::with_capacity(columns.len() * target.height as usize * 3);
    for y in positions(image.size.height, target.height) {
        let row = &image.rgb[y * image.size.width as usize * 3..];
        rgb.extend(columns.iter().flat_map(|x| &row[x * 3..x * 3 + 3]));
    }
    RgbPixels { size: target, rgb }
}

#[cfg(test)]
mod tests;
