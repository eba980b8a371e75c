//! Recurrent states: causal convolutions and the gated delta rule from states that are there, and a captured step of both.

use triptych_core::DType;
use triptych_cuda_standin::{Left, Standin};
use triptych_kernels::cuda::{CudaCausalConv, CudaDecay, CudaLinear, CudaStateCache, CudaStep, CudaTensor};
use triptych_kernels::ops::{
    Activation, Backend, Captured, ConvRows, DeltaRows, ForwardInputs, LinearPart, PADDING_SLOT,
    RecurrentSequences, StageBuilder, StateLayout, StateSlots, WeightView,
};
use triptych_kernels::{CudaBackend, CudaConfig, KernelError, Precision};

use crate::cache::address;
use crate::device::{Device, Plain};
use crate::element::{Element, close, elements, values, widened};
use crate::{launch, oracle};

/// `States` of `recurrent.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct States {
    values: u64,
    query_start: u64,
    slots: u64,
    slot_stride: u64,
    n_conv: u32,
    gap: u32,
}

impl Plain for States {}

/// `DeltaHeads` of `recurrent.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Heads {
    decay: u64,
    n_heads: u32,
    n_key_heads: u32,
    key_dim: u32,
    value_dim: u32,
}

impl Plain for Heads {}

/// Lengths and slots of the sequences of a launch: around the rows of a block and the tokens that are prepared at once, none, and
/// padding.
const BATCHES: [&[(usize, u32)]; 4] = [
    &[(1, 0)],
    &[(9, 4), (0, 1), (3, PADDING_SLOT), (8, 2)],
    &[(130, 3), (2, 0), (64, 1)],
    &[(2, PADDING_SLOT), (1, PADDING_SLOT)],
];

const N_SLOTS: usize = 5;

/// Values of states, NaN wherever no sequence of a batch has its state, and offsets and slots of the sequences.
struct Batch {
    states: Vec<f32>,
    starts: Vec<u32>,
    slots: Vec<u32>,
}

impl Batch {
    /// Slots of `stride` values, of which those of `used` are states.
    fn new(of: &[(usize, u32)], stride: usize, used: std::ops::Range<usize>) -> Self {
        let mut states = vec![f32::NAN; N_SLOTS * stride];
        let mut starts = vec![0];
        for (len, slot) in of {
            starts.push(starts[starts.len() - 1] + *len as u32);
            if *slot != PADDING_SLOT {
                let at = *slot as usize * stride;
                states[at + used.start..at + used.end]
                    .copy_from_slice(&values(40 + u64::from(*slot), used.len()));
            }
        }
        Self { states, starts, slots: of.iter().map(|(_, slot)| *slot).collect() }
    }

    fn n_rows(&self) -> usize {
        self.starts[self.starts.len() - 1] as usize
    }

    /// Rows and slot of each sequence that is not padding.
    fn seqs(&self) -> impl Iterator<Item = (std::ops::Range<usize>, usize)> {
        let rows = self.starts.windows(2).map(|at| at[0] as usize..at[1] as usize);
        let all = rows.zip(&self.slots).map(|(rows, slot)| (rows, *slot as usize));
        all.filter(|(_, slot)| *slot < N_SLOTS)
    }
}

/// An error unless states are nearly those expected, and NaN where those are.
fn same_states(what: &str, actual: &[f32], expect: &[f32]) {
    for (i, (a, e)) in actual.iter().zip(expect).enumerate() {
        let near = (a.is_nan() && e.is_nan()) || (a - e).abs() <= 2e-5 * (1.0 + e.abs());
        assert!(near, "{what}: value {i} of the states is {a}, not {e}");
    }
}

fn channels_are_convolved_from_their_last_rows<T: Element>() {
    let device = Device::new(1);
    for (channels, kernel) in [(1, 1), (5, 2), (300, 4), (3, 64)] {
        for (batch, has_bias) in BATCHES.into_iter().zip([true, false].into_iter().cycle()) {
            let kept = kernel - 1;
            let (stride, used) = (kept * channels + 7, 0..kept * channels);
            let mut batch = Batch::new(batch, stride, used);
            let n = batch.n_rows() * channels;
            let (x, weight, bias) = (elements::<T>(1, n), values(2, kernel * channels), values(3, channels));
            let (y, from, states) =
                (device.poisoned::<T>(n), device.upload(&x), device.upload(&batch.states));
            let [starts, slots] = [&batch.starts, &batch.slots].map(|words| device.upload(words));
            let (w, b) = (device.upload(&weight), device.upload(&bias));
            let at = States {
                values: address(&device, &states),
                query_start: address(&device, &starts),
                slots: address(&device, &slots),
                slot_stride: stride as u64,
                n_conv: (kept * channels) as u32,
                gap: 0,
            };
            let grid = [channels.div_ceil(256) as u32, 130_u32.div_ceil(64), batch.slots.len() as u32];
            let (name, silu, none) = (format!("causal_conv_{}", T::NAME), 4_u32, 0_u64);
            let (n_channels, taps) = (channels as u32, kernel as u32);
            if has_bias {
                launch!(device, name, grid, 256, 0; y, from, w, b, at, silu, n_channels, taps);
            } else {
                launch!(device, name, grid, 256, 0; y, from, w, none, at, silu, n_channels, taps);
            }
            let (x, mut expect) = (widened(&x), vec![0.0; n]);
            let seqs: Vec<_> = batch.seqs().collect();
            for (rows, slot) in seqs {
                let state = &mut batch.states[slot * stride..][..kept * channels];
                let mut history = state.to_vec();
                history.extend(&x[rows.start * channels..rows.end * channels]);
                for i in 0..rows.len() * channels {
                    let (t, channel) = (i / channels, i % channels);
                    let term = |tap: usize| {
                        f64::from(history[(t + tap) * channels + channel])
                            * f64::from(weight[tap * channels + channel])
                    };
                    let sum: f64 = (0..kernel).map(term).sum();
                    let sum = sum + if has_bias { f64::from(bias[channel]) } else { 0.0 };
                    expect[rows.start * channels + i] = oracle::activation(Activation::Silu, sum) as f32;
                }
                let last = history.len() - kept * channels;
                state.copy_from_slice(&history[last..]);
            }
            let what = format!("{channels} channels, {kernel} taps, {:?}", batch.slots);
            close(&what, &device.download(&y, n), &expect, T::STEP.max(1e-5));
            same_states(&what, &device.download(&states, batch.states.len()), &batch.states);
        }
    }
    device.finish();
}

/// A head's rows and its state after them, in f64.
struct Head<'a> {
    q: &'a dyn Fn(usize) -> Vec<f32>,
    k: &'a dyn Fn(usize) -> Vec<f32>,
    v: &'a dyn Fn(usize) -> Vec<f32>,
    /// Logit of the weight, and the input of the decay.
    gates: &'a dyn Fn(usize) -> [f32; 2],
    /// Rate and bias of the decay.
    decay: [f32; 2],
}

impl Head<'_> {
    fn walk(&self, rows: std::ops::Range<usize>, state: &mut [f32]) -> Vec<f32> {
        let mut out = Vec::new();
        let mut wide: Vec<f64> = state.iter().map(|value| f64::from(*value)).collect();
        let unit = |x: Vec<f32>| {
            let norm = (x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() + 1e-6).sqrt();
            x.into_iter().map(|x| f64::from(x) / norm).collect::<Vec<f64>>()
        };
        for t in rows {
            let (q, k, v, [b, a]) =
                (unit((self.q)(t)), unit((self.k)(t)), (self.v)(t), (self.gates)(t).map(f64::from));
            let step = (a + f64::from(self.decay[1])).exp().ln_1p();
            let (beta, decay) = (1.0 / (1.0 + (-b).exp()), (f64::from(self.decay[0]) * step).exp());
            wide.iter_mut().for_each(|value| *value *= decay);
            let value_dim = v.len();
            for (column, v) in v.iter().enumerate() {
                let at = |key: usize| key * value_dim + column;
                let known: f64 = k.iter().enumerate().map(|(key, k)| wide[at(key)] * k).sum();
                let delta = beta * (f64::from(*v) - known);
                k.iter().enumerate().for_each(|(key, k)| wide[at(key)] += k * delta);
                let sum: f64 = q.iter().enumerate().map(|(key, q)| wide[at(key)] * q).sum();
                out.push((sum / (k.len() as f64).sqrt()) as f32);
            }
        }
        state.iter_mut().zip(wide).for_each(|(to, value)| *to = value as f32);
        out
    }
}

fn the_delta_rule_goes_on_from_its_states<T: Element>() {
    let device = Device::new(2);
    for (n_key_heads, n_heads, key_dim, value_dim) in
        [(1, 2, 5, 3), (2, 4, 16, 33), (1, 1, 130, 40), (1, 2, 256, 9)]
    {
        for of in BATCHES {
            let (n_conv, matrix) = (11, key_dim * value_dim);
            let stride = n_conv + n_heads * matrix + 3;
            let mut batch = Batch::new(of, stride, n_conv..stride - 3);
            let (n, key_width) = (batch.n_rows(), n_key_heads * key_dim);
            let (width, out) = (2 * key_width + n_heads * value_dim, n_heads * value_dim);
            let qkv = elements::<T>(1, n * width);
            let gates: Vec<T> =
                values(2, n * 2 * n_heads).into_iter().map(|g| T::from_f32(6.0 * g)).collect();
            let decay: Vec<f32> = values(3, 2 * n_heads)
                .iter()
                .enumerate()
                .map(|(i, d)| if i < n_heads { -d.exp() } else { *d })
                .collect();
            let (y, states) = (device.poisoned::<T>(n * out), device.upload(&batch.states));
            let (from, of_gates, d) = (device.upload(&qkv), device.upload(&gates), device.upload(&decay));
            let [starts, slots] = [&batch.starts, &batch.slots].map(|words| device.upload(words));
            let at = States {
                values: address(&device, &states),
                query_start: address(&device, &starts),
                slots: address(&device, &slots),
                slot_stride: stride as u64,
                n_conv: n_conv as u32,
                gap: 0,
            };
            let [of_heads, of_keys, keys, columns] =
                [n_heads, n_key_heads, key_dim, value_dim].map(|n| n as u32);
            let heads = Heads {
                decay: address(&device, &d),
                n_heads: of_heads,
                n_key_heads: of_keys,
                key_dim: keys,
                value_dim: columns,
            };
            let grid = [columns.div_ceil(32), of_heads, batch.slots.len() as u32];
            let name = format!("gated_delta_rule_{}", T::NAME);
            launch!(device, name, grid, 256, 0; y, from, of_gates, at, heads);
            let (qkv, gates, mut expect) = (widened(&qkv), widened(&gates), vec![0.0; n * out]);
            let seqs: Vec<_> = batch.seqs().collect();
            for (rows, slot) in seqs {
                for head in 0..n_heads {
                    let part = |t: usize, first: usize, n: usize| qkv[t * width + first..][..n].to_vec();
                    let key_head = head / (n_heads / n_key_heads) * key_dim;
                    let walked = Head {
                        q: &|t| part(t, key_head, key_dim),
                        k: &|t| part(t, key_width + key_head, key_dim),
                        v: &|t| part(t, 2 * key_width + head * value_dim, value_dim),
                        gates: &|t| [head, n_heads + head].map(|i| gates[t * 2 * n_heads + i]),
                        decay: [decay[head], decay[n_heads + head]],
                    };
                    let state = &mut batch.states[slot * stride + n_conv + head * matrix..][..matrix];
                    let found = walked.walk(rows.clone(), state);
                    for (t, row) in rows.clone().zip(found.chunks(value_dim)) {
                        expect[t * out + head * value_dim..][..value_dim].copy_from_slice(row);
                    }
                }
            }
            let what = format!("{n_key_heads} and {n_heads} heads of {key_dim} and {value_dim}, {of:?}");
            close(&what, &device.download(&y, n * out), &expect, T::STEP.max(2e-5));
            same_states(&what, &device.download(&states, batch.states.len()), &batch.states);
        }
    }
    device.finish();
}

for_each_element!(channels_are_convolved_from_their_last_rows, the_delta_rule_goes_on_from_its_states);

/// Rows of the captured step, and its sequences: padding among them.
const ROWS: usize = 6;
const LAYOUT: StateLayout = StateLayout {
    n_layers: 2,
    n_slots: 4,
    conv_channels: 2 * 8 + 2 * 40,
    conv_kernel: 4,
    n_heads: 2,
    key_dim: 8,
    value_dim: 40,
};

/// A layer of linear attention in a decoder: projections, the convolution, the delta rule, its gate.
struct Model {
    backend: CudaBackend,
    qkv: CudaLinear,
    gates: CudaLinear,
    conv: CudaCausalConv,
    decay: CudaDecay,
}

const WIDTH: usize = 80;

impl Model {
    fn new(device: usize, precision: Precision) -> Self {
        let backend = CudaBackend::new(CudaConfig { device, precision }).expect("a device");
        let bytes = |seed, n| values(seed, n).iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let linear = |seed, n_out: usize| {
            let data = bytes(seed, WIDTH * n_out);
            let view = WeightView { dtype: DType::F32, shape: &[n_out, WIDTH], data: &data };
            backend.load_linear(&[LinearPart::new(view, None)]).expect("a layer")
        };
        let (channels, n_heads) = (LAYOUT.conv_channels, LAYOUT.n_heads);
        let taps = bytes(3, channels * LAYOUT.conv_kernel);
        let shape = [channels, 1, LAYOUT.conv_kernel];
        let taps = WeightView { dtype: DType::F32, shape: &shape, data: &taps };
        let [a_log, dt_bias] = [4, 5].map(|seed| bytes(seed, n_heads));
        let of_heads = |data| WeightView { dtype: DType::F32, shape: &[LAYOUT.n_heads], data };
        Self {
            qkv: linear(1, channels),
            gates: linear(2, 2 * n_heads),
            conv: backend.load_causal_conv(taps, None).expect("taps"),
            decay: backend.load_decay(of_heads(&a_log), of_heads(&dt_bias)).expect("decays"),
            backend,
        }
    }

    fn forward(
        &self,
        (backend, step): (&CudaBackend, &CudaStep),
        x: &CudaTensor,
        (cache, seqs): (&mut CudaStateCache, RecurrentSequences),
    ) -> Result<CudaTensor, KernelError> {
        let none = Activation::None;
        let rows = backend.linear(x, &self.qkv, none, None)?;
        let at = StateSlots { cache: &mut *cache, layer: 1, seqs };
        let qkv = backend.causal_conv(
            step,
            at,
            ConvRows { x: &rows, taps: &self.conv, activation: Activation::Silu },
        )?;
        let beta_decay = backend.linear(x, &self.gates, none, None)?;
        let rows = DeltaRows { qkv: &qkv, beta_decay: &beta_decay, n_key_heads: 1 };
        let mut y =
            backend.gated_delta_rule(step, StateSlots { cache, layer: 1, seqs }, rows, &self.decay)?;
        backend.multiply_gated(&mut y, x, Activation::Sigmoid)?;
        Ok(y)
    }

    /// A step as it is: rows of sequences of one token, by their slots.
    fn eager(&self, slots: &[u32], seed: u64, cache: &mut CudaStateCache) -> Vec<f32> {
        let starts: Vec<u32> = (0..=slots.len() as u32).collect();
        let mut builder = StageBuilder::new();
        let seqs = builder.recurrent(&starts, slots).expect("sequences");
        let step = self.backend.stage(builder).expect("a step");
        let x = self.backend.upload(features(seed, slots.len()), slots.len(), WIDTH).expect("rows");
        let y = self.forward((&self.backend, &step), &x, (cache, seqs)).expect("a forward");
        self.backend.download(&y).expect("values")
    }

    fn capture(&self, cache: &mut CudaStateCache) -> Box<Captured<CudaBackend>> {
        let (inputs, seqs) = inputs(&[], 1).expect("padding");
        let captured = self
            .backend
            .capture(inputs, &mut |backend, step, x| self.forward((backend, step), x, (&mut *cache, seqs)));
        captured.expect("a graph")
    }
}

fn features(seed: u64, n: usize) -> Vec<f32> {
    values(100 + seed, n * WIDTH)
}

/// Inputs of a step of sequences of one row, padded to the captured shape.
fn inputs(slots: &[u32], seed: u64) -> Result<(ForwardInputs, RecurrentSequences), KernelError> {
    let mut arrays = StageBuilder::with_rooms(RecurrentSequences::rooms(ROWS).to_vec());
    let starts: Vec<u32> = (0..=ROWS as u32).collect();
    let padded: Vec<u32> = slots.iter().copied().chain(std::iter::repeat(PADDING_SLOT)).take(ROWS).collect();
    let seqs = arrays.bounded_recurrent(&starts, &padded, 1)?;
    let mut features = features(seed, slots.len());
    features.resize(ROWS * WIDTH, f32::NAN);
    Ok((ForwardInputs { arrays, features, dims: (ROWS, WIDTH) }, seqs))
}

#[test]
fn a_replayed_step_over_states_is_the_eager_step_to_the_bit() {
    for (i, precision) in [Precision::F32, Precision::Bf16, Precision::Int8].into_iter().enumerate() {
        let device = Standin::get().new_device(40 + i as u64);
        let model = Model::new(device, precision);
        let [mut replayed, mut eager] = [(); 2].map(|()| model.backend.state_cache(LAYOUT).expect("a cache"));
        // A state is there before the capture, and the run before it touches none.
        for cache in [&mut replayed, &mut eager] {
            model.eager(&[2], 7, cache);
        }
        let mut graph = model.capture(&mut replayed);
        for (step, slots) in [&[2][..], &[3, 0, 2], &[1], &[], &[0, 1, 2, 3], &[2, 1]].into_iter().enumerate()
        {
            let seed = step as u64;
            let (inputs, _) = inputs(slots, seed).expect("a step");
            let rows = graph.replay(inputs, slots.len()).expect("a replay");
            assert_eq!(rows, model.eager(slots, seed, &mut eager), "{precision:?} {slots:?}");
        }
        // States of both caches are the same, those of slots that the last steps left out too.
        let after = [&mut replayed, &mut eager].map(|cache| model.eager(&[0, 1, 2, 3], 9, cache));
        assert_eq!(after[0], after[1], "{precision:?}");
        drop((graph, model, replayed, eager));
        assert_eq!(Standin::get().left(device), Left::default(), "{precision:?}");
    }
}

#[test]
fn padding_of_a_captured_step_gives_zeros() {
    let model = Model::new(Standin::get().new_device(50), Precision::Bf16);
    let mut cache = model.backend.state_cache(LAYOUT).expect("a cache");
    let mut graph = model.capture(&mut cache);
    // Where a row is not a number its product with zeros is none either: only rows of the two ops are zeros.
    let (mut inputs, _) = inputs(&[1], 3).expect("a step");
    inputs.features[WIDTH..].fill(1.0);
    let rows = graph.replay(inputs, ROWS).expect("a replay");
    let (real, padding) = rows.split_at(WIDTH);
    assert!(real.iter().any(|value| *value != 0.0));
    assert!(padding.iter().all(|value| *value == 0.0), "{padding:?}");
}

#[test]
fn replays_with_slots_or_rows_that_the_launches_do_not_allow_are_refused() {
    let model = Model::new(Standin::get().new_device(51), Precision::F32);
    let mut cache = model.backend.state_cache(LAYOUT).expect("a cache");
    let mut graph = model.capture(&mut cache);
    let good = graph.replay(inputs(&[3], 1).expect("a step").0, 1).expect("a replay");
    let beyond = graph.replay(inputs(&[LAYOUT.n_slots as u32], 1).expect("a step").0, 1);
    assert!(matches!(beyond, Err(KernelError::Index { index: 4, len: 4, .. })), "{beyond:?}");
    // Two rows of one sequence.
    let mut arrays = StageBuilder::with_rooms(RecurrentSequences::rooms(ROWS).to_vec());
    let mut slots = [PADDING_SLOT; ROWS];
    slots[0] = 3;
    arrays.bounded_recurrent(&[0, 2, 2, 3, 4, 5, 6], &slots, 2).expect("sequences");
    let long = ForwardInputs { arrays, features: vec![0.0; ROWS * WIDTH], dims: (ROWS, WIDTH) };
    let long = graph.replay(long, 1);
    assert!(matches!(long, Err(KernelError::Shape { what: "queries of the longest", .. })), "{long:?}");
    // What was refused changed no state: the slot goes on from one step.
    let next = graph.replay(inputs(&[3], 2).expect("a step").0, 1).expect("a replay");
    let mut fresh = model.backend.state_cache(LAYOUT).expect("a cache");
    assert_eq!(good, model.eager(&[0], 1, &mut fresh));
    assert_eq!(next, model.eager(&[0], 2, &mut fresh));
}
