//! Ops that treat each row alone.

use triptych_kernels::ops::{Activation, Backend, NormKind, Unfold};

use crate::oracle;
use crate::subject::{ELEMENTWISE, Stored, Subject, values};

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
    use Activation::{Gelu, GeluTanh, None, QuickGelu, Relu, Silu};
    for act in [None, Gelu, GeluTanh, QuickGelu, Relu, Silu] {
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

pub fn addition_is_by_element<B: Backend>(subject: &Subject<B>) {
    for (n, width) in [(0, 3), (1, 1), (3, 33), (300, 257)] {
        let (x, y) = (values(1, n * width), values(2, n * width));
        let mut sum = subject.tensor(&x, n, width);
        subject.backend.add(&mut sum, &subject.tensor(&y, n, width)).expect("add");
        let expect: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        subject.close("a sum", &sum, (&expect, n, width), 0.0);
    }
}

pub fn rotary_embedding_turns_halves<B: Backend>(subject: &Subject<B>) {
    for head_dim in [2, 12, 20, 64, 80] {
        for (n, n_heads) in [(0, 1), (1, 3), (33, 2)] {
            let (width, half) = (n_heads * head_dim, head_dim / 2);
            let (x, angles) = (values(1, n * width), values(2, n * half));
            let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
            let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
            let mut t = subject.tensor(&x, n, width);
            subject.backend.rope(&mut t, head_dim, &cos, &sin).expect("rope");
            let mut expect = Vec::new();
            for (i, head) in x.chunks(head_dim).enumerate() {
                for d in 0..head_dim {
                    let angle = angles[i / n_heads * half + d % half];
                    let (sign, other) = if d < half { (-1.0, head[d + half]) } else { (1.0, head[d - half]) };
                    expect.push(head[d] * angle.cos() + sign * other * angle.sin());
                }
            }
            subject.close(&format!("heads of {head_dim}"), &t, (&expect, n, width), ELEMENTWISE);
        }
    }
}

pub fn windows_of_a_signal_have_zeros_outside<B: Backend>(subject: &Subject<B>) {
    for (n_seqs, t, channels) in [(1, 3, 1), (2, 8, 5), (3, 7, 80)] {
        for (kernel, stride, padding) in [(1, 1, 0), (3, 1, 1), (3, 2, 1), (2, 3, 4)] {
            let conv = Unfold { n_seqs, kernel, stride, padding };
            let x = values(1, n_seqs * t * channels);
            let y = subject.backend.unfold(&subject.tensor(&x, n_seqs * t, channels), conv).expect("unfold");
            let expect = oracle::unfold(&x, channels, conv);
            let width = channels * kernel;
            subject.close(&format!("{conv:?}"), &y, (&expect, expect.len() / width, width), 0.0);
        }
    }
    let short = Unfold { n_seqs: 2, kernel: 5, stride: 1, padding: 0 };
    let y = subject.backend.unfold(&subject.tensor(&[1.0; 6], 6, 1), short).expect("unfold");
    subject.close("a signal shorter than a window", &y, (&[], 0, 5), 0.0);
}
