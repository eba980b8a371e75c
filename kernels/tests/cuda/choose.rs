//! Choosing tokens, and what comes before and beside it, against plain sorts.

use cudarc::driver::{CudaSlice, DeviceRepr};

use crate::device::{Device, Plain};
use crate::element::values;
use crate::launch;

/// `Sampling` of `choose.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Sampling {
    draw: u64,
    temperature: f32,
    top_p: f32,
    min_p: f32,
    top_k: u32,
}

/// `Choice` of `choose.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct Choice {
    token: u32,
    status: u32,
}

/// `Edit` of `choose.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Edit {
    token: u32,
    bias: f32,
    repetition: f32,
    subtract: f32,
}

impl Plain for Sampling {}
// SAFETY: plain numbers without gaps.
unsafe impl DeviceRepr for Sampling {}
// SAFETY: as above.
unsafe impl DeviceRepr for Choice {}
// SAFETY: as above.
unsafe impl DeviceRepr for Edit {}

const GREEDY: Sampling = Sampling { draw: 0, temperature: 0.0, top_p: 1.0, min_p: 0.0, top_k: 0 };
const THREADS: u32 = 256;
const NO: f32 = f32::NEG_INFINITY;

fn chosen(device: &Device, logits: &[f32], how: &[Sampling]) -> Vec<Choice> {
    let vocab = logits.len() / how.len();
    let (out, from, with) = (device.poisoned::<Choice>(how.len()), device.upload(logits), device.upload(how));
    launch!(device, "choose", [how.len() as u32, 1, 1], THREADS, 0; out, from, with, vocab as u32);
    device.download(&out, how.len())
}

/// The token of one row by full sorts, in f64, and the tokens whose share of the draw is so near that rounding may decide.
fn drawn_plainly(logits: &[f32], how: Sampling) -> Vec<u32> {
    let max = logits.iter().copied().fold(NO, f32::max);
    let best = logits.iter().position(|l| *l == max).expect("a token") as u32;
    if how.temperature <= 0.0 || how.top_k == 1 {
        return vec![best];
    }
    let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    if how.top_k > 0 {
        let mut sorted = logits.to_vec();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let kth = sorted[(how.top_k as usize).min(sorted.len()) - 1];
        all.retain(|c| c.1 >= kth);
    }
    all.iter_mut().for_each(|c| c.1 = ((c.1 - max) / how.temperature).exp());
    all.retain(|c| c.1 > 0.0);
    let sum = |all: &[(u32, f32)]| all.iter().map(|c| f64::from(c.1)).sum::<f64>();
    if how.top_p < 1.0 {
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let (mut reached, mass) = (0.0, f64::from(how.top_p) * sum(&all));
        let end = all.iter().position(|c| {
            reached += f64::from(c.1);
            reached >= mass
        });
        all.truncate(end.map_or(all.len(), |end| end + 1));
    }
    all.retain(|c| c.1 >= how.min_p);
    let point = how.draw as f64 / (1_u64 << 53) as f64 * sum(&all);
    let (mut reached, slack) = (0.0, 1e-6 * sum(&all));
    let near = all.iter().filter(|c| {
        let before = reached;
        reached += f64::from(c.1);
        point >= before - slack && point < reached + slack
    });
    near.map(|c| c.0).collect()
}

fn draws(seed: u64, n: usize) -> Vec<u64> {
    values(seed, n).iter().map(|v| (f64::from(v + 1.0) / 2.0 * (1_u64 << 53) as f64) as u64).collect()
}

#[test]
fn choices_are_those_of_full_sorts() {
    let device = Device::new(1);
    let settings = [
        GREEDY,
        Sampling { temperature: 1.0, ..GREEDY },
        Sampling { temperature: 0.3, ..GREEDY },
        Sampling { temperature: 1.0, top_k: 1, ..GREEDY },
        Sampling { temperature: 1.5, top_k: 2, ..GREEDY },
        Sampling { temperature: 1.0, top_k: 40, ..GREEDY },
        Sampling { temperature: 1.0, top_p: 0.01, ..GREEDY },
        Sampling { temperature: 1.0, top_p: 0.9, ..GREEDY },
        Sampling { temperature: 2.0, top_p: 0.999, ..GREEDY },
        Sampling { temperature: 0.7, min_p: 0.05, ..GREEDY },
        Sampling { temperature: 1.0, min_p: 1.0, ..GREEDY },
        Sampling { temperature: 1.0, top_k: 50, top_p: 0.8, min_p: 0.1, ..GREEDY },
        Sampling { temperature: 1.0, top_k: 9, top_p: 0.99, min_p: 0.5, ..GREEDY },
    ];
    for vocab in [1_usize, 2, 3, 255, 256, 257, 1000] {
        for (i, how) in settings.into_iter().enumerate() {
            let rows: Vec<Sampling> =
                draws(i as u64 + 1, 4).into_iter().map(|draw| Sampling { draw, ..how }).collect();
            // Many equals, as rounded logits have.
            let logits: Vec<f32> = values(vocab as u64, vocab * rows.len())
                .into_iter()
                .map(|v| (v * 20.0).round() / 4.0)
                .enumerate()
                .map(|(i, v)| if i % 11 == 5 && i % vocab != 0 { NO } else { v })
                .collect();
            for ((choice, how), row) in
                chosen(&device, &logits, &rows).iter().zip(&rows).zip(logits.chunks(vocab))
            {
                let expect = drawn_plainly(row, *how);
                assert_eq!(choice.status, 0);
                assert!(expect.contains(&choice.token), "{vocab} {how:?}: {} for {expect:?}", choice.token);
            }
        }
    }
    device.finish();
}

/// The table of the host's own test, in `kernels/src/sampling.rs`.
#[test]
fn cuts_leave_what_they_should() {
    let device = Device::new(8);
    let logits = [1.0_f32, 4.0, NO, 3.0, 2.0].map(|l| l * 0.5);
    let base = Sampling { temperature: 1.0, ..GREEDY };
    let cases: [(Sampling, &[u32]); 10] = [
        (base, &[0, 1, 3, 4]),
        (Sampling { temperature: 0.0, ..base }, &[1]),
        (Sampling { temperature: 1e-6, ..base }, &[1]),
        (Sampling { top_k: 2, ..base }, &[1, 3]),
        (Sampling { top_k: 99, ..base }, &[0, 1, 3, 4]),
        // The probabilities are 0.46, 0.28, 0.17, 0.10.
        (Sampling { top_p: 0.4, ..base }, &[1]),
        (Sampling { top_p: 0.7, ..base }, &[1, 3]),
        // Of the two that top-k leaves the first has 0.62.
        (Sampling { top_k: 2, top_p: 0.6, ..base }, &[1]),
        // The weights are 1, 0.61, 0.37, 0.22.
        (Sampling { min_p: 0.5, ..base }, &[1, 3]),
        (Sampling { min_p: 1.0, ..base }, &[1]),
    ];
    for (how, expect) in cases {
        let rows: Vec<Sampling> = (0..64).map(|i| Sampling { draw: i << 47, ..how }).collect();
        let drawn = chosen(&device, &logits.repeat(64), &rows);
        let tokens: std::collections::BTreeSet<u32> = drawn.iter().map(|choice| choice.token).collect();
        assert_eq!(tokens.into_iter().collect::<Vec<_>>(), expect, "{how:?}");
    }
}

#[test]
fn every_draw_of_a_small_vocabulary_is_where_it_should_be() {
    let device = Device::new(2);
    let logits = [0.2_f32, 0.5, 0.3].map(f32::ln);
    let half = 1_u64 << 52;
    // Shares in the order of tokens: 0 up to 0.2, 1 up to 0.7, then 2; by weight: 1, 2, 0.
    for (top_p, expect) in [(1.0, [0, 1, 2, 2]), (0.9999, [1, 2, 0, 0])] {
        let at = [0, half, half + half / 2, 2 * half - 1];
        let at = if top_p < 1.0 { [0, half + half / 10, 2 * half - half / 5, 2 * half - 1] } else { at };
        let how = at.map(|draw| Sampling { draw, temperature: 1.0, top_p, min_p: 0.0, top_k: 0 });
        let tokens: Vec<u32> = chosen(&device, &logits.repeat(4), &how).iter().map(|c| c.token).collect();
        assert_eq!(tokens, expect, "{top_p}");
    }
}

#[test]
fn logits_that_allow_no_choice_say_so() {
    let device = Device::new(3);
    let one = |logits: &[f32]| chosen(&device, logits, &[Sampling { temperature: 1.0, ..GREEDY }])[0];
    assert_eq!(one(&[0.0, f32::NAN, f32::NAN]), Choice { token: 1, status: 1 });
    assert_eq!(one(&[f32::INFINITY, 0.0]), Choice { token: 0, status: 1 });
    assert_eq!(one(&[NO, NO]).status, 2);
    assert_eq!(one(&[NO, -1e30]), Choice { token: 1, status: 0 });
}

#[test]
fn equals_go_to_the_lowest_token() {
    let device = Device::new(4);
    let mut logits = vec![0.0; 600];
    logits[300] = 1.0;
    logits[299] = 1.0;
    logits[599] = 1.0;
    assert_eq!(chosen(&device, &logits, &[GREEDY])[0].token, 299);
}

#[test]
fn a_row_is_chosen_the_same_alone() {
    let device = Device::new(5);
    let logits = values(3, 5 * 333);
    let how: Vec<Sampling> = draws(4, 5)
        .into_iter()
        .map(|draw| Sampling { draw, temperature: 5.0, top_p: 0.9, ..GREEDY })
        .collect();
    let together = chosen(&device, &logits, &how);
    for (i, row) in logits.chunks(333).enumerate() {
        assert_eq!(chosen(&device, row, &how[i..=i])[0], together[i]);
    }
}

#[test]
fn edits_and_masks_change_logits_in_their_order() {
    let device = Device::new(6);
    let vocab = 70;
    let mut logits = values(7, 3 * vocab);
    logits[3] = NO;
    logits[4] = f32::NAN;
    let edit = |token, bias, repetition, subtract| Edit { token, bias, repetition, subtract };
    let rows = [
        vec![edit(0, 5.0, 2.0, 0.5), edit(1, -5.0, 2.0, 0.5), edit(3, 1.0, 1.5, 1.0), edit(4, NO, 1.0, 0.0)],
        // Several of one token, in their order.
        vec![
            edit(6, 1.0, 1.0, 0.0),
            edit(6, 0.0, 3.0, 0.0),
            edit(6, 0.0, 1.0, 0.5),
            edit(9, 2.0, 2.0, 0.0),
            edit(9, NO, 1.0, 0.0),
            edit(12, NO, 1.0, 0.0),
            edit(12, 3.0, 1.0, 0.0),
        ],
        vec![edit(69, 0.0, 1.0, 3.0), edit(70, 0.0, 1.0, 1.0), edit(u32::MAX, 0.0, 1.0, 1.0)],
    ];
    let starts = [0, 4, 11, 14_u32];
    // The first row has no mask, the others share one of every third token.
    let mask: Vec<u32> = (0..vocab.div_ceil(32) as u32)
        .map(|word| (0..32).filter(|bit| (word * 32 + bit).is_multiple_of(3)).map(|bit| 1 << bit).sum())
        .collect();
    let (to, edits) = (device.upload(&logits), device.upload(&rows.concat()));
    let (at, masks, mask_start) =
        (device.upload(&starts), device.upload(&mask), device.upload(&[0_u32, 1, 1]));
    launch!(device, "edit_logits", [3, 1, 1], THREADS, 0; to, edits, at, masks, mask_start, vocab as u32);
    let mut expect = logits.clone();
    for (i, edits) in rows.iter().enumerate() {
        let row = &mut expect[i * vocab..][..vocab];
        for e in edits.iter().filter(|e| (e.token as usize) < vocab) {
            let logit = row[e.token as usize] + e.bias;
            let repeated = if logit < 0.0 { logit * e.repetition } else { logit / e.repetition };
            row[e.token as usize] = if e.bias == NO { NO } else { repeated - e.subtract };
        }
        if i > 0 {
            row.iter_mut().enumerate().filter(|(t, _)| !t.is_multiple_of(3)).for_each(|(_, l)| *l = NO);
        }
    }
    assert_eq!(device.download(&to, logits.len()), expect);
}

fn top(device: &Device, logits: &[f32], choice: Choice, n_top: usize) -> (f32, Vec<u32>, Vec<f32>) {
    let (chosen, tokens, logprobs): (CudaSlice<f32>, CudaSlice<u32>, CudaSlice<f32>) =
        (device.poisoned(1), device.poisoned(n_top), device.poisoned(n_top));
    let (from, choices) = (device.upload(logits), device.upload(&[choice]));
    launch!(device, "log_probabilities", [1, 1, 1], THREADS, 0;
        chosen, tokens, logprobs, from, choices, n_top as u32, logits.len() as u32);
    (device.download(&chosen, 1)[0], device.download(&tokens, n_top), device.download(&logprobs, n_top))
}

#[test]
fn log_probabilities_come_best_first_and_leave_out_what_is_ruled_out() {
    let device = Device::new(7);
    for vocab in [1_usize, 2, 4, 256, 300] {
        let logits: Vec<f32> = values(8, vocab)
            .iter()
            .enumerate()
            .map(|(i, v)| if i % 7 == 3 { NO } else { (v * 8.0).round() / 2.0 })
            .collect();
        let norm = logits.iter().map(|l| f64::from(*l).exp()).sum::<f64>().ln();
        let choice = Choice { token: (vocab as u32 - 1) / 8 * 7, status: 0 };
        let (chosen, tokens, logprobs) = top(&device, &logits, choice, 5);
        assert!((f64::from(chosen) - (f64::from(logits[choice.token as usize]) - norm)).abs() < 1e-5);
        let mut sorted: Vec<u32> = (0..vocab as u32).filter(|t| logits[*t as usize] > NO).collect();
        sorted.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
        sorted.resize(sorted.len().max(5), vocab as u32);
        assert_eq!(tokens, sorted[..5]);
        for (token, logprob) in tokens.iter().zip(logprobs) {
            let logit = logits.get(*token as usize).copied().unwrap_or(NO);
            let expect = f64::from(logit) - norm;
            assert!(logit == NO && logprob == NO || (f64::from(logprob) - expect).abs() < 1e-5);
        }
    }
}
