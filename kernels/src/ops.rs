//! The op trait: every piece of arithmetic a model may ask for.
//!
//! Dimension names are those of `triptych_core::shape`. An activation is always a matrix
//! `[n_tokens, width]`, f32 at the interface, row-major, without padding: the tokens of all sequences of a
//! step one after another. Heads lie side by side in a row: `width = n_heads · head_dim`.
//!
//! Sequences are separated by offsets, never by padding: there is one entry more than there are sequences, the first is 0,
//! none is below the one before, and the last is `n_tokens`.
//!
//! Whatever ops index with (ids, slots, offsets, tables, angles) is staged once for a step ([`StageBuilder`]); ops take the
//! step and handles of its arrays.

use triptych_core::EncodedRows;

use crate::{check, sampling};

mod attention;
mod bias;
mod choose;
mod conv;
mod error;
mod experts;
mod graph;
mod pending;
mod recurrent;
mod rotary;
mod stage;
mod weights;

pub use attention::{
    AttentionShape, ChosenHeads, FusedQkv, KvLayer, KvLayout, KvSlots, Mask, MaskBounds, Qkv, Varlen,
};
pub(crate) use bias::{BiasDims, LoadedDims};
pub use bias::{BucketRule, BucketSides, RelativeBias, ScoreBias, StoredBias};
pub use choose::{
    Choice, Choices, ChooseBatch, ChooseRow, Edit, SampleError, Sampling, TokenLogprobs, WholeRows, mask_of,
};
pub use conv::{Conv2d, Unfold};
pub use error::{KernelError, Result};
pub use experts::{ExpertLayers, Routed, RouterScores, Routing};
pub use graph::{Captured, CapturedForward, DeviceForward, ForwardInputs, Prepare};
pub use pending::{CarriedToken, PendingChoices, Submitted};
pub use recurrent::{ConvRows, DeltaRows, StateLayout, StateSlots};
pub use rotary::{RopePairs, RopeShape, Rotation};
pub use stage::{
    Angles, HostStep, Indices, Offsets, PADDING_SLOT, PagedBatch, PagedBounds, PagedSequences,
    RecurrentBatch, RecurrentSequences, Sequences, StageBuilder, WeightedRows,
};
pub(crate) use stage::{ArrayContent, SeqLens, StagedArray};
pub use weights::{LinearPart, WeightView};

/// A function applied to each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Activation {
    /// The identity.
    #[default]
    None,
    /// `0.5 x (1 + erf(x/√2))`.
    Gelu,
    /// The tanh form of GELU.
    GeluTanh,
    /// `x · sigmoid(1.702 x)`.
    QuickGelu,
    /// `x · sigmoid(x)`.
    Silu,
    /// `max(x, 0)`.
    Relu,
    /// The hyperbolic tangent.
    Tanh,
    /// `1 / (1 + e⁻ˣ)`.
    Sigmoid,
}

/// Kind of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Mean and variance.
    Layer,
    /// Root mean square only.
    Rms,
}

/// A forward on a back end, over arrays and features `[n_rows, width]`.
pub type Forward<'a, B, E> =
    dyn FnMut(&B, &<B as Backend>::Step, &<B as Backend>::Tensor) -> Result<<B as Backend>::Tensor, E> + 'a;

/// A back end: where weights and activations live, and the ops over them.
///
/// Ops check shapes and indices and return [`KernelError`]; they never panic on them. An op reads its
/// arguments and writes only its result or what it takes as `&mut`. Results do not depend on how many threads
/// ran, nor on what else is in the batch: a row's value is a function of that row's sequence alone.
pub trait Backend: Clone + Send + Sync + 'static {
    /// An activation, `[n_tokens, width]`.
    type Tensor: Clone + Send + Sync;
    /// A linear layer in the back end's own layout.
    type Linear: Send + Sync;
    /// The experts of a layer.
    type Experts: Send + Sync;
    /// An embedding table.
    type Table: Send + Sync;
    /// Scale and bias of a norm.
    type Norm: Send + Sync;
    /// Taps of a depthwise convolution.
    type Depthwise: Send + Sync;
    /// A bias on attention scores.
    type Bias: Send + Sync;
    /// Taps of a causal convolution.
    type CausalConv: Send + Sync;
    /// Decays of the heads of the gated delta rule.
    type Decay: Send + Sync;
    /// A cache of recurrent states.
    type StateCache: Send;
    /// A paged KV cache.
    type KvCache: Send;
    /// A paged KV cache in host memory, to swap with.
    type HostKvCache: Send;
    /// The arrays of a step, where ops read them.
    type Step: Send + Sync;
    /// Choices under way; [`Infallible`](std::convert::Infallible) where they are made at once.
    type Pending: PendingChoices<Self::Step>;

    /// The name used in settings and logs.
    fn name(&self) -> &'static str;

    /// The same back end as encoders use it: with more bits for weights where it keeps so few of them that only decoders,
    /// which read all weights for a few tokens, gain from it.
    #[must_use]
    fn for_encoders(&self) -> Self {
        self.clone()
    }

    // Loading. Called once a weight; may be slow.

    /// Packs layers that read the same input as one, `[Σ out, in]`: outputs side by side, in order.
    fn load_linear(&self, parts: &[LinearPart<'_>]) -> Result<Self::Linear>;
    /// The same for layers that give logits: kept in more bits where weights are very small, since an error there is one
    /// in the answer.
    ///
    /// # Errors
    /// As [`Self::load_linear`].
    fn load_logits(&self, parts: &[LinearPart<'_>]) -> Result<Self::Linear> {
        self.load_linear(parts)
    }
    /// The same for the layer that gives the logits of a router, `[n_experts, hidden]`: kept in as many bits as activations are,
    /// since an error there is another choice.
    ///
    /// # Errors
    /// As [`Self::load_linear`].
    fn load_router(&self, router: LinearPart<'_>) -> Result<Self::Linear> {
        self.load_linear(&[router])
    }
    /// The same for a layer of an expert, which is multiplied with the rows of few tokens.
    ///
    /// # Errors
    /// As [`Self::load_linear`].
    fn load_expert(&self, parts: &[LinearPart<'_>]) -> Result<Self::Linear> {
        self.load_linear(parts)
    }
    /// Puts experts of equal shapes together, in the order of the router's logits.
    fn load_experts(&self, experts: Vec<ExpertLayers<Self::Linear>>) -> Result<Self::Experts>;
    /// Takes a table `[n_rows, width]`, whose rows are given times `scale`.
    fn load_table(&self, table: WeightView<'_>, scale: f32) -> Result<Self::Table>;
    /// Takes a weight that is both: a layer that gives logits, and a table whose rows are those of the stored weight times
    /// `scale`. A back end may keep one of the two for both, where that changes no row by more than keeping it did.
    ///
    /// # Errors
    /// As [`Self::load_logits`] and [`Self::load_table`].
    fn load_tied(&self, part: LinearPart<'_>, scale: f32) -> Result<(Self::Linear, Self::Table)> {
        Ok((self.load_logits(&[part])?, self.load_table(part.weight, scale)?))
    }
    /// Takes a norm's `scale [width]` and `bias [width]`.
    fn load_norm(
        &self,
        kind: NormKind,
        scale: WeightView<'_>,
        bias: Option<WeightView<'_>>,
        eps: f32,
    ) -> Result<Self::Norm>;
    /// Takes a depthwise convolution's `weight [channels, 1, kernel, kernel]` and `bias [channels]`.
    fn load_depthwise(&self, weight: WeightView<'_>, bias: Option<WeightView<'_>>)
    -> Result<Self::Depthwise>;

    /// Takes a causal convolution's `weight [channels, 1, kernel]` and `bias [channels]`.
    fn load_causal_conv(
        &self,
        weight: WeightView<'_>,
        bias: Option<WeightView<'_>>,
    ) -> Result<Self::CausalConv>;
    /// Takes the decays of heads: `a_log [n_heads]`, the logarithm of their rates, and `dt_bias [n_heads]`.
    fn load_decay(&self, a_log: WeightView<'_>, dt_bias: WeightView<'_>) -> Result<Self::Decay>;

    /// Takes a bias on attention scores.
    fn load_bias(&self, bias: StoredBias<'_>) -> Result<Self::Bias>;

    // Moving data.

    /// Takes the arrays of a step, or of an encoder batch. Ops take them by the handles that the builder gave.
    fn stage(&self, builder: StageBuilder) -> Result<Self::Step>;
    /// An activation from host memory, `[n_tokens, width]`.
    fn upload(&self, values: Vec<f32>, n_tokens: usize, width: usize) -> Result<Self::Tensor>;
    /// Rows of encoder outputs, one output's under another's, widened from what they are stored as: `[Σ n_rows, hidden]`.
    fn upload_rows(&self, rows: &[EncodedRows<'_>]) -> Result<Self::Tensor>;
    /// Zeros, `[n_tokens, width]`.
    ///
    /// # Errors
    /// As [`Self::upload`].
    fn zeros(&self, n_tokens: usize, width: usize) -> Result<Self::Tensor> {
        self.upload(vec![0.0; n_tokens.saturating_mul(width)], n_tokens, width)
    }
    /// The values in host memory, `[n_tokens, width]`, row-major.
    fn download(&self, x: &Self::Tensor) -> Result<Vec<f32>>;
    /// As [`download`](Self::download), and drops the activation.
    fn take_values(&self, x: Self::Tensor) -> Result<Vec<f32>> {
        self.download(&x)
    }
    /// `(n_tokens, width)`.
    fn dims(&self, x: &Self::Tensor) -> (usize, usize);

    // Rows.

    /// Rows `ids` of a table: `[ids.len(), width]`.
    fn embed(&self, step: &Self::Step, table: &Self::Table, ids: Indices) -> Result<Self::Tensor>;
    /// Weighted sums of rows of a table, terms in their order: `[rows.len(), width]`. Row `i` is
    /// `Σⱼ weights[i, j] · table[rows[i, j]]`.
    fn embed_weighted(
        &self,
        step: &Self::Step,
        table: &Self::Table,
        rows: WeightedRows,
    ) -> Result<Self::Tensor>;
    /// Rows `rows` of `x`, in that order, repeats allowed: `[rows.len(), width]`.
    fn gather_rows(&self, step: &Self::Step, x: &Self::Tensor, rows: Indices) -> Result<Self::Tensor>;
    /// Replaces row `rows[i]` of `x` by row `i` of `src`, `[rows.len(), width]`.
    fn scatter_rows(
        &self,
        step: &Self::Step,
        x: &mut Self::Tensor,
        rows: Indices,
        src: &Self::Tensor,
    ) -> Result<()>;
    /// Columns `start .. start + width`, `[n_tokens, width]`.
    fn columns(&self, x: &Self::Tensor, start: usize, width: usize) -> Result<Self::Tensor>;
    /// The same values as `[n_tokens / group, width · group]`: `group` consecutive rows become one.
    fn merge_rows(&self, x: Self::Tensor, group: usize) -> Result<Self::Tensor>;
    /// The same values as `[n_tokens · parts, width / parts]`: each row becomes `parts` rows, such as its heads.
    fn split_rows(&self, x: Self::Tensor, parts: usize) -> Result<Self::Tensor>;

    /// Transposes each of `n_seqs` sequences of one length: `[n_seqs · t, width]` to `[n_seqs · width, t]`, so that
    /// attention can run over columns.
    fn transpose(&self, x: &Self::Tensor, n_seqs: usize) -> Result<Self::Tensor>;

    // Arithmetic.

    /// `act(x Wᵀ + b)`, plus `residual` if there is one: `[n_tokens, out]`.
    fn linear(
        &self,
        x: &Self::Tensor,
        w: &Self::Linear,
        act: Activation,
        residual: Option<&Self::Tensor>,
    ) -> Result<Self::Tensor>;
    /// Normalises each row, `[n_tokens, width]`.
    fn norm(&self, x: &Self::Tensor, norm: &Self::Norm) -> Result<Self::Tensor>;
    /// `x += y`, both `[n_tokens, width]`.
    fn add(&self, x: &mut Self::Tensor, y: &Self::Tensor) -> Result<()>;
    /// `x = c · tanh(x / c)` for the bound `c`, a positive number: values come near it and never reach it.
    fn softcap(&self, x: &mut Self::Tensor, c: f32) -> Result<()>;
    /// `act(x[:, ..w]) · x[:, w..]` with `w = width / 2`, the gate of a gated feed-forward: `[n_tokens, width / 2]`.
    fn gate(&self, x: &Self::Tensor, act: Activation) -> Result<Self::Tensor>;
    /// `x = x · act(gate)`, both `[n_tokens, width]`.
    fn multiply_gated(&self, x: &mut Self::Tensor, gate: &Self::Tensor, act: Activation) -> Result<()>;
    /// Sums of the experts that each row is routed to, plus `residual` if there is one: `[n_tokens, hidden]`. A row's value is
    /// `Σ weight · down(act(gate x) · up x)` over its experts in the order of their numbers.
    fn fused_experts(
        &self,
        experts: &Self::Experts,
        routed: Routed<'_, Self::Tensor>,
    ) -> Result<Self::Tensor>;
    /// Normalises each sequence as a whole: mean and variance over all its rows and columns (a group norm of one
    /// group), scale and bias of each column. `seqs`: offsets of the sequences in the rows.
    fn group_norm(
        &self,
        step: &Self::Step,
        x: &Self::Tensor,
        norm: &Self::Norm,
        seqs: Offsets,
    ) -> Result<Self::Tensor>;
    /// Rotary embedding in place: pair `i` of each head, `(a, b)`, becomes `(a·cos − b·sin, b·cos + a·sin)`.
    /// `angles`: `[n_tokens, rotary_dim / 2]`, shared by the heads.
    fn rope(&self, step: &Self::Step, x: &mut Self::Tensor, shape: RopeShape, angles: Angles) -> Result<()>;
    /// Windows of a signal, such as audio, for a 1-D convolution. `x` is `[n_seqs · t, channels]`, each sequence `t`
    /// rows; the result `[n_seqs · t_out, channels · kernel]` with columns in the order of a stored weight
    /// `[out, channels, kernel]`, zeros outside, `t_out = (t + 2·padding − kernel) / stride + 1`.
    fn unfold(&self, x: &Self::Tensor, conv: Unfold) -> Result<Self::Tensor>;
    /// Windows of images for a 2-D convolution. `x` is `[n_images · height · width, channels]`, pixels row by
    /// row; the result `[n_images · out_height · out_width, channels · kernel · kernel]` with columns in the
    /// order of a stored weight `[out, channels, kernel, kernel]`, zeros outside.
    fn unfold2d(&self, x: &Self::Tensor, conv: Conv2d) -> Result<Self::Tensor>;
    /// A convolution of each channel by itself: `x` as in [`unfold2d`](Self::unfold2d), the result
    /// `[n_images · out_height · out_width, channels]`. `conv.kernel` is that of the weights.
    fn depthwise2d(&self, x: &Self::Tensor, w: &Self::Depthwise, conv: Conv2d) -> Result<Self::Tensor>;

    // Choosing.

    /// Chooses tokens by `logits: [n_rows, vocab]`, and hands over the rows that are asked for whole, as they are.
    ///
    /// Where there is a device, nothing but the choices and those rows leaves it. Host back ends change rows in place.
    ///
    /// # Errors
    /// [`KernelError::Index`] for a row that is not there, [`KernelError::Shape`] for a mask of another vocabulary, or whole
    /// rows that do not ascend. Logits that allow no choice are an error of that choice alone.
    fn choose(&self, logits: Self::Tensor, batch: &ChooseBatch) -> Result<Choices> {
        let dims = self.dims(&logits);
        check::choose(dims, batch)?;
        Ok(sampling::choose_rows(self.take_values(logits)?, dims.1, batch))
    }

    /// Begins [`choose`](Self::choose), and returns without waiting for a device.
    ///
    /// # Errors
    /// As [`choose`](Self::choose).
    fn submit_choices(&self, logits: Self::Tensor, batch: &ChooseBatch) -> Result<Submitted<Self::Pending>> {
        Ok(Submitted::Done(self.choose(logits, batch)?))
    }

    // Attention.

    /// Attention inside each sequence, block-diagonal. `q: [Σq, n_heads·head_dim]`,
    /// `k`, `v: [Σk, n_kv_heads·head_dim]`; the offsets give each sequence's queries and keys, which may differ
    /// in number (rectangular). Returns the shape of `q`.
    fn attention(
        &self,
        step: &Self::Step,
        qkv: Qkv<'_, Self::Tensor>,
        shape: AttentionShape,
        seqs: Varlen<'_, Self::Bias, Self::Tensor>,
    ) -> Result<Self::Tensor>;
    /// The same of queries, keys and values side by side, `[n_tokens, (n_heads + 2·n_kv_heads)·head_dim]`, as one projection
    /// gives them.
    ///
    /// # Errors
    /// As [`Self::attention`].
    fn fused_attention(
        &self,
        step: &Self::Step,
        qkv: &Self::Tensor,
        shape: AttentionShape,
        seqs: Varlen<'_, Self::Bias, Self::Tensor>,
    ) -> Result<Self::Tensor> {
        let [q, kv] = shape.widths();
        check::same("fused_attention", "qkv width", &[self.dims(qkv).1], &[q + 2 * kv])?;
        let [q, k, v] = [self.columns(qkv, 0, q)?, self.columns(qkv, q, kv)?, self.columns(qkv, q + kv, kv)?];
        self.attention(step, Qkv { q: &q, k: &k, v: &v }, shape, seqs)
    }
    /// Softmax weights of the keys in some heads of [`attention`](Self::attention), in host memory: `[heads, n_q, n_k]`
    /// of each sequence, one after another. Keys that a query does not see weigh zero. `qk` are query and key.
    fn attention_weights(
        &self,
        step: &Self::Step,
        qk: [&Self::Tensor; 2],
        chosen: ChosenHeads,
        seqs: Varlen<'_, Self::Bias, Self::Tensor>,
    ) -> Result<Vec<f32>>;
    /// An empty cache, `layout.n_layers` by `layout.n_blocks` blocks.
    fn kv_cache(&self, layout: KvLayout) -> Result<Self::KvCache>;
    /// Bytes of one block of such a cache, all layers together.
    fn kv_block_bytes(&self, layout: KvLayout) -> usize;
    /// Writes row `i` of `k` and `v`, `[n_tokens, n_kv_heads·head_dim]`, to slot `i` of `to`. No slot comes twice.
    fn write_kv(
        &self,
        step: &Self::Step,
        to: KvSlots<'_, Self::KvCache>,
        kv: [&Self::Tensor; 2],
    ) -> Result<()>;
    /// The same of keys and values side by side, `[n_tokens, 2·n_kv_heads·head_dim]`, as one projection gives them.
    ///
    /// # Errors
    /// As [`Self::write_kv`].
    fn write_fused_kv(
        &self,
        step: &Self::Step,
        to: KvSlots<'_, Self::KvCache>,
        kv: &Self::Tensor,
    ) -> Result<()> {
        let width = check::divides("write_fused_kv", "kv width", 2, self.dims(kv).1)?;
        let [k, v] = [self.columns(kv, 0, width)?, self.columns(kv, width, width)?];
        self.write_kv(step, to, [&k, &v])
    }
    /// Writes the keys, rotated, and the values of rows to slots, as [`write_kv`](Self::write_kv) does. Returns the queries,
    /// rotated: `[n_tokens, n_heads·head_dim]`.
    ///
    /// # Errors
    /// As [`Self::rope`] and [`Self::write_kv`].
    fn write_fused_qkv(
        &self,
        step: &Self::Step,
        to: KvSlots<'_, Self::KvCache>,
        qkv: FusedQkv<'_, Self::Tensor>,
    ) -> Result<Self::Tensor> {
        let FusedQkv { rows, shape, rotation } = qkv;
        check::fused_qkv("write_fused_qkv", self.dims(rows), shape, rotation)?;
        let [width, kv] = shape.widths();
        let mut q = self.columns(rows, 0, width)?;
        let [mut k, v] = [self.columns(rows, width, kv)?, self.columns(rows, width + kv, kv)?];
        if let Some(Rotation { shape, angles }) = rotation {
            self.rope(step, &mut q, shape, angles)?;
            self.rope(step, &mut k, shape, angles)?;
        }
        self.write_kv(step, to, [&k, &v])?;
        Ok(q)
    }
    /// Copies whole blocks, all layers, in order: `[(from, to)]`.
    fn copy_blocks(&self, cache: &mut Self::KvCache, pairs: &[(u32, u32)]) -> Result<()>;
    /// An empty cache in host memory. Blocks take as many bytes as on the device.
    fn host_kv_cache(&self, layout: KvLayout) -> Result<Self::HostKvCache>;
    /// Copies whole blocks, all layers, to the host: `(device block, host block)`. The layouts agree in all but
    /// the number of blocks.
    fn swap_out(
        &self,
        device: &Self::KvCache,
        host: &mut Self::HostKvCache,
        pairs: &[(u32, u32)],
    ) -> Result<()>;
    /// Copies whole blocks, all layers, back: `(host block, device block)`.
    fn swap_in(
        &self,
        host: &Self::HostKvCache,
        device: &mut Self::KvCache,
        pairs: &[(u32, u32)],
    ) -> Result<()>;
    /// Attention of `q: [Σq, n_heads·head_dim]` over the keys of each sequence in the cache. Returns the shape of `q`.
    fn paged_attention(
        &self,
        step: &Self::Step,
        q: &Self::Tensor,
        kv: KvLayer<'_, Self::KvCache, Self::Bias, Self::Tensor>,
        shape: AttentionShape,
    ) -> Result<Self::Tensor>;

    // Recurrent states.

    /// A cache of zeros, `layout.n_slots` slots by `layout.n_layers` layers.
    fn state_cache(&self, layout: StateLayout) -> Result<Self::StateCache>;
    /// Bytes of one slot of such a cache, all layers together.
    fn state_slot_bytes(&self, layout: StateLayout) -> usize;
    /// Copies whole slots, all layers, in order: `[(from, to)]`.
    fn copy_states(&self, cache: &mut Self::StateCache, pairs: &[(u32, u32)]) -> Result<()>;
    /// Zeros in whole slots, all layers, whatever was there.
    fn reset_states(&self, cache: &mut Self::StateCache, slots: &[u32]) -> Result<()>;
    /// A causal convolution of each channel by itself over the rows of each sequence, `[n_tokens, channels]`:
    /// `activation(bias + Σⱼ weight[j] · x[t − kernel + 1 + j])`. Rows before those of the step come from the sequence's slot, whose last
    /// `kernel − 1` rows are then kept there. A row has the same bits however a sequence is cut into steps.
    fn causal_conv(
        &self,
        step: &Self::Step,
        at: StateSlots<'_, Self::StateCache>,
        rows: ConvRows<'_, Self::Tensor, Self::CausalConv>,
    ) -> Result<Self::Tensor>;
    /// The gated delta rule, token by token: `[n_tokens, n_heads·value_dim]`. Queries and keys are divided by their L2 norm (1e-6 is
    /// added to its square), and queries by the root of `key_dim`; with `β = sigmoid(b)` and
    /// `g = −exp(a_log) · softplus(a + dt_bias)` the state `S [key_dim, value_dim]` of a head becomes `S' = e^g S`, then
    /// `S' + k ⊗ β (v − S'ᵀ k)`, and the row of the head is `Sᵀ q`. A row has the same bits however a sequence is cut into steps.
    fn gated_delta_rule(
        &self,
        step: &Self::Step,
        at: StateSlots<'_, Self::StateCache>,
        rows: DeltaRows<'_, Self::Tensor>,
        decay: &Self::Decay,
    ) -> Result<Self::Tensor>;

    // Graphs.

    /// `true` if forwards can be captured.
    fn captures(&self) -> bool {
        false
    }
    /// Captures a forward over inputs of these shapes; nothing is kept of their values. `forward` gets the back end to compute
    /// on, the arrays and the features, and is called twice: the first call makes ready what a capture forbids. What it
    /// submits may depend on the shapes, not on values. Both it and a replay write to caches that it has: their memory must stay
    /// as long as the captured forward, and what the first call writes is that of these inputs.
    ///
    /// # Errors
    /// [`KernelError::NotCapturable`] from a back end without graphs, or for a forward that uploads activations or downloads;
    /// those of `forward`. The back end can be used further.
    fn capture<E: From<KernelError>>(
        &self,
        _inputs: ForwardInputs,
        _forward: &mut Forward<'_, Self, E>,
    ) -> Result<Box<Captured<Self>>, E> {
        Err(KernelError::NotCapturable { op: "capture" }.into())
    }
}
