//! Linear layers.

use triptych_core::DType;
use triptych_kernels::ops::{Activation, Backend, LinearPart};

use crate::oracle;
use crate::subject::{Stored, Subject, through, values};

/// Row counts around the heights of register tiles.
const ROWS: [usize; 9] = [0, 1, 2, 13, 14, 15, 31, 32, 33];

/// Widths around those of vectors, strips and panels.
const WIDTHS: [usize; 8] = [1, 12, 20, 31, 32, 33, 64, 80];

/// Weights that keep sums near one.
pub fn weights(seed: u64, n_in: usize, n_out: usize) -> Vec<f32> {
    let scale = 1.0 / (n_in as f32).sqrt();
    values(seed, n_in * n_out).into_iter().map(|w| w * scale).collect()
}

/// A layer of f32.
pub fn layer<B: Backend>(
    subject: &Subject<B>,
    weight: &[f32],
    bias: Option<&[f32]>,
    n_in: usize,
    n_out: usize,
) -> B::Linear {
    let weight = Stored::f32(weight, &[n_out, n_in]);
    let bias = bias.map(|b| Stored::f32(b, &[n_out]));
    let part = LinearPart::new(weight.view(), bias.as_ref().map(Stored::view));
    subject.backend.load_linear(&[part]).expect("a layer")
}

pub fn linear_is_the_oracles_over_odd_sizes<B: Backend>(subject: &Subject<B>) {
    for n_in in WIDTHS {
        for n_out in WIDTHS {
            let (weight, bias) = (weights(1, n_in, n_out), values(2, n_out));
            let w = layer(subject, &weight, Some(&bias), n_in, n_out);
            for n in ROWS {
                let x = values(3, n * n_in);
                let y = subject.backend.linear(&subject.tensor(&x, n, n_in), &w, Activation::None, None);
                let expect = oracle::linear(&x, &weight, Some(&bias), n_in, Activation::None);
                let what = format!("[{n}, {n_in}] by {n_out}");
                subject.close(&what, &y.expect("linear"), (&expect, n, n_out), subject.products);
            }
        }
    }
}

pub fn linear_is_the_oracles_where_it_takes_several_tasks<B: Backend>(subject: &Subject<B>) {
    for (n, n_in, n_out) in [(1, 700, 1003), (5, 515, 1003), (130, 301, 333), (250, 64, 70)] {
        is_the_oracles(subject, n, n_in, n_out);
    }
}

/// Rows of 4096 bytes in one precision or another, which are laid a line further apart; and sums that wait in memory.
pub fn linear_is_the_oracles_over_rows_of_whole_pages<B: Backend>(subject: &Subject<B>) {
    for (n, n_in, n_out) in [(1, 1024, 40), (20, 1024, 130), (20, 2048, 130), (17, 4096, 40)] {
        is_the_oracles(subject, n, n_in, n_out);
    }
}

fn is_the_oracles<B: Backend>(subject: &Subject<B>, n: usize, n_in: usize, n_out: usize) {
    let (x, weight) = (values(1, n * n_in), weights(2, n_in, n_out));
    let w = layer(subject, &weight, None, n_in, n_out);
    let y = subject.backend.linear(&subject.tensor(&x, n, n_in), &w, Activation::None, None);
    let expect = oracle::linear(&x, &weight, None, n_in, Activation::None);
    subject.close(
        &format!("[{n}, {n_in}] by {n_out}"),
        &y.expect("linear"),
        (&expect, n, n_out),
        subject.products,
    );
}

pub fn every_activation_and_residual_is_applied_after_the_bias<B: Backend>(subject: &Subject<B>) {
    use Activation::{Gelu, GeluTanh, None, QuickGelu, Relu, Silu, Tanh};
    let (n, n_in, n_out) = (5, 20, 45);
    let (x, weight) = (values(1, n * n_in), weights(2, n_in, n_out));
    let bias: Vec<f32> = values(3, n_out).into_iter().map(|b| 5.0 * b).collect();
    let residual = values(4, n * n_out);
    let w = layer(subject, &weight, Some(&bias), n_in, n_out);
    for act in [None, Gelu, GeluTanh, QuickGelu, Silu, Relu, Tanh] {
        let (x_t, r_t) = (subject.tensor(&x, n, n_in), subject.tensor(&residual, n, n_out));
        let y = subject.backend.linear(&x_t, &w, act, Some(&r_t)).expect("linear");
        let mut expect = oracle::linear(&x, &weight, Some(&bias), n_in, act);
        expect.iter_mut().zip(&residual).for_each(|(y, r)| *y += r);
        subject.close(&format!("{act:?}"), &y, (&expect, n, n_out), subject.products);
    }
}

pub fn stacked_layers_stand_side_by_side<B: Backend>(subject: &Subject<B>) {
    let (n, n_in, outs) = (3, 24, [20, 1, 33]);
    let x = values(1, n * n_in);
    let weights: Vec<_> = (10..).zip(outs).map(|(seed, n_out)| weights(seed, n_in, n_out)).collect();
    // A convolution's weight has three dimensions; the second part has no bias.
    let stored: Vec<_> = weights.iter().zip(outs).map(|(w, n_out)| Stored::f32(w, &[n_out, 8, 3])).collect();
    let biases = outs.map(|n_out| values(20, n_out));
    let stored_biases: Vec<_> = biases.iter().map(|b| Stored::f32(b, &[b.len()])).collect();
    let parts: Vec<_> = (0..3)
        .map(|i| LinearPart::new(stored[i].view(), (i != 1).then(|| stored_biases[i].view())))
        .collect();
    let w = subject.backend.load_linear(&parts).expect("a layer");
    let y = subject.backend.linear(&subject.tensor(&x, n, n_in), &w, Activation::None, None).expect("linear");
    let mut bias = biases.concat();
    bias[outs[0]] = 0.0;
    let expect = oracle::linear(&x, &weights.concat(), Some(&bias), n_in, Activation::None);
    subject.close("three parts", &y, (&expect, n, outs.iter().sum()), subject.products);
}

pub fn a_scale_is_a_factor_on_weight_and_bias<B: Backend>(subject: &Subject<B>) {
    let (n, n_in, outs) = (3, 24, [20, 33]);
    let x = values(1, n * n_in);
    let weights = [weights(10, n_in, outs[0]), weights(11, n_in, outs[1])];
    let biases = [values(12, outs[0]), values(13, outs[1])];
    let stored = [0, 1].map(|i| Stored::f32(&weights[i], &[outs[i], n_in]));
    let stored_biases = [0, 1].map(|i| Stored::f32(&biases[i], &[outs[i]]));
    let scales = [1.0, -2.5];
    let part = |i: usize| {
        let part = LinearPart::new(stored[i].view(), Some(stored_biases[i].view()));
        LinearPart { scale: scales[i], ..part }
    };
    let w = subject.backend.load_linear(&[part(0), part(1)]).expect("a layer");
    let y = subject.backend.linear(&subject.tensor(&x, n, n_in), &w, Activation::None, None).expect("linear");
    let scaled = |values: &[Vec<f32>; 2]| -> Vec<f32> {
        values.iter().zip(scales).flat_map(|(values, scale)| values.iter().map(move |v| v * scale)).collect()
    };
    let (weight, bias) = (scaled(&weights), scaled(&biases));
    let expect = oracle::linear(&x, &weight, Some(&bias), n_in, Activation::None);
    subject.close("a scaled part", &y, (&expect, n, outs.iter().sum()), subject.products);
}

pub fn weights_are_read_in_every_dtype_from_unaligned_bytes<B: Backend>(subject: &Subject<B>) {
    let (n, n_in, n_out) = (2, 20, 33);
    let (x, weight, bias) = (values(1, n * n_in), weights(2, n_in, n_out), values(3, n_out));
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let (w, b) = (Stored::new(dtype, &weight, &[n_out, n_in]), Stored::new(dtype, &bias, &[n_out]));
        let part = LinearPart::new(w.view(), Some(b.view()));
        let w = subject.backend.load_linear(&[part]).expect("a layer");
        let y = subject.backend.linear(&subject.tensor(&x, n, n_in), &w, Activation::None, None);
        let (weight, bias) = (through(dtype, &weight), through(dtype, &bias));
        let expect = oracle::linear(&x, &weight, Some(&bias), n_in, Activation::None);
        subject.close(dtype.as_str(), &y.expect("linear"), (&expect, n, n_out), subject.products);
    }
}
