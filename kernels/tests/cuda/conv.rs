//! Windows of convolutions, and convolutions of each channel by itself.

use triptych_kernels::ops::{Conv2d, Unfold};

use crate::device::{Device, Plain};
use crate::element::{Element, close, elements, values, widened};
use crate::{launch, oracle};

/// `Windows` of `conv.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Windows {
    n_images: u32,
    size: [u32; 2],
    kernel: [u32; 2],
    stride: [u32; 2],
    padding: [u32; 2],
    out: [u32; 2],
}

impl Plain for Windows {}

impl From<Conv2d> for Windows {
    fn from(conv: Conv2d) -> Self {
        let words = |pair: [usize; 2]| pair.map(|n| n as u32);
        let out = [0, 1].map(|axis| {
            let padded = conv.size[axis] + 2 * conv.padding[axis];
            padded.checked_sub(conv.kernel[axis]).map_or(0, |rest| rest / conv.stride[axis] + 1)
        });
        Self {
            n_images: conv.n_images as u32,
            size: words(conv.size),
            kernel: words(conv.kernel),
            stride: words(conv.stride),
            padding: words(conv.padding),
            out: words(out),
        }
    }
}

impl Windows {
    fn n_rows(&self) -> usize {
        self.n_images as usize * self.out[0] as usize * self.out[1] as usize
    }
}

fn images() -> Vec<(Conv2d, usize)> {
    let conv = |n_images, size, kernel, stride, padding| Conv2d { n_images, size, kernel, stride, padding };
    vec![
        (conv(0, [3, 3], [1, 1], [1, 1], [0, 0]), 2),
        (conv(1, [1, 1], [1, 1], [1, 1], [0, 0]), 1),
        (conv(2, [5, 7], [3, 3], [1, 1], [1, 1]), 3),
        (conv(3, [6, 9], [3, 2], [2, 3], [1, 0]), 4),
        (conv(1, [4, 4], [7, 7], [2, 2], [3, 3]), 2),
        (conv(2, [14, 14], [14, 14], [14, 14], [0, 0]), 3),
    ]
}

fn grid(n_rows: usize) -> [u32; 3] {
    [(n_rows as u32).min(3), 1, 1]
}

fn windows_of_images_have_zeros_outside<T: Element>() {
    let device = Device::new(1);
    for (conv, channels) in images() {
        let windows = Windows::from(conv);
        let x = elements::<T>(1, conv.n_images * conv.size[0] * conv.size[1] * channels);
        let n = windows.n_rows() * channels * conv.kernel[0] * conv.kernel[1];
        let (y, from) = (device.poisoned::<T>(n), device.upload(&x));
        launch!(device, format!("unfold_{}", T::NAME), grid(windows.n_rows()), 256, 0;
            y, from, windows, channels as u32);
        let expect = oracle::unfold2d(&widened(&x), channels, conv);
        close("windows", &device.download(&y, n), &expect, 0.0);
    }
    device.finish();
}

fn a_signal_is_an_image_of_one_column<T: Element>() {
    let device = Device::new(2);
    for (n_seqs, t, channels, kernel, stride, padding) in [
        (1, 1, 1, 1, 1, 0),
        (2, 9, 3, 3, 1, 1),
        (3, 10, 2, 3, 2, 1),
        (1, 127, 1, 127, 64, 0),
        (2, 8, 5, 4, 3, 2),
    ] {
        let x = elements::<T>(1, n_seqs * t * channels);
        let conv = Conv2d {
            n_images: n_seqs,
            size: [t, 1],
            kernel: [kernel, 1],
            stride: [stride, 1],
            padding: [padding, 0],
        };
        let windows = Windows::from(conv);
        let n = windows.n_rows() * channels * kernel;
        let (y, from) = (device.poisoned::<T>(n), device.upload(&x));
        launch!(device, format!("unfold_{}", T::NAME), grid(windows.n_rows()), 256, 0;
            y, from, windows, channels as u32);
        let expect = oracle::unfold(&widened(&x), channels, Unfold { n_seqs, kernel, stride, padding });
        close("windows of a signal", &device.download(&y, n), &expect, 0.0);
    }
    device.finish();
}

fn channels_are_convolved_apart<T: Element>() {
    let device = Device::new(3);
    for ((conv, channels), has_bias) in images().into_iter().flat_map(|image| [(image, true), (image, false)])
    {
        let (windows, taps) = (Windows::from(conv), conv.kernel[0] * conv.kernel[1]);
        let x = elements::<T>(1, conv.n_images * conv.size[0] * conv.size[1] * channels);
        let (weight, bias) = (values(2, taps * channels), values(3, channels));
        let n = windows.n_rows() * channels;
        let (y, from) = (device.poisoned::<T>(n), device.upload(&x));
        let (w, b) = (device.upload(&weight), device.upload(&bias));
        let name = format!("depthwise_{}", T::NAME);
        if has_bias {
            launch!(device, name, grid(windows.n_rows()), 256, 0; y, from, w, b, windows, channels as u32);
        } else {
            launch!(device, name, grid(windows.n_rows()), 256, 0; y, from, w, 0_u64, windows, channels as u32);
        }
        let unfolded = oracle::unfold2d(&widened(&x), channels, conv);
        let expect: Vec<f32> = (0..n)
            .map(|i| {
                let channel = i % channels;
                let products =
                    (0..taps).map(|tap| unfolded[i * taps + tap] * weight[tap * channels + channel]);
                products.sum::<f32>() + if has_bias { bias[channel] } else { 0.0 }
            })
            .collect();
        close("channels", &device.download(&y, n), &expect, T::STEP * 4.0);
    }
    device.finish();
}

for_each_element! {
    windows_of_images_have_zeros_outside,
    a_signal_is_an_image_of_one_column,
    channels_are_convolved_apart,
}
