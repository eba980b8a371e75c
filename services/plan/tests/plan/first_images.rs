//! Order of a queue of images: what waiting requests gain by it, that nobody starves, and that text passes.

use crate::made::{FAST, SLOW, apart, image, one};
use std::time::Duration;
use triptych_bench::offered::Offered;
use triptych_encoder::order::JobOrder;
use triptych_plan::simulator::result::Simulation;
use triptych_plan::simulator::simulate;
use triptych_plan::simulator::spec::{ClusterSpec, PoolRole};

/// A cluster with one encoder that takes its jobs in this order.
fn ordered(mut cluster: ClusterSpec, order: JobOrder) -> ClusterSpec {
    for pool in &mut cluster.pools {
        if let PoolRole::Encoder(encoder) | PoolRole::Both { encoder, .. } = &mut pool.role {
            encoder.batch.order = order;
        }
    }
    cluster
}

/// A request of new images at a moment.
fn images(index: u64, at_ms: u64, n: u64) -> Offered {
    one(index, at_ms, 20, (0..n).map(|i| image(index * 100 + i, 500)).collect())
}

fn ttfts(run: &Simulation) -> Vec<f64> {
    let ttft = |o: &triptych_bench::outcome::Outcome| (o.tokens[0] - o.due).as_secs_f64();
    run.outcomes.iter().map(ttft).collect()
}

/// Mean and median.
fn mean_and_median(mut ttfts: Vec<f64>) -> (f64, f64) {
    ttfts.sort_by(f64::total_cmp);
    let middle = ttfts.len() / 2;
    (ttfts.iter().sum::<f64>() / ttfts.len() as f64, (ttfts[middle - 1] + ttfts[middle]) / 2.0)
}

#[test]
fn of_eight_that_wait_the_short_ones_do_not_wait_for_the_long_ones() {
    let sizes: [(&str, [u64; 8]); 4] = [
        ("one image each", [1; 8]),
        ("two images each", [2; 8]),
        ("1 to 4 images, long ones first", [4, 4, 3, 3, 2, 2, 1, 1]),
        ("one of 8 before seven of 1", [8, 1, 1, 1, 1, 1, 1, 1]),
    ];
    for (what, sizes) in sizes {
        let found = [JobOrder::Arrival, JobOrder::LeastWorkLeft].map(|order| {
            let offered = sizes.iter().zip(0..).map(|(n, i)| images(i, i, *n));
            mean_and_median(ttfts(&simulate(&ordered(apart(1, 1, FAST), order), offered, 1).unwrap()))
        });
        println!("{what}: {found:?}");
    }
}
