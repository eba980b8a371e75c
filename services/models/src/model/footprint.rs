//! A back end that adds up the weights it is given and computes nothing, like torch's meta device.
//!
//! A stage that is loaded on it goes through all of its loading code without touching a weight: missing tensors are
//! errors, and memory is added up. Sizes are those of `kernels::cpu`: linear layers in panels of 32 outputs, in the
//! precision; tables as stored, or in bf16 or int8, or as the layer that gives logits; the rest in f32.
//!
//! A forward of an encoder runs on it too, over tensors that are sizes alone ([`tensors`]): the most memory that it would have at
//! once. Ops of decoders' caches are refused.

mod tensors;

use parking_lot::Mutex;
use std::sync::Arc;
use triptych_core::EncodedRows;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_kernels::cpu::{is_table_of_logits, table_bytes};
use triptych_kernels::ops::*;
use triptych_kernels::{CpuBackend, CpuConfig, Precision};

use tensors::{Activations, HeldBytes, SizedTensor};

/// Outputs of a panel of a linear layer.
const PANEL: usize = 32;

/// Sums over the weights that were loaded so far. Clones share one sum.
#[derive(Clone)]
pub struct FootprintBackend {
    footprint: Arc<Mutex<Footprint>>,
    activations: Activations,
    precision: Precision,
    // For the sizes of KV blocks and of what ops take.
    cpu: CpuBackend,
}

/// A sum over weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Elements, counted once for each time they were loaded.
    pub n_elements: usize,
    /// Bytes in memory.
    pub n_bytes: usize,
}

impl FootprintBackend {
    /// Adds up what the CPU back end would hold with `precision`.
    ///
    /// # Errors
    /// As [`CpuBackend::new`].
    pub fn new(precision: Precision) -> Result<Self> {
        let cpu = CpuBackend::new(CpuConfig { threads: 1, precision, ..CpuConfig::default() })?;
        Ok(Self { footprint: Arc::default(), activations: Activations::default(), precision, cpu })
    }

    /// The sums so far.
    pub fn footprint(&self) -> Footprint {
        *self.footprint.lock()
    }

    /// The most bytes that forwards had at once so far, their results included.
    pub fn activation_bytes(&self) -> usize {
        self.activations.most()
    }

    /// Forgets the forwards so far, whose results are dropped.
    pub fn restart(&self) {
        self.activations.take_back();
        self.activations.restart();
    }

    /// Counts memory that is taken beside the results of a forward.
    pub fn hold_briefly(&self, n_bytes: usize) {
        self.activations.scratch(n_bytes);
    }

    /// The results of forwards so far are dropped.
    pub fn drop_results(&self) {
        self.activations.take_back();
    }

    fn add(&self, n_elements: usize, n_bytes: usize) {
        let mut footprint = self.footprint.lock();
        footprint.n_elements += n_elements;
        footprint.n_bytes += n_bytes;
    }

    /// Adds a linear layer.
    fn linear(&self, precision: Precision, parts: &[LinearPart<'_>]) -> Result<[usize; 2]> {
        let n_out: usize = parts.iter().filter_map(|p| p.weight.shape.first()).sum();
        let n_in: usize = parts.first().map_or(0, |p| p.weight.shape.iter().skip(1).product());
        let padded = n_out.next_multiple_of(PANEL);
        let weights = match precision {
            Precision::F32 => padded * n_in * 4,
            // Inputs are interleaved in pairs.
            Precision::Bf16 => padded * n_in.next_multiple_of(2) * 2,
            // Inputs are interleaved in fours; each output has a scale and a sum.
            Precision::Int8 => padded * (n_in.next_multiple_of(4) + 8),
            // Groups of 64 inputs have two scales; each output has a sum.
            Precision::Int4 => padded * (n_in.div_ceil(64) * 36 + 4),
        };
        let bias = if parts.iter().any(|p| p.bias.is_some()) { padded * size_of::<f32>() } else { 0 };
        let views = parts.iter().flat_map(|p| [Some(p.weight), p.bias]).flatten();
        self.add(views.map(n_elements).sum(), weights + bias);
        Ok([n_in, n_out])
    }

    /// Attention over keys of `[n_seqs, n_keys]` in all, with queries of so many rows and columns.
    fn attend(
        &self,
        queries: (usize, usize),
        shape: AttentionShape,
        seqs: Varlen<'_, (), SizedTensor>,
    ) -> SizedTensor {
        let [_, keys] = seqs.seqs.offsets();
        let (n_seqs, n_keys) = (keys.n_seqs().max(1), keys.n_rows());
        let n_blocks = n_seqs * n_keys.div_ceil(n_seqs).div_ceil(KV_BLOCK_TOKENS);
        let may_centre = self.cpu.attention_precision() == Precision::Int8
            && matches!(seqs.mask, Mask::Full)
            && shape.softcap.is_none();
        let centred = may_centre.then(|| self.activations.result((n_keys, shape.widths()[1])));
        let pages = self.activations.held(self.cpu.attention_scratch([n_blocks, n_keys], shape));
        let attended = self.activations.result((queries.0, shape.widths()[0]));
        drop((pages, centred));
        attended
    }

    /// Adds a tensor that is kept as f32.
    fn wide(&self, values: WeightView<'_>) {
        let n = n_elements(values);
        self.add(n, n * size_of::<f32>());
    }
}

fn n_elements(weight: WeightView<'_>) -> usize {
    weight.shape.iter().product()
}

fn refuse<T>(op: &'static str) -> Result<T> {
    Err(KernelError::Library { op, message: "this back end only adds up sizes".into() })
}

impl Backend for FootprintBackend {
    type Tensor = SizedTensor;
    // `[n_in, n_out]`.
    type Linear = [usize; 2];
    type Experts = ();
    // The width.
    type Table = usize;
    type Norm = ();
    type Depthwise = ();
    type Bias = ();
    type CausalConv = ();
    type Decay = ();
    type StateCache = ();
    type KvCache = ();
    type HostKvCache = ();
    type Step = HeldBytes;
    type Pending = std::convert::Infallible;

    fn name(&self) -> &'static str {
        "footprint"
    }
    fn for_encoders(&self) -> Self {
        Self { precision: self.precision.of_encoders(), cpu: self.cpu.for_encoders(), ..self.clone() }
    }
    fn load_linear(&self, parts: &[LinearPart<'_>]) -> Result<[usize; 2]> {
        self.linear(self.precision, parts)
    }
    fn load_logits(&self, parts: &[LinearPart<'_>]) -> Result<[usize; 2]> {
        // Logits are kept as encoders' layers are.
        self.linear(self.precision.of_encoders(), parts)
    }
    fn load_router(&self, router: LinearPart<'_>) -> Result<[usize; 2]> {
        self.linear(self.precision.of_routers(), &[router])
    }
    fn load_experts(&self, _: Vec<ExpertLayers<[usize; 2]>>) -> Result<()> {
        Ok(())
    }
    fn load_table(&self, table: WeightView<'_>, _: f32) -> Result<usize> {
        let n = n_elements(table);
        let width = table.shape.last().copied().unwrap_or_default();
        let n_rows = n.checked_div(width).unwrap_or_default();
        self.add(n, table_bytes(self.precision, table.dtype, [n_rows, width]));
        Ok(width)
    }
    fn load_tied(&self, part: LinearPart<'_>, scale: f32) -> Result<([usize; 2], usize)> {
        let layer = self.load_logits(&[part])?;
        let width = match is_table_of_logits(self.precision, &part) {
            true => {
                self.add(n_elements(part.weight), 0);
                layer[0]
            }
            false => self.load_table(part.weight, scale)?,
        };
        Ok((layer, width))
    }
    fn load_norm(
        &self,
        _: NormKind,
        scale: WeightView<'_>,
        bias: Option<WeightView<'_>>,
        _: f32,
    ) -> Result<()> {
        self.wide(scale);
        bias.into_iter().for_each(|b| self.wide(b));
        Ok(())
    }
    fn load_depthwise(&self, weight: WeightView<'_>, bias: Option<WeightView<'_>>) -> Result<()> {
        self.wide(weight);
        bias.into_iter().for_each(|b| self.wide(b));
        Ok(())
    }
    fn load_causal_conv(&self, weight: WeightView<'_>, bias: Option<WeightView<'_>>) -> Result<()> {
        self.load_depthwise(weight, bias)
    }
    fn load_decay(&self, a_log: WeightView<'_>, dt_bias: WeightView<'_>) -> Result<()> {
        [a_log, dt_bias].into_iter().for_each(|values| self.wide(values));
        Ok(())
    }
    fn load_bias(&self, bias: StoredBias<'_>) -> Result<()> {
        let n = match bias {
            StoredBias::Relative { table, rule } => {
                let n_heads = table.shape.last().copied().unwrap_or_default();
                n_heads * (2 * rule.max_distance + 1)
            }
            StoredBias::Alibi(slopes) => slopes.len(),
            StoredBias::Tables { dims, .. } => dims.iter().product(),
        };
        // Elements are counted as they are stored: of what is laid out from a table there are many times more.
        self.add(0, n * size_of::<f32>());
        Ok(())
    }
    fn kv_cache(&self, _: KvLayout) -> Result<()> {
        Ok(())
    }
    fn kv_block_bytes(&self, layout: KvLayout) -> usize {
        self.cpu.kv_block_bytes(layout)
    }
    fn state_cache(&self, _: StateLayout) -> Result<()> {
        Ok(())
    }
    fn state_slot_bytes(&self, layout: StateLayout) -> usize {
        self.cpu.state_slot_bytes(layout)
    }
    fn dims(&self, x: &SizedTensor) -> (usize, usize) {
        x.dims()
    }
    fn stage(&self, arrays: StageBuilder) -> Result<HeldBytes> {
        Ok(self.activations.held(arrays.n_bytes()))
    }
    fn upload(&self, _: Vec<f32>, n_tokens: usize, width: usize) -> Result<SizedTensor> {
        Ok(self.activations.fresh((n_tokens, width)))
    }
    fn upload_rows(&self, _: &[EncodedRows<'_>]) -> Result<SizedTensor> {
        refuse("upload_rows")
    }
    fn download(&self, x: &SizedTensor) -> Result<Vec<f32>> {
        let (n_tokens, width) = x.dims();
        Ok(vec![0.0; n_tokens.saturating_mul(width)])
    }
    fn take_values(&self, x: SizedTensor) -> Result<Vec<f32>> {
        let values = self.download(&x);
        self.activations.give_away(x);
        values
    }
    fn embed(&self, _: &HeldBytes, width: &usize, ids: Indices) -> Result<SizedTensor> {
        Ok(self.activations.result((ids.len(), *width)))
    }
    fn embed_weighted(&self, _: &HeldBytes, width: &usize, rows: WeightedRows) -> Result<SizedTensor> {
        Ok(self.activations.result((rows.len(), *width)))
    }
    fn gather_rows(&self, _: &HeldBytes, x: &SizedTensor, rows: Indices) -> Result<SizedTensor> {
        Ok(self.activations.result((rows.len(), x.dims().1)))
    }
    fn scatter_rows(&self, _: &HeldBytes, x: &mut SizedTensor, _: Indices, _: &SizedTensor) -> Result<()> {
        x.own();
        Ok(())
    }
    fn columns(&self, x: &SizedTensor, _: usize, width: usize) -> Result<SizedTensor> {
        Ok(self.activations.result((x.dims().0, width)))
    }
    fn merge_rows(&self, x: SizedTensor, group: usize) -> Result<SizedTensor> {
        let (n_tokens, width) = x.dims();
        Ok(x.reshape((n_tokens / group.max(1), width.saturating_mul(group))))
    }
    fn split_rows(&self, x: SizedTensor, parts: usize) -> Result<SizedTensor> {
        let (n_tokens, width) = x.dims();
        Ok(x.reshape((n_tokens.saturating_mul(parts), width / parts.max(1))))
    }
    fn transpose(&self, x: &SizedTensor, n_seqs: usize) -> Result<SizedTensor> {
        let (n_tokens, width) = x.dims();
        Ok(self.activations.result((n_seqs.saturating_mul(width), n_tokens / n_seqs.max(1))))
    }
    fn linear(
        &self,
        x: &SizedTensor,
        w: &[usize; 2],
        _: Activation,
        _: Option<&SizedTensor>,
    ) -> Result<SizedTensor> {
        let n_tokens = x.dims().0;
        let out = self.activations.result((n_tokens, w[1]));
        self.activations.scratch(self.cpu.linear_scratch(n_tokens, *w));
        Ok(out)
    }
    fn norm(&self, x: &SizedTensor, _: &()) -> Result<SizedTensor> {
        Ok(self.activations.result(x.dims()))
    }
    fn add(&self, x: &mut SizedTensor, _: &SizedTensor) -> Result<()> {
        x.own();
        Ok(())
    }
    fn softcap(&self, x: &mut SizedTensor, _: f32) -> Result<()> {
        x.own();
        Ok(())
    }
    fn gate(&self, x: &SizedTensor, _: Activation) -> Result<SizedTensor> {
        let (n_tokens, width) = x.dims();
        Ok(self.activations.result((n_tokens, width / 2)))
    }
    fn multiply_gated(&self, x: &mut SizedTensor, _: &SizedTensor, _: Activation) -> Result<()> {
        x.own();
        Ok(())
    }
    fn fused_experts(&self, _: &(), _: Routed<'_, SizedTensor>) -> Result<SizedTensor> {
        refuse("fused_experts")
    }
    fn group_norm(&self, _: &HeldBytes, x: &SizedTensor, _: &(), _: Offsets) -> Result<SizedTensor> {
        Ok(self.activations.result(x.dims()))
    }
    fn rope(&self, _: &HeldBytes, x: &mut SizedTensor, _: RopeShape, _: Angles) -> Result<()> {
        x.own();
        Ok(())
    }
    fn unfold(&self, x: &SizedTensor, conv: Unfold) -> Result<SizedTensor> {
        Ok(self.activations.result(conv.dims(x.dims())?))
    }
    fn unfold2d(&self, x: &SizedTensor, conv: Conv2d) -> Result<SizedTensor> {
        Ok(self.activations.result(conv.dims(x.dims())?))
    }
    fn depthwise2d(&self, x: &SizedTensor, _: &(), conv: Conv2d) -> Result<SizedTensor> {
        let (n_rows, _) = conv.dims(x.dims())?;
        Ok(self.activations.result((n_rows, x.dims().1)))
    }
    fn attention(
        &self,
        _: &HeldBytes,
        qkv: Qkv<'_, SizedTensor>,
        shape: AttentionShape,
        seqs: Varlen<'_, (), SizedTensor>,
    ) -> Result<SizedTensor> {
        Ok(self.attend(qkv.q.dims(), shape, seqs))
    }
    fn fused_attention(
        &self,
        _: &HeldBytes,
        qkv: &SizedTensor,
        shape: AttentionShape,
        seqs: Varlen<'_, (), SizedTensor>,
    ) -> Result<SizedTensor> {
        Ok(self.attend(qkv.dims(), shape, seqs))
    }
    fn attention_weights(
        &self,
        _: &HeldBytes,
        _: [&SizedTensor; 2],
        _: ChosenHeads,
        _: Varlen<'_, (), SizedTensor>,
    ) -> Result<Vec<f32>> {
        refuse("attention_weights")
    }
    fn write_kv(&self, _: &HeldBytes, _: KvSlots<'_, ()>, _: [&SizedTensor; 2]) -> Result<()> {
        refuse("write_kv")
    }
    fn copy_states(&self, _: &mut (), _: &[(u32, u32)]) -> Result<()> {
        refuse("copy_states")
    }
    fn reset_states(&self, _: &mut (), _: &[u32]) -> Result<()> {
        refuse("reset_states")
    }
    fn causal_conv(
        &self,
        _: &HeldBytes,
        _: StateSlots<'_, ()>,
        _: ConvRows<'_, SizedTensor, ()>,
    ) -> Result<SizedTensor> {
        refuse("causal_conv")
    }
    fn gated_delta_rule(
        &self,
        _: &HeldBytes,
        _: StateSlots<'_, ()>,
        _: DeltaRows<'_, SizedTensor>,
        _: &(),
    ) -> Result<SizedTensor> {
        refuse("gated_delta_rule")
    }
    fn copy_blocks(&self, _: &mut (), _: &[(u32, u32)]) -> Result<()> {
        refuse("copy_blocks")
    }
    fn host_kv_cache(&self, _: KvLayout) -> Result<()> {
        Ok(())
    }
    fn swap_out(&self, _: &(), _: &mut (), _: &[(u32, u32)]) -> Result<()> {
        refuse("swap_out")
    }
    fn swap_in(&self, _: &(), _: &mut (), _: &[(u32, u32)]) -> Result<()> {
        refuse("swap_in")
    }
    fn paged_attention(
        &self,
        _: &HeldBytes,
        _: &SizedTensor,
        _: KvLayer<'_, (), (), SizedTensor>,
        _: AttentionShape,
    ) -> Result<SizedTensor> {
        refuse("paged_attention")
    }
}
