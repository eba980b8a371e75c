//! The reference back end on candle-core: f32 on the CPU, slow and plain, the oracle of the others.
//!
//! Each op is the textbook formula in library calls. It knows no layout of its own: weights lie as stored,
//! the paged cache is rows of keys and values that attention gathers. Nothing is fused or kept between calls.

use std::convert::Infallible;

use candle_core::Tensor;
use triptych_core::EncodedRows;

use crate::check::{self, Attended, Dims};
use crate::experts::{self, HostExperts};
use crate::host::{BiasSlices, HostBias, HostMask, HostVarlen};
use crate::ops::{
    Activation, Angles, AttentionShape, Backend, ChosenHeads, Conv2d, ConvRows, DeltaRows, ExpertLayers,
    HostStep, Indices, KvLayer, KvLayout, KvSlots, LinearPart, NormKind, Offsets, Qkv, Result, RopeShape,
    Routed, ScoreBias, Sequences, StageBuilder, StateLayout, StateSlots, StoredBias, Unfold, Varlen,
    WeightView, WeightedRows,
};
use crate::states::HostStates;
use crate::stored;

mod attention;
mod cache;
mod conv;
mod recurrent;
mod rows;
mod tensor;
mod weights;

pub use cache::ReferenceKvCache;
pub use weights::{ReferenceCausalConv, ReferenceDecay, ReferenceDepthwise, ReferenceLinear, ReferenceNorm};

use tensor::{InOp, dims, matrix, values, vector};

/// The back end. It holds nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReferenceBackend;

impl ReferenceBackend {
    /// A back end.
    pub fn new() -> Self {
        Self
    }
}

impl Backend for ReferenceBackend {
    type Tensor = Tensor;
    type Linear = ReferenceLinear;
    type Experts = HostExperts<ReferenceLinear>;
    type Table = Tensor;
    type Norm = ReferenceNorm;
    type Depthwise = ReferenceDepthwise;
    type Bias = HostBias;
    type CausalConv = ReferenceCausalConv;
    type Decay = ReferenceDecay;
    type StateCache = HostStates;
    type KvCache = ReferenceKvCache;
    type HostKvCache = ReferenceKvCache;
    type Step = HostStep;
    type Pending = Infallible;

    fn name(&self) -> &'static str {
        "reference"
    }

    fn load_linear(&self, parts: &[LinearPart<'_>]) -> Result<ReferenceLinear> {
        let stacked = stored::stack(parts)?;
        let (n_in, n_out) = (stacked.n_in, stacked.n_out);
        let weight = matrix("load_linear", stacked.weight(), (n_out, n_in))?;
        let weight = weight.t().and_then(|w| w.contiguous()).op("load_linear")?;
        let bias = stacked.bias.map(|b| vector("load_linear", b)).transpose()?;
        Ok(ReferenceLinear { n_in, n_out, weight, bias })
    }

    fn load_experts(&self, experts: Vec<ExpertLayers<ReferenceLinear>>) -> Result<Self::Experts> {
        HostExperts::new(experts, |layer| (layer.n_in, layer.n_out))
    }

    fn load_table(&self, table: WeightView<'_>, scale: f32) -> Result<Tensor> {
        let op = "load_table";
        let dims = stored::table_dims(op, table)?;
        let values = stored::to_f32(op, table)?.into_iter().map(|value| value * scale);
        matrix(op, values.collect(), dims)
    }

    fn load_norm(
        &self,
        kind: NormKind,
        scale: WeightView<'_>,
        bias: Option<WeightView<'_>>,
        eps: f32,
    ) -> Result<ReferenceNorm> {
        let (scale, bias) = stored::norm(scale, bias)?;
        let bias = bias.map(|b| vector("load_norm", b)).transpose()?;
        Ok(ReferenceNorm { kind, scale: vector("load_norm", scale)?, bias, eps })
    }

    fn load_depthwise(
        &self,
        weight: WeightView<'_>,
        bias: Option<WeightView<'_>>,
    ) -> Result<ReferenceDepthwise> {
        Ok(ReferenceDepthwise(stored::taps("load_depthwise", weight, bias)?))
    }

    fn load_causal_conv(
        &self,
        weight: WeightView<'_>,
        bias: Option<WeightView<'_>>,
    ) -> Result<ReferenceCausalConv> {
        Ok(ReferenceCausalConv(stored::causal_taps(weight, bias)?))
    }

    fn load_decay(&self, a_log: WeightView<'_>, dt_bias: WeightView<'_>) -> Result<ReferenceDecay> {
        Ok(ReferenceDecay(stored::Decays::new(a_log, dt_bias)?))
    }

    fn load_bias(&self, bias: StoredBias<'_>) -> Result<HostBias> {
        HostBias::load(bias)
    }

    fn stage(&self, builder: StageBuilder) -> Result<HostStep> {
        Ok(builder.finish())
    }

    fn upload(&self, values: Vec<f32>, n_tokens: usize, width: usize) -> Result<Tensor> {
        check::upload(values.len(), n_tokens, width)?;
        matrix("upload", values, (n_tokens, width))
    }

    fn upload_rows(&self, rows: &[EncodedRows<'_>]) -> Result<Tensor> {
        let dims = check::upload_rows(rows)?;
        matrix("upload_rows", rows.iter().flat_map(|rows| rows.to_f32()).collect(), dims)
    }

    fn download(&self, x: &Tensor) -> Result<Vec<f32>> {
        values("download", x)
    }

    fn dims(&self, x: &Tensor) -> Dims {
        dims(x)
    }

    fn embed(&self, step: &HostStep, table: &Tensor, ids: Indices) -> Result<Tensor> {
        check::below("embed", "row", ids, dims(table).0)?;
        rows::gather("embed", table, step.indices("embed", ids)?)
    }

    fn embed_weighted(&self, step: &HostStep, table: &Tensor, rows: WeightedRows) -> Result<Tensor> {
        let op = "embed_weighted";
        check::below(op, "row", rows.rows, dims(table).0)?;
        let (ids, weights) = step.weighted(op, rows)?;
        rows::weighted_sums(op, &rows::gather(op, table, ids)?, weights, rows.n_terms)
    }

    fn gather_rows(&self, step: &HostStep, x: &Tensor, rows: Indices) -> Result<Tensor> {
        check::below("gather_rows", "row", rows, dims(x).0)?;
        rows::gather("gather_rows", x, step.indices("gather_rows", rows)?)
    }

    fn scatter_rows(&self, step: &HostStep, x: &mut Tensor, rows: Indices, src: &Tensor) -> Result<()> {
        check::scatter_rows(dims(x), rows, dims(src))?;
        *x = rows::scatter(x, step.indices("scatter_rows", rows)?, src)?;
        Ok(())
    }

    fn columns(&self, x: &Tensor, start: usize, width: usize) -> Result<Tensor> {
        check::columns(dims(x), start, width)?;
        x.narrow(1, start, width).and_then(|t| t.contiguous()).op("columns")
    }

    fn merge_rows(&self, x: Tensor, group: usize) -> Result<Tensor> {
        x.reshape(check::merge_rows(dims(&x), group)?).op("merge_rows")
    }

    fn split_rows(&self, x: Tensor, parts: usize) -> Result<Tensor> {
        x.reshape(check::split_rows(dims(&x), parts)?).op("split_rows")
    }

    fn transpose(&self, x: &Tensor, n_seqs: usize) -> Result<Tensor> {
        let check::Transposed { t, dims: out } = check::transpose(dims(x), n_seqs)?;
        let turned = || x.reshape((n_seqs, t, dims(x).1))?.transpose(1, 2)?.contiguous()?.reshape(out);
        turned().op("transpose")
    }

    fn linear(
        &self,
        x: &Tensor,
        w: &ReferenceLinear,
        act: Activation,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        check::linear(dims(x), (w.n_in, w.n_out), residual.map(dims))?;
        rows::linear(x, w, act, residual)
    }

    fn norm(&self, x: &Tensor, norm: &ReferenceNorm) -> Result<Tensor> {
        check::same("norm", "x width", &[dims(x).1], norm.scale.dims())?;
        rows::norm(x, norm)
    }

    fn add(&self, x: &mut Tensor, y: &Tensor) -> Result<()> {
        check::same("add", "y", y.dims(), x.dims())?;
        *x = x.add(y).op("add")?;
        Ok(())
    }

    fn softcap(&self, x: &mut Tensor, c: f32) -> Result<()> {
        *x = rows::softcap(x, c).op("softcap")?;
        Ok(())
    }

    fn gate(&self, x: &Tensor, act: Activation) -> Result<Tensor> {
        let width = check::divides("gate", "x width", 2, dims(x).1)?;
        rows::gate(x, width, act)
    }

    fn multiply_gated(&self, x: &mut Tensor, gate: &Tensor, act: Activation) -> Result<()> {
        check::multiply_gated(dims(x), dims(gate))?;
        *x = rows::multiply_gated(x, gate, act).op("multiply_gated")?;
        Ok(())
    }

    fn fused_experts(&self, experts: &Self::Experts, routed: Routed<'_, Tensor>) -> Result<Tensor> {
        experts::fused_experts(self, experts, routed)
    }

    fn group_norm(&self, step: &HostStep, x: &Tensor, norm: &ReferenceNorm, seqs: Offsets) -> Result<Tensor> {
        check::group_norm(dims(x), norm.scale.elem_count(), seqs)?;
        rows::group_norm(x, norm, step.offsets("group_norm", seqs)?)
    }

    fn rope(&self, step: &HostStep, x: &mut Tensor, shape: RopeShape, angles: Angles) -> Result<()> {
        check::rope(dims(x), shape, angles)?;
        let [cos, sin] = step.angles("rope", angles)?;
        *x = rows::rope(x, shape, cos, sin)?;
        Ok(())
    }

    fn unfold(&self, x: &Tensor, conv: Unfold) -> Result<Tensor> {
        conv::unfold(x, conv, check::unfold(dims(x), conv)?)
    }

    fn unfold2d(&self, x: &Tensor, conv: Conv2d) -> Result<Tensor> {
        conv::unfold2d(x, conv, check::unfold2d(dims(x), conv)?)
    }

    fn depthwise2d(&self, x: &Tensor, w: &ReferenceDepthwise, conv: Conv2d) -> Result<Tensor> {
        let planes = check::depthwise2d(dims(x), w.0.channels, w.0.kernel, conv)?;
        conv::depthwise2d(x, &w.0, conv, planes)
    }

    fn attention(
        &self,
        step: &HostStep,
        qkv: Qkv<'_, Tensor>,
        shape: AttentionShape,
        seqs: Varlen<'_, HostBias, Tensor>,
    ) -> Result<Tensor> {
        let op = "attention";
        check::attention([dims(qkv.q), dims(qkv.k), dims(qkv.v)], shape, attended(&seqs))?;
        let materialized = materialized(op, seqs.bias)?;
        attention::block_diagonal(qkv, shape, HostVarlen::of(op, step, seqs, &materialized)?)
    }

    fn attention_weights(
        &self,
        step: &HostStep,
        qk: [&Tensor; 2],
        chosen: ChosenHeads,
        seqs: Varlen<'_, HostBias, Tensor>,
    ) -> Result<Vec<f32>> {
        let op = "attention_weights";
        check::attention_weights(qk.map(dims), chosen, attended(&seqs))?;
        let (heads, materialized) = (step.indices(op, chosen.heads)?, materialized(op, seqs.bias)?);
        let seqs = HostVarlen::of(op, step, seqs, &materialized)?;
        attention::chosen_weights(qk, chosen.shape, heads, seqs)
    }

    fn kv_cache(&self, layout: KvLayout) -> Result<ReferenceKvCache> {
        ReferenceKvCache::new(layout)
    }

    fn kv_block_bytes(&self, layout: KvLayout) -> usize {
        ReferenceKvCache::block_bytes(layout)
    }

    fn write_kv(&self, step: &HostStep, to: KvSlots<'_, ReferenceKvCache>, kv: [&Tensor; 2]) -> Result<()> {
        let KvSlots { cache, layer, slots } = to;
        check::layer("write_kv", layer, cache.layout)?;
        check::write_kv(kv.map(dims), cache.layout, slots)?;
        cache.write(layer, kv, step.indices("write_kv", slots)?)
    }

    fn copy_blocks(&self, cache: &mut ReferenceKvCache, pairs: &[(u32, u32)]) -> Result<()> {
        cache.copy(pairs)
    }

    fn host_kv_cache(&self, layout: KvLayout) -> Result<ReferenceKvCache> {
        ReferenceKvCache::new(layout)
    }

    fn swap_out(
        &self,
        device: &ReferenceKvCache,
        host: &mut ReferenceKvCache,
        pairs: &[(u32, u32)],
    ) -> Result<()> {
        host.copy_from("swap_out", device, pairs)
    }

    fn swap_in(
        &self,
        host: &ReferenceKvCache,
        device: &mut ReferenceKvCache,
        pairs: &[(u32, u32)],
    ) -> Result<()> {
        device.copy_from("swap_in", host, pairs)
    }

    fn paged_attention(
        &self,
        step: &HostStep,
        q: &Tensor,
        kv: KvLayer<'_, ReferenceKvCache, HostBias, Tensor>,
        shape: AttentionShape,
    ) -> Result<Tensor> {
        let op = "paged_attention";
        let KvLayer { cache, layer, seqs, mask, bias } = kv;
        check::layer(op, layer, cache.layout)?;
        let of_bias = bias.dims(HostBias::dims, dims);
        check::paged(dims(q), cache.layout, shape, Attended { seqs, mask, bias: of_bias })?;
        let materialized = materialized(op, bias)?;
        let bias = BiasSlices::of(op, step, bias, &materialized)?;
        attention::paged(
            q,
            attention::Pages { cache, layer, batch: step.paged(op, seqs)? },
            shape,
            (HostMask::of(op, step, mask)?, bias),
        )
    }

    fn state_cache(&self, layout: StateLayout) -> Result<HostStates> {
        HostStates::new(layout)
    }

    fn state_slot_bytes(&self, layout: StateLayout) -> usize {
        layout.slot_bytes()
    }

    fn copy_states(&self, cache: &mut HostStates, pairs: &[(u32, u32)]) -> Result<()> {
        cache.copy(pairs)
    }

    fn reset_states(&self, cache: &mut HostStates, slots: &[u32]) -> Result<()> {
        cache.reset(slots)
    }

    fn causal_conv(
        &self,
        step: &HostStep,
        at: StateSlots<'_, HostStates>,
        rows: ConvRows<'_, Tensor, ReferenceCausalConv>,
    ) -> Result<Tensor> {
        let ConvRows { x, taps: w, activation: act } = rows;
        let StateSlots { cache: states, layer, seqs } = at;
        check::causal_conv(dims(x), [w.0.kernel[1], w.0.channels], states.at(layer, seqs))?;
        let batch = step.recurrent("causal_conv", seqs)?;
        recurrent::causal_conv(x, &w.0, act, recurrent::At { states, layer, batch })
    }

    fn gated_delta_rule(
        &self,
        step: &HostStep,
        at: StateSlots<'_, HostStates>,
        rows: DeltaRows<'_, Tensor>,
        decay: &ReferenceDecay,
    ) -> Result<Tensor> {
        let StateSlots { cache: states, layer, seqs } = at;
        let (given, heads) = ([rows.qkv, rows.beta_decay].map(dims), [rows.n_key_heads, decay.0.rates.len()]);
        let out = check::gated_delta_rule(given, heads, states.at(layer, seqs))?;
        let batch = step.recurrent("gated_delta_rule", seqs)?;
        recurrent::gated_delta_rule(rows, &decay.0, out, recurrent::At { states, layer, batch })
    }
}

/// Sequences, as far as checks look at them.
fn attended(seqs: &Varlen<'_, HostBias, Tensor>) -> Attended<Sequences> {
    let Varlen { seqs, mask, bias } = *seqs;
    Attended { seqs, mask, bias: bias.dims(HostBias::dims, dims) }
}

/// Values of a bias that is an activation.
fn materialized(op: &'static str, bias: ScoreBias<'_, HostBias, Tensor>) -> Result<Vec<f32>> {
    match bias {
        ScoreBias::Materialized(x) => values(op, x),
        ScoreBias::None | ScoreBias::Loaded(_) | ScoreBias::Chosen(..) => Ok(Vec::new()),
    }
}
