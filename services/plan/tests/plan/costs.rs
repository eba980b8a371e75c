//! Costs from curves, and errors for curves that are impossible.

use crate::made::{SLOW, curves};
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::time::Duration;
use triptych_bench::offered::ItemShape;
use triptych_core::TowerIdx;
use triptych_plan::curves::{BatchShape, CostCurves, Costs, CurvesError, Spread, StepShape, VERSION};

#[test]
fn costs_are_what_was_measured_between_it_and_beyond() {
    let costs = Costs::new(&curves(SLOW));
    let encoder = costs.encoder(TowerIdx::default());
    let near =
        |actual: f64, expect: f64| assert!((actual / expect - 1.0).abs() < 0.02, "{actual} for {expect}");
    near(encoder.encode(BatchShape::of([500])).p50_us, 500_000.0);
    near(encoder.encode(BatchShape::of([500, 500, 2000])).p50_us, 3_000_000.0);
    let step = StepShape {
        prefill_tokens: 256,
        prefill_context: 256 * 257 / 2,
        decodes: 4,
        decode_context: 2000,
        ..StepShape::default()
    };
    near(costs.step(step).p50_us, 10_000.0 + 256_000.0 + 8000.0);
    assert_eq!(costs.step(StepShape::default()), Spread::default());
    assert_eq!(encoder.encode(BatchShape::default()), Spread::default());
    let (encode, step) = costs.quality();
    assert!(encode.worst < 0.01 && step.worst < 0.01, "{encode:?} {step:?}");
    // Along a line: between, before and behind.
    near(costs.publish(5_000_000).p50_us, 500.45);
    near(costs.publish(20_000_000).p50_us, 2000.0);
    assert!(costs.publish(0).p50_us <= 1.0);
    let item = encoder.item(ItemShape::Image { width: 500, height: 1000 });
    assert_eq!((item.tokens, item.bytes), (500, 500_000));
    assert_eq!(encoder.row_bytes(3), 3000);
}

#[test]
fn drawn_times_have_the_median_and_the_95th_percentile_that_were_measured() {
    let mut rng = StdRng::seed_from_u64(3);
    let spread = Spread { p50_us: 1000.0, p95_us: 2000.0 };
    let mut times: Vec<Duration> = (0..20_000).map(|_| spread.draw(&mut rng)).collect();
    times.sort_unstable();
    let at = |share: f64| times[(times.len() as f64 * share) as usize].as_secs_f64() * 1e6;
    assert!((at(0.5) / 1000.0 - 1.0).abs() < 0.03, "{}", at(0.5));
    assert!((at(0.95) / 2000.0 - 1.0).abs() < 0.05, "{}", at(0.95));
    assert_eq!(Spread::fixed(7.0).draw(&mut rng), Duration::from_micros(7));
}

#[test]
fn a_file_is_read_as_it_was_written_and_every_mistake_in_it_is_named() {
    let good = curves(SLOW);
    let text = serde_json::to_string(&good).unwrap();
    assert_eq!(CostCurves::read(&text).unwrap(), good);
    let mut bad = good.clone();
    bad.threads = 0;
    bad.step[2].p95_us = 0.5;
    bad.encode[1].p50_us = -1.0;
    bad.publish.swap(0, 1);
    bad.items[1].tokens = 3;
    bad.colocated.step = 0.5;
    let mistakes = bad.mistakes();
    for part in
        ["threads is 0", "step[2]: p95_us", "encode[1]: p50_us", "publish[1]", "items[1]", "colocated.step"]
    {
        assert!(mistakes.iter().any(|m| m.contains(part)), "{part}: {mistakes:?}");
    }
    assert_eq!(mistakes.len(), 6, "{mistakes:?}");
    let parsed = CostCurves::read(&serde_json::to_string(&bad).unwrap());
    assert!(matches!(parsed, Err(CurvesError::Wrong { mistakes }) if mistakes.len() == 6));
    let other = text.replacen(&format!("\"version\":{VERSION}"), &format!("\"version\":{}", VERSION + 1), 1);
    let other = CostCurves::read(&other).unwrap_err();
    assert!(other.to_string().contains(&format!("version {}", VERSION + 1)), "{other}");
}
