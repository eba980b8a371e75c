//! Ops that treat each row alone.

use triptych_kernels::ops::{Activation, Backend, NormKind, RopePairs, RopeShape};

use crate::oracle;
use crate::sequences::offsets;
use crate::subject::{ELEMENTWISE, Stored, Subject, stage, values};

const ROWS: [usize; 4] = [0, 1, 3, 33];
const WIDTHS: [usize; 8] = [1, 12, 20, 31, 32, 33, 64, 80];

/// A norm with weights of its own.
pub fn load_norm<B: Backend>(
    subject: &Subject<B>,
    kind: NormKind,
    scale: &[f32],
    bias: Option<&[f32]>,
) -> B::Norm {
    let width = scale.len();
    let (scale, bias) = (Stored::f32(scale, &[width]), bias.map(|b| Stored::f32(b, &[width])));
    subject.backend.load_norm(kind, scale.view(), bias.as_ref().map(Stored::view), 1e-5).expect("a norm")
}

pub fn norms_are_the_oracles_over_odd_widths<B: Backend>(subject: &Subject<B>) {
    for kind in [NormKind::Layer, NormKind::Rms] {
        for width in WIDTHS {
            let (scale, bias) = (values(1, width), values(2, width));
            for bias in [None, Some(&bias[..])] {
                let norm = load_norm(subject, kind, &scale, bias);
                for n in ROWS {
                    // Far from zero, where a variance without its mean would show.
                    let x: Vec<f32> = values(3, n * width).into_iter().map(|x| x + 2.0).collect();
                    let y = subject.backend.norm(&subject.tensor(&x, n, width), &norm).expect("norm");
                    let expect = oracle::norm(&x, kind, &scale, bias, 1e-5);
                    subject.close(&format!("{kind:?} of {width}"), &y, (&expect, n, width), 2e-5);
                }
            }
        }
    }
}

pub fn a_gate_multiplies_activated_and_plain_half<B: Backend>(subject: &Subject<B>) {
    use Activation::{Gelu, GeluTanh, None, QuickGelu, Relu, Sigmoid, Silu, Tanh};
    for act in [None, Gelu, GeluTanh, QuickGelu, Relu, Sigmoid, Silu, Tanh] {
        for width in WIDTHS {
            for n in ROWS {
                let x: Vec<f32> = values(1, n * 2 * width).into_iter().map(|x| 6.0 * x).collect();
                let y = subject.backend.gate(&subject.tensor(&x, n, 2 * width), act).expect("gate");
                let row = |row: &[f32]| -> Vec<f32> {
                    let (gate, plain) = row.split_at(width);
                    let values = gate.iter().zip(plain);
                    values.map(|(&g, &p)| (oracle::activation(act, g.into()) * f64::from(p)) as f32).collect()
                };
                let expect: Vec<f32> = x.chunks(2 * width).flat_map(row).collect();
                subject.close(&format!("{act:?} of {width}"), &y, (&expect, n, width), ELEMENTWISE);
            }
        }
    }
}

pub fn values_are_multiplied_by_an_activated_gate<B: Backend>(subject: &Subject<B>) {
    for (n, width) in [(0, 3), (1, 1), (3, 33), (300, 257)] {
        for act in [Activation::Silu, Activation::Sigmoid, Activation::None] {
            let (x, gate) = (values(1, n * width), values(2, n * width));
            let gate: Vec<f32> = gate.into_iter().map(|g| 6.0 * g).collect();
            let mut product = subject.tensor(&x, n, width);
            let (before, by) = (product.clone(), subject.tensor(&gate, n, width));
            subject.backend.multiply_gated(&mut product, &by, act).expect("a product");
            let each = x.iter().zip(&gate);
            let expect: Vec<f32> =
                each.map(|(&x, &g)| (f64::from(x) * oracle::activation(act, g.into())) as f32).collect();
            subject.close(&format!("{act:?} of a gate"), &product, (&expect, n, width), ELEMENTWISE);
            subject.close("a clone", &before, (&x, n, width), 0.0);
        }
    }
    let (mut x, gate) = (subject.tensor(&[1.0; 6], 2, 3), subject.tensor(&[1.0; 6], 3, 2));
    assert!(subject.backend.multiply_gated(&mut x, &gate, Activation::Silu).is_err(), "{}", subject.name);
}

pub fn addition_is_by_element<B: Backend>(subject: &Subject<B>) {
    for (n, width) in [(0, 3), (1, 1), (3, 33), (300, 257)] {
        let (x, y) = (values(1, n * width), values(2, n * width));
        let mut sum = subject.tensor(&x, n, width);
        subject.backend.add(&mut sum, &subject.tensor(&y, n, width)).expect("add");
        let expect: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        subject.close("a sum", &sum, (&expect, n, width), 0.0);
    }
}

pub fn capped_values_come_near_their_bound<B: Backend>(subject: &Subject<B>) {
    for (n, width) in [(0, 3), (1, 1), (3, 33), (300, 257)] {
        for c in [0.5, 30.0] {
            let x: Vec<f32> = values(1, n * width).into_iter().map(|x| 20.0 * x).collect();
            let mut capped = subject.tensor(&x, n, width);
            let before = capped.clone();
            subject.backend.softcap(&mut capped, c).expect("softcap");
            let cap = |x: &f32| f64::from(c) * (f64::from(*x) / f64::from(c)).tanh();
            let expect: Vec<f32> = x.iter().map(|x| cap(x) as f32).collect();
            subject.close("capped values", &capped, (&expect, n, width), ELEMENTWISE);
            subject.close("a clone", &before, (&x, n, width), 0.0);
        }
    }
}

pub fn rotary_embedding_turns_pairs_and_leaves_the_rest<B: Backend>(subject: &Subject<B>) {
    let widths =
        [(2, 2), (12, 12), (20, 20), (64, 64), (80, 80), (20, 12), (33, 32), (36, 2), (52, 26), (7, 0)];
    for ((head_dim, rotary_dim), pairs) in
        widths.into_iter().flat_map(|w| [(w, RopePairs::Halves), (w, RopePairs::Interleaved)])
    {
        for (n, n_heads) in [(0, 1), (1, 3), (33, 2)] {
            let (width, half) = (n_heads * head_dim, rotary_dim / 2);
            let (x, angles) = (values(1, n * width), values(2, n * half));
            let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
            let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
            let shape = RopeShape { head_dim, rotary_dim, pairs };
            let mut t = subject.tensor(&x, n, width);
            let (step, turned) = stage(&subject.backend, |builder| builder.angles(&cos, &sin, half));
            subject.backend.rope(&step, &mut t, shape, turned).expect("rope");
            let mut expect = x.clone();
            for (i, head) in expect.chunks_mut(head_dim).enumerate() {
                for pair in 0..half {
                    let angle = angles[i / n_heads * half + pair];
                    let [a, b] = match pairs {
                        RopePairs::Halves => [pair, pair + half],
                        RopePairs::Interleaved => [2 * pair, 2 * pair + 1],
                    };
                    let (x, y) = (head[a], head[b]);
                    head[a] = x * angle.cos() - y * angle.sin();
                    head[b] = x * angle.sin() + y * angle.cos();
                }
            }
            subject.close(&format!("{shape:?}"), &t, (&expect, n, width), ELEMENTWISE);
        }
    }
}

pub fn a_sequence_is_normalised_as_a_whole<B: Backend>(subject: &Subject<B>) {
    for kind in [NormKind::Layer, NormKind::Rms] {
        for width in WIDTHS {
            let (scale, bias) = (values(1, width), values(2, width));
            let norm = load_norm(subject, kind, &scale, Some(&bias));
            for rows in [&[][..], &[0], &[1], &[33, 0, 1, 31]] {
                let n = rows.iter().sum();
                let x: Vec<f32> = values(3, n * width).into_iter().map(|x| x + 2.0).collect();
                let t = subject.tensor(&x, n, width);
                let seqs = offsets(rows.iter().copied());
                let (step, seqs) = stage(&subject.backend, |builder| builder.offsets(&seqs));
                let y = subject.backend.group_norm(&step, &t, &norm, seqs);
                let expect = oracle::group_norm(&x, kind, [&scale, &bias], rows);
                let what = format!("{kind:?} of {rows:?} by {width}");
                subject.close(&what, &y.expect("group norm"), (&expect, n, width), 2e-5);
            }
        }
    }
}
