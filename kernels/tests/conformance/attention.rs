//! Attention inside sequences.

use triptych_kernels::ops::{AttentionShape, Backend, Mask, Qkv, Varlen};

use crate::bias::Added;
use crate::oracle;
use crate::subject::{Subject, values};

/// A shape with the usual scale.
pub fn shape(n_heads: usize, n_kv_heads: usize, head_dim: usize) -> AttentionShape {
    AttentionShape { n_heads, n_kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt() }
}

/// Offsets of sequences of these lengths.
pub fn offsets(lens: impl IntoIterator<Item = usize>) -> Vec<u32> {
    let mut offsets = vec![0];
    for len in lens {
        offsets.push(offsets[offsets.len() - 1] + len as u32);
    }
    offsets
}

/// Sequences of `(queries, keys)` with their data.
pub struct Sequences {
    pub lens: Vec<(usize, usize)>,
    pub shape: AttentionShape,
    pub mask: Mask,
    pub bias: Added,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

impl Sequences {
    pub fn new(lens: &[(usize, usize)], shape: AttentionShape, mask: Mask) -> Self {
        let (n_q, n_k) = lens.iter().fold((0, 0), |sum, len| (sum.0 + len.0, sum.1 + len.1));
        let kv_width = shape.n_kv_heads * shape.head_dim;
        // Queries large enough that weights differ.
        let q = values(1, n_q * shape.n_heads * shape.head_dim).into_iter().map(|q| 3.0 * q).collect();
        let (k, v) = (values(2, n_k * kv_width), values(3, n_k * kv_width));
        Self { lens: lens.to_vec(), shape, mask, bias: Added::None, q, k, v }
    }

    /// The same with something added to the scores.
    pub fn biased(self, bias: Added) -> Self {
        Self { bias, ..self }
    }

    pub fn n_queries(&self) -> usize {
        self.lens.iter().map(|len| len.0).sum()
    }

    pub fn n_keys(&self) -> usize {
        self.lens.iter().map(|len| len.1).sum()
    }

    pub fn q_width(&self) -> usize {
        self.shape.n_heads * self.shape.head_dim
    }

    pub fn kv_width(&self) -> usize {
        self.shape.n_kv_heads * self.shape.head_dim
    }

    /// Sequence `i` by itself.
    pub fn alone(&self, i: usize) -> Self {
        let (q_start, k_start) =
            self.lens[..i].iter().fold((0, 0), |sum, len| (sum.0 + len.0, sum.1 + len.1));
        let (n_q, n_k) = self.lens[i];
        let (q_width, kv_width) = (self.q_width(), self.kv_width());
        Self {
            lens: vec![self.lens[i]],
            q: self.q[q_start * q_width..][..n_q * q_width].to_vec(),
            k: self.k[k_start * kv_width..][..n_k * kv_width].to_vec(),
            v: self.v[k_start * kv_width..][..n_k * kv_width].to_vec(),
            bias: self.bias.alone(i, &self.lens, self.shape.n_heads),
            ..*self
        }
    }

    pub fn expect(&self) -> Vec<f32> {
        let one = |i| {
            let seq = self.alone(i);
            oracle::attention([&seq.q, &seq.k, &seq.v], seq.shape, seq.mask, |score| seq.bias.at(score))
        };
        (0..self.lens.len()).flat_map(one).collect()
    }

    /// Weights of some heads, `[heads, n_queries, n_keys]` of each sequence.
    pub fn expect_weights(&self, heads: &[u32]) -> Vec<f32> {
        let one = |i: usize| -> Vec<f32> {
            let seq = self.alone(i);
            let all = oracle::weights([&seq.q, &seq.k], seq.shape, seq.mask, |score| seq.bias.at(score));
            let ((n_queries, n_keys), n_heads) = (seq.lens[0], seq.shape.n_heads);
            let row =
                |(&head, query): (&u32, usize)| &all[(query * n_heads + head as usize) * n_keys..][..n_keys];
            let places = heads.iter().flat_map(|head| (0..n_queries).map(move |query| (head, query)));
            places.flat_map(row).map(|&weight| weight as f32).collect()
        };
        (0..self.lens.len()).flat_map(one).collect()
    }

    /// Offsets of queries and of keys.
    pub fn offsets(&self) -> [Vec<u32>; 2] {
        [offsets(self.lens.iter().map(|len| len.0)), offsets(self.lens.iter().map(|len| len.1))]
    }

    /// The sequences as an op takes them.
    pub fn varlen<'a>(&'a self, [cu_seqlens_q, cu_seqlens_k]: &'a [Vec<u32>; 2]) -> Varlen<'a> {
        Varlen { cu_seqlens_q, cu_seqlens_k, mask: self.mask, bias: self.bias.view() }
    }

    pub fn attend<B: Backend>(&self, subject: &Subject<B>, backend: &B) -> B::Tensor {
        let (n_q, n_k) = (self.n_queries(), self.n_keys());
        let q = subject.tensor(&self.q, n_q, self.q_width());
        let (k, v) =
            (subject.tensor(&self.k, n_k, self.kv_width()), subject.tensor(&self.v, n_k, self.kv_width()));
        let seqs = &self.offsets();
        backend.attention(Qkv { q: &q, k: &k, v: &v }, self.shape, self.varlen(seqs)).expect("attention")
    }

    pub fn check<B: Backend>(&self, subject: &Subject<B>) {
        let out = self.attend(subject, &subject.backend);
        let what = format!("{:?} {:?} {:?} {}", self.lens, self.shape, self.mask, self.bias.name());
        subject.close(&what, &out, (&self.expect(), self.n_queries(), self.q_width()), subject.products);
    }
}

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

pub fn attention_is_the_oracles_over_many_keys<B: Backend>(subject: &Subject<B>) {
    for mask in [Mask::Full, Mask::Causal] {
        Sequences::new(&[(70, 530), (1, 257)], shape(2, 1, 20), mask).check(subject);
        Sequences::new(&[(300, 300)], shape(2, 2, 64), mask).check(subject);
    }
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
        let offsets = &seqs.offsets();
        let fused =
            subject.backend.fused_attention(&qkv, seqs.shape, seqs.varlen(offsets)).expect("attention");
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
