//! Rotary embedding: pairs of a head turned by the angles of their token.

use super::context::Context;
use super::matrix::CpuTensor;
use super::rows::VALUES_PER_NS;
use super::simd::{Kernel, Simd};
use crate::ops::{RopePairs, RopeShape};

/// Turns pairs of each head, in place. `cos`, `sin`: `[n_tokens, rotary_dim / 2]`.
pub(super) fn rope(context: &Context, x: &mut CpuTensor, shape: RopeShape, cos_sin: [&[f32]; 2]) {
    let (_, width) = x.dims();
    let half = shape.rotary_dim / 2;
    if half == 0 {
        return;
    }
    context.pool.rows(x.data_mut(), width, width / VALUES_PER_NS, |first, x| {
        let n = x.len() / width * half;
        let [cos, sin] = cos_sin.map(|values| &values[first * half..][..n]);
        context.isa.run(RopeRows { x, width, shape, cos, sin });
    });
}

/// Rows `[n, width]` and the angles of each.
struct RopeRows<'a> {
    x: &'a mut [f32],
    width: usize,
    shape: RopeShape,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for RopeRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _s: S) {
        let half = self.shape.rotary_dim / 2;
        let angles = self.cos.chunks_exact(half).zip(self.sin.chunks_exact(half));
        for (row, (cos, sin)) in self.x.chunks_exact_mut(self.width).zip(angles) {
            for head in row.chunks_exact_mut(self.shape.head_dim) {
                match self.shape.pairs {
                    RopePairs::Halves => turn_halves(&mut head[..2 * half], cos, sin),
                    RopePairs::Interleaved => turn_neighbours(&mut head[..2 * half], cos, sin),
                }
            }
        }
    }
}

/// Pairs half a row apart.
#[inline(always)]
fn turn_halves(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (a, b) = x.split_at_mut(cos.len());
    for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// Pairs side by side.
#[inline(always)]
fn turn_neighbours(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    for ((pair, cos), sin) in x.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
        let [a, b] = *pair;
        *pair = [a * cos - b * sin, b * cos + a * sin];
    }
}
