//! Faults that are injected under load: one drill after the other, drawn from a seed.

use crate::fleet::{ENCODERS, Fleet, PDS};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::sleep;

/// Kinds of drills, in round-robin order: a run of enough drills has each.
const KINDS: [&str; 13] = [
    "kill encoder",
    "kill pd",
    "stop encoder",
    "partition encoder and pd",
    "restart redis",
    "stop pd",
    "slow s3",
    "partition worker and redis",
    "roll pd",
    "partition proxy and pd",
    "roll encoder",
    "slow redis",
    "s3 is gone",
];

/// A sequence of drills.
pub struct Drills {
    rng: StdRng,
    next: usize,
    /// Number of drills done, by kind.
    pub done: BTreeMap<&'static str, usize>,
}

impl Drills {
    pub fn new(seed: u64) -> Self {
        Self { rng: StdRng::seed_from_u64(seed), next: 0, done: BTreeMap::new() }
    }

    /// True if each kind was done.
    pub fn all_done(&self) -> bool {
        self.done.len() == KINDS.len()
    }

    /// One drill: from the fault to its end.
    pub async fn one(&mut self, fleet: &mut Fleet) {
        let kind = KINDS[self.next % KINDS.len()];
        self.next += 1;
        let encoder = ENCODERS[self.rng.random_range(0..3)];
        let pd = PDS[self.rng.random_range(0..3)];
        let worker = if self.rng.random_bool(0.5) { encoder } else { pd };
        let proxy = crate::fleet::PROXIES[self.rng.random_range(0..2)];
        let lasts = Duration::from_millis(self.rng.random_range(500..4000));
        match kind {
            "kill encoder" => fleet.replace(encoder),
            "kill pd" => fleet.replace(pd),
            "roll encoder" => fleet.roll(encoder).await,
            "roll pd" => fleet.roll(pd).await,
            "stop encoder" => stop(fleet, encoder, lasts).await,
            "stop pd" => stop(fleet, pd, lasts).await,
            "restart redis" => {
                fleet.redis.kill();
                sleep(lasts).await;
                fleet.redis.restart();
            }
            "slow s3" => {
                fleet.slow_s3(Duration::from_millis(400));
                sleep(lasts).await;
                fleet.slow_s3(Duration::ZERO);
            }
            "s3 is gone" => {
                fleet.cut_s3(true);
                sleep(lasts).await;
                fleet.cut_s3(false);
            }
            "slow redis" => {
                fleet.slow_redis(Duration::from_millis(100));
                sleep(lasts).await;
                fleet.slow_redis(Duration::ZERO);
            }
            "partition worker and redis" => partition(fleet, worker, &fleet.redis_address(), lasts).await,
            "partition proxy and pd" => partition(fleet, proxy, &fleet.net.address(pd), lasts).await,
            _ => partition(fleet, pd, &fleet.net.address(encoder), lasts).await,
        }
        *self.done.entry(kind).or_default() += 1;
        sleep(Duration::from_millis(self.rng.random_range(500..2500))).await;
    }
}

async fn stop(fleet: &Fleet, name: &str, lasts: Duration) {
    fleet.signal(name, "STOP");
    sleep(lasts).await;
    fleet.signal(name, "CONT");
}

async fn partition(fleet: &Fleet, name: &str, from: &str, lasts: Duration) {
    fleet.net.partition(name, from);
    sleep(lasts).await;
    fleet.net.heal(name, from);
}
