//! The CPU back end: packed weights, SIMD, attention over pages as they lie.
//!
//! Kernels are written once over vectors ([`simd`]) and the words of panels ([`cell`]), and compiled for
//! each instruction set, one of which is chosen when the back end is made. All sums go through one register
//! tile ([`tile`]), in one order, so a row has the same bits alone and in a batch, on one thread and on many.
//! They differ between instruction sets and precisions, within rounding.
//!
//! This file is the contract with [`Backend`]: it checks arguments and hands them down. Below it, nothing
//! checks again except what unsafe code leans on.

use std::convert::Infallible;
use std::sync::Arc;

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
use crate::precision::Precision;
use crate::states::HostStates;
use crate::stored;

mod simd;
mod table;

mod bf16;
mod cell;
mod math;
mod tile;

mod kept;
mod matrix;
mod packed;
mod panels;
mod pool;

mod attention;
mod caches;
mod causal_conv;
mod context;
mod conv;
mod delta;
mod kv;
mod linear;
mod norm;
mod peak;
pub mod pixels;
mod rope;
mod rows;
mod scratch;

pub use causal_conv::CpuCausalConv;
pub use conv::CpuDepthwise;
pub use delta::CpuDecay;
pub use kept::{KEPT_BYTES, Kept, Room};
pub use kv::CpuKvCache;
pub use linear::CpuLinear;
pub use matrix::CpuTensor;
pub use norm::CpuNorm;
pub use packed::{PackedWeights, Packing};
pub use peak::Peak;
pub use pool::{Cores, share_cores, stop_sharing_cores};
pub use simd::{Isa, NoSuchIsa};
pub use table::{CpuTable, is_table_of_logits, table_bytes};

use causal_conv::At;
use cell::{Bf16Dot, Bf16Fma, F32Fma, Int8Fma};
use context::Context;
use kv::{Columns, Pages};

/// Settings of the back end.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuConfig {
    /// Threads, the caller of an op included; zero means one for each core.
    pub threads: usize,
    /// Precision of weights.
    pub precision: Precision,
    /// Precision of keys and values in caches; `None` means that of the weights. int4 means int8.
    pub kv: Option<Precision>,
    /// The instruction set; `None` means the best this machine has.
    pub isa: Option<Isa>,
}

/// The back end. Clones share its threads.
#[derive(Clone, Debug)]
pub struct CpuBackend {
    context: Context,
    /// Precision of keys and values in caches.
    kv: Precision,
}

impl CpuBackend {
    /// A back end with threads of its own.
    ///
    /// # Errors
    /// [`Isa`](crate::KernelError::Isa) if the machine lacks the instruction set asked for;
    /// [`Library`](crate::KernelError::Library) if threads cannot be started.
    pub fn new(config: CpuConfig) -> Result<Self> {
        let isa = simd::FoundIsa::new(config.isa)?;
        let CpuConfig { threads, precision, kv, .. } = config;
        let context = Context {
            pool: pool::Pool::new(threads)?,
            isa,
            precision,
            l2_bytes: caches::l2_bytes(),
            packed: None,
        };
        Ok(Self { context, kv: kv.unwrap_or(precision).at_least_bytes() })
    }

    /// The same back end for a load that takes packed weights from a file, or keeps them there.
    #[must_use]
    pub fn with_packed(&self, packed: Arc<PackedWeights>) -> Self {
        let mut with = self.clone();
        with.context.packed = Some(packed);
        with
    }

    /// The instruction set it runs on.
    pub fn isa(&self) -> Isa {
        self.context.isa.get()
    }

    /// Precision of the weights.
    pub fn precision(&self) -> Precision {
        self.context.precision
    }

    /// Attention inside each sequence; the arguments are checked.
    fn attend(
        &self,
        qkv: [Columns<'_>; 3],
        shape: AttentionShape,
        seqs: HostVarlen<'_>,
    ) -> Result<CpuTensor> {
        match self.context.precision {
            Precision::Int8 | Precision::Int4 if self.context.isa.has_byte_dot() => {
                attention::block_diagonal::<attention::Int8Pages>(&self.context, qkv, shape, seqs)
            }
            Precision::Bf16 if self.context.isa.has_bf16_dot() => {
                attention::block_diagonal::<Bf16Dot>(&self.context, qkv, shape, seqs)
            }
            Precision::Bf16 => attention::block_diagonal::<Bf16Fma>(&self.context, qkv, shape, seqs),
            // Nothing is kept here that should be small, and bytes would be taken apart.
            Precision::F32 | Precision::Int8 | Precision::Int4 => {
                attention::block_diagonal::<F32Fma>(&self.context, qkv, shape, seqs)
            }
        }
    }
}

impl Backend for CpuBackend {
    type Tensor = CpuTensor;
    type Linear = CpuLinear;
    type Experts = HostExperts<CpuLinear>;
    type Table = CpuTable;
    type Norm = CpuNorm;
    type Depthwise = CpuDepthwise;
    type Bias = HostBias;
    type CausalConv = CpuCausalConv;
    type Decay = CpuDecay;
    type StateCache = HostStates;
    type KvCache = CpuKvCache;
    type HostKvCache = CpuKvCache;
    type Step = HostStep;
    type Pending = Infallible;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn for_encoders(&self) -> Self {
        let mut encoders = self.clone();
        encoders.context.precision = self.context.precision.of_encoders();
        encoders
    }

    fn load_linear(&self, parts: &[LinearPart<'_>]) -> Result<CpuLinear> {
        Ok(CpuLinear::new(&self.context, self.context.precision, stored::stack(parts)?))
    }

    fn load_logits(&self, parts: &[LinearPart<'_>]) -> Result<CpuLinear> {
        Ok(CpuLinear::new(&self.context, self.context.precision.at_least_bytes(), stored::stack(parts)?))
    }

    fn load_router(&self, router: LinearPart<'_>) -> Result<CpuLinear> {
        Ok(CpuLinear::new(&self.context, self.context.precision.of_routers(), stored::stack(&[router])?))
    }

    fn load_experts(&self, experts: Vec<ExpertLayers<CpuLinear>>) -> Result<Self::Experts> {
        HostExperts::new(experts, CpuLinear::dims)
    }

    fn load_table(&self, table: WeightView<'_>, scale: f32) -> Result<CpuTable> {
        let dims = stored::table_dims("load_table", table)?;
        Ok(CpuTable::new(&self.context, table, dims, scale))
    }

    fn load_tied(&self, part: LinearPart<'_>, scale: f32) -> Result<(CpuLinear, CpuTable)> {
        let layer = self.load_logits(&[part])?;
        let table = match is_table_of_logits(self.context.precision, &part) {
            true => CpuTable::of_logits(&layer, scale / part.scale),
            false => self.load_table(part.weight, scale)?,
        };
        Ok((layer, table))
    }

    fn load_norm(
        &self,
        kind: NormKind,
        scale: WeightView<'_>,
        bias: Option<WeightView<'_>>,
        eps: f32,
    ) -> Result<CpuNorm> {
        let (scale, bias) = stored::norm(scale, bias)?;
        Ok(CpuNorm { kind, scale, bias, eps })
    }

    fn load_depthwise(&self, weight: WeightView<'_>, bias: Option<WeightView<'_>>) -> Result<CpuDepthwise> {
        Ok(CpuDepthwise(stored::taps("load_depthwise", weight, bias)?))
    }

    fn load_causal_conv(
        &self,
        weight: WeightView<'_>,
        bias: Option<WeightView<'_>>,
    ) -> Result<CpuCausalConv> {
        Ok(CpuCausalConv(stored::causal_taps(weight, bias)?))
    }

    fn load_decay(&self, a_log: WeightView<'_>, dt_bias: WeightView<'_>) -> Result<CpuDecay> {
        Ok(CpuDecay(stored::Decays::new(a_log, dt_bias)?))
    }

    fn load_bias(&self, bias: StoredBias<'_>) -> Result<HostBias> {
        HostBias::load(bias)
    }

    fn stage(&self, builder: StageBuilder) -> Result<HostStep> {
        Ok(builder.finish())
    }

    fn upload(&self, values: Vec<f32>, n_tokens: usize, width: usize) -> Result<CpuTensor> {
        check::upload(values.len(), n_tokens, width)?;
        Ok(CpuTensor::new(values, n_tokens, width))
    }

    fn upload_rows(&self, rows: &[EncodedRows<'_>]) -> Result<CpuTensor> {
        let (n_tokens, width) = check::upload_rows(rows)?;
        Ok(CpuTensor::new(rows::widen(&self.context, rows, n_tokens * width), n_tokens, width))
    }

    fn download(&self, x: &CpuTensor) -> Result<Vec<f32>> {
        Ok(x.data().to_vec())
    }

    fn take_values(&self, x: CpuTensor) -> Result<Vec<f32>> {
        Ok(x.into_values())
    }

    fn dims(&self, x: &CpuTensor) -> Dims {
        x.dims()
    }

    fn embed(&self, step: &HostStep, table: &CpuTable, ids: Indices) -> Result<CpuTensor> {
        check::below("embed", "row", ids, table.n_rows)?;
        Ok(table::embed(&self.context, table, step.indices("embed", ids)?))
    }

    fn embed_weighted(&self, step: &HostStep, table: &CpuTable, rows: WeightedRows) -> Result<CpuTensor> {
        let op = "embed_weighted";
        check::below(op, "row", rows.rows, table.n_rows)?;
        let (ids, weights) = step.weighted(op, rows)?;
        Ok(table::embed_weighted(&self.context, table, (ids, weights), rows.n_terms))
    }

    fn gather_rows(&self, step: &HostStep, x: &CpuTensor, rows: Indices) -> Result<CpuTensor> {
        check::below("gather_rows", "row", rows, x.dims().0)?;
        Ok(rows::gather(&self.context, x, step.indices("gather_rows", rows)?))
    }

    fn scatter_rows(&self, step: &HostStep, x: &mut CpuTensor, rows: Indices, src: &CpuTensor) -> Result<()> {
        check::scatter_rows(x.dims(), rows, src.dims())?;
        rows::scatter(x, step.indices("scatter_rows", rows)?, src);
        Ok(())
    }

    fn columns(&self, x: &CpuTensor, start: usize, width: usize) -> Result<CpuTensor> {
        check::columns(x.dims(), start, width)?;
        Ok(rows::columns(&self.context, x, start, width))
    }

    fn merge_rows(&self, x: CpuTensor, group: usize) -> Result<CpuTensor> {
        let (n_tokens, width) = check::merge_rows(x.dims(), group)?;
        Ok(x.reshape(n_tokens, width))
    }

    fn split_rows(&self, x: CpuTensor, parts: usize) -> Result<CpuTensor> {
        let (n_tokens, width) = check::split_rows(x.dims(), parts)?;
        Ok(x.reshape(n_tokens, width))
    }

    fn transpose(&self, x: &CpuTensor, n_seqs: usize) -> Result<CpuTensor> {
        Ok(rows::transpose(&self.context, x, check::transpose(x.dims(), n_seqs)?))
    }

    fn linear(
        &self,
        x: &CpuTensor,
        w: &CpuLinear,
        act: Activation,
        residual: Option<&CpuTensor>,
    ) -> Result<CpuTensor> {
        check::linear(x.dims(), w.dims(), residual.map(CpuTensor::dims))?;
        Ok(w.apply(&self.context, x, act, residual))
    }

    fn norm(&self, x: &CpuTensor, norm: &CpuNorm) -> Result<CpuTensor> {
        check::same("norm", "x width", &[x.dims().1], &[norm.scale.len()])?;
        Ok(norm::norm(&self.context, x, norm))
    }

    fn add(&self, x: &mut CpuTensor, y: &CpuTensor) -> Result<()> {
        let (x_dims, y_dims) = (x.dims(), y.dims());
        check::same("add", "y", &[y_dims.0, y_dims.1], &[x_dims.0, x_dims.1])?;
        rows::add(&self.context, x, y);
        Ok(())
    }

    fn softcap(&self, x: &mut CpuTensor, c: f32) -> Result<()> {
        rows::softcap(&self.context, x, c);
        Ok(())
    }

    fn gate(&self, x: &CpuTensor, act: Activation) -> Result<CpuTensor> {
        let width = check::divides("gate", "x width", 2, x.dims().1)?;
        Ok(rows::gate(&self.context, x, width, act))
    }

    fn multiply_gated(&self, x: &mut CpuTensor, gate: &CpuTensor, act: Activation) -> Result<()> {
        check::multiply_gated(x.dims(), gate.dims())?;
        rows::multiply_gated(&self.context, x, gate, act);
        Ok(())
    }

    fn fused_experts(&self, experts: &Self::Experts, routed: Routed<'_, CpuTensor>) -> Result<CpuTensor> {
        experts::fused_experts(self, experts, routed)
    }

    fn group_norm(&self, step: &HostStep, x: &CpuTensor, norm: &CpuNorm, seqs: Offsets) -> Result<CpuTensor> {
        check::group_norm(x.dims(), norm.scale.len(), seqs)?;
        Ok(norm::group_norm(&self.context, x, norm, step.offsets("group_norm", seqs)?))
    }

    fn rope(&self, step: &HostStep, x: &mut CpuTensor, shape: RopeShape, angles: Angles) -> Result<()> {
        check::rope(x.dims(), shape, angles)?;
        rope::rope(&self.context, x, shape, step.angles("rope", angles)?);
        Ok(())
    }

    fn unfold(&self, x: &CpuTensor, conv: Unfold) -> Result<CpuTensor> {
        Ok(conv::unfold(&self.context, x, conv, check::unfold(x.dims(), conv)?))
    }

    fn unfold2d(&self, x: &CpuTensor, conv: Conv2d) -> Result<CpuTensor> {
        Ok(conv::unfold2d(&self.context, x, conv, check::unfold2d(x.dims(), conv)?))
    }

    fn depthwise2d(&self, x: &CpuTensor, w: &CpuDepthwise, conv: Conv2d) -> Result<CpuTensor> {
        let planes = check::depthwise2d(x.dims(), w.0.channels, w.0.kernel, conv)?;
        Ok(conv::depthwise2d(&self.context, x, w, conv, planes))
    }

    fn attention(
        &self,
        step: &HostStep,
        qkv: Qkv<'_, CpuTensor>,
        shape: AttentionShape,
        seqs: Varlen<'_, HostBias, CpuTensor>,
    ) -> Result<CpuTensor> {
        check::attention([qkv.q.dims(), qkv.k.dims(), qkv.v.dims()], shape, attended(&seqs))?;
        let seqs = HostVarlen::of("attention", step, seqs, materialized(seqs.bias))?;
        self.attend([qkv.q, qkv.k, qkv.v].map(Columns::all), shape, seqs)
    }

    fn fused_attention(
        &self,
        step: &HostStep,
        qkv: &CpuTensor,
        shape: AttentionShape,
        seqs: Varlen<'_, HostBias, CpuTensor>,
    ) -> Result<CpuTensor> {
        let (n_tokens, width) = qkv.dims();
        let [q, kv] = shape.widths();
        check::same("fused_attention", "qkv width", &[width], &[q + 2 * kv])?;
        check::attention([q, kv, kv].map(|width| (n_tokens, width)), shape, attended(&seqs))?;
        let seqs = HostVarlen::of("fused_attention", step, seqs, materialized(seqs.bias))?;
        self.attend([0, q, q + kv].map(|first| Columns { of: qkv, first }), shape, seqs)
    }

    fn attention_weights(
        &self,
        step: &HostStep,
        qk: [&CpuTensor; 2],
        chosen: ChosenHeads,
        seqs: Varlen<'_, HostBias, CpuTensor>,
    ) -> Result<Vec<f32>> {
        let op = "attention_weights";
        check::attention_weights(qk.map(CpuTensor::dims), chosen, attended(&seqs))?;
        let (context, qk) = (&self.context, qk.map(Columns::all));
        let heads = (chosen.shape, step.indices(op, chosen.heads)?);
        let seqs = HostVarlen::of(op, step, seqs, materialized(seqs.bias))?;
        match self.context.precision {
            Precision::Bf16 | Precision::Int8 | Precision::Int4 if self.context.isa.has_bf16_dot() => {
                attention::weights::<Bf16Dot>(context, qk, heads, seqs)
            }
            Precision::Bf16 => attention::weights::<Bf16Fma>(context, qk, heads, seqs),
            Precision::F32 | Precision::Int8 | Precision::Int4 => {
                attention::weights::<F32Fma>(context, qk, heads, seqs)
            }
        }
    }

    fn kv_cache(&self, layout: KvLayout) -> Result<CpuKvCache> {
        CpuKvCache::new(self.kv, layout)
    }

    fn kv_block_bytes(&self, layout: KvLayout) -> usize {
        CpuKvCache::block_bytes(self.kv, layout)
    }

    fn write_kv(&self, step: &HostStep, to: KvSlots<'_, CpuKvCache>, kv: [&CpuTensor; 2]) -> Result<()> {
        let KvSlots { cache, layer, slots } = to;
        check::layer("write_kv", layer, cache.layout())?;
        check::write_kv(kv.map(CpuTensor::dims), cache.layout(), slots)?;
        cache.write(&self.context, layer, kv.map(Columns::all), step.indices("write_kv", slots)?);
        Ok(())
    }

    fn write_fused_kv(&self, step: &HostStep, to: KvSlots<'_, CpuKvCache>, kv: &CpuTensor) -> Result<()> {
        let (KvSlots { cache, layer, slots }, op) = (to, "write_fused_kv");
        check::layer(op, layer, cache.layout())?;
        let (n_tokens, width) = (kv.dims().0, check::divides(op, "kv width", 2, kv.dims().1)?);
        check::write_kv([(n_tokens, width); 2], cache.layout(), slots)?;
        let kv = [0, width].map(|first| Columns { of: kv, first });
        cache.write(&self.context, layer, kv, step.indices(op, slots)?);
        Ok(())
    }

    fn copy_blocks(&self, cache: &mut CpuKvCache, pairs: &[(u32, u32)]) -> Result<()> {
        cache.copy(pairs)
    }

    fn host_kv_cache(&self, layout: KvLayout) -> Result<CpuKvCache> {
        CpuKvCache::new(self.kv, layout)
    }

    fn swap_out(&self, device: &CpuKvCache, host: &mut CpuKvCache, pairs: &[(u32, u32)]) -> Result<()> {
        host.copy_from("swap_out", device, pairs)
    }

    fn swap_in(&self, host: &CpuKvCache, device: &mut CpuKvCache, pairs: &[(u32, u32)]) -> Result<()> {
        device.copy_from("swap_in", host, pairs)
    }

    fn paged_attention(
        &self,
        step: &HostStep,
        q: &CpuTensor,
        kv: KvLayer<'_, CpuKvCache, HostBias, CpuTensor>,
        shape: AttentionShape,
    ) -> Result<CpuTensor> {
        let op = "paged_attention";
        check::layer(op, kv.layer, kv.cache.layout())?;
        let KvLayer { cache, layer, seqs, mask, bias } = kv;
        let of_bias = bias.dims(HostBias::dims, CpuTensor::dims);
        check::paged(q.dims(), cache.layout(), shape, Attended { seqs, mask, bias: of_bias })?;
        let (batch, bias) = (step.paged(op, seqs)?, BiasSlices::of(op, step, bias, materialized(bias))?);
        let mask = HostMask::of(op, step, mask)?;
        let step = attention::Step { q: Columns::all(q), layer, mask, bias, shape, batch, may_share: true };
        Ok(match &cache.0 {
            Pages::F32(pages) => attention::paged::<F32Fma>(&self.context, pages, step),
            Pages::Bf16(pages) if self.context.isa.has_bf16_dot() => {
                attention::paged::<Bf16Dot>(&self.context, pages, step)
            }
            Pages::Bf16(pages) => attention::paged::<Bf16Fma>(&self.context, pages, step),
            Pages::Int8(pages) if self.context.isa.has_byte_dot() => {
                attention::paged::<attention::Int8Pages>(&self.context, pages, step)
            }
            Pages::Int8(pages) => attention::paged::<Int8Fma>(&self.context, pages, step),
        })
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
        rows: ConvRows<'_, CpuTensor, CpuCausalConv>,
    ) -> Result<CpuTensor> {
        let ConvRows { x, taps: w, activation: act } = rows;
        let StateSlots { cache: states, layer, seqs } = at;
        check::causal_conv(x.dims(), [w.0.kernel[1], w.0.channels], states.at(layer, seqs))?;
        let batch = step.recurrent("causal_conv", seqs)?;
        Ok(causal_conv::causal_conv(&self.context, x, w, act, At { states, layer, batch }))
    }

    fn gated_delta_rule(
        &self,
        step: &HostStep,
        at: StateSlots<'_, HostStates>,
        rows: DeltaRows<'_, CpuTensor>,
        decay: &CpuDecay,
    ) -> Result<CpuTensor> {
        let StateSlots { cache: states, layer, seqs } = at;
        let given = [rows.qkv, rows.beta_decay].map(CpuTensor::dims);
        let heads = [rows.n_key_heads, decay.0.rates.len()];
        let out = check::gated_delta_rule(given, heads, states.at(layer, seqs))?;
        let batch = step.recurrent("gated_delta_rule", seqs)?;
        Ok(delta::gated_delta_rule(&self.context, rows, decay, out, At { states, layer, batch }))
    }
}

/// Sequences, as far as checks look at them.
fn attended(seqs: &Varlen<'_, HostBias, CpuTensor>) -> Attended<Sequences> {
    let Varlen { seqs, mask, bias } = *seqs;
    Attended { seqs, mask, bias: bias.dims(HostBias::dims, CpuTensor::dims) }
}

/// Values of a bias that is an activation.
fn materialized<'a>(bias: ScoreBias<'a, HostBias, CpuTensor>) -> &'a [f32] {
    match bias {
        ScoreBias::Materialized(values) => values.data(),
        ScoreBias::None | ScoreBias::Loaded(_) | ScoreBias::Chosen(..) => &[],
    }
}
