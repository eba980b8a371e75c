//! A back end that adds up the weights it is given and computes nothing, like torch's meta device.
//!
//! A stage that is loaded on it goes through all of its loading code without touching a weight: missing tensors are
//! errors, and memory is added up. Sizes are those of `kernels::cpu`: linear layers in panels of 32 outputs, in the
//! precision; tables as stored, or in bf16 or int8, or as the layer that gives logits; the rest in f32.

use parking_lot::Mutex;
use std::sync::Arc;
use triptych_core::EncodedRows;
use triptych_kernels::cpu::{is_table_of_logits, table_bytes};
use triptych_kernels::ops::*;
use triptych_kernels::{CpuBackend, CpuConfig, Precision};

/// Outputs of a panel of a linear layer.
const PANEL: usize = 32;

/// Sums over the weights that were loaded so far. Clones share one sum.
#[derive(Clone)]
pub struct FootprintBackend {
    footprint: Arc<Mutex<Footprint>>,
    precision: Precision,
    // For the sizes of KV blocks.
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
        Ok(Self { footprint: Arc::default(), precision, cpu })
    }

    /// The sums so far.
    pub fn footprint(&self) -> Footprint {
        *self.footprint.lock()
    }

    fn add(&self, n_elements: usize, n_bytes: usize) {
        let mut footprint = self.footprint.lock();
        footprint.n_elements += n_elements;
        footprint.n_bytes += n_bytes;
    }

    /// Adds a linear layer.
    fn linear(&self, precision: Precision, parts: &[LinearPart<'_>]) -> Result<()> {
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
        Ok(())
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
    type Tensor = ();
    type Linear = ();
    type Experts = ();
    type Table = ();
    type Norm = ();
    type Depthwise = ();
    type Bias = ();
    type CausalConv = ();
    type Decay = ();
    type StateCache = ();
    type KvCache = ();
    type HostKvCache = ();
    type Step = ();
    type Pending = std::convert::Infallible;

    fn name(&self) -> &'static str {
        "footprint"
    }
    fn for_encoders(&self) -> Self {
        Self { precision: self.precision.of_encoders(), ..self.clone() }
    }
    fn load_linear(&self, parts: &[LinearPart<'_>]) -> Result<()> {
        self.linear(self.precision, parts)
    }
    fn load_logits(&self, parts: &[LinearPart<'_>]) -> Result<()> {
        // Logits are kept as encoders' layers are.
        self.linear(self.precision.of_encoders(), parts)
    }
    fn load_router(&self, router: LinearPart<'_>) -> Result<()> {
        self.linear(self.precision.of_routers(), &[router])
    }
    fn load_experts(&self, _: Vec<ExpertLayers<()>>) -> Result<()> {
        Ok(())
    }
    fn load_table(&self, table: WeightView<'_>, _: f32) -> Result<()> {
        let n = n_elements(table);
        let width = table.shape.last().copied().unwrap_or_default();
        let n_rows = n.checked_div(width).unwrap_or_default();
        self.add(n, table_bytes(self.precision, table.dtype, [n_rows, width]));
        Ok(())
    }
    fn load_tied(&self, part: LinearPart<'_>, scale: f32) -> Result<((), ())> {
        self.load_logits(&[part])?;
        match is_table_of_logits(self.precision, &part) {
            true => self.add(n_elements(part.weight), 0),
            false => self.load_table(part.weight, scale)?,
        }
        Ok(((), ()))
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
    fn dims(&self, _: &()) -> (usize, usize) {
        (0, 0)
    }
    fn stage(&self, _: StageBuilder) -> Result<()> {
        refuse("stage")
    }
    fn upload(&self, _: Vec<f32>, _: usize, _: usize) -> Result<()> {
        refuse("upload")
    }
    fn upload_rows(&self, _: &[EncodedRows<'_>]) -> Result<()> {
        refuse("upload_rows")
    }
    fn download(&self, _: &()) -> Result<Vec<f32>> {
        refuse("download")
    }
    fn embed(&self, _: &(), _: &(), _: Indices) -> Result<()> {
        refuse("embed")
    }
    fn embed_weighted(&self, _: &(), _: &(), _: WeightedRows) -> Result<()> {
        refuse("embed_weighted")
    }
    fn gather_rows(&self, _: &(), _: &(), _: Indices) -> Result<()> {
        refuse("gather_rows")
    }
    fn scatter_rows(&self, _: &(), _: &mut (), _: Indices, _: &()) -> Result<()> {
        refuse("scatter_rows")
    }
    fn columns(&self, _: &(), _: usize, _: usize) -> Result<()> {
        refuse("columns")
    }
    fn merge_rows(&self, _: (), _: usize) -> Result<()> {
        refuse("merge_rows")
    }
    fn split_rows(&self, _: (), _: usize) -> Result<()> {
        refuse("split_rows")
    }
    fn transpose(&self, _: &(), _: usize) -> Result<()> {
        refuse("transpose")
    }
    fn linear(&self, _: &(), _: &(), _: Activation, _: Option<&()>) -> Result<()> {
        refuse("linear")
    }
    fn norm(&self, _: &(), _: &()) -> Result<()> {
        refuse("norm")
    }
    fn add(&self, _: &mut (), _: &()) -> Result<()> {
        refuse("add")
    }
    fn softcap(&self, _: &mut (), _: f32) -> Result<()> {
        refuse("softcap")
    }
    fn gate(&self, _: &(), _: Activation) -> Result<()> {
        refuse("gate")
    }
    fn multiply_gated(&self, _: &mut (), _: &(), _: Activation) -> Result<()> {
        refuse("multiply_gated")
    }
    fn fused_experts(&self, _: &(), _: Routed<'_, ()>) -> Result<()> {
        refuse("fused_experts")
    }
    fn group_norm(&self, _: &(), _: &(), _: &(), _: Offsets) -> Result<()> {
        refuse("group_norm")
    }
    fn rope(&self, _: &(), _: &mut (), _: RopeShape, _: Angles) -> Result<()> {
        refuse("rope")
    }
    fn unfold(&self, _: &(), _: Unfold) -> Result<()> {
        refuse("unfold")
    }
    fn unfold2d(&self, _: &(), _: Conv2d) -> Result<()> {
        refuse("unfold2d")
    }
    fn depthwise2d(&self, _: &(), _: &(), _: Conv2d) -> Result<()> {
        refuse("depthwise2d")
    }
    fn attention(&self, _: &(), _: Qkv<'_, ()>, _: AttentionShape, _: Varlen<'_, (), ()>) -> Result<()> {
        refuse("attention")
    }
    fn attention_weights(
        &self,
        _: &(),
        _: [&(); 2],
        _: ChosenHeads,
        _: Varlen<'_, (), ()>,
    ) -> Result<Vec<f32>> {
        refuse("attention_weights")
    }
    fn write_kv(&self, _: &(), _: KvSlots<'_, ()>, _: [&(); 2]) -> Result<()> {
        refuse("write_kv")
    }
    fn copy_states(&self, _: &mut (), _: &[(u32, u32)]) -> Result<()> {
        refuse("copy_states")
    }
    fn reset_states(&self, _: &mut (), _: &[u32]) -> Result<()> {
        refuse("reset_states")
    }
    fn causal_conv(&self, _: &(), _: StateSlots<'_, ()>, _: ConvRows<'_, (), ()>) -> Result<()> {
        refuse("causal_conv")
    }
    fn gated_delta_rule(&self, _: &(), _: StateSlots<'_, ()>, _: DeltaRows<'_, ()>, _: &()) -> Result<()> {
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
    fn paged_attention(&self, _: &(), _: &(), _: KvLayer<'_, (), (), ()>, _: AttentionShape) -> Result<()> {
        refuse("paged_attention")
    }
}
