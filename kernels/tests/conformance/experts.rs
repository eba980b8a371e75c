//! Mixtures of experts.

use triptych_kernels::KernelError;
use triptych_kernels::ops::{Activation, Backend, ExpertLayers, LinearPart, Routed, RouterScores, Routing};

use crate::linear::weights;
use crate::oracle;
use crate::subject::{Stored, Subject, values};

/// A layer of experts, and the weights that it was loaded from.
struct Mixture {
    hidden: usize,
    width: usize,
    /// `[2·width, hidden]` and `[hidden, width]` of each expert.
    experts: Vec<[Vec<f32>; 2]>,
}

const SOFTMAX: Routing = Routing { top_k: 2, scores: RouterScores::Softmax, renormalize: true, scale: 1.0 };

impl Mixture {
    fn new(n_experts: usize, hidden: usize, width: usize) -> Self {
        let expert = |e: usize| {
            let seed = 100 + 2 * e as u64;
            [weights(seed, hidden, 2 * width), weights(seed + 1, width, hidden)]
        };
        Self { hidden, width, experts: (0..n_experts).map(expert).collect() }
    }

    fn load<B: Backend>(&self, subject: &Subject<B>) -> B::Experts {
        let layer = |weight: &[f32], shape: [usize; 2]| {
            let stored = Stored::f32(weight, &shape);
            subject.backend.load_expert(&[LinearPart::new(stored.view(), None)]).expect("a layer")
        };
        let experts = self.experts.iter().map(|[gate_up, down]| ExpertLayers {
            gate_up: layer(gate_up, [2 * self.width, self.hidden]),
            down: layer(down, [self.hidden, self.width]),
        });
        subject.backend.load_experts(experts.collect()).expect("experts of equal shapes")
    }

    /// The sums, expert by expert, in f64 where it matters.
    fn oracle(&self, x: &[f32], logits: &[f32], routing: Routing, residual: Option<&[f32]>) -> Vec<f32> {
        let n_experts = self.experts.len();
        let mut out = Vec::new();
        for (token, (row, logits)) in x.chunks(self.hidden).zip(logits.chunks(n_experts)).enumerate() {
            let mut sum = vec![0.0_f64; self.hidden];
            for (expert, weight) in chosen(logits, routing) {
                let [gate_up, down] = &self.experts[expert];
                let inner = oracle::linear(row, gate_up, None, self.hidden, Activation::None);
                let (gate, up) = inner.split_at(self.width);
                let gated: Vec<f32> = gate
                    .iter()
                    .zip(up)
                    .map(|(g, u)| {
                        (oracle::activation(Activation::Silu, f64::from(*g)) * f64::from(*u)) as f32
                    })
                    .collect();
                let outer = oracle::linear(&gated, down, None, self.width, Activation::None);
                sum.iter_mut().zip(outer).for_each(|(sum, y)| *sum += weight * f64::from(y));
            }
            let residual =
                residual.map_or(vec![0.0; self.hidden], |r| r[token * self.hidden..][..self.hidden].to_vec());
            out.extend(sum.iter().zip(residual).map(|(sum, r)| *sum as f32 + r));
        }
        out
    }
}

/// The experts of a token and their weights.
fn chosen(logits: &[f32], routing: Routing) -> Vec<(usize, f64)> {
    let exp: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
    let score = |l: f32| match routing.scores {
        RouterScores::Softmax => f64::from(l).exp() / exp,
        RouterScores::Sigmoid => 1.0 / (1.0 + (-f64::from(l)).exp()),
    };
    let mut all: Vec<(usize, f64)> = logits.iter().map(|l| score(*l)).enumerate().collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all.truncate(routing.top_k);
    let sum: f64 = if routing.renormalize { all.iter().map(|(_, score)| score).sum() } else { 1.0 };
    all.iter().map(|(expert, score)| (*expert, score / sum * f64::from(routing.scale))).collect()
}

/// Logits so far apart that no rounding makes another choice: `[n_tokens, n_experts]`.
fn apart(seed: u64, n_tokens: usize, n_experts: usize) -> Vec<f32> {
    let order = |token: usize| {
        let mut experts: Vec<(usize, f32)> =
            values(seed + token as u64, n_experts).into_iter().enumerate().collect();
        experts.sort_by(|a, b| a.1.total_cmp(&b.1));
        let mut logits = vec![0.0; n_experts];
        experts.iter().enumerate().for_each(|(rank, (e, _))| logits[*e] = 0.0625 * rank as f32 - 1.0);
        logits
    };
    (0..n_tokens).flat_map(order).collect()
}

fn is_the_oracles<B: Backend>(subject: &Subject<B>, mixture: &Mixture, n: usize, routing: Routing) {
    let n_experts = mixture.experts.len();
    let experts = mixture.load(subject);
    let (x, residual) = (values(7, n * mixture.hidden), values(8, n * mixture.hidden));
    let logits = apart(9, n, n_experts);
    for residual in [None, Some(&residual)] {
        let of = residual.map(|r| subject.tensor(r, n, mixture.hidden));
        let (x_t, l_t) = (subject.tensor(&x, n, mixture.hidden), subject.tensor(&logits, n, n_experts));
        let routed =
            Routed { x: &x_t, logits: &l_t, routing, activation: Activation::Silu, residual: of.as_ref() };
        let y = subject.backend.fused_experts(&experts, routed).expect("experts");
        let expect = mixture.oracle(&x, &logits, routing, residual.map(Vec::as_slice));
        let what = format!("{n} rows, {n_experts} experts of {}, {routing:?}", mixture.width);
        subject.close(&what, &y, (&expect, n, mixture.hidden), 2.0 * subject.products);
    }
}

pub fn experts_are_the_oracles_over_odd_sizes<B: Backend>(subject: &Subject<B>) {
    for (n_experts, hidden, width) in [(2, 20, 12), (5, 33, 31), (8, 64, 80), (40, 32, 16)] {
        let mixture = Mixture::new(n_experts, hidden, width);
        for n in [0, 1, 3, 40] {
            is_the_oracles(subject, &mixture, n, SOFTMAX);
        }
    }
}

pub fn every_kind_of_routing_is_the_oracles<B: Backend>(subject: &Subject<B>) {
    let mixture = Mixture::new(6, 24, 20);
    for top_k in [1, 3, 6] {
        for scores in [RouterScores::Softmax, RouterScores::Sigmoid] {
            for renormalize in [true, false] {
                let routing = Routing { top_k, scores, renormalize, scale: 1.5 };
                is_the_oracles(subject, &mixture, 9, routing);
            }
        }
    }
}

pub fn a_row_among_others_goes_to_its_experts_as_alone<B: Backend>(subject: &Subject<B>) {
    let (n, n_experts, mixture) = (50, 8, Mixture::new(8, 40, 24));
    let experts = mixture.load(subject);
    let (x, logits) = (values(7, n * mixture.hidden), values(9, n * n_experts));
    let run = |rows: std::ops::Range<usize>| {
        let x = subject.tensor(&x[rows.start * 40..rows.end * 40], rows.len(), 40);
        let logits = subject.tensor(&logits[rows.start * 8..rows.end * 8], rows.len(), 8);
        let routed =
            Routed { x: &x, logits: &logits, routing: SOFTMAX, activation: Activation::Silu, residual: None };
        subject.bits(&subject.backend.fused_experts(&experts, routed).expect("experts"))
    };
    let all = run(0..n);
    for row in [0, 17, 49] {
        assert_eq!(run(row..row + 1), all[row * 40..(row + 1) * 40], "{}: row {row}", subject.name);
    }
}

pub fn equal_logits_choose_the_first_experts_and_no_number_is_the_lowest<B: Backend>(subject: &Subject<B>) {
    let mixture = Mixture::new(40, 16, 8);
    let experts = mixture.load(subject);
    let x = values(7, 2 * 16);
    // Of equals the first, in other lanes too; what is no number comes after all that are.
    let (equal, mut odd) = (vec![0.5; 40], vec![f32::NAN; 40]);
    (odd[3], odd[35]) = (-2.0, -2.0);
    let run = |logits: &[f32]| {
        let (x, logits) = (subject.tensor(&x, 2, 16), subject.tensor(logits, 2, 40));
        let routed =
            Routed { x: &x, logits: &logits, routing: SOFTMAX, activation: Activation::Silu, residual: None };
        subject.backend.fused_experts(&experts, routed).expect("experts")
    };
    let y = run(&[equal, odd].concat());
    let mut clear = vec![-9.0; 80];
    [0, 1, 40 + 3, 40 + 35].into_iter().for_each(|at| clear[at] = 1.0);
    let expect = mixture.oracle(&x, &clear, SOFTMAX, None);
    subject.close("ties", &y, (&expect, 2, 16), 2.0 * subject.products);
}

pub fn experts_and_rows_that_do_not_fit_are_refused<B: Backend>(subject: &Subject<B>) {
    let is_refused = |result: Result<B::Tensor, KernelError>| {
        matches!(result, Err(KernelError::Shape { .. } | KernelError::Index { .. }))
    };
    let mixture = Mixture::new(4, 16, 8);
    let experts = mixture.load(subject);
    let run = |x: [usize; 2], logits: [usize; 2], top_k: usize| {
        let (x, logits) = (
            subject.tensor(&vec![0.0; x[0] * x[1]], x[0], x[1]),
            subject.tensor(&vec![0.0; logits[0] * logits[1]], logits[0], logits[1]),
        );
        let routing = Routing { top_k, ..SOFTMAX };
        let routed = Routed { x: &x, logits: &logits, routing, activation: Activation::Silu, residual: None };
        subject.backend.fused_experts(&experts, routed)
    };
    assert!(run([2, 16], [2, 4], 2).is_ok(), "{}", subject.name);
    for (x, logits, top_k) in [
        ([2, 16], [1, 4], 2),
        ([2, 16], [2, 5], 2),
        ([2, 15], [2, 4], 2),
        ([2, 16], [2, 4], 0),
        ([2, 16], [2, 4], 5),
    ] {
        assert!(is_refused(run(x, logits, top_k)), "{}: {x:?} {logits:?} {top_k}", subject.name);
    }
    assert!(subject.backend.load_experts(Vec::new()).is_err(), "{}", subject.name);
    let layer = |shape: [usize; 2]| {
        let stored = Stored::f32(&weights(1, shape[1], shape[0]), &shape);
        subject.backend.load_expert(&[LinearPart::new(stored.view(), None)]).expect("a layer")
    };
    let uneven = ExpertLayers { gate_up: layer([16, 16]), down: layer([16, 7]) };
    assert!(subject.backend.load_experts(vec![uneven]).is_err(), "{}", subject.name);
}
