//! Recurrent states: causal convolutions and the gated delta rule, over slots of a cache.

use std::ops::Range;

use triptych_kernels::KernelError;
use triptych_kernels::ops::{
    Activation, Backend, ConvRows, DeltaRows, PADDING_SLOT, RecurrentSequences, StateLayout, StateSlots,
};

use crate::oracle;
use crate::sequences::offsets;
use crate::subject::{Stored, Subject, stage, values};

/// Error of sums in f32, relative to one plus the value.
const SUMS: f32 = 2e-5;

/// A layer with a convolution of its queries, keys and values, and the weights that it was loaded from.
struct Layer {
    layout: StateLayout,
    n_key_heads: usize,
    /// `[channels, kernel]`.
    taps: Vec<f32>,
    bias: Option<Vec<f32>>,
    /// `[n_heads]` each.
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
}

/// The same on a back end.
struct Loaded<B: Backend> {
    conv: B::CausalConv,
    decay: B::Decay,
}

/// Sequences of a step: slots, and rows of each in a longer run of rows.
type Batch<'a> = &'a [(u32, Range<usize>)];

impl Layer {
    fn new(n_key_heads: usize, n_heads: usize, key_dim: usize, value_dim: usize) -> Self {
        let conv_channels = 2 * n_key_heads * key_dim + n_heads * value_dim;
        Self {
            layout: StateLayout {
                n_layers: 2,
                n_slots: 5,
                conv_channels,
                conv_kernel: 4,
                n_heads,
                key_dim,
                value_dim,
            },
            n_key_heads,
            taps: values(11, 4 * conv_channels),
            bias: None,
            a_log: values(12, n_heads),
            dt_bias: values(13, n_heads),
        }
    }

    fn with_conv(channels: usize, kernel: usize, bias: bool) -> Self {
        let layout =
            StateLayout { conv_channels: channels, conv_kernel: kernel, ..Self::new(1, 1, 1, 1).layout };
        let bias = bias.then(|| values(14, channels));
        Self { layout, taps: values(11, kernel * channels), bias, ..Self::new(1, 1, 1, 1) }
    }

    fn load<B: Backend>(&self, subject: &Subject<B>) -> Loaded<B> {
        let StateLayout { conv_channels, conv_kernel, n_heads, .. } = self.layout;
        let taps = Stored::f32(&self.taps, &[conv_channels, 1, conv_kernel]);
        let bias = self.bias.as_ref().map(|bias| Stored::f32(bias, &[conv_channels]));
        let conv = subject.backend.load_causal_conv(taps.view(), bias.as_ref().map(Stored::view));
        let [a_log, dt_bias] = [&self.a_log, &self.dt_bias].map(|values| Stored::f32(values, &[n_heads]));
        let decay = subject.backend.load_decay(a_log.view(), dt_bias.view());
        Loaded { conv: conv.expect("taps"), decay: decay.expect("decays") }
    }

    fn states<B: Backend>(&self, subject: &Subject<B>) -> B::StateCache {
        subject.backend.state_cache(self.layout).expect("a cache")
    }

    fn qkv_width(&self) -> usize {
        2 * self.n_key_heads * self.layout.key_dim + self.layout.n_heads * self.layout.value_dim
    }

    /// Rows of queries, keys and values, and of the gates, of `n` tokens.
    fn rows(&self, seed: u64, n: usize) -> [Vec<f32>; 2] {
        let gates = values(seed + 1, n * 2 * self.layout.n_heads);
        // From slow to fast decays, and into the linear part of the softplus.
        [values(seed, n * self.qkv_width()), gates.into_iter().map(|g| 6.0 * g).collect()]
    }

    /// The convolution of one sequence, from its beginning.
    fn conv_oracle(&self, x: &[f32], act: Activation) -> Vec<f32> {
        let StateLayout { conv_channels: channels, conv_kernel: kernel, .. } = self.layout;
        let value = |i: usize| {
            let (t, channel) = (i / channels, i % channels);
            let terms = (0..kernel).filter_map(|tap| {
                let row = (t + tap + 1).checked_sub(kernel)?;
                Some(f64::from(x[row * channels + channel]) * f64::from(self.taps[channel * kernel + tap]))
            });
            let bias = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[channel]));
            oracle::activation(act, bias + terms.sum::<f64>()) as f32
        };
        (0..x.len()).map(value).collect()
    }

    /// The delta rule over one sequence, from its beginning.
    fn delta_oracle(&self, [qkv, gates]: [&[f32]; 2]) -> Vec<f32> {
        let StateLayout { n_heads, key_dim, value_dim, .. } = self.layout;
        let key_width = self.n_key_heads * key_dim;
        let mut states = vec![vec![vec![0.0_f64; value_dim]; key_dim]; n_heads];
        let mut out = Vec::new();
        let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
        let unit = |x: &[f32]| {
            let norm = (wide(x).iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            wide(x).into_iter().map(|x| x / norm).collect::<Vec<f64>>()
        };
        for (row, gates) in qkv.chunks(self.qkv_width()).zip(gates.chunks(2 * n_heads)) {
            for (head, state) in states.iter_mut().enumerate() {
                let key_head = head * self.n_key_heads / n_heads * key_dim;
                let (q, k) =
                    (unit(&row[key_head..][..key_dim]), unit(&row[key_width + key_head..][..key_dim]));
                let v = wide(&row[2 * key_width + head * value_dim..][..value_dim]);
                let beta = 1.0 / (1.0 + (-f64::from(gates[head])).exp());
                let step = f64::from(gates[n_heads + head]) + f64::from(self.dt_bias[head]);
                let decay = (-f64::from(self.a_log[head]).exp() * step.exp().ln_1p()).exp();
                state.iter_mut().flatten().for_each(|value| *value *= decay);
                for column in 0..value_dim {
                    let known: f64 = state.iter().zip(&k).map(|(row, k)| row[column] * k).sum();
                    state
                        .iter_mut()
                        .zip(&k)
                        .for_each(|(row, k)| row[column] += k * beta * (v[column] - known));
                    let sum: f64 = state.iter().zip(&q).map(|(row, q)| row[column] * q).sum();
                    out.push((sum / (key_dim as f64).sqrt()) as f32);
                }
            }
        }
        out
    }
}

/// Handles of the sequences of a batch.
fn staged<B: Backend>(backend: &B, batch: Batch<'_>) -> (B::Step, RecurrentSequences) {
    let starts = offsets(batch.iter().map(|(_, rows)| rows.len()));
    let slots: Vec<u32> = batch.iter().map(|(slot, _)| *slot).collect();
    stage(backend, |builder| builder.recurrent(&starts, &slots))
}

/// The rows of a batch, one sequence's under another's, of a run of rows.
fn gathered(rows: &[f32], width: usize, batch: Batch<'_>) -> Vec<f32> {
    batch.iter().flat_map(|(_, of)| &rows[of.start * width..of.end * width]).copied().collect()
}

/// Layer 1 of a cache over the sequences of a batch, on one of the subject's back ends.
struct Step<'a, B: Backend> {
    subject: &'a Subject<B>,
    backend: &'a B,
    layer: &'a Layer,
    loaded: &'a Loaded<B>,
}

impl<'a, B: Backend> Step<'a, B> {
    fn new(subject: &'a Subject<B>, layer: &'a Layer, loaded: &'a Loaded<B>) -> Self {
        Self { subject, backend: &subject.backend, layer, loaded }
    }

    fn conv(&self, cache: &mut B::StateCache, x: &[f32], batch: Batch<'_>, act: Activation) -> B::Tensor {
        let ((step, seqs), width) = (staged(self.backend, batch), self.layer.layout.conv_channels);
        let x = gathered(x, width, batch);
        let x = self.subject.tensor(&x, x.len() / width, width);
        let at = StateSlots { cache, layer: 1, seqs };
        self.backend
            .causal_conv(&step, at, ConvRows { x: &x, taps: &self.loaded.conv, activation: act })
            .expect("a convolution")
    }

    fn delta(&self, cache: &mut B::StateCache, rows: &[Vec<f32>; 2], batch: Batch<'_>) -> B::Tensor {
        let (step, seqs) = staged(self.backend, batch);
        let widths = [self.layer.qkv_width(), 2 * self.layer.layout.n_heads];
        let [qkv, beta_decay] = [0, 1].map(|i| {
            let x = gathered(&rows[i], widths[i], batch);
            self.subject.tensor(&x, x.len() / widths[i], widths[i])
        });
        let rows = DeltaRows { qkv: &qkv, beta_decay: &beta_decay, n_key_heads: self.layer.n_key_heads };
        let at = StateSlots { cache, layer: 1, seqs };
        self.backend.gated_delta_rule(&step, at, rows, &self.loaded.decay).expect("the delta rule")
    }
}

/// Lengths of the sequences of a batch, which take slots from the last down.
const LENS: [&[usize]; 5] = [&[], &[0], &[1], &[3, 0, 70, 1, 2], &[130]];

fn batch_of(lens: &[usize]) -> Vec<(u32, Range<usize>)> {
    let mut start = 0;
    let rows = lens.iter().map(|len| {
        start += len;
        start - len..start
    });
    (0..5).rev().zip(rows).collect()
}

pub fn causal_convolutions_are_the_oracles_over_odd_sizes<B: Backend>(subject: &Subject<B>) {
    for (channels, kernel, bias) in
        [(1, 1, true), (5, 2, false), (33, 4, true), (260, 3, false), (7, 64, true)]
    {
        let layer = Layer::with_conv(channels, kernel, bias);
        let loaded = layer.load(subject);
        for (lens, act) in LENS.into_iter().zip([Activation::None, Activation::Silu].into_iter().cycle()) {
            let batch = batch_of(lens);
            let n = lens.iter().sum();
            let x = values(1, n * channels);
            let y = Step::new(subject, &layer, &loaded).conv(&mut layer.states(subject), &x, &batch, act);
            let expect: Vec<f32> = batch
                .iter()
                .flat_map(|(_, rows)| layer.conv_oracle(&x[rows.start * channels..rows.end * channels], act))
                .collect();
            let what = format!("{channels} channels, {kernel} taps, {lens:?}");
            subject.close(&what, &y, (&expect, n, channels), SUMS);
        }
    }
}

pub fn the_delta_rule_is_the_oracles_over_odd_sizes<B: Backend>(subject: &Subject<B>) {
    for (n_key_heads, n_heads, key_dim, value_dim) in
        [(1, 1, 1, 1), (1, 2, 5, 3), (2, 4, 16, 33), (1, 1, 128, 128), (1, 3, 130, 70), (2, 2, 256, 17)]
    {
        let layer = Layer::new(n_key_heads, n_heads, key_dim, value_dim);
        let loaded = layer.load(subject);
        for lens in LENS {
            let batch = batch_of(lens);
            let n = lens.iter().sum();
            let rows = layer.rows(1, n);
            let y = Step::new(subject, &layer, &loaded).delta(&mut layer.states(subject), &rows, &batch);
            let (width, out) = (layer.qkv_width(), n_heads * value_dim);
            let of = |seq: &Range<usize>| {
                let gates = &rows[1][seq.start * 2 * n_heads..seq.end * 2 * n_heads];
                layer.delta_oracle([&rows[0][seq.start * width..seq.end * width], gates])
            };
            let expect: Vec<f32> = batch.iter().flat_map(|(_, seq)| of(seq)).collect();
            let what = format!("{n_key_heads} and {n_heads} heads of {key_dim} and {value_dim}, {lens:?}");
            subject.close(&what, &y, (&expect, n, out), SUMS);
        }
    }
}

/// Both ops over a batch, as bits.
fn both<B: Backend>(
    step: &Step<'_, B>,
    cache: &mut B::StateCache,
    rows: &[Vec<f32>; 2],
    batch: Batch<'_>,
) -> [Vec<u32>; 2] {
    let conv = step.conv(cache, &rows[0], batch, Activation::Silu);
    let delta = step.delta(cache, rows, batch);
    [step.subject.bits(&conv), step.subject.bits(&delta)]
}

/// The bits of a sequence computed in pieces, which is in slot 3 beside another whose rows change.
fn in_pieces<B: Backend>(step: &Step<'_, B>, rows: &[Vec<f32>; 2], cuts: &[usize]) -> [Vec<u32>; 2] {
    let mut cache = step.layer.states(step.subject);
    let mut found = [Vec::new(), Vec::new()];
    let mut start = 0;
    for (i, len) in cuts.iter().enumerate() {
        let piece = start..start + len;
        let beside = i % 3;
        let batch = [(0, 0..beside), (3, piece.clone()), (1, beside..beside + 2)];
        let bits = both(step, &mut cache, rows, &batch);
        let widths =
            [step.layer.layout.conv_channels, step.layer.layout.n_heads * step.layer.layout.value_dim];
        for ((found, bits), width) in found.iter_mut().zip(&bits).zip(widths) {
            found.extend(&bits[beside * width..(beside + len) * width]);
        }
        start += len;
    }
    found
}

pub fn a_sequence_cut_into_steps_has_the_bits_of_the_whole<B: Backend>(subject: &Subject<B>) {
    for (n_key_heads, n_heads, key_dim, value_dim) in [(1, 2, 12, 40), (1, 1, 128, 70)] {
        let layer = Layer::new(n_key_heads, n_heads, key_dim, value_dim);
        let (loaded, rows) = (layer.load(subject), layer.rows(5, 70));
        let step = Step::new(subject, &layer, &loaded);
        let whole = in_pieces(&step, &rows, &[70]);
        for cuts in [&[1; 70][..], &[64, 6], &[0, 1, 2, 30, 0, 37], &[16, 16, 38], &[69, 1]] {
            assert_eq!(in_pieces(&step, &rows, cuts), whole, "{}: {cuts:?}", subject.name);
        }
        let alone = both(&step, &mut layer.states(subject), &rows, &[(2, 0..70)]);
        assert_eq!(alone, whole, "{}: alone", subject.name);
        let other = Step { backend: &subject.other_threads, ..step };
        assert_eq!(in_pieces(&other, &rows, &[70]), whole, "{}: on other threads", subject.name);
    }
}

pub fn copied_states_go_on_as_the_original_would<B: Backend>(subject: &Subject<B>) {
    let layer = Layer::new(1, 2, 9, 20);
    let (loaded, rows) = (layer.load(subject), layer.rows(5, 30));
    let step = Step::new(subject, &layer, &loaded);
    let mut cache = layer.states(subject);
    both(&step, &mut cache, &rows, &[(0, 0..20), (4, 5..9)]);
    // In order: slot 2 has what was in slot 0 before slot 0 is written.
    subject.backend.copy_states(&mut cache, &[(0, 2), (4, 0), (4, 4)]).expect("copies");
    let goes_on = both(&step, &mut cache, &rows, &[(2, 20..30)]);
    let mut fresh = layer.states(subject);
    let whole = both(&step, &mut fresh, &rows, &[(1, 0..30)]);
    let check = |what: &str, found: &[Vec<u32>; 2], whole: &[Vec<u32>; 2]| {
        for (found, whole) in found.iter().zip(whole) {
            assert_eq!(found[..], whole[whole.len() - found.len()..], "{}: {what}", subject.name);
        }
    };
    check("a copy", &goes_on, &whole);
    let of_other = both(&step, &mut layer.states(subject), &rows, &[(1, 5..12)]);
    for slot in [0, 4] {
        check("a copy of another", &both(&step, &mut cache, &rows, &[(slot, 9..12)]), &of_other);
    }
}

pub fn slots_that_are_reset_have_nothing_of_what_was_there<B: Backend>(subject: &Subject<B>) {
    let layer = Layer::new(1, 2, 9, 20);
    let (loaded, rows) = (layer.load(subject), layer.rows(5, 30));
    let step = Step::new(subject, &layer, &loaded);
    let clean = both(&step, &mut layer.states(subject), &rows, &[(1, 0..10)]);
    let mut cache = layer.states(subject);
    let poisoned = [0, 1].map(|i| vec![f32::NAN; rows[i].len()]);
    both(&step, &mut cache, &poisoned, &[(0, 0..3), (1, 3..9), (2, 9..10)]);
    let spoiled = both(&step, &mut cache, &rows, &[(2, 0..10)]);
    assert_ne!(spoiled, clean, "{}: states reach the rows", subject.name);
    subject.backend.reset_states(&mut cache, &[1, 0]).expect("a reset");
    for slot in [0, 1] {
        assert_eq!(both(&step, &mut cache, &rows, &[(slot, 0..10)]), clean, "{}: slot {slot}", subject.name);
    }
    let still = both(&step, &mut cache, &rows, &[(2, 0..10)]);
    assert_ne!(still, clean, "{}: the others stay", subject.name);
}

pub fn padding_gives_zeros_and_leaves_every_state<B: Backend>(subject: &Subject<B>) {
    let layer = Layer::new(1, 2, 9, 20);
    let (loaded, rows) = (layer.load(subject), layer.rows(5, 30));
    let step = Step::new(subject, &layer, &loaded);
    let widths = [layer.layout.conv_channels, 40];
    let mut cache = layer.states(subject);
    both(&step, &mut cache, &rows, &[(0, 0..10), (4, 10..11)]);
    let nothing = vec![f32::NAN; 30 * layer.qkv_width()];
    let poisoned = [nothing.clone(), nothing];
    let padded = both(&step, &mut cache, &poisoned, &[(PADDING_SLOT, 0..1), (PADDING_SLOT, 0..3)]);
    assert!(padded.iter().flatten().all(|bits| *bits == 0), "{}: padding is not zero", subject.name);
    // Among others, with an activation that gives something else for nothing.
    let batch = [(PADDING_SLOT, 0..2), (0, 10..13), (PADDING_SLOT, 3..4)];
    let y = step.conv(&mut cache, &rows[0], &batch, Activation::Sigmoid);
    let found = [subject.bits(&y), subject.bits(&step.delta(&mut cache, &rows, &batch))];
    let mut alone = layer.states(subject);
    both(&step, &mut alone, &rows, &[(3, 0..10)]);
    let y = step.conv(&mut alone, &rows[0], &[(3, 10..13)], Activation::Sigmoid);
    let expect = [subject.bits(&y), subject.bits(&step.delta(&mut alone, &rows, &[(3, 10..13)]))];
    for ((found, expect), width) in found.iter().zip(&expect).zip(widths) {
        let (zeros, rest) = found.split_at(2 * width);
        assert!(zeros.iter().chain(&rest[3 * width..]).all(|bits| *bits == 0), "{}", subject.name);
        assert_eq!(rest[..3 * width], expect[..], "{}: beside padding", subject.name);
    }
}

pub fn layers_of_states_are_kept_apart<B: Backend>(subject: &Subject<B>) {
    let layer = Layer::new(1, 2, 9, 20);
    let (loaded, rows) = (layer.load(subject), layer.rows(5, 10));
    let mut cache = layer.states(subject);
    let step = Step::new(subject, &layer, &loaded);
    let first = both(&step, &mut cache, &rows, &[(1, 0..10)]);
    let (staged, seqs) = staged(&subject.backend, &[(1, 0..10)]);
    let x = subject.tensor(&rows[0], 10, layer.qkv_width());
    let at = StateSlots { cache: &mut cache, layer: 0, seqs };
    let y = subject
        .backend
        .causal_conv(&staged, at, ConvRows { x: &x, taps: &loaded.conv, activation: Activation::Silu })
        .expect("a convolution");
    assert_eq!(subject.bits(&y), first[0], "{}: layer 0 has seen nothing", subject.name);
    let bytes = subject.backend.state_slot_bytes(layer.layout);
    assert_eq!(bytes, 2 * (3 * 58 + 2 * 9 * 20) * 4, "{}: bytes of a slot", subject.name);
}

pub fn states_and_rows_that_do_not_fit_are_refused<B: Backend>(subject: &Subject<B>) {
    let (backend, layer) = (&subject.backend, Layer::new(1, 2, 9, 20));
    let (loaded, width) = (layer.load(subject), layer.qkv_width());
    let mut cache = layer.states(subject);
    let mut run = |rows: [(usize, usize); 2], n_key_heads: usize, index: usize, slot: u32| {
        let (step, seqs) = stage(backend, |builder| builder.recurrent(&[0, 3], &[slot]));
        let [qkv, gates] = rows.map(|(n, width)| subject.tensor(&vec![0.5; n * width], n, width));
        let at = StateSlots { cache: &mut cache, layer: index, seqs };
        let conv = backend
            .causal_conv(&step, at, ConvRows { x: &qkv, taps: &loaded.conv, activation: Activation::None })
            .map(drop);
        let rows = DeltaRows { qkv: &qkv, beta_decay: &gates, n_key_heads };
        let at = StateSlots { cache: &mut cache, layer: index, seqs };
        [conv, backend.gated_delta_rule(&step, at, rows, &loaded.decay).map(drop)]
    };
    let whole = [(3, width), (3, 4)];
    assert_eq!(run(whole, 1, 1, 4), [Ok(()), Ok(())], "{}", subject.name);
    let index = |what, index, len| {
        ["causal_conv", "gated_delta_rule"].map(|op| Err(KernelError::Index { op, what, index, len }))
    };
    assert_eq!(run(whole, 1, 2, 4), index("layer", 2, 2), "{}", subject.name);
    assert_eq!(run(whole, 1, 1, 5), index("slot", 5, 5), "{}", subject.name);
    for (rows, n_key_heads) in [
        ([(2, width), (2, 4)], 1),
        ([(3, width - 1), (3, 4)], 1),
        ([(3, width), (3, 3)], 1),
        ([(3, width), (2, 4)], 1),
        (whole, 0),
        (whole, 2),
        (whole, 3),
        (whole, usize::MAX),
    ] {
        let [_, delta] = run(rows, n_key_heads, 1, 0);
        assert!(matches!(delta, Err(KernelError::Shape { .. })), "{}: {rows:?} {delta:?}", subject.name);
    }
    for x in [(2, width), (3, width + 1)] {
        let [conv, _] = run([x, (3, 4)], 1, 1, 0);
        assert!(matches!(conv, Err(KernelError::Shape { .. })), "{}: {x:?} {conv:?}", subject.name);
    }
    let (_, of_another) = staged(backend, &[(0, 0..3)]);
    let (step, _) = staged(backend, &[(0, 0..3)]);
    let [qkv, gates] = whole.map(|(n, width)| subject.tensor(&vec![0.5; n * width], n, width));
    let at = StateSlots { cache: &mut cache, layer: 0, seqs: of_another };
    let conv = backend
        .causal_conv(&step, at, ConvRows { x: &qkv, taps: &loaded.conv, activation: Activation::None })
        .map(drop);
    assert!(matches!(conv, Err(KernelError::Step { .. })), "{}: {conv:?}", subject.name);
    let rows = DeltaRows { qkv: &qkv, beta_decay: &gates, n_key_heads: 1 };
    let at = StateSlots { cache: &mut cache, layer: 0, seqs: of_another };
    let delta = backend.gated_delta_rule(&step, at, rows, &loaded.decay).map(drop);
    assert!(matches!(delta, Err(KernelError::Step { .. })), "{}: {delta:?}", subject.name);
    assert!(backend.copy_states(&mut cache, &[(0, 1), (5, 1)]).is_err(), "{}", subject.name);
    assert!(backend.reset_states(&mut cache, &[0, PADDING_SLOT]).is_err(), "{}", subject.name);
}

pub fn weights_and_layouts_of_states_that_do_not_fit_are_refused<B: Backend>(subject: &Subject<B>) {
    let (backend, layout) = (&subject.backend, Layer::new(1, 2, 9, 20).layout);
    for wrong in [
        StateLayout { conv_kernel: 0, ..layout },
        StateLayout { conv_kernel: 65, ..layout },
        StateLayout { key_dim: 0, ..layout },
        StateLayout { key_dim: 257, ..layout },
        StateLayout { n_layers: 0, ..layout },
        StateLayout { n_slots: usize::MAX / 8, ..layout },
        StateLayout { value_dim: usize::MAX, ..layout },
    ] {
        assert!(backend.state_cache(wrong).is_err(), "{}: {wrong:?}", subject.name);
    }
    let stored = |shape: &[usize]| Stored::f32(&vec![0.5; shape.iter().product()], shape);
    let [taps, flat, square] = [&[6, 1, 4][..], &[6, 4], &[6, 1, 4, 1]].map(stored);
    let [six, five] = [&[6][..], &[5]].map(stored);
    assert!(backend.load_causal_conv(taps.view(), Some(six.view())).is_ok(), "{}", subject.name);
    for (weight, bias) in [(&taps, Some(&five)), (&flat, None), (&square, None)] {
        let loaded = backend.load_causal_conv(weight.view(), bias.map(Stored::view));
        assert!(loaded.is_err(), "{}", subject.name);
    }
    for (a_log, dt_bias) in [(&six, &five), (&flat, &flat)] {
        assert!(backend.load_decay(a_log.view(), dt_bias.view()).is_err(), "{}", subject.name);
    }
    // Weights of other widths than those of the cache.
    let layer = Layer::new(1, 2, 9, 20);
    let (loaded, other) =
        (Layer::with_conv(6, 4, false).load(subject), Layer::new(1, 1, 9, 20).load(subject));
    let mut cache = layer.states(subject);
    let (step, seqs) = staged(backend, &[(0, 0..1)]);
    let [x, qkv, gates] = [6, layer.qkv_width(), 4].map(|width| subject.tensor(&vec![0.5; width], 1, width));
    let at = StateSlots { cache: &mut cache, layer: 0, seqs };
    assert!(
        backend
            .causal_conv(&step, at, ConvRows { x: &x, taps: &loaded.conv, activation: Activation::None })
            .is_err(),
        "{}",
        subject.name
    );
    let rows = DeltaRows { qkv: &qkv, beta_decay: &gates, n_key_heads: 1 };
    let at = StateSlots { cache: &mut cache, layer: 0, seqs };
    assert!(backend.gated_delta_rule(&step, at, rows, &other.decay).is_err(), "{}", subject.name);
}
