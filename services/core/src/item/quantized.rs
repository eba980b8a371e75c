//! Rows of eight-bit elements with one scale a row: half the bytes of bf16 on the wire and in the store.
//!
//! The scale maps the row's largest value to the type's largest. `I8` has even steps; `F8` is E4M3 as in "FP8 Formats for
//! Deep Learning" (Micikevicius et al., 2022): four bits of exponent, three of fraction, no infinities, 448 the largest.

use crate::DType;

/// Bytes of a row's scale.
pub(super) const SCALE_BYTES: usize = 4;

const I8_LARGEST: f32 = 127.0;
const F8_LARGEST: f32 = 448.0;
/// Smallest normal exponent of E4M3, and bits of its fraction.
const F8_MIN_EXPONENT: i32 = -6;
const F8_FRACTION_BITS: i32 = 3;
const F8_NAN: u8 = 0x7f;

/// Scales of all rows, then their elements.
pub(super) fn narrow(values: &[f32], hidden: usize, dtype: DType) -> Vec<u8> {
    let hidden = hidden.max(1);
    let n_rows = values.len().div_ceil(hidden);
    let mut bytes = Vec::with_capacity(n_rows * SCALE_BYTES + values.len());
    let largest = if dtype == DType::F8 { F8_LARGEST } else { I8_LARGEST };
    let scales: Vec<f32> = values
        .chunks(hidden)
        // Unlike `f32::max`, this keeps NaN, so that the reader sees it.
        .map(|row| {
            row.iter().fold(0.0_f32, |m, v| if v.abs() > m || v.is_nan() { v.abs() } else { m }) / largest
        })
        .collect();
    bytes.extend(scales.iter().flat_map(|s| s.to_le_bytes()));
    for (row, scale) in values.chunks(hidden).zip(scales) {
        let inverse = if scale > 0.0 { scale.recip() } else { 0.0 };
        bytes.extend(row.iter().map(|v| match dtype {
            DType::F8 => to_f8(v * inverse),
            // The cast saturates, so a value that rounds past the largest is in range.
            _ => ((v * inverse).round_ties_even().max(-I8_LARGEST) as i8).cast_unsigned(),
        }));
    }
    bytes
}

/// A row as f32, multiplied by its scale.
pub(super) fn widen(row: &[u8], scale: f32, dtype: DType, out: &mut [f32]) {
    for (wide, b) in out.iter_mut().zip(row) {
        *wide = value(*b, dtype) * scale;
    }
}

/// One element without its scale.
pub(super) fn value(byte: u8, dtype: DType) -> f32 {
    if dtype == DType::F8 { from_f8(byte) } else { f32::from(byte.cast_signed()) }
}

fn from_f8(byte: u8) -> f32 {
    let sign = if byte & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(byte >> 3 & 0xf), f32::from(byte & 7));
    match (exponent, byte & 7) {
        (0xf, 7) => f32::NAN,
        (0, _) => sign * fraction * 2.0_f32.powi(F8_MIN_EXPONENT - F8_FRACTION_BITS),
        _ => sign * (8.0 + fraction) * 2.0_f32.powi(exponent - 7 - F8_FRACTION_BITS),
    }
}

/// Rounds to the nearest, ties to even, and saturates.
fn to_f8(value: f32) -> u8 {
    if value.is_nan() {
        return F8_NAN;
    }
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = value.abs().min(F8_LARGEST);
    // The exponent of an f32, without its bias; what is below the normals has the spacing of the smallest of them.
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(F8_MIN_EXPONENT);
    let steps = (magnitude * 2.0_f32.powi(F8_FRACTION_BITS - exponent)).round_ties_even() as i32;
    // Eight to fifteen steps are a normal of this exponent; sixteen carry into the next, and fewer are subnormal.
    let code = (exponent - F8_MIN_EXPONENT) * 8 + steps;
    sign | u8::try_from(code.min(0x7e)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f8_reads_back_as_itself() {
        for byte in 0..=u8::MAX {
            let value = from_f8(byte);
            if value.is_nan() {
                assert_eq!(byte & 0x7f, F8_NAN);
            } else {
                assert_eq!(to_f8(value), byte, "{value}");
            }
        }
        assert_eq!(from_f8(0x7e), F8_LARGEST);
        assert_eq!(from_f8(1), 2.0_f32.powi(-9));
    }

    #[test]
    fn values_between_go_to_the_nearest_and_ties_to_even() {
        for (value, expected) in [(17.0, 16.0), (17.1, 18.0), (19.0, 20.0), (500.0, 448.0), (-460.0, -448.0)]
        {
            assert_eq!(from_f8(to_f8(value)), expected, "{value}");
        }
        assert_eq!(to_f8(2.0_f32.powi(-10)), 0, "half the smallest is a tie, and zero is even");
        assert_eq!(from_f8(to_f8(1.9375)), 2.0, "the fraction carries into the exponent");
    }

    #[test]
    fn a_row_of_zeros_stays_zero_and_nan_is_kept() {
        for dtype in [DType::I8, DType::F8] {
            let bytes = narrow(&[0.0, 0.0, f32::NAN, 1.0], 2, dtype);
            let scales = bytes[..8].as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
            let mut rows = [1.0; 4];
            for ((row, scale), out) in bytes[8..].chunks(2).zip(scales).zip(rows.chunks_mut(2)) {
                widen(row, scale, dtype, out);
            }
            assert_eq!(rows[..2], [0.0, 0.0]);
            assert!(rows[2].is_nan());
        }
    }
}
