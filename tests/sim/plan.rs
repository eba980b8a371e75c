//! What goes wrong in a simulation, and when: drawn from its seed before it starts.

use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use std::time::Duration;

/// How many of each there are.
pub const N_PROXIES: usize = 2;
pub const N_ENCODERS: usize = 3;
pub const N_PDS: usize = 2;
pub const N_CLIENTS: usize = 3;

/// One thing that goes wrong, for a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// When it starts.
    pub at: Duration,
    /// How long it lasts.
    pub lasts: Duration,
    /// What it is.
    pub kind: Kind,
}

/// What can go wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A host loses all it has, and starts again.
    Crash(String),
    /// Two hosts do not hear each other: what is sent is lost.
    Partition(String, String),
    /// What two hosts send each other is held back, and arrives at the end.
    Hold(String, String),
    /// A link is slow, by this much.
    Slow(String, String, Duration),
}

/// Everything that a seed decides, apart from the network's own dice.
#[derive(Clone, Debug)]
pub struct Plan {
    /// In order of time.
    pub troubles: Vec<Trouble>,
    /// Requests of each client.
    pub n_requests: usize,
    /// Different images; few, so that many ask for the same.
    pub n_images: usize,
    /// Encoder workers neither share the jobs of one key nor know what they made: whatever is asked twice is done twice.
    pub forgetful: bool,
}

impl Plan {
    /// The plan of a seed. Every fourth has no trouble: then nothing at all may fail.
    pub fn of(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed ^ 0x7219_0f5a);
        let n = if seed.is_multiple_of(4) { 0 } else { rng.random_range(1..=4) };
        let mut troubles: Vec<_> = (0..n).map(|_| trouble(&mut rng)).collect();
        troubles.sort_by_key(|t| t.at);
        Self {
            troubles,
            n_requests: rng.random_range(2..=5),
            n_images: rng.random_range(1..=4),
            forgetful: seed.is_multiple_of(8),
        }
    }
}

fn trouble(rng: &mut impl Rng) -> Trouble {
    let mut pick = |prefix: &str, n: usize| format!("{prefix}-{}", rng.random_range(0..n));
    let (proxy, encoder, pd) = (pick("proxy", N_PROXIES), pick("encoder", N_ENCODERS), pick("pd", N_PDS));
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
        0 | 1 => Kind::Crash(encoder),
        2 | 3 => Kind::Crash(pd),
        4 => Kind::Crash(store),
        5 => Kind::Crash(proxy),
        6 => Kind::Partition(a, b),
        7 => Kind::Hold(a, b),
        _ => Kind::Slow(a, b, Duration::from_millis(rng.random_range(20..300))),
    };
    Trouble {
        at: Duration::from_millis(rng.random_range(50..1500)),
        lasts: Duration::from_millis(rng.random_range(50..3000)),
        kind,
    }
}
