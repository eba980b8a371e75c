//! Recurrent states on a device: their cache, and the launches of the ops over them.

use super::arguments::{DeltaHeads, States};
use super::memory::Fixed;
use super::queue::{Argument, Launch, Queue, as_bytes};
use super::rows::activation_number;
use super::tensor::{CudaStep, CudaTensor};
use crate::check::{self, Dims, StatesAt};
use crate::ops::{Activation, DeltaRows, RecurrentSequences, Result, StateLayout, StateSlots, WeightView};
use crate::stored;

/// A cache of recurrent states on a device, f32: for each slot its layers, for each of them the rows of a convolution and then the
/// matrices of heads, `[n_heads, key_dim, value_dim]`.
#[derive(Debug)]
pub struct CudaStateCache {
    layout: StateLayout,
    memory: Fixed,
}

/// Taps of a causal convolution, f32: `[kernel, channels]`, and `[channels]`.
#[derive(Debug)]
pub struct CudaCausalConv {
    channels: usize,
    kernel: usize,
    weight: Fixed,
    bias: Option<Fixed>,
}

/// Decays of the heads of the gated delta rule, f32: `−exp(a_log)`, then `dt_bias`, `[2, n_heads]`.
#[derive(Debug)]
pub struct CudaDecay {
    n_heads: usize,
    values: Fixed,
}

impl CudaStateCache {
    /// Zeros.
    pub(super) fn new(queue: &Queue, layout: StateLayout) -> Result<Self> {
        let op = "state_cache";
        let n_bytes = check::state_layout(layout)? * size_of::<f32>();
        let memory = Fixed::new(op, queue.device(), n_bytes)?;
        queue.fill(op, memory.address(), 0, n_bytes)?;
        Ok(Self { layout, memory })
    }

    /// The states that an op is given, for its checks.
    pub(super) fn at(&self, layer: usize, seqs: RecurrentSequences) -> StatesAt {
        StatesAt { layout: self.layout, layer, seqs }
    }

    fn slot(&self, slot: u32) -> u64 {
        self.memory.address() + (slot as usize * self.layout.slot_bytes()) as u64
    }

    /// Copies whole slots, one pair after the other.
    pub(super) fn copy(&mut self, queue: &Queue, pairs: &[(u32, u32)]) -> Result<()> {
        check::copy_states(self.layout, pairs)?;
        let differing = pairs.iter().filter(|(from, to)| from != to);
        differing.into_iter().try_for_each(|&(from, to)| {
            queue.copy("copy_states", self.slot(from), self.slot(to), self.layout.slot_bytes())
        })
    }

    /// Zeros in whole slots.
    pub(super) fn reset(&mut self, queue: &Queue, slots: &[u32]) -> Result<()> {
        check::reset_states(self.layout, slots)?;
        slots
            .iter()
            .try_for_each(|&slot| queue.fill("reset_states", self.slot(slot), 0, self.layout.slot_bytes()))
    }
}

impl CudaCausalConv {
    /// Takes a stored convolution.
    pub(super) fn load(queue: &Queue, weight: WeightView<'_>, bias: Option<WeightView<'_>>) -> Result<Self> {
        let (op, taps) = ("load_causal_conv", stored::causal_taps(weight, bias)?);
        let fixed = |values: &[f32]| queue.fixed(op, as_bytes(values));
        let bias = taps.bias.as_deref().map(fixed).transpose()?;
        Ok(Self { channels: taps.channels, kernel: taps.kernel[1], weight: fixed(&taps.weight)?, bias })
    }

    /// Kernel and channels.
    pub(super) fn taps(&self) -> [usize; 2] {
        [self.kernel, self.channels]
    }
}

impl CudaDecay {
    /// Takes stored decays.
    pub(super) fn load(queue: &Queue, a_log: WeightView<'_>, dt_bias: WeightView<'_>) -> Result<Self> {
        let stored::Decays { rates, dt_bias } = stored::Decays::new(a_log, dt_bias)?;
        let n_heads = rates.len();
        let values = queue.fixed("load_decay", as_bytes(&[rates, dt_bias].concat()))?;
        Ok(Self { n_heads, values })
    }

    /// Heads.
    pub(super) fn n_heads(&self) -> usize {
        self.n_heads
    }
}

/// Rows of a sequence that a block of the convolution has, as `recurrent.cu` counts them.
const CONV_ROWS: usize = 64;

/// Columns of a head's state that a block of the delta rule has.
const COLUMNS: usize = 32;

/// Threads of a block of either.
const THREADS: u32 = 256;

/// States of a layer and the sequences that have them, which an op has checked.
pub(super) struct StepStates {
    layout: StateLayout,
    states: States,
    n_seqs: usize,
    max_seqlen_q: usize,
}

impl StepStates {
    /// Those of a step, whose slots every replay of a captured forward must find in the cache too.
    pub(super) fn of(
        op: &'static str,
        queue: &Queue,
        step: &CudaStep,
        at: &StateSlots<'_, CudaStateCache>,
    ) -> Result<Self> {
        let (layout, seqs) = (at.cache.layout, at.seqs);
        let [query_start, slots] = step.recurrent(op, seqs)?;
        if let Some(recording) = queue.recording() {
            let [_, words] = seqs.words();
            recording.limit(words.start, layout.n_slots);
        }
        let layer = at.layer * layout.layer_values() * size_of::<f32>();
        let states = States {
            values: at.cache.memory.address() + layer as u64,
            query_start,
            slots,
            slot_stride: layout.slot_values() as u64,
            n_conv: layout.conv_values() as u32,
            gap: 0,
        };
        Ok(Self { layout, states, n_seqs: seqs.n_seqs(), max_seqlen_q: seqs.max_seqlen_q })
    }
}

/// A causal convolution of each channel: `[n_tokens, channels]`.
pub(super) fn causal_conv(
    queue: &Queue,
    at: &StepStates,
    (x, w): (&CudaTensor, &CudaCausalConv),
    act: Activation,
) -> Result<CudaTensor> {
    let op = "causal_conv";
    let y = CudaTensor::new(op, queue, x.dims())?;
    if y.n_values() == 0 {
        return Ok(y);
    }
    let grid = [w.channels.div_ceil(THREADS as usize), at.max_seqlen_q.div_ceil(CONV_ROWS), at.n_seqs];
    let function = queue.kernel(queue.device().kernels.causal_conv);
    let (bias, act) = (w.bias.as_ref().map_or(0, Fixed::address), activation_number(act));
    let [channels, kernel] = [w.channels, w.kernel].map(|n| n as u32);
    let arguments: [&dyn Argument; 8] =
        [&y.address(), &x.address(), &w.weight.address(), &bias, &at.states, &act, &channels, &kernel];
    queue.launch(op, function, Launch { grid, threads: THREADS, shared_bytes: 0 }, arguments)?;
    Ok(y)
}

/// The gated delta rule: `[n_tokens, n_heads · value_dim]`.
pub(super) fn gated_delta_rule(
    queue: &Queue,
    at: &StepStates,
    (rows, decay): (DeltaRows<'_, CudaTensor>, &CudaDecay),
    out: Dims,
) -> Result<CudaTensor> {
    let op = "gated_delta_rule";
    let y = CudaTensor::new(op, queue, out)?;
    if y.n_values() == 0 {
        return Ok(y);
    }
    let StateLayout { n_heads, key_dim, value_dim, .. } = at.layout;
    let [of_heads, n_key_heads, key_dim, of_values] =
        [n_heads, rows.n_key_heads, key_dim, value_dim].map(|n| n as u32);
    let decay = decay.values.address();
    let heads = DeltaHeads { decay, n_heads: of_heads, n_key_heads, key_dim, value_dim: of_values };
    let grid = [value_dim.div_ceil(COLUMNS), n_heads, at.n_seqs];
    let function = queue.kernel(queue.device().kernels.gated_delta_rule);
    let (qkv, gates) = (rows.qkv.address(), rows.beta_decay.address());
    let arguments: [&dyn Argument; 5] = [&y.address(), &qkv, &gates, &at.states, &heads];
    queue.launch(op, function, Launch { grid, threads: THREADS, shared_bytes: 0 }, arguments)?;
    Ok(y)
}
