//! Attention inside sequences.

use triptych_kernels::ops::{AttentionShape, Backend, Mask};

use crate::added::Added;
use crate::oracle::Seen;
use crate::sequences::{Sequences, shape};
use crate::subject::{Subject, stage};

pub fn attention_is_the_oracles_over_odd_sizes<B: Backend>(subject: &Subject<B>) {
    for head_dim in [1, 12, 20, 33, 64, 80, 128] {
        for (n_heads, n_kv_heads) in [(1, 1), (3, 3), (4, 2), (5, 1)] {
            let shape = shape(n_heads, n_kv_heads, head_dim);
            let square = [(1, 1), (0, 0), (31, 31), (32, 32), (33, 33), (2, 2)];
            Sequences::new(&square, shape, Mask::Full).check(subject);
            Sequences::new(&square, shape, Mask::Causal).check(subject);
            Sequences::new(&[(1, 64), (5, 31), (0, 7), (2, 33)], shape, Mask::Causal).check(subject);
            Sequences::new(&[(7, 3), (1, 65), (0, 1), (20, 32)], shape, Mask::Full).check(subject);
        }
    }
}

/// Channels that attend to channels are heads as wide as an image has positions.
pub fn attention_is_the_oracles_over_wide_heads<B: Backend>(subject: &Subject<B>) {
    for head_dim in [257, 600] {
        for (n_heads, n_kv_heads) in [(1, 1), (2, 1)] {
            let shape = shape(n_heads, n_kv_heads, head_dim);
            Sequences::new(&[(9, 9), (0, 0), (1, 33), (2, 0)], shape, Mask::Full).check(subject);
            Sequences::new(&[(5, 5), (3, 7)], shape, Mask::Causal).check(subject);
        }
    }
}

pub fn attention_is_the_oracles_over_many_keys<B: Backend>(subject: &Subject<B>) {
    for mask in [Mask::Full, Mask::Causal] {
        Sequences::new(&[(70, 530), (1, 257)], shape(2, 1, 20), mask).check(subject);
        Sequences::new(&[(300, 300)], shape(2, 2, 64), mask).check(subject);
    }
}

/// Windows of one key, within a block, of several stretches of keys; spans across blocks and up to the last key.
pub fn bounds_of_the_mask_are_the_oracles<B: Backend>(subject: &Subject<B>) {
    let both = Seen::Causal { window: Some(20), span: [10, 25] };
    for mask in [Seen::window(1), Seen::window(30), Seen::span(0, 3), Seen::span(5, 70), both] {
        for (n_heads, n_kv_heads, head_dim) in [(1, 1, 12), (4, 2, 33), (2, 1, 64)] {
            let lens = [(1, 1), (0, 0), (33, 33), (3, 40), (70, 70), (1, 66)];
            Sequences::new(&lens, shape(n_heads, n_kv_heads, head_dim), mask).check(subject);
        }
    }
    for mask in [Seen::window(40), Seen::window(300), Seen::span(250, 600)] {
        Sequences::new(&[(70, 700), (1, 557), (600, 600)], shape(2, 1, 20), mask).check(subject);
    }
}

/// Bounds below most scores and above all.
pub fn capped_scores_are_the_oracles<B: Backend>(subject: &Subject<B>) {
    for softcap in [0.5, 2.0, 50.0] {
        for (n_heads, n_kv_heads, head_dim) in [(1, 1, 12), (4, 2, 33), (2, 1, 64), (1, 1, 257)] {
            let shape = AttentionShape { softcap: Some(softcap), ..shape(n_heads, n_kv_heads, head_dim) };
            let lens = [(1, 1), (0, 0), (33, 33), (3, 40), (1, 66)];
            Sequences::new(&lens, shape, Mask::Full).check(subject);
            Sequences::new(&lens, shape, Mask::Causal).check(subject);
            Sequences::new(&lens, shape, Seen::window(20)).check(subject);
            Sequences::new(&lens, shape, Mask::Causal).biased(Added::alibi(n_heads)).check(subject);
        }
    }
    let shape = AttentionShape { softcap: Some(3.0), ..shape(2, 1, 20) };
    Sequences::new(&[(70, 530), (1, 257)], shape, Mask::Causal).check(subject);
}

pub fn queries_without_keys_give_zeros<B: Backend>(subject: &Subject<B>) {
    let seqs = Sequences::new(&[(3, 0), (1, 1)], shape(2, 1, 12), Mask::Full);
    let out = subject.backend.download(&seqs.attend(subject, &subject.backend)).expect("download");
    assert!(out[..3 * 24].iter().all(|&value| value == 0.0), "{}", subject.name);
    seqs.check(subject);
}

pub fn large_scores_do_not_overflow<B: Backend>(subject: &Subject<B>) {
    let mut seqs = Sequences::new(&[(9, 300)], shape(1, 1, 12), Mask::Full);
    seqs.k.iter_mut().for_each(|k| *k *= 500.0);
    let out = subject.backend.download(&seqs.attend(subject, &subject.backend)).expect("download");
    assert!(out.iter().all(|value| value.abs() <= 1.001), "{}: not a mean of values", subject.name);
}

pub fn attention_over_one_projection_is_that_over_its_parts<B: Backend>(subject: &Subject<B>) {
    for (n_heads, n_kv_heads, head_dim) in [(2, 2, 64), (4, 2, 20), (3, 1, 12)] {
        let seqs =
            Sequences::new(&[(37, 37), (0, 0), (64, 64)], shape(n_heads, n_kv_heads, head_dim), Mask::Full);
        let apart = subject.backend.download(&seqs.attend(subject, &subject.backend)).expect("download");
        let rows = (0..seqs.n_queries()).flat_map(|row| {
            let part = |of: &'_ [f32], width: usize| of[row * width..][..width].to_vec();
            let (q, kv) = (seqs.q_width(), seqs.kv_width());
            [part(&seqs.q, q), part(&seqs.k, kv), part(&seqs.v, kv)].concat()
        });
        let rows: Vec<f32> = rows.collect();
        let width = seqs.q_width() + 2 * seqs.kv_width();
        let qkv = subject.tensor(&rows, seqs.n_queries(), width);
        let (step, staged) = stage(&subject.backend, |builder| seqs.stage(builder));
        let bias = seqs.load_bias(&subject.backend);
        let fused = subject.backend.fused_attention(&step, &qkv, seqs.shape, seqs.varlen(staged, &bias));
        let fused = fused.expect("attention");
        let fused = subject.backend.download(&fused).expect("download");
        assert_eq!(fused, apart, "{}: {:?}", subject.name, seqs.shape);
    }
}

pub fn what_is_not_a_number_stays_in_its_sequence<B: Backend>(subject: &Subject<B>) {
    for odd in [f32::NAN, f32::INFINITY] {
        for of_values in [false, true] {
            let mut seqs = Sequences::new(&[(3, 40), (5, 70)], shape(2, 2, 20), Mask::Full);
            let place = 33 * seqs.kv_width();
            if of_values {
                seqs.v[place] = odd
            } else {
                seqs.k[place] = odd
            }
            let out = subject.backend.download(&seqs.attend(subject, &subject.backend)).expect("download");
            let (first, second) = out.split_at(3 * seqs.q_width());
            let what = format!("{}: {odd} of values: {of_values}", subject.name);
            let head = &first[..seqs.shape.head_dim];
            assert!(head.iter().any(|value| !value.is_finite()), "{what}: it is seen");
            assert!(second.iter().all(|value| value.is_finite()), "{what}: others do not see it");
        }
    }
}
