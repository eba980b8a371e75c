//! Pieces of convolutions.

use triptych_kernels::ops::{Backend, Conv2d, Unfold};

use crate::oracle;
use crate::subject::{ELEMENTWISE, Stored, Subject, values};

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

/// Images of odd sizes under kernels of every kind.
const CONVS: [Conv2d; 6] = [
    Conv2d { n_images: 1, size: [1, 1], kernel: [1, 1], stride: [1, 1], padding: [0, 0] },
    Conv2d { n_images: 2, size: [5, 7], kernel: [3, 3], stride: [1, 1], padding: [1, 1] },
    Conv2d { n_images: 3, size: [8, 6], kernel: [2, 2], stride: [2, 2], padding: [0, 0] },
    Conv2d { n_images: 1, size: [9, 4], kernel: [3, 2], stride: [2, 3], padding: [2, 0] },
    Conv2d { n_images: 1, size: [15, 15], kernel: [7, 7], stride: [4, 4], padding: [3, 3] },
    Conv2d { n_images: 1, size: [2, 3], kernel: [5, 4], stride: [1, 1], padding: [2, 3] },
];

pub fn windows_of_an_image_have_zeros_outside<B: Backend>(subject: &Subject<B>) {
    for conv in CONVS {
        for channels in [1, 3, 33] {
            let n = conv.n_images * conv.size[0] * conv.size[1];
            let x = values(1, n * channels);
            let y = subject.backend.unfold2d(&subject.tensor(&x, n, channels), conv).expect("unfold");
            let expect = oracle::unfold2d(&x, channels, conv);
            let width = channels * conv.kernel[0] * conv.kernel[1];
            subject.close(&format!("{conv:?}"), &y, (&expect, expect.len() / width, width), 0.0);
        }
    }
    let small = Conv2d { kernel: [4, 2], padding: [1, 0], size: [1, 6], ..CONVS[0] };
    let y = subject.backend.unfold2d(&subject.tensor(&[1.0; 6], 6, 1), small).expect("unfold");
    subject.close("an image smaller than a window", &y, (&[], 0, 8), 0.0);
}

/// A depthwise convolution's weights.
pub fn load_depthwise<B: Backend>(
    subject: &Subject<B>,
    weight: &[f32],
    bias: Option<&[f32]>,
    [down, across]: [usize; 2],
) -> B::Depthwise {
    let channels = weight.len() / down / across;
    let weight = Stored::f32(weight, &[channels, 1, down, across]);
    let bias = bias.map(|b| Stored::f32(b, &[channels]));
    subject.backend.load_depthwise(weight.view(), bias.as_ref().map(Stored::view)).expect("taps")
}

pub fn a_channel_is_convolved_by_itself<B: Backend>(subject: &Subject<B>) {
    for conv in CONVS {
        for channels in [1, 12, 33] {
            let n_taps = conv.kernel[0] * conv.kernel[1];
            let n = conv.n_images * conv.size[0] * conv.size[1];
            let (x, weight) = (values(1, n * channels), values(2, channels * n_taps));
            let bias = values(3, channels);
            for bias in [None, Some(&bias[..])] {
                let w = load_depthwise(subject, &weight, bias, conv.kernel);
                let y = subject.backend.depthwise2d(&subject.tensor(&x, n, channels), &w, conv);
                let windows = oracle::unfold2d(&x, channels, conv);
                let one = |(i, window): (usize, &[f32])| {
                    let channel = i % channels;
                    let taps = window.iter().zip(&weight[channel * n_taps..]);
                    let sum: f64 = taps.map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
                    (sum + bias.map_or(0.0, |bias| f64::from(bias[channel]))) as f32
                };
                let expect: Vec<f32> = windows.chunks(n_taps).enumerate().map(one).collect();
                let what = format!("{channels} channels, {conv:?}");
                let rows = expect.len() / channels;
                subject.close(&what, &y.expect("depthwise"), (&expect, rows, channels), ELEMENTWISE);
            }
        }
    }
}
