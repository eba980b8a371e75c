//! Biases added to scores, in attention inside sequences and over pages.

use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_kernels::ops::{Backend, BucketSides, ChosenHeads, Mask};

use crate::added::{Added, scaled};
use crate::paged::{Tables, attend, filled};
use crate::sequences::{Sequences, shape};
use crate::subject::{Subject, stage};

pub fn a_bias_is_added_to_every_score<B: Backend>(subject: &Subject<B>) {
    let square = [(1, 1), (0, 0), (31, 31), (32, 32), (33, 33), (2, 2)];
    let more_keys = [(1, 64), (5, 31), (0, 7), (2, 33)];
    let more_queries = [(7, 3), (1, 65), (0, 1), (20, 12), (3, 0)];
    for (n_heads, n_kv_heads, head_dim) in [(1, 1, 12), (3, 3, 33), (4, 2, 20), (5, 1, 64)] {
        let shape = shape(n_heads, n_kv_heads, head_dim);
        for (lens, mask) in [
            (&square[..], Mask::Full),
            (&square, Mask::Causal),
            (&more_keys, Mask::Full),
            (&more_keys, Mask::Causal),
            (&more_queries, Mask::Full),
        ] {
            for bias in Added::every(n_heads, lens) {
                Sequences::new(lens, shape, mask).biased(bias).check(subject);
            }
        }
    }
}

pub fn a_bias_reaches_over_many_keys<B: Backend>(subject: &Subject<B>) {
    let lens = [(17, 530), (1, 257), (260, 260)];
    for mask in [Mask::Full, Mask::Causal] {
        for bias in Added::every(2, &lens) {
            Sequences::new(&lens, shape(2, 1, 12), mask).biased(bias).check(subject);
        }
    }
}

pub fn sequences_of_one_size_share_tables<B: Backend>(subject: &Subject<B>) {
    for n in [1, 31, 49] {
        let (n_heads, lens) = (2, [(n, n); 4]);
        let bias = Added::Shared(scaled(7, 2 * n_heads * n * n), vec![1, 0, 1, 1]);
        Sequences::new(&lens, shape(n_heads, 2, 20), Mask::Full).biased(bias).check(subject);
    }
}

pub fn keys_hidden_by_a_bias_weigh_nothing<B: Backend>(subject: &Subject<B>) {
    let lens = [(3, 300), (2, 1)];
    let Added::Materialized(mut values) = Added::materialized(2, &lens) else { unreachable!("made so") };
    // The first query of the first head sees nothing, the second only the last key, and the third all but it.
    values[..300].fill(f32::NEG_INFINITY);
    values[300..599].fill(f32::NEG_INFINITY);
    values[899] = f32::NEG_INFINITY;
    let seqs = Sequences::new(&lens, shape(2, 2, 20), Mask::Full).biased(Added::Materialized(values));
    seqs.check(subject);
    let out = subject.backend.download(&seqs.attend(subject, &subject.backend)).expect("download");
    assert!(out[..20].iter().all(|&value| value == 0.0), "{}: nothing seen", subject.name);
}

pub fn a_bias_over_pages_is_that_inside_sequences<B: Backend>(subject: &Subject<B>) {
    let decode = [(1, 1), (1, 31), (1, 32), (1, 33), (1, 64), (1, 300)];
    let mixed = [(1, 70), (5, 37), (33, 33), (0, 3), (2, 2), (14, 280)];
    for (n_heads, n_kv_heads, head_dim) in [(2, 2, 64), (6, 2, 33)] {
        for lens in [&decode[..], &mixed] {
            for mask in [Mask::Full, Mask::Causal] {
                for bias in Added::every(n_heads, lens) {
                    let shape = shape(n_heads, n_kv_heads, head_dim);
                    let seqs = Sequences::new(lens, shape, mask).biased(bias);
                    let tables = Tables::new(&seqs, 2, 7);
                    let cache = filled(subject, &seqs, &tables, 1);
                    let out = attend(subject, &seqs, &tables, (&cache, 1));
                    let what = format!("paged {lens:?} {mask:?} {}", seqs.bias.name());
                    let expect = seqs.expect();
                    subject.close(&what, &out, (&expect, seqs.n_queries(), seqs.q_width()), subject.products);
                }
            }
        }
    }
}

pub fn a_biased_sequence_is_the_same_alone<B: Backend>(subject: &Subject<B>) {
    for mask in [Mask::Full, Mask::Causal] {
        let lens = [(1, 40), (5, 270), (1, 1), (0, 3), (14, 65)];
        for bias in Added::every(6, &lens) {
            let seqs = Sequences::new(&lens, shape(6, 2, 33), mask).biased(bias);
            let tables = Tables::new(&seqs, 1, 7);
            let cache = filled(subject, &seqs, &tables, 0);
            let together = subject.bits(&attend(subject, &seqs, &tables, (&cache, 0)));
            let inside = subject.bits(&seqs.attend(subject, &subject.backend));
            if subject.keeps_pages {
                assert_eq!(together, inside, "{} {mask:?} {}: pages", subject.name, seqs.bias.name());
            }
            let bits = |i: usize| {
                let alone = Tables { layout: tables.layout, blocks: vec![tables.blocks[i].clone()] };
                subject.bits(&attend(subject, &seqs.alone(i), &alone, (&cache, 0)))
            };
            let alone: Vec<u32> = (0..lens.len()).flat_map(bits).collect();
            assert_eq!(together, alone, "{} {mask:?} {}", subject.name, seqs.bias.name());
        }
    }
}

pub fn chunks_of_a_biased_prefill_give_what_the_whole_gives<B: Backend>(subject: &Subject<B>) {
    let n = 75;
    let causal = |bias| Sequences::new(&[(n, n)], shape(4, 2, 20), Mask::Causal).biased(bias);
    for bias in [Added::relative(4, BucketSides::Past), Added::alibi(4)] {
        let whole = causal(bias);
        let tables = Tables::new(&whole, 1, 3);
        let cache = filled(subject, &whole, &tables, 0);
        let out = attend(subject, &whole, &tables, (&cache, 0));
        let expect = subject.backend.download(&out).expect("download");
        let (width, mut start) = (whole.q_width(), 0);
        for len in [1, KV_BLOCK_TOKENS, 13, 28, 1] {
            let end = start + len;
            let q = whole.q[start * width..end * width].to_vec();
            let bias = whole.bias.clone();
            let chunk = Sequences { lens: vec![(len, end)], bias, q, k: vec![], v: vec![], ..whole };
            let out = attend(subject, &chunk, &tables, (&cache, 0));
            subject.close(whole.bias.name(), &out, (&expect[start * width..end * width], len, width), 1e-6);
            start = end;
        }
        assert_eq!(start, n);
    }
}

/// Softmax weights of chosen heads for the keys of `seqs`.
fn weigh<B: Backend>(subject: &Subject<B>, seqs: &Sequences, heads: &[u32]) -> Vec<f32> {
    let q = subject.tensor(&seqs.q, seqs.n_queries(), seqs.q_width());
    let k = subject.tensor(&seqs.k, seqs.n_keys(), seqs.kv_width());
    let (step, (heads, staged)) =
        stage(&subject.backend, |builder| Ok((builder.indices(heads)?, seqs.stage(builder)?)));
    let (chosen, bias) = (ChosenHeads { shape: seqs.shape, heads }, seqs.load_bias(&subject.backend));
    subject.backend.attention_weights(&step, [&q, &k], chosen, seqs.varlen(staged, &bias)).expect("weights")
}

pub fn weights_are_those_of_attention<B: Backend>(subject: &Subject<B>) {
    let lens = [(1, 33), (3, 300), (0, 5), (31, 64), (2, 2)];
    for (n_heads, n_kv_heads, head_dim) in [(3, 3, 12), (4, 2, 33), (6, 1, 64)] {
        for mask in [Mask::Full, Mask::Causal] {
            for bias in [Added::None, Added::alibi(n_heads), Added::materialized(n_heads, &lens)] {
                let seqs = Sequences::new(&lens, shape(n_heads, n_kv_heads, head_dim), mask).biased(bias);
                let heads = [n_heads as u32 - 1, 0, 1];
                let (weights, expect) = (weigh(subject, &seqs, &heads), seqs.expect_weights(&heads));
                assert_eq!(weights.len(), expect.len(), "{}", subject.name);
                for (i, (a, e)) in weights.iter().zip(&expect).enumerate() {
                    let near = (a - e).abs() <= subject.products;
                    assert!(near, "{}: {mask:?} {}: {i} is {a}, not {e}", subject.name, seqs.bias.name());
                }
                let alone = weigh(subject, &seqs.alone(1), &heads);
                assert_eq!(weights[3 * 33..][..alone.len()], alone, "{}: alone", subject.name);
            }
        }
    }
}

pub fn a_query_that_sees_no_key_has_no_weights<B: Backend>(subject: &Subject<B>) {
    let seqs = Sequences::new(&[(2, 0), (1, 3)], shape(2, 2, 20), Mask::Full)
        .biased(Added::Materialized(vec![f32::NEG_INFINITY; 6]));
    assert_eq!(weigh(subject, &seqs, &[1, 1]), [0.0; 6], "{}", subject.name);
}
