//! Linear layers in bytes: weights quantized for each output when they are packed, rows for each call.
//!
//! A weight is `scale · q` with `q` in −127 ..= 127 and one scale for each output; a value of a row is
//! `scale · (q − zero)` with `q` in 0 ..= 255, scale and zero of that row alone, spanning from its smallest value
//! to its largest and always zero itself (Jacob et al. 2018, "Quantization and Training of Neural Networks for
//! Efficient Integer-Arithmetic-Only Inference"). Sums of products are integers, exact on every instruction
//! set, so sets differ only in how these are read; `Σ (q − zero) · w` is the sum less `zero` times the sum of the
//! weights of the output, which is kept beside them.
//!
//! A row with a value that is not finite has a scale that is not a number, and so has all it gives.

use super::product::{Product, ProductArgs, Units, stride};
use crate::cpu::cell::{ByteQuad, LARGEST_BYTE, Math, PANEL, TO_LOW_BITS, Word, n_cells};
use crate::cpu::context::Context;
use crate::cpu::matrix::CpuTensor;
use crate::cpu::panels::{self, Panels};
use crate::cpu::pool::Shared;
use crate::cpu::simd::{FoundIsa, Kernel, Simd};
use crate::cpu::tile::Rows;
use crate::stored::Stacked;

/// Largest byte of a row.
const ROW_LARGEST: f32 = 255.0;

/// Unsigned bytes by signed ones: sums are the bits of i32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Int8Dot;

impl Math for Int8Dot {
    type Word = ByteQuad;
    type Row = ByteQuad;
    const PARTS: usize = 1;

    #[inline(always)]
    fn multiply_add<S: Simd>(s: S, row: ByteQuad, _part: usize, columns: S::V, acc: S::V) -> S::V {
        s.dot_bytes(acc, row as u32, columns)
    }

    fn run<K: Kernel>(isa: FoundIsa, kernel: K) {
        isa.run_byte_dot(kernel);
    }
}

/// A weight in bytes.
#[derive(Debug)]
pub(crate) struct BytePanels {
    /// `[n_panels][k_cells][32]`.
    panels: Panels<ByteQuad>,
    /// Scale of each output, `[n_panels · 32]`.
    scales: Vec<f32>,
    /// Sums of the weights of each output, `[n_panels · 32]`.
    sums: Vec<f32>,
}

impl BytePanels {
    /// Zeros for a weight.
    pub(super) fn blank(stacked: &Stacked<'_>) -> Self {
        let panels = Panels::blank(stacked, n_cells::<ByteQuad>(stacked.n_in));
        let n_columns = stacked.n_out.next_multiple_of(PANEL);
        Self { panels, scales: vec![0.0; n_columns], sums: vec![0.0; n_columns] }
    }

    /// Quantizes a weight and packs it into zeros.
    pub(super) fn fill(&mut self, context: &Context, stacked: &Stacked<'_>) {
        let outputs = (&Shared::new(&mut self.scales), &Shared::new(&mut self.sums));
        let n_cells = n_cells::<ByteQuad>(stacked.n_in);
        panels::pack(&mut self.panels, &context.pool, stacked, n_cells, |out, values, quads| {
            // SAFETY: each output is filled once.
            let scale = unsafe { outputs.0.slice(out..out + 1) };
            // SAFETY: as above.
            let sum = unsafe { outputs.1.slice(out..out + 1) };
            context.isa.run(QuantizeOutput { values, quads, scale, sum });
        });
    }

    /// Reads the bytes of an output; returns their scale.
    pub(super) fn read_output(&self, out: usize, to: &mut [f32]) -> f32 {
        let quads = self.panels.output(out, n_cells::<ByteQuad>(to.len()));
        for (to, quad) in to.chunks_mut(ByteQuad::STEPS).zip(quads) {
            to.iter_mut().zip(quad.to_le_bytes()).for_each(|(to, byte)| *to = f32::from(byte as i8));
        }
        self.scales[out]
    }

    /// Its arrays as bytes, to be saved or filled.
    pub(super) fn records(&mut self) -> Vec<&mut [u8]> {
        let Self { panels, scales, sums } = self;
        vec![panels::bytes_mut(panels.cells_mut()), panels::bytes_mut(scales), panels::bytes_mut(sums)]
    }

    /// `act(x Wᵀ + b) + residual`, `out: [n_tokens, n_out]`.
    pub(super) fn multiply(
        &self,
        context: &Context,
        x: &CpuTensor,
        ProductArgs { size, epilogue }: ProductArgs<'_>,
        out: &mut [f32],
    ) {
        let stride = stride::<ByteQuad>(n_cells::<ByteQuad>(size.n_in));
        let (cells, rows) = quantize(context, x, stride);
        let units = Int8Units { rows: &rows, scales: &self.scales, sums: &self.sums };
        let (x, panels) = (Rows { cells: &cells, stride }, self.panels.cells());
        Product::<Int8Dot, _> { x, panels, size, units, epilogue }.run(context, out);
    }
}

/// The weights of one output to bytes.
struct QuantizeOutput<'a> {
    values: &'a [f32],
    /// Four bytes of weights each; the last one is filled up with zeros.
    quads: &'a mut [ByteQuad],
    /// Scale of the weights, `[1]`.
    scale: &'a mut [f32],
    /// Sum of the weights as they are read, `[1]`.
    sum: &'a mut [f32],
}

impl Kernel for QuantizeOutput<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let zero = s.splat(0.0);
        let mut largest = zero;
        for values in self.values.chunks(S::LANES) {
            let values = s.load_or(values, 0.0);
            largest = s.max(s.max(values, s.sub(zero, values)), largest);
        }
        let scale = s.largest(largest) / LARGEST_BYTE;
        let inverse = if scale < f32::MIN_POSITIVE { 0.0 } else { 1.0 / scale };
        let mut sum = 0;
        for (quads, values) in
            self.quads.chunks_mut(S::LANES / ByteQuad::STEPS).zip(self.values.chunks(S::LANES))
        {
            let scaled = s.mul(s.load_or(values, 0.0), s.splat(inverse));
            let mut bytes = [0; 16];
            s.store_low_bytes(&mut bytes, s.add(scaled, s.splat(TO_LOW_BITS)));
            for (quad, bytes) in quads.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *quad = i32::from_le_bytes(*bytes);
            }
            sum += bytes.iter().map(|byte| i32::from(*byte as i8)).sum::<i32>();
        }
        (self.scale[0], self.sum[0]) = (scale, scale * sum as f32);
    }
}

/// Conversion of a row's bytes to values: `scale · q + offset`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowScale {
    pub(super) scale: f32,
    /// `−scale · zero`.
    pub(super) offset: f32,
}

/// Rows in bytes, `[n_tokens, k_cells]`, and how to read each. They take `n_cells` of the width, or fewer than `k_cells`.
pub(super) fn quantize(context: &Context, x: &CpuTensor, k_cells: usize) -> (Vec<ByteQuad>, Vec<RowScale>) {
    let (n_tokens, width) = x.dims();
    let mut cells = vec![ByteQuad::default(); n_tokens * k_cells];
    let mut scales = vec![RowScale::default(); n_tokens];
    let shared = &Shared::new(&mut scales);
    context.pool.rows(&mut cells, k_cells, width / 4 + 1, |row, cells| {
        let n_rows = cells.len() / k_cells;
        let values = &x.data()[row * width..][..n_rows * width];
        // SAFETY: runs of rows do not overlap, and each is one task.
        let scales = unsafe { shared.slice(row..row + n_rows) };
        context.isa.run(QuantizeRows { values, cells: (cells, k_cells), scales });
    });
    (cells, scales)
}

/// Rows of values to bytes.
struct QuantizeRows<'a> {
    /// `[n, width]`, width not zero.
    values: &'a [f32],
    /// `[n, k_cells]`, and how many a row takes.
    cells: (&'a mut [ByteQuad], usize),
    /// `[n]`.
    scales: &'a mut [RowScale],
}

impl Kernel for QuantizeRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.values.len() / self.scales.len().max(1);
        let rows = self.values.chunks_exact(width).zip(self.scales);
        for (cells, (values, scale)) in self.cells.0.chunks_exact_mut(self.cells.1).zip(rows) {
            let [low, high] = bounds(s, values);
            let step = (high - low) / ROW_LARGEST;
            let inverse = if step < f32::MIN_POSITIVE { 0.0 } else { 1.0 / step };
            let zero = (-low * inverse).round_ties_even();
            *scale = RowScale { scale: step, offset: -step * zero };
            fill(s, cells, values, (inverse, zero));
        }
    }
}

/// The smallest and the largest value of a row and zero; not numbers unless all values are finite.
#[inline(always)]
fn bounds<S: Simd>(s: S, values: &[f32]) -> [f32; 2] {
    let zero = s.splat(0.0);
    // Two at a time, since each waits for the one before.
    let mut bounds = [Bounds { low: zero, high: zero, odd: zero }; 2];
    let pairs = values.chunks_exact(2 * S::LANES);
    let rest = pairs.remainder().chunks(S::LANES);
    for pair in pairs {
        bounds[0].take(s, s.load(pair));
        bounds[1].take(s, s.load(&pair[S::LANES..]));
    }
    for values in rest {
        bounds[0].take(s, s.load_or(values, 0.0));
    }
    let [first, second] = bounds;
    let odd = s.sum(s.add(first.odd, second.odd));
    [odd - s.largest(s.max(first.low, second.low)), odd + s.largest(s.max(first.high, second.high))]
}

/// Bounds of the values of a row that each lane has read so far.
#[derive(Clone, Copy)]
struct Bounds<V> {
    /// The smallest value or zero, with the other sign.
    low: V,
    /// The largest value or zero.
    high: V,
    /// Zero while all values are finite, and then not a number.
    odd: V,
}

impl<V: Copy> Bounds<V> {
    #[inline(always)]
    fn take<S: Simd<V = V>>(&mut self, s: S, values: V) {
        self.low = s.max(s.sub(s.splat(0.0), values), self.low);
        self.high = s.max(values, self.high);
        // Zero times what is not finite is not a number.
        self.odd = s.fma(values, s.splat(0.0), self.odd);
    }
}

/// Writes the nearest bytes of a row; the padding of its cells is multiplied with zero weights.
#[inline(always)]
fn fill<S: Simd>(s: S, cells: &mut [ByteQuad], values: &[f32], (inverse, zero): (f32, f32)) {
    let (inverse, zero) = (s.splat(inverse), s.splat(zero));
    let n_quads = S::LANES / ByteQuad::STEPS;
    let (whole, rest) = cells.split_at_mut(values.len() / S::LANES * n_quads);
    let values = values.chunks_exact(S::LANES);
    let last = values.remainder();
    for (cells, values) in whole.chunks_exact_mut(n_quads).zip(values) {
        put(cells, bytes(s, s.load(values), (inverse, zero)));
    }
    if !last.is_empty() {
        put(rest, bytes(s, s.load_or(last, 0.0), (inverse, zero)));
    }
}

/// Values to bytes, the first lane's first.
#[inline(always)]
fn bytes<S: Simd>(s: S, values: S::V, (inverse, zero): (S::V, S::V)) -> [u8; 16] {
    let scaled = s.add(s.mul(values, inverse), zero);
    let clamped = s.min(s.max(scaled, s.splat(0.0)), s.splat(ROW_LARGEST));
    let mut bytes = [0; 16];
    s.store_low_bytes(&mut bytes, s.add(clamped, s.splat(TO_LOW_BITS)));
    bytes
}

/// Writes as many cells as there are, up to four.
#[inline(always)]
fn put(cells: &mut [ByteQuad], bytes: [u8; 16]) {
    for (cell, quad) in cells.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *cell = i32::from_le_bytes(*quad);
    }
}

/// Sums of bytes.
#[derive(Clone, Copy)]
struct Int8Units<'a> {
    /// `[n_tokens]`.
    rows: &'a [RowScale],
    /// As in [`BytePanels`].
    scales: &'a [f32],
    /// As in [`BytePanels`].
    sums: &'a [f32],
}

impl Units for Int8Units<'_> {
    type Row = RowScale;
    /// Scales, and sums of weights.
    type Columns<V: Copy> = [V; 2];

    #[inline(always)]
    fn row(self, row: usize) -> RowScale {
        self.rows[row]
    }

    #[inline(always)]
    fn columns<S: Simd>(self, s: S, column: usize) -> [S::V; 2] {
        [s.load(&self.scales[column..]), s.load(&self.sums[column..])]
    }

    #[inline(always)]
    fn values<S: Simd>(s: S, row: RowScale, [scales, weights]: [S::V; 2], sums: S::V) -> S::V {
        let scale = s.mul(s.splat(row.scale), scales);
        s.fma(s.whole(sums), scale, s.mul(s.splat(row.offset), weights))
    }
}
