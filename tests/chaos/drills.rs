//! Faults that are injected under load: one drill after the other, drawn from a seed.

use crate::fleet::Fleet;
use crate::names::{ENCODERS, PDS, PROXIES};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Kinds of drills, in round-robin order: a run of enough drills has each.
const KINDS: [&str; 15] = [
    "kill encoder",
    "kill pd",
    "stop encoder",
    "partition encoder and pd",
    "kill proxy",
    "restart redis",
    "stop pd",
    "slow s3",
    "partition worker and redis",
    "roll pd",
    "partition proxy and pd",
    "roll proxy",
    "roll encoder",
    "slow redis",
    "s3 is gone",
];
/// The drill after each other one: a stream that its PD worker's death does not end is what this cluster is for.
const BETWEEN: &str = "kill pd";
/// Other drills before that.
const OTHERS: usize = 4;
/// Time for a stream to be resumed after its PD worker died.
const RESUMED_TIME: Duration = Duration::from_secs(3);
/// PD workers that are killed in one drill, at most, before a stream is resumed.
const MAX_KILLS: usize = 10;

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
        let kind = match self.next % (OTHERS + 1) {
            OTHERS => BETWEEN,
            _ => KINDS[(self.next - self.next / (OTHERS + 1)) % KINDS.len()],
        };
        self.next += 1;
        let encoder = ENCODERS[self.rng.random_range(0..3)];
        let pd = PDS[self.rng.random_range(0..3)];
        let worker = if self.rng.random_bool(0.5) { encoder } else { pd };
        let proxy = PROXIES[self.rng.random_range(0..2)];
        let lasts = Duration::from_millis(self.rng.random_range(500..4000));
        match kind {
            "kill encoder" => fleet.replace(encoder).await,
            "kill pd" => kill_pd(fleet).await,
            "kill proxy" => fleet.replace(proxy).await,
            "roll proxy" => fleet.roll(proxy).await,
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

/// Kills the PD worker that has the most requests, until a stream was resumed.
async fn kill_pd(fleet: &mut Fleet) {
    let before = fleet.resumed_streams().await;
    for _ in 0..MAX_KILLS {
        let pd = fleet.busiest_pd().await;
        fleet.replace(pd).await;
        let killed = Instant::now();
        while killed.elapsed() < RESUMED_TIME {
            if fleet.resumed_streams().await > before {
                return;
            }
            sleep(Duration::from_millis(100)).await;
        }
        fleet.wait_ready(pd).await;
    }
    panic!("{MAX_KILLS} PD workers died and no stream was resumed");
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
