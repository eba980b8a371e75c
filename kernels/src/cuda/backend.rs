//! The back end: checks of each op, and the launches that it is made of.
//!
//! One file over 600 lines: one method for each op of the trait, in its order.

use std::sync::Arc;

use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_core::{DType, EncodedRows};

use super::arguments::Windows;
use super::attention::{QkvRows, block_diagonal, paged, weights};
use super::bias::CudaBias;
use super::choose::{self, CudaPending};
use super::cublaslt::Cublaslt;
use super::device::{Device, DeviceMemory};
use super::element::Element;
use super::experts::CudaExperts;
use super::graph;
use super::kv::{CudaHostKvCache, CudaKvCache, FusedRows, KvRows, SlotRows, block_bytes};
use super::linear::{CudaLinear, Finish, Use};
use super::memory::Fixed;
use super::queue::{Argument, Launch, Queue, as_bytes};
use super::recurrent::{self, CudaCausalConv, CudaDecay, CudaStateCache, StepStates};
use super::rows::{self, CudaDepthwise, CudaNorm, CudaTable, activation_number, shared_work};
use super::tensor::{CudaStep, CudaTensor};
use crate::check::{self, Attended, Dims};
use crate::ops::{
    Activation, Angles, AttentionShape, Backend, Captured, Choices, ChooseBatch, ChosenHeads, Conv2d,
    ConvRows, DeltaRows, ExpertLayers, Forward, ForwardInputs, FusedQkv, Indices, KernelError, KvLayer,
    KvLayout, KvSlots, LinearPart, NormKind, Offsets, PendingChoices, Qkv, Result, RopeShape, Rotation,
    Routed, Sequences, StageBuilder, StateLayout, StateSlots, StoredBias, Submitted, Unfold, Varlen,
    WeightView, WeightedRows,
};
use crate::precision::Precision;
use crate::stored;

/// Settings of the back end.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaConfig {
    /// Number of the device, from 0.
    pub device: usize,
    /// Precision of weights. f32: activations and caches too, without TF32; any other: activations and caches in bf16.
    pub precision: Precision,
}

/// The back end. Clones share the device; encoders have a stream of their own.
#[derive(Clone, Debug)]
pub struct CudaBackend {
    queue: Arc<Queue>,
    encoders: Arc<Queue>,
    cublaslt: Arc<Cublaslt>,
    precision: Precision,
    ordinal: usize,
}

impl CudaBackend {
    /// A back end on a device.
    ///
    /// # Errors
    /// [`Library`](crate::KernelError::Library) without a driver or cublasLt, or on a device that is too old;
    /// [`Index`](crate::KernelError::Index) for a device that is not there.
    pub fn new(config: CudaConfig) -> Result<Self> {
        let device = Arc::new(Device::new(config.device)?);
        device.bind("cuda")?;
        let cublaslt = Arc::new(Cublaslt::new()?);
        let element = if config.precision == Precision::F32 { Element::F32 } else { Element::Bf16 };
        let [queue, encoders] =
            [Arc::new(Queue::new(&device, element)?), Arc::new(Queue::new(&device, element)?)];
        Ok(Self { queue, encoders, cublaslt, precision: config.precision, ordinal: config.device })
    }

    /// Memory of the device.
    ///
    /// # Errors
    /// [`KernelError`](crate::KernelError) if the driver does not answer.
    pub fn memory(&self) -> Result<DeviceMemory> {
        self.queue.device().memory()
    }

    /// Bytes that came down from the decoder's stream so far.
    pub fn n_downloaded(&self) -> u64 {
        self.queue.n_downloaded()
    }

    /// Number of the device, from 0.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Precision of the weights.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Address of indices that an op has checked to be below `len`.
    fn rows_below(&self, op: &'static str, step: &CudaStep, rows: Indices, len: usize) -> Result<u64> {
        check::below(op, "row", rows, len)?;
        self.limit(rows, len);
        step.indices(op, rows)
    }

    /// Notes, where work is captured, that every replay's indices must be below `len` too.
    fn limit(&self, indices: Indices, len: usize) {
        if let Some(recording) = self.queue.recording()
            && indices.len() > 0
        {
            recording.limit(indices.words().start, len);
        }
    }

    /// Slots of a layer that an op has checked.
    fn slots(&self, op: &'static str, step: &CudaStep, to: &KvSlots<'_, CudaKvCache>) -> Result<SlotRows> {
        self.limit(to.slots, to.cache.layout().n_blocks * KV_BLOCK_TOKENS);
        Ok(SlotRows { layer: to.layer, slots: step.indices(op, to.slots)?, n_slots: to.slots.len() })
    }

    /// States of a layer that an op has checked.
    fn states(
        &self,
        op: &'static str,
        step: &CudaStep,
        at: &StateSlots<'_, CudaStateCache>,
    ) -> Result<StepStates> {
        StepStates::of(op, &self.queue, step, at)
    }

    fn tensor(&self, op: &'static str, dims: Dims) -> Result<CudaTensor> {
        CudaTensor::new(op, &self.queue, dims)
    }

    fn fixed(&self, op: &'static str, values: &[f32]) -> Result<Fixed> {
        self.queue.fixed(op, as_bytes(values))
    }

    /// Rows `first ..` of a tensor from stored rows, which the device widens.
    fn fill_stored(
        &self,
        op: &'static str,
        x: &CudaTensor,
        first: usize,
        from: EncodedRows<'_>,
    ) -> Result<()> {
        let queue = &self.queue;
        let at = x.address() + (first * x.dims().1 * self.queue.element().size()) as u64;
        let [n_rows, width] = [from.n_rows(), from.hidden()].map(|n| n as u32);
        let launch = shared_work(from.n_rows() * from.hidden());
        match (from.dtype(), self.queue.element()) {
            (DType::F32, Element::F32) | (DType::Bf16, Element::Bf16) => {
                return queue.upload_to(op, at, from.data());
            }
            (DType::F16, _) => return x.fill_rows(op, queue, first, &from.to_f32()),
            _ => {}
        }
        let stored = queue.upload(op, from.data())?;
        let kernels = &queue.device().kernels;
        match from.dtype() {
            DType::F32 | DType::Bf16 | DType::F16 => {
                let function = if self.queue.element() == Element::F32 {
                    kernels.widen_bf16
                } else {
                    kernels.narrow_bf16
                };
                queue.launch(op, function, launch, [&at, &stored.address(), &n_rows, &width])
            }
            DType::I8 | DType::F8 => {
                let scales = queue.upload(op, from.scales())?;
                let is_f8 = u32::from(from.dtype() == DType::F8);
                let arguments: [&dyn Argument; 6] =
                    [&at, &stored.address(), &scales.address(), &is_f8, &n_rows, &width];
                queue.launch(op, self.queue.kernel(kernels.read_bytes), launch, arguments)
            }
        }
    }

    fn write_rows(
        &self,
        op: &'static str,
        step: &CudaStep,
        to: KvSlots<'_, CudaKvCache>,
        rows: KvRows,
    ) -> Result<()> {
        let slots = self.slots(op, step, &to)?;
        to.cache.write(op, &self.queue, slots, rows)
    }
}

impl Backend for CudaBackend {
    type Tensor = CudaTensor;
    type Linear = CudaLinear;
    type Experts = CudaExperts;
    type Table = CudaTable;
    type Norm = CudaNorm;
    type Depthwise = CudaDepthwise;
    type Bias = CudaBias;
    type CausalConv = CudaCausalConv;
    type Decay = CudaDecay;
    type StateCache = CudaStateCache;
    type KvCache = CudaKvCache;
    type HostKvCache = CudaHostKvCache;
    type Step = CudaStep;
    type Pending = CudaPending;

    fn name(&self) -> &'static str {
        "cuda"
    }

    fn for_encoders(&self) -> Self {
        let precision = self.precision.of_encoders();
        Self { queue: Arc::clone(&self.encoders), precision, ..self.clone() }
    }

    fn load_linear(&self, parts: &[LinearPart<'_>]) -> Result<CudaLinear> {
        let weights = stored::stack(parts)?;
        CudaLinear::load(&self.queue, &self.cublaslt, self.precision, Use::Hidden, &weights)
    }

    fn load_logits(&self, parts: &[LinearPart<'_>]) -> Result<CudaLinear> {
        let weights = stored::stack(parts)?;
        CudaLinear::load(&self.queue, &self.cublaslt, self.precision, Use::Logits, &weights)
    }

    fn load_router(&self, router: LinearPart<'_>) -> Result<CudaLinear> {
        let (precision, weights) = (self.precision.of_routers(), stored::stack(&[router])?);
        CudaLinear::load(&self.queue, &self.cublaslt, precision, Use::Hidden, &weights)
    }

    fn load_expert(&self, parts: &[LinearPart<'_>]) -> Result<CudaLinear> {
        let weights = stored::stack(parts)?;
        CudaLinear::load(&self.queue, &self.cublaslt, self.precision, Use::Expert, &weights)
    }

    fn load_experts(&self, experts: Vec<ExpertLayers<CudaLinear>>) -> Result<CudaExperts> {
        CudaExperts::new(&self.queue, experts)
    }

    fn load_table(&self, table: WeightView<'_>, scale: f32) -> Result<CudaTable> {
        let op = "load_table";
        let dims = stored::table_dims(op, table)?;
        let mut bytes = Vec::new();
        self.queue
            .element()
            .encode(stored::to_f32(op, table)?.into_iter().map(|value| value * scale), &mut bytes);
        Ok(CudaTable { rows: self.queue.fixed(op, &bytes)?, dims })
    }

    fn load_norm(
        &self,
        kind: NormKind,
        scale: WeightView<'_>,
        bias: Option<WeightView<'_>>,
        eps: f32,
    ) -> Result<CudaNorm> {
        let op = "load_norm";
        let (scale, bias) = stored::norm(scale, bias)?;
        let bias = bias.map(|bias| self.fixed(op, &bias)).transpose()?;
        Ok(CudaNorm { kind, width: scale.len(), scale: self.fixed(op, &scale)?, bias, eps })
    }

    fn load_depthwise(&self, weight: WeightView<'_>, bias: Option<WeightView<'_>>) -> Result<CudaDepthwise> {
        let op = "load_depthwise";
        let taps = stored::taps(op, weight, bias)?;
        let bias = taps.bias.map(|bias| self.fixed(op, &bias)).transpose()?;
        let (channels, kernel) = (taps.channels, taps.kernel);
        Ok(CudaDepthwise { channels, kernel, weight: self.fixed(op, &taps.weight)?, bias })
    }

    fn load_causal_conv(
        &self,
        weight: WeightView<'_>,
        bias: Option<WeightView<'_>>,
    ) -> Result<CudaCausalConv> {
        CudaCausalConv::load(&self.queue, weight, bias)
    }

    fn load_decay(&self, a_log: WeightView<'_>, dt_bias: WeightView<'_>) -> Result<CudaDecay> {
        CudaDecay::load(&self.queue, a_log, dt_bias)
    }

    fn load_bias(&self, bias: StoredBias<'_>) -> Result<CudaBias> {
        CudaBias::load(&self.queue, bias)
    }

    fn stage(&self, builder: StageBuilder) -> Result<CudaStep> {
        CudaStep::new(&self.queue, builder)
    }

    fn upload(&self, values: Vec<f32>, n_tokens: usize, width: usize) -> Result<CudaTensor> {
        check::upload(values.len(), n_tokens, width)?;
        let x = self.tensor("upload", (n_tokens, width))?;
        x.fill_rows("upload", &self.queue, 0, &values)?;
        Ok(x)
    }

    fn upload_rows(&self, rows: &[EncodedRows<'_>]) -> Result<CudaTensor> {
        let op = "upload_rows";
        let x = self.tensor(op, check::upload_rows(rows)?)?;
        let mut first = 0;
        for part in rows {
            self.fill_stored(op, &x, first, *part)?;
            first += part.n_rows();
        }
        Ok(x)
    }

    fn zeros(&self, n_tokens: usize, width: usize) -> Result<CudaTensor> {
        let x = self.tensor("zeros", (n_tokens, width))?;
        self.queue.fill("zeros", x.address(), 0, x.n_values() * self.queue.element().size())?;
        Ok(x)
    }

    fn download(&self, x: &CudaTensor) -> Result<Vec<f32>> {
        let mut values = Vec::with_capacity(x.n_values());
        let n_bytes = x.n_values() * self.queue.element().size();
        self.queue.download("download", x.address(), n_bytes, |part| {
            self.queue.element().decode(part, &mut values)
        })?;
        Ok(values)
    }

    fn dims(&self, x: &CudaTensor) -> Dims {
        x.dims()
    }

    fn embed(&self, step: &CudaStep, table: &CudaTable, ids: Indices) -> Result<CudaTensor> {
        let op = "embed";
        let at = self.rows_below(op, step, ids, table.dims.0)?;
        let dims = (ids.len(), table.dims.1);
        rows::gather(op, &self.queue, table.rows.address(), at, dims)
    }

    fn embed_weighted(&self, step: &CudaStep, table: &CudaTable, rows: WeightedRows) -> Result<CudaTensor> {
        let op = "embed_weighted";
        let terms = rows::Terms {
            rows: self.rows_below(op, step, rows.rows, table.dims.0)?,
            weights: step.weights(op, rows)?,
            n_terms: rows.n_terms,
        };
        rows::weighted(&self.queue, table.rows.address(), terms, (rows.len(), table.dims.1))
    }

    fn gather_rows(&self, step: &CudaStep, x: &CudaTensor, rows: Indices) -> Result<CudaTensor> {
        let op = "gather_rows";
        let at = self.rows_below(op, step, rows, x.dims().0)?;
        let dims = (rows.len(), x.dims().1);
        rows::gather(op, &self.queue, x.address(), at, dims)
    }

    fn scatter_rows(
        &self,
        step: &CudaStep,
        x: &mut CudaTensor,
        rows: Indices,
        src: &CudaTensor,
    ) -> Result<()> {
        let op = "scatter_rows";
        check::scatter_rows(x.dims(), rows, src.dims())?;
        let from = src.address();
        let of_rows = self.rows_below(op, step, rows, x.dims().0)?;
        let to = x.write(op, &self.queue)?;
        let [n_rows, width] = [rows.len(), x.dims().1].map(|n| n as u32);
        let function = self.queue.kernel(self.queue.device().kernels.scatter_rows);
        let arguments: [&dyn Argument; 5] = [&to, &from, &of_rows, &n_rows, &width];
        self.queue.launch(op, function, shared_work(src.n_values()), arguments)
    }

    fn columns(&self, x: &CudaTensor, start: usize, width: usize) -> Result<CudaTensor> {
        let op = "columns";
        check::columns(x.dims(), start, width)?;
        let y = self.tensor(op, (x.dims().0, width))?;
        let [n_rows, x_width, start, width] = [x.dims().0, x.dims().1, start, width].map(|n| n as u32);
        let arguments: [&dyn Argument; 6] = [&y.address(), &x.address(), &n_rows, &x_width, &start, &width];
        let function = self.queue.kernel(self.queue.device().kernels.columns);
        self.queue.launch(op, function, shared_work(y.n_values()), arguments)?;
        Ok(y)
    }

    fn merge_rows(&self, x: CudaTensor, group: usize) -> Result<CudaTensor> {
        let dims = check::merge_rows(x.dims(), group)?;
        Ok(x.reshape(dims))
    }

    fn split_rows(&self, x: CudaTensor, parts: usize) -> Result<CudaTensor> {
        let dims = check::split_rows(x.dims(), parts)?;
        Ok(x.reshape(dims))
    }

    fn transpose(&self, x: &CudaTensor, n_seqs: usize) -> Result<CudaTensor> {
        let op = "transpose";
        let check::Transposed { t, dims } = check::transpose(x.dims(), n_seqs)?;
        let (y, width) = (self.tensor(op, dims)?, x.dims().1);
        if y.n_values() > 0 {
            let launch =
                Launch { grid: [width.div_ceil(32), t.div_ceil(32), n_seqs], threads: 256, shared_bytes: 0 };
            let [t, width] = [t, width].map(|n| n as u32);
            let function = self.queue.kernel(self.queue.device().kernels.transpose);
            self.queue.launch(op, function, launch, [&y.address(), &x.address(), &t, &width])?;
        }
        Ok(y)
    }

    fn linear(
        &self,
        x: &CudaTensor,
        w: &CudaLinear,
        act: Activation,
        residual: Option<&CudaTensor>,
    ) -> Result<CudaTensor> {
        check::linear(x.dims(), w.dims(), residual.map(CudaTensor::dims))?;
        w.apply(&self.queue, &self.cublaslt, x, Finish { act, residual })
    }

    fn norm(&self, x: &CudaTensor, norm: &CudaNorm) -> Result<CudaTensor> {
        check::same("norm", "x width", &[x.dims().1], &[norm.width])?;
        rows::norm(&self.queue, x, norm)
    }

    fn add(&self, x: &mut CudaTensor, y: &CudaTensor) -> Result<()> {
        let (op, x_dims, y_dims) = ("add", x.dims(), y.dims());
        check::same(op, "y", &[y_dims.0, y_dims.1], &[x_dims.0, x_dims.1])?;
        let to = x.write(op, &self.queue)?;
        let [n_rows, width] = [x_dims.0, x_dims.1].map(|n| n as u32);
        let function = self.queue.kernel(self.queue.device().kernels.add);
        let arguments: [&dyn Argument; 4] = [&to, &y.address(), &n_rows, &width];
        self.queue.launch(op, function, shared_work(x.n_values()), arguments)
    }

    fn softcap(&self, x: &mut CudaTensor, c: f32) -> Result<()> {
        rows::softcap(&self.queue, x, c)
    }

    fn gate(&self, x: &CudaTensor, act: Activation) -> Result<CudaTensor> {
        let op = "gate";
        let width = check::divides(op, "x width", 2, x.dims().1)?;
        let y = self.tensor(op, (x.dims().0, width))?;
        let [n_rows, width] = [x.dims().0, width].map(|n| n as u32);
        let act = activation_number(act);
        let function = self.queue.kernel(self.queue.device().kernels.gate);
        let arguments: [&dyn Argument; 5] = [&y.address(), &x.address(), &act, &n_rows, &width];
        self.queue.launch(op, function, shared_work(y.n_values()), arguments)?;
        Ok(y)
    }

    fn multiply_gated(&self, x: &mut CudaTensor, gate: &CudaTensor, act: Activation) -> Result<()> {
        check::multiply_gated(x.dims(), gate.dims())?;
        rows::multiply_gated(&self.queue, x, gate, act)
    }

    fn fused_experts(&self, experts: &CudaExperts, routed: Routed<'_, CudaTensor>) -> Result<CudaTensor> {
        experts.apply(&self.queue, routed)
    }

    fn group_norm(
        &self,
        step: &CudaStep,
        x: &CudaTensor,
        norm: &CudaNorm,
        seqs: Offsets,
    ) -> Result<CudaTensor> {
        check::group_norm(x.dims(), norm.width, seqs)?;
        let starts = step.offsets("group_norm", seqs)?;
        rows::group_norm(&self.queue, x, norm, starts, seqs.n_seqs())
    }

    fn rope(&self, step: &CudaStep, x: &mut CudaTensor, shape: RopeShape, angles: Angles) -> Result<()> {
        check::rope(x.dims(), shape, angles)?;
        let rotation = step.rotation("rope", Rotation { shape, angles })?;
        rows::rope(&self.queue, x, shape.head_dim, rotation)
    }

    fn unfold(&self, x: &CudaTensor, conv: Unfold) -> Result<CudaTensor> {
        let check::Windows { t, t_out, width } = check::unfold(x.dims(), conv)?;
        let column = |n: usize, other: u32| [n as u32, other];
        let windows = Windows {
            n_images: conv.n_seqs as u32,
            size: column(t, 1),
            kernel: column(conv.kernel, 1),
            stride: column(conv.stride, 1),
            padding: column(conv.padding, 0),
            out: column(t_out, 1),
        };
        let dims = (conv.n_seqs * t_out, width);
        rows::unfold("unfold", &self.queue, x, windows, dims)
    }

    fn unfold2d(&self, x: &CudaTensor, conv: Conv2d) -> Result<CudaTensor> {
        let planes = check::unfold2d(x.dims(), conv)?;
        let dims = (planes.n_rows, planes.width);
        rows::unfold("unfold2d", &self.queue, x, windows(conv, planes.out), dims)
    }

    fn depthwise2d(&self, x: &CudaTensor, w: &CudaDepthwise, conv: Conv2d) -> Result<CudaTensor> {
        let planes = check::depthwise2d(x.dims(), w.channels, w.kernel, conv)?;
        let windows = windows(conv, planes.out);
        rows::depthwise(&self.queue, x, w, windows, planes.n_rows)
    }

    fn choose(&self, logits: CudaTensor, batch: &ChooseBatch) -> Result<Choices> {
        check::choose(logits.dims(), batch)?;
        choose::submit(&self.queue, logits, batch)?.wait()
    }

    fn submit_choices(&self, logits: CudaTensor, batch: &ChooseBatch) -> Result<Submitted<CudaPending>> {
        check::choose(logits.dims(), batch)?;
        Ok(Submitted::UnderWay(choose::submit(&self.queue, logits, batch)?))
    }

    fn attention(
        &self,
        step: &CudaStep,
        qkv: Qkv<'_, CudaTensor>,
        shape: AttentionShape,
        seqs: Varlen<'_, CudaBias, CudaTensor>,
    ) -> Result<CudaTensor> {
        let Qkv { q, k, v } = qkv;
        check::attention([q.dims(), k.dims(), v.dims()], shape, attended(&seqs))?;
        let rows = QkvRows {
            n_queries: q.dims().0,
            q: q.address(),
            k: k.address(),
            v: v.address(),
            q_stride: q.dims().1,
            kv_stride: k.dims().1,
        };
        block_diagonal(&self.queue, step, rows, shape, seqs)
    }

    fn fused_attention(
        &self,
        step: &CudaStep,
        qkv: &CudaTensor,
        shape: AttentionShape,
        seqs: Varlen<'_, CudaBias, CudaTensor>,
    ) -> Result<CudaTensor> {
        let op = "fused_attention";
        let (n_tokens, width) = qkv.dims();
        let [q, kv] = shape.widths();
        check::same(op, "qkv width", &[width], &[q + 2 * kv])?;
        check::attention([q, kv, kv].map(|width| (n_tokens, width)), shape, attended(&seqs))?;
        let [q, k, v] =
            [0, q, q + kv].map(|first| qkv.address() + (first * self.queue.element().size()) as u64);
        let rows = QkvRows { n_queries: n_tokens, q, k, v, q_stride: width, kv_stride: width };
        block_diagonal(&self.queue, step, rows, shape, seqs)
    }

    fn attention_weights(
        &self,
        step: &CudaStep,
        qk: [&CudaTensor; 2],
        chosen: ChosenHeads,
        seqs: Varlen<'_, CudaBias, CudaTensor>,
    ) -> Result<Vec<f32>> {
        check::attention_weights(qk.map(CudaTensor::dims), chosen, attended(&seqs))?;
        weights(&self.queue, qk, step, chosen, seqs)
    }

    fn kv_cache(&self, layout: KvLayout) -> Result<CudaKvCache> {
        CudaKvCache::new(&self.queue, layout)
    }

    fn kv_block_bytes(&self, layout: KvLayout) -> usize {
        block_bytes(layout, self.queue.element())
    }

    fn write_kv(&self, step: &CudaStep, to: KvSlots<'_, CudaKvCache>, kv: [&CudaTensor; 2]) -> Result<()> {
        check::layer("write_kv", to.layer, to.cache.layout())?;
        check::write_kv(kv.map(CudaTensor::dims), to.cache.layout(), to.slots)?;
        let [k, v] = kv.map(CudaTensor::address);
        self.write_rows("write_kv", step, to, KvRows { k, v, stride: kv[0].dims().1 })
    }

    fn write_fused_kv(&self, step: &CudaStep, to: KvSlots<'_, CudaKvCache>, kv: &CudaTensor) -> Result<()> {
        let op = "write_fused_kv";
        check::layer(op, to.layer, to.cache.layout())?;
        let (n_tokens, width) = (kv.dims().0, check::divides(op, "kv width", 2, kv.dims().1)?);
        check::write_kv([(n_tokens, width); 2], to.cache.layout(), to.slots)?;
        let k = kv.address();
        let v = k + (width * self.queue.element().size()) as u64;
        self.write_rows(op, step, to, KvRows { k, v, stride: 2 * width })
    }

    fn write_fused_qkv(
        &self,
        step: &CudaStep,
        to: KvSlots<'_, CudaKvCache>,
        qkv: FusedQkv<'_, CudaTensor>,
    ) -> Result<CudaTensor> {
        let op = "write_fused_qkv";
        let FusedQkv { rows, shape, rotation } = qkv;
        let ((n_tokens, _), [width, kv_width]) = (rows.dims(), shape.widths());
        check::fused_qkv(op, rows.dims(), shape, rotation)?;
        check::layer(op, to.layer, to.cache.layout())?;
        check::same_heads(op, to.cache.layout(), shape)?;
        check::write_kv([(n_tokens, kv_width); 2], to.cache.layout(), to.slots)?;
        let q = self.tensor(op, (n_tokens, width))?;
        let rotation = rotation.map(|rotation| step.rotation(op, rotation)).transpose()?;
        let rows = FusedRows { q: q.address(), rows: rows.address(), n_heads: shape.n_heads, rotation };
        let slots = self.slots(op, step, &to)?;
        to.cache.write_fused(op, &self.queue, slots, rows)?;
        Ok(q)
    }

    fn copy_blocks(&self, cache: &mut CudaKvCache, pairs: &[(u32, u32)]) -> Result<()> {
        cache.copy(&self.queue, pairs)
    }

    fn host_kv_cache(&self, layout: KvLayout) -> Result<CudaHostKvCache> {
        CudaHostKvCache::new(self.queue.element(), layout)
    }

    fn swap_out(&self, device: &CudaKvCache, host: &mut CudaHostKvCache, pairs: &[(u32, u32)]) -> Result<()> {
        host.take(&self.queue, device, pairs)
    }

    fn swap_in(&self, host: &CudaHostKvCache, device: &mut CudaKvCache, pairs: &[(u32, u32)]) -> Result<()> {
        host.give(&self.queue, device, pairs)
    }

    fn paged_attention(
        &self,
        step: &CudaStep,
        q: &CudaTensor,
        kv: KvLayer<'_, CudaKvCache, CudaBias, CudaTensor>,
        shape: AttentionShape,
    ) -> Result<CudaTensor> {
        let op = "paged_attention";
        check::layer(op, kv.layer, kv.cache.layout())?;
        let KvLayer { seqs, mask, bias, .. } = kv;
        let bias = bias.dims(CudaBias::dims, CudaTensor::dims);
        check::paged(q.dims(), kv.cache.layout(), shape, Attended { seqs, mask, bias })?;
        paged(&self.queue, step, q, kv, shape)
    }

    fn state_cache(&self, layout: StateLayout) -> Result<CudaStateCache> {
        CudaStateCache::new(&self.queue, layout)
    }

    fn state_slot_bytes(&self, layout: StateLayout) -> usize {
        layout.slot_bytes()
    }

    fn copy_states(&self, cache: &mut CudaStateCache, pairs: &[(u32, u32)]) -> Result<()> {
        cache.copy(&self.queue, pairs)
    }

    fn reset_states(&self, cache: &mut CudaStateCache, slots: &[u32]) -> Result<()> {
        cache.reset(&self.queue, slots)
    }

    fn causal_conv(
        &self,
        step: &CudaStep,
        at: StateSlots<'_, CudaStateCache>,
        rows: ConvRows<'_, CudaTensor, CudaCausalConv>,
    ) -> Result<CudaTensor> {
        let ConvRows { x, taps: w, activation: act } = rows;
        check::causal_conv(x.dims(), w.taps(), at.cache.at(at.layer, at.seqs))?;
        recurrent::causal_conv(&self.queue, &self.states("causal_conv", step, &at)?, (x, w), act)
    }

    fn gated_delta_rule(
        &self,
        step: &CudaStep,
        at: StateSlots<'_, CudaStateCache>,
        rows: DeltaRows<'_, CudaTensor>,
        decay: &CudaDecay,
    ) -> Result<CudaTensor> {
        let (op, given) = ("gated_delta_rule", [rows.qkv, rows.beta_decay].map(CudaTensor::dims));
        let heads = [rows.n_key_heads, decay.n_heads()];
        let out = check::gated_delta_rule(given, heads, at.cache.at(at.layer, at.seqs))?;
        recurrent::gated_delta_rule(&self.queue, &self.states(op, step, &at)?, (rows, decay), out)
    }

    fn captures(&self) -> bool {
        true
    }

    fn capture<E: From<KernelError>>(
        &self,
        inputs: ForwardInputs,
        forward: &mut Forward<'_, Self, E>,
    ) -> Result<Box<Captured<Self>>, E> {
        graph::capture(&self.queue, inputs, &mut |queue, step, features| {
            forward(&Self { queue: Arc::new(queue), ..self.clone() }, step, features)
        })
    }
}

/// Sequences, as far as checks look at them.
fn attended(seqs: &Varlen<'_, CudaBias, CudaTensor>) -> Attended<Sequences> {
    let Varlen { seqs, mask, bias } = *seqs;
    Attended { seqs, mask, bias: bias.dims(CudaBias::dims, CudaTensor::dims) }
}

/// Windows of a convolution as kernels have them.
fn windows(conv: Conv2d, out: [usize; 2]) -> Windows {
    let words = |pair: [usize; 2]| pair.map(|n| n as u32);
    Windows {
        n_images: conv.n_images as u32,
        size: words(conv.size),
        kernel: words(conv.kernel),
        stride: words(conv.stride),
        padding: words(conv.padding),
        out: words(out),
    }
}
