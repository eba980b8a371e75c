//! Sequences of queries and keys with their data, and the attention that the oracle gives for them.

use std::num::NonZeroU32;

use triptych_kernels::KernelError;
use triptych_kernels::ops::{
    self, AttentionShape, Backend, Indices, Mask, MaskBounds, Qkv, StageBuilder, Varlen,
};

use crate::added::{Added, OnBackend};
use crate::oracle::{self, Seen};
use crate::subject::{Subject, stage, values};

/// A shape with the usual scale.
pub fn shape(n_heads: usize, n_kv_heads: usize, head_dim: usize) -> AttentionShape {
    AttentionShape { n_heads, n_kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt(), softcap: None }
}

/// Offsets of sequences of these lengths.
pub fn offsets(lens: impl IntoIterator<Item = usize>) -> Vec<u32> {
    let mut offsets = vec![0];
    for len in lens {
        offsets.push(offsets[offsets.len() - 1] + len as u32);
    }
    offsets
}

/// Product of [`Sequences::stage`].
#[derive(Clone, Copy)]
pub struct Staged {
    seqs: ops::Sequences,
    table_of: Option<Indices>,
    mask: Mask,
}

/// Sequences of `(queries, keys)` with their data.
pub struct Sequences {
    pub lens: Vec<(usize, usize)>,
    pub shape: AttentionShape,
    pub mask: Seen,
    pub bias: Added,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

impl Sequences {
    pub fn new(lens: &[(usize, usize)], shape: AttentionShape, mask: impl Into<Seen>) -> Self {
        let (n_q, n_k) = lens.iter().fold((0, 0), |sum, len| (sum.0 + len.0, sum.1 + len.1));
        let kv_width = shape.n_kv_heads * shape.head_dim;
        // Queries large enough that weights differ.
        let q = values(1, n_q * shape.n_heads * shape.head_dim).into_iter().map(|q| 3.0 * q).collect();
        let (k, v) = (values(2, n_k * kv_width), values(3, n_k * kv_width));
        Self { lens: lens.to_vec(), shape, mask: mask.into(), bias: Added::None, q, k, v }
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

    /// Adds the sequences to a step, the tables of their bias, and their mask.
    pub fn stage(&self, builder: &mut StageBuilder) -> Result<Staged, KernelError> {
        let [queries, keys] = self.offsets();
        let (seqs, table_of) = (builder.sequences(&queries, &keys)?, self.bias.stage(builder)?);
        Ok(Staged { seqs, table_of, mask: self.stage_mask(builder)? })
    }

    /// Adds the mask to a step.
    pub fn stage_mask(&self, builder: &mut StageBuilder) -> Result<Mask, KernelError> {
        let Seen::Causal { window, span } = self.mask else { return Ok(Mask::Full) };
        let of_seq = |&len: &(usize, usize)| (0..len.0).map(move |query| self.mask.ahead(len, query) as u32);
        let rows: Vec<u32> = self.lens.iter().flat_map(of_seq).collect();
        let ahead = (span != [0; 2]).then(|| builder.indices(&rows)).transpose()?;
        Ok(Mask::causal(MaskBounds { window: window.and_then(NonZeroU32::new), ahead }))
    }

    /// The bias on a back end.
    pub fn load_bias<B: Backend>(&self, backend: &B) -> OnBackend<B> {
        self.bias.load(backend, self.shape.n_heads, &self.lens)
    }

    /// The sequences as an op takes them, with what [`Self::stage`] and [`Self::load_bias`] gave.
    pub fn varlen<'a, B: Backend>(
        &self,
        Staged { seqs, table_of, mask }: Staged,
        bias: &'a OnBackend<B>,
    ) -> Varlen<'a, B::Bias, B::Tensor> {
        Varlen { seqs, mask, bias: bias.view(table_of) }
    }

    pub fn attend<B: Backend>(&self, subject: &Subject<B>, backend: &B) -> B::Tensor {
        let (n_q, n_k) = (self.n_queries(), self.n_keys());
        let q = subject.tensor(&self.q, n_q, self.q_width());
        let (k, v) =
            (subject.tensor(&self.k, n_k, self.kv_width()), subject.tensor(&self.v, n_k, self.kv_width()));
        let (step, staged) = stage(backend, |builder| self.stage(builder));
        let (qkv, bias) = (Qkv { q: &q, k: &k, v: &v }, self.load_bias(backend));
        backend.attention(&step, qkv, self.shape, self.varlen(staged, &bias)).expect("attention")
    }

    pub fn check<B: Backend>(&self, subject: &Subject<B>) {
        let out = self.attend(subject, &subject.backend);
        let what = format!("{:?} {:?} {:?} {}", self.lens, self.shape, self.mask, self.bias.name());
        subject.close(&what, &out, (&self.expect(), self.n_queries(), self.q_width()), subject.products);
    }
}
