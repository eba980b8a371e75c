//! The result of a row depends on its sequence alone: bit for bit, whatever else is in the batch and however many
//! threads run. A request's greedy tokens rest on this.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_kernels::ops::{Activation, Backend, BucketSides, Conv2d, Mask, NormKind};

use crate::added::Added;
use crate::conv::load_depthwise;
use crate::linear::{layer, weights};
use crate::oracle::Seen;
use crate::paged::{Tables, attend, filled};
use crate::rows::load_norm;
use crate::sequences::{Sequences, offsets, shape};
use crate::subject::{Subject, stage, values};

pub fn a_row_of_a_linear_layer_is_the_same_alone<B: Backend>(subject: &Subject<B>) {
    let config = Config { cases: 24, failure_persistence: None, ..Config::default() };
    let sizes = (1_usize..60, 1_usize..300, 1_usize..300, any::<prop::sample::Index>());
    let run = TestRunner::new(config).run(&sizes, |(n, n_in, n_out, row)| {
        let row = row.index(n);
        let [alone, together] = linear_alone_and_together(subject, [n, n_in, n_out], row);
        prop_assert_eq!(together, alone, "row {} of {}", row, n);
        Ok(())
    });
    run.unwrap_or_else(|error| panic!("{}: {error}", subject.name));
}

/// As long as the rows whose sums wait in memory.
pub fn a_long_row_of_a_linear_layer_is_the_same_alone<B: Backend>(subject: &Subject<B>) {
    for n_in in [1100, 2048, 4096] {
        let [alone, together] = linear_alone_and_together(subject, [20, n_in, 130], 17);
        assert_eq!(together, alone, "{}: of {n_in} values", subject.name);
    }
}

/// Results of a row as the only one, and among `n`.
fn linear_alone_and_together<B: Backend>(
    subject: &Subject<B>,
    [n, n_in, n_out]: [usize; 3],
    row: usize,
) -> [Vec<u32>; 2] {
    let (x, weight, bias) = (values(1, n * n_in), weights(2, n_in, n_out), values(3, n_out));
    let w = layer(subject, &weight, Some(&bias), n_in, n_out);
    let linear = |x: &[f32], n| {
        let y = subject.backend.linear(&subject.tensor(x, n, n_in), &w, Activation::Gelu, None);
        subject.bits(&y.expect("linear"))
    };
    let together = linear(&x, n);
    [linear(&x[row * n_in..][..n_in], 1), together[row * n_out..][..n_out].to_vec()]
}

pub fn a_sequence_is_the_same_alone<B: Backend>(subject: &Subject<B>) {
    for mask in [Mask::Full, Mask::Causal] {
        let lens = [(1, 40), (33, 270), (0, 3), (2, 2), (14, 300)];
        let seqs = Sequences::new(&lens, shape(4, 2, 20), mask);
        let together = subject.bits(&seqs.attend(subject, &subject.backend));
        let bits = |i| subject.bits(&seqs.alone(i).attend(subject, &subject.backend));
        let alone: Vec<u32> = (0..lens.len()).flat_map(bits).collect();
        assert_eq!(together, alone, "{} {mask:?}", subject.name);
    }
}

/// Windows that begin in one segment of keys or another, spans that end at the last key.
pub fn sequences_of_bounded_masks_are_the_same_alone<B: Backend>(subject: &Subject<B>) {
    let both = Seen::Causal { window: Some(300), span: [690, 700] };
    for mask in [Seen::window(5), Seen::window(200), Seen::window(600), Seen::span(500, 700), both] {
        let lens = [(1, 700), (1, 700), (16, 700), (1, 600), (0, 520), (5, 530), (3, 513)];
        let seqs = Sequences::new(&lens, shape(4, 2, 33), mask);
        assert_same_alone(subject, &seqs, &tables_in_common(&seqs));
        let together = subject.bits(&seqs.attend(subject, &subject.backend));
        let bits = |i| subject.bits(&seqs.alone(i).attend(subject, &subject.backend));
        let alone: Vec<u32> = (0..lens.len()).flat_map(bits).collect();
        assert_eq!(together, alone, "{} {mask:?}", subject.name);
    }
}

pub fn a_cached_sequence_is_the_same_alone<B: Backend>(subject: &Subject<B>) {
    for mask in [Mask::Full, Mask::Causal] {
        let lens = [(1, 40), (5, 270), (1, 1), (0, 3), (1, 65)];
        let seqs = Sequences::new(&lens, shape(6, 2, 33), mask);
        let tables = Tables::new(&seqs, 1, 7);
        assert_same_alone(subject, &seqs, &tables);
    }
}

/// Compares what cached sequences give in a batch and each by itself.
fn assert_same_alone<B: Backend>(subject: &Subject<B>, seqs: &Sequences, tables: &Tables) {
    let cache = filled(subject, seqs, tables, 0);
    let together = subject.bits(&attend(subject, seqs, tables, (&cache, 0)));
    let bits = |i: usize| {
        let alone = Tables { layout: tables.layout, blocks: vec![tables.blocks[i].clone()] };
        subject.bits(&attend(subject, &seqs.alone(i), &alone, (&cache, 0)))
    };
    let alone: Vec<u32> = (0..seqs.lens.len()).flat_map(bits).collect();
    assert_eq!(together, alone, "{} {:?} {}", subject.name, seqs.mask, seqs.bias.name());
}

/// As beams over one encoder output, and prompts that begin alike: such pages are read once for all of them.
pub fn sequences_over_the_same_pages_are_the_same_alone<B: Backend>(subject: &Subject<B>) {
    // The first three have one table; the others have their first 512 tokens in common, of which the last sees but some.
    let lens = [(1, 700), (1, 700), (16, 700), (1, 600), (0, 520), (5, 530), (3, 513)];
    let shape = shape(4, 2, 33);
    for (mask, sides) in [(Mask::Full, BucketSides::Both), (Mask::Causal, BucketSides::Past)] {
        for bias in [Added::None, Added::relative(shape.n_heads, sides)] {
            let seqs = Sequences::new(&lens, shape, mask).biased(bias);
            let tables = tables_in_common(&seqs);
            assert_same_alone(subject, &seqs, &tables);
        }
    }
}

/// Tables of which the first three are one, and those after them begin alike.
fn tables_in_common(seqs: &Sequences) -> Tables {
    let own = Sequences { lens: vec![(1, 700), (1, 600), (1, 40), (1, 40), (1, 40)], ..seqs.alone(0) };
    let Tables { layout, blocks } = Tables::new(&own, 1, 7);
    let first = &blocks[1][..512 / KV_BLOCK_TOKENS];
    let later = blocks[2..].iter().zip(&seqs.lens[4..]).map(|(rest, len)| {
        let mut table = [first, rest].concat();
        table.truncate(len.1.div_ceil(KV_BLOCK_TOKENS));
        table
    });
    let one = std::iter::repeat_n(blocks[0].clone(), 3);
    Tables { layout, blocks: one.chain([blocks[1].clone()]).chain(later).collect() }
}

pub fn chunks_of_a_prefill_give_what_the_whole_gives<B: Backend>(subject: &Subject<B>) {
    let n = 75;
    let whole = Sequences::new(&[(n, n)], shape(4, 2, 20), Mask::Causal);
    let tables = Tables::new(&whole, 1, 3);
    let cache = filled(subject, &whole, &tables, 0);
    let expect = subject.backend.download(&attend(subject, &whole, &tables, (&cache, 0))).expect("download");
    let (width, mut start) = (whole.q_width(), 0);
    for len in [1, 32, 13, 29] {
        let end = start + len;
        let q = whole.q[start * width..end * width].to_vec();
        let bias = Added::None;
        let chunk = Sequences { lens: vec![(len, end)], bias, q, k: vec![], v: vec![], ..whole };
        let out = attend(subject, &chunk, &tables, (&cache, 0));
        subject.close("a chunk", &out, (&expect[start * width..end * width], len, width), 1e-6);
        start = end;
    }
    assert_eq!(start, n);
}

pub fn threads_do_not_change_a_bit<B: Backend>(subject: &Subject<B>) {
    let backends = [&subject.backend, &subject.other_threads];
    for (n, n_in, n_out) in [(1, 600, 2000), (9, 300, 1000), (150, 200, 300)] {
        let x = subject.tensor(&values(1, n * n_in), n, n_in);
        let w = layer(subject, &weights(2, n_in, n_out), None, n_in, n_out);
        let [many, one] = backends.map(|b| b.linear(&x, &w, Activation::None, None).expect("linear"));
        assert_eq!(subject.bits(&many), subject.bits(&one), "{}: [{n}, {n_in}] by {n_out}", subject.name);
    }
    // The last are too few rows for as many tasks as threads want, over keys enough to be cut.
    for lens in [&[(200, 200), (1, 300), (50, 50)][..], &[(1, 1700)], &[(3, 513), (1, 40)]] {
        for mask in [Seen::All, Seen::span(0, 0), Seen::window(100)] {
            let seqs = Sequences::new(lens, shape(4, 2, 64), mask);
            let [many, one] = backends.map(|b| seqs.attend(subject, b));
            assert_eq!(subject.bits(&many), subject.bits(&one), "{}: attention of {lens:?}", subject.name);
        }
    }
}

pub fn elementwise_rows_are_the_same_alone<B: Backend>(subject: &Subject<B>) {
    let (n, width) = (400, 130);
    let x = values(1, n * width);
    let norm = load_norm(subject, NormKind::Layer, &values(2, width), None);
    let both = |x: &[f32], n| {
        let x = subject.tensor(x, n, width);
        let normed = subject.backend.norm(&x, &norm).expect("norm");
        let gated = subject.backend.gate(&x, Activation::Silu).expect("gate");
        [subject.bits(&normed), subject.bits(&gated)]
    };
    let [norms, gates] = both(&x, n);
    for row in [0, 1, 199, 399] {
        let [norm, gate] = both(&x[row * width..][..width], 1);
        assert_eq!(norms[row * width..][..width], norm, "{}: norm of row {row}", subject.name);
        assert_eq!(gates[row * width / 2..][..width / 2], gate, "{}: gate of row {row}", subject.name);
    }
}

pub fn a_convolved_image_and_a_normalised_sequence_are_the_same_alone<B: Backend>(subject: &Subject<B>) {
    let (n_images, size, channels) = (5, [9, 11], 40);
    let n = size[0] * size[1];
    let x = values(1, n_images * n * channels);
    let w = load_depthwise(subject, &values(2, 9 * channels), None, [3, 3]);
    let norm = load_norm(subject, NormKind::Layer, &values(3, channels), None);
    let both = |backend: &B, x: &[f32], n_images: usize| {
        let conv = Conv2d { n_images, size, kernel: [3, 3], stride: [1, 1], padding: [1, 1] };
        let x = subject.tensor(x, n_images * n, channels);
        let convolved = backend.depthwise2d(&x, &w, conv).expect("depthwise");
        let (step, seqs) = stage(backend, |builder| builder.offsets(&offsets([n].repeat(n_images))));
        let normed = backend.group_norm(&step, &x, &norm, seqs).expect("group norm");
        [subject.bits(&convolved), subject.bits(&normed)]
    };
    let together = both(&subject.backend, &x, n_images);
    assert_eq!(together, both(&subject.other_threads, &x, n_images), "{}: threads", subject.name);
    for (i, image) in x.chunks(n * channels).enumerate() {
        let alone = both(&subject.backend, image, 1);
        for (together, alone) in together.iter().zip(&alone) {
            assert_eq!(together[i * n * channels..][..n * channels], alone[..], "{}: {i}", subject.name);
        }
    }
}
