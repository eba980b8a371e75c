//! Weights as `fragments.cuh` reads them: fragments of `mma.m16n8k16`, a lane's side by side. Described at the top of that file.

use half::bf16;

use crate::stored::Stacked;

/// Outputs, and inputs, of a fragment.
const TILE: usize = 16;

/// Inputs that share a scale in four bits.
const GROUP: usize = 32;

/// Inputs that one vector of a lane in four bits covers.
const INT4_INPUTS: usize = 64;

/// `[n_out / 16, n_in / 16, 32 lanes, 8]`.
pub(super) fn bf16_fragments(weights: &Stacked<'_>) -> Vec<bf16> {
    let mut out = Vec::with_capacity(padded(weights.n_out, TILE) * padded(weights.n_in, TILE));
    each_tile(weights, |rows| {
        in_fragments(rows, weights.n_in, 1, |value| out.push(bf16::from_f32(value)));
    });
    out
}

/// `[n_out / 16, n_in / 32, 32 lanes, 16]`, and a scale for each output, `[n_out]`.
pub(super) fn int8_fragments(weights: &Stacked<'_>) -> (Vec<u8>, Vec<f32>) {
    let (mut bytes, mut scales) = (Vec::new(), Vec::with_capacity(weights.n_out));
    each_tile(weights, |rows| {
        for row in &mut *rows {
            let largest = row.iter().fold(0_f32, |most, value| most.max(value.abs()));
            let scale = largest / 127.0;
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            row.iter_mut()
                .for_each(|value| *value = (*value * inverse).round_ties_even().clamp(-127.0, 127.0));
            scales.push(scale);
        }
        in_fragments(rows, weights.n_in, 2, |value| bytes.push((value as i8).cast_unsigned()));
    });
    scales.truncate(weights.n_out);
    (bytes, scales)
}

/// `[n_out / 16, n_in / 64, 32 lanes, 16 bytes]`, and scales `[n_out / 16, n_in / 32, 16]`.
pub(super) fn int4_fragments(weights: &Stacked<'_>) -> (Vec<u8>, Vec<bf16>) {
    let (mut bytes, mut scales) = (Vec::new(), Vec::new());
    let n_groups = padded(weights.n_in, INT4_INPUTS) / GROUP;
    each_tile(weights, |rows| {
        let of_tile = scales.len();
        scales.resize(of_tile + n_groups * TILE, bf16::ZERO);
        for (r, row) in rows.iter_mut().enumerate() {
            for (g, group) in row.chunks_mut(GROUP).enumerate() {
                // The value of largest magnitude stands for -8 or 7, whichever has its sign.
                let largest =
                    group.iter().fold(0_f32, |most, v| if v.abs() > most.abs() { *v } else { most });
                let scale = bf16::from_f32(largest / if largest < 0.0 { -8.0 } else { 7.0 });
                let inverse = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
                group.iter_mut().for_each(|v| *v = (*v * inverse).round_ties_even().clamp(-8.0, 7.0));
                scales[of_tile + g * TILE + r] = scale;
            }
        }
        let mut lane = [0_u8; 2 * TILE];
        let mut n = 0;
        in_fragments(rows, weights.n_in, 4, |value| {
            lane[n] = (value as i32 + 8) as u8;
            n += 1;
            if n == lane.len() {
                // Of fragments 0 and 1, then of 2 and 3: the first in the lower half of each byte.
                let pairs = lane.as_chunks::<TILE>().0.iter();
                bytes.extend(pairs.flat_map(|pair| (0..8).map(|i| pair[i] | pair[i + 8] << 4)));
                n = 0;
            }
        });
    });
    (bytes, scales)
}

fn padded(n: usize, unit: usize) -> usize {
    n.next_multiple_of(unit)
}

/// Calls `each` with the rows of 16 outputs at a time, zeros beyond the last.
fn each_tile(weights: &Stacked<'_>, mut each: impl FnMut(&mut [Vec<f32>])) {
    let mut rows = vec![vec![0.0; weights.n_in]; TILE];
    for first in (0..weights.n_out).step_by(TILE) {
        for (i, row) in rows.iter_mut().enumerate() {
            match first + i < weights.n_out {
                true => weights.row(first + i, row),
                false => row.fill(0.0),
            }
        }
        each(&mut rows);
    }
}

/// Calls `each` with the weights of 16 outputs, `per_lane` fragments of a lane side by side, zeros beyond the inputs.
fn in_fragments(rows: &[Vec<f32>], n_in: usize, per_lane: usize, mut each: impl FnMut(f32)) {
    for vector in 0..n_in.div_ceil(TILE * per_lane) {
        for lane in 0..32 {
            for fragment in 0..per_lane {
                for i in 0..8 {
                    let out = lane / 4 + if i & 2 == 0 { 0 } else { 8 };
                    let within = lane % 4 * 2 + (i & 1) + if i & 4 == 0 { 0 } else { 8 };
                    let input = (vector * per_lane + fragment) * TILE + within;
                    each(rows[out].get(input).copied().unwrap_or(0.0));
                }
            }
        }
    }
}
