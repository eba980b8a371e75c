//! Random weights: the same for the same seed and name, scaled so that activations neither die nor explode.

use super::tensor::TensorRole;
use half::bf16;

/// Values of one tensor as bf16 bytes. Matrices are uniform with variance `1 / fan-in`.
pub(super) fn values(seed: u64, names: &[String], shape: &[usize], role: TensorRole) -> Vec<u8> {
    let n: usize = shape.iter().product();
    if role == TensorRole::Scale {
        return bf16::ONE.to_le_bytes().repeat(n);
    }
    let fan_in: usize = shape.iter().skip(1).product();
    let bound = match role {
        TensorRole::Bias => 0.02,
        _ => (3.0 / fan_in.max(1) as f32).sqrt(),
    };
    let mut state = start(seed, names);
    let mut bytes = Vec::with_capacity(2 * n);
    for _ in 0..n {
        let unit = (next(&mut state) >> 40) as f32 / (1u64 << 24) as f32;
        bytes.extend_from_slice(&bf16::from_f32((2.0 * unit - 1.0) * bound).to_le_bytes());
    }
    bytes
}

fn start(seed: u64, names: &[String]) -> u64 {
    let name = names.first().map_or("", |n| n.as_str());
    let mut hash = blake3::Hasher::new();
    hash.update(&seed.to_le_bytes()).update(name.as_bytes());
    let head: [u8; 8] = hash.finalize().as_bytes()[..8].try_into().expect("a BLAKE3 hash has 32 bytes");
    u64::from_le_bytes(head)
}

/// SplitMix64 (<https://prng.di.unimi.it/splitmix64.c>): one multiply-xor chain per value is what makes
/// gigabytes of random weights a matter of seconds.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
