//! Speed of the simulator: `cargo test --release --workspace --test plan -- --ignored --nocapture fleet` prints it.

use crate::made::{FAST, Load, apart};
use std::time::Instant;
use triptych_bench::outcome::End;
use triptych_plan::simulator::simulate;

fn run(n_workers: usize, n: u64) -> f64 {
    let (encoders, pds) = (n_workers / 2, n_workers - n_workers / 2);
    let rate = 8.0 * encoders as f64;
    let load = Load { rate, n, text: 400, output: 150, images: 1, image_tokens: 500, pool: None };
    let mut cluster = apart(encoders, pds, FAST);
    cluster.proxy.max_in_flight = 1 << 20;
    let began = Instant::now();
    let run = simulate(&cluster, load.requests(1), 1).unwrap();
    let took = began.elapsed();
    let whole = run.outcomes.iter().filter(|o| o.end == End::Whole).count();
    println!(
        "{n_workers} workers, {n} requests ({whole} whole), {:.0} s simulated in {:.1} s: {} events, {:.0} a second; \
         {} steps; encoders {:.0} % busy, PD workers {:.0} %",
        run.span.as_secs_f64(),
        took.as_secs_f64(),
        run.n_events,
        run.n_events as f64 / took.as_secs_f64(),
        run.pools[1].n_steps,
        run.pools[0].utilisation * 100.0,
        run.pools[1].utilisation * 100.0,
    );
    whole as f64 / n as f64
}

#[test]
fn a_small_fleet_runs_to_its_end() {
    assert!(run(8, 100) > 0.99);
}

#[test]
#[ignore = "a measurement: prints, and takes a minute when it is not optimised"]
fn fleets_of_three_sizes() {
    for (workers, n) in [(8, 2_000), (64, 10_000), (512, 50_000)] {
        run(workers, n);
    }
}
