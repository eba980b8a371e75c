//! Randomness that is the same everywhere: one generator with a written-down algorithm (xoshiro256++), seeded by the
//! run's number and by what the stream is for, so that one purpose drawing more never shifts another's draws.

use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};

/// The generator of every workload.
pub type BenchRng = Xoshiro256PlusPlus;

/// Purpose of a stream of random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Arrival times.
    Arrivals,
    /// Lengths of texts, and items.
    Requests,
    /// Clients.
    Clients,
    /// Content of texts.
    Text,
    /// Resamples of a bootstrap.
    Bootstrap,
}

/// A stream of its own for `(seed, purpose, number)`.
pub fn rng(seed: u64, purpose: Purpose, number: u64) -> BenchRng {
    BenchRng::seed_from_u64(mix(mix(seed ^ 0x7472_6970) ^ ((purpose as u64) << 56) ^ mix(number)))
}

/// SplitMix64's finisher: close numbers become far ones.
pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Uniform over `[0, 1)`, never 1.
pub fn unit(rng: &mut BenchRng) -> f64 {
    rng.random::<f64>()
}
