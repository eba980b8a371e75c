//! bf16 as bits: a value rounded to one, and two of them in four bytes.

/// Two bf16. A plain integer, since the allocator gives those out zeroed without touching them.
pub(crate) type Bf16Pair = u32;

/// Both values of a pair, as f32.
#[inline(always)]
pub(crate) fn unpack_pair(pair: Bf16Pair) -> [f32; 2] {
    [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]
}

/// The nearest bf16, ties to even, as its bits. Like `half::bf16::from_f32`, which the test below holds, but
/// without a branch, so that loops over it become vectors.
#[inline(always)]
pub(crate) fn bf16_bits(value: f32) -> u32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded }
}
