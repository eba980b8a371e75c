//! The faults of a simulation, drawn from its seed before it starts.

use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use std::time::Duration;

/// Number of proxies.
pub const N_PROXIES: usize = 2;
pub const N_ENCODERS: usize = 3;
pub const N_PDS: usize = 2;
pub const N_CLIENTS: usize = 3;

/// A fault of limited duration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Start, in simulated time.
    pub at: Duration,
    /// Duration.
    pub lasts: Duration,
    /// Kind.
    pub kind: FaultKind,
}

/// Kinds of faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// A host loses its state, and restarts.
    Crash(String),
    /// Messages between two hosts are lost.
    Partition(String, String),
    /// Messages between two hosts are held, and delivered at the end.
    Hold(String, String),
    /// A link has this much latency.
    Slow(String, String, Duration),
}

/// The scenario of a seed; the network draws its latencies separately.
#[derive(Clone, Debug)]
pub struct FaultPlan {
    /// In order of time.
    pub faults: Vec<Fault>,
    /// Requests of each client.
    pub n_requests: usize,
    /// Number of distinct images; small, so that many requests share one.
    pub n_images: usize,
    /// Encoder workers neither share running jobs nor reuse outputs: every job is a forward pass.
    pub without_reuse: bool,
}

impl FaultPlan {
    /// The plan of a seed. Every fourth has no fault: then no request may fail.
    pub fn of(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed ^ 0x7219_0f5a);
        let n = if seed.is_multiple_of(4) { 0 } else { rng.random_range(1..=4) };
        let mut faults: Vec<_> = (0..n).map(|_| fault(&mut rng)).collect();
        faults.sort_by_key(|t| t.at);
        Self {
            faults,
            n_requests: rng.random_range(2..=5),
            n_images: rng.random_range(1..=4),
            without_reuse: seed.is_multiple_of(8),
        }
    }
}

fn fault(rng: &mut impl Rng) -> Fault {
    let mut pick = |prefix: &str, n: usize| format!("{prefix}-{}", rng.random_range(0..n));
    let proxy = pick("proxy", N_PROXIES);
    let encoder = pick("encoder", N_ENCODERS);
    let pd = pick("pd", N_PDS);
    let store = "store".to_owned();
    let pairs = [
        (proxy.clone(), encoder.clone()),
        (proxy.clone(), pd.clone()),
        (proxy.clone(), store.clone()),
        (encoder.clone(), store.clone()),
        (pd.clone(), store.clone()),
        (pd.clone(), encoder.clone()),
    ];
    let (a, b) = pairs[rng.random_range(0..pairs.len())].clone();
    let kind = match rng.random_range(0..9) {
        0 | 1 => FaultKind::Crash(encoder),
        2 | 3 => FaultKind::Crash(pd),
        4 => FaultKind::Crash(store),
        5 => FaultKind::Crash(proxy),
        6 => FaultKind::Partition(a, b),
        7 => FaultKind::Hold(a, b),
        _ => FaultKind::Slow(a, b, Duration::from_millis(rng.random_range(20..300))),
    };
    Fault {
        at: Duration::from_millis(rng.random_range(50..1500)),
        lasts: Duration::from_millis(rng.random_range(50..3000)),
        kind,
    }
}
