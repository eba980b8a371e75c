//! Encoder outputs in fewer bits: what the element type of the rows in the store costs in accuracy.
//!
//! `cargo test --workspace --test matrix narrow -- --nocapture` prints the table that
//! `benches/results/ec_rows.md` holds.

use crate::bench::{Bench, roomy};
use crate::case::{Case, cases};
use triptych_core::item::rows_from_f32;
use triptych_core::sampling::SamplingParams;
use triptych_core::{DType, EncodedItem, EncoderOutput};

/// Accuracy cost of one element type, over all golden models.
#[derive(Default)]
struct Cost {
    /// Root mean square error of the rows over that of their values, the worst model's.
    rows: f64,
    /// Errors of the log-probabilities of the first token, over its five likeliest, in standard deviations of the
    /// request's logits: the golden models' weights are random, and their logits of any size.
    logprobs: Vec<f64>,
    /// Greedy completions that are the same, and all.
    same: (usize, usize),
    /// Bytes of the rows over those in f32.
    bytes: (usize, usize),
}

fn narrow(output: &EncoderOutput, dtype: DType) -> EncoderOutput {
    let item = output.item();
    let values = output.rows_f32(0, item.n_tokens as usize).expect("its own rows");
    let rows = rows_from_f32(&values, item.hidden as usize, dtype);
    EncoderOutput::seal(EncodedItem { dtype, ..item.clone() }, rows)
        .expect("as many bytes as its metadata say")
}

/// Root mean square of the difference over that of the values.
fn relative_error(exact: &EncoderOutput, narrowed: &EncoderOutput) -> f64 {
    let all =
        |output: &EncoderOutput| output.rows_f32(0, output.item().n_tokens as usize).expect("its own rows");
    let (exact, narrowed) = (all(exact), all(narrowed));
    let square = |v: f32| f64::from(v) * f64::from(v);
    let error: f64 = exact.iter().zip(&narrowed).map(|(a, b)| square(a - b)).sum();
    let size: f64 = exact.iter().map(|v| square(*v)).sum();
    (error / size.max(f64::MIN_POSITIVE)).sqrt()
}

/// Of the logits that the rules leave.
fn deviation(logits: &[f32]) -> f64 {
    let finite: Vec<f64> = logits.iter().filter(|l| l.is_finite()).map(|l| f64::from(*l)).collect();
    let mean = finite.iter().sum::<f64>() / finite.len() as f64;
    (finite.iter().map(|l| (l - mean) * (l - mean)).sum::<f64>() / finite.len() as f64).sqrt()
}

fn measure(case: &Case, dtype: DType, cost: &mut Cost) {
    let mut narrowed = Case::open(&case.name);
    narrowed.outputs = case.outputs.iter().map(|output| narrow(output, dtype)).collect();
    for (exact, output) in case.outputs.iter().zip(&narrowed.outputs) {
        cost.rows = cost.rows.max(relative_error(exact, output));
        cost.bytes.0 += output.rows().len();
        cost.bytes.1 += exact.rows().len();
    }
    let mut bench = Bench::new(&narrowed, roomy());
    let first =
        |p: SamplingParams| SamplingParams { logprobs: Some(5), max_tokens: Some(1), ignore_eos: true, ..p };
    for (id, request) in narrowed.numbered() {
        bench.add(narrowed.arrival(request, id, request.greedy()));
        bench.add(narrowed.arrival(request, id + 100, first(request.greedy())));
    }
    bench.settle();
    for (id, request) in narrowed.numbered() {
        let tokens = bench.seen[&id].tokens();
        let (completion, _) = request.completion();
        let written = tokens.strip_suffix(&request.end_tokens[..1]).unwrap_or(&tokens);
        cost.same.0 += usize::from(written == completion);
        cost.same.1 += 1;
        let forced = request.forced.iter().any(|f| f.0 == -1);
        if !forced {
            let logits = case.next_logits(request);
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
            let spread = deviation(&logits);
            for entry in &bench.seen[&(id + 100)].deltas[0].logprobs[0].top {
                let expected = f64::from(logits[entry.token_id as usize] - max) - sum.ln();
                cost.logprobs.push((f64::from(entry.logprob) - expected).abs() / spread);
            }
        }
    }
}

#[test]
fn rows_in_fewer_bits_cost_what_they_should() {
    let cases = cases();
    println!(
        "| rows | bytes | rms error of rows, worst model | log-probability error, median and p99 | same greedy answers |"
    );
    println!("|---|---|---|---|---|");
    // Bounds by the steps of each type: 2^-9, 1/254 of a row's largest value, 2^-4.
    for (dtype, rows, logprob, same) in
        [(DType::Bf16, 0.004, 0.01, 0.8), (DType::I8, 0.016, 0.04, 0.6), (DType::F8, 0.04, 0.15, 0.25)]
    {
        let mut cost = Cost::default();
        for case in cases.iter().filter(|case| !case.outputs.is_empty()) {
            measure(case, dtype, &mut cost);
        }
        cost.logprobs.sort_by(f64::total_cmp);
        let [median, p99] =
            [2, 100].map(|part| cost.logprobs[cost.logprobs.len() - 1 - cost.logprobs.len() / part]);
        let share = cost.same.0 as f64 / cost.same.1 as f64;
        let bytes = cost.bytes.0 as f64 / cost.bytes.1 as f64;
        println!(
            "| {dtype} | {bytes:.2} | {:.4} | {median:.4}, {p99:.3} | {} of {} |",
            cost.rows, cost.same.0, cost.same.1
        );
        assert!(cost.rows < rows && median < logprob && share > same, "{dtype} costs more than it should");
    }
}
