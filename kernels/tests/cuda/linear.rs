//! Products of few rows with packed weights: bf16, int8 and int4.

use triptych_kernels::ops::Activation;

use crate::cache::address;
use crate::device::{Device, Plain};
use crate::element::{Bf16, Element, close, elements, values, widened};
use crate::{launch, oracle};

/// `Epilogue` of `linear.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Epilogue {
    y: u64,
    bias: u64,
    residual: u64,
    activation: u32,
    gap: u32,
}

impl Plain for Epilogue {}

/// `Product` of `linear.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Product {
    x: u64,
    n_tokens: u32,
    n_in: u32,
    n_out: u32,
    gap: u32,
}

impl Plain for Product {}

/// Weights as their kernel has them, and what they stand for.
pub enum Weights {
    Bf16(Vec<Bf16>),
    Int8(Vec<u8>, Vec<f32>),
    Int4(Vec<u8>, Vec<Bf16>),
}

#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Bf16,
    Int8,
    Int4,
}

/// `(output, input)` of element `i` of lane `lane` in a fragment of 16 outputs by 16 inputs.
fn place(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + if i & 2 != 0 { 8 } else { 0 }, lane % 4 * 2 + (i & 1) + if i & 4 != 0 { 8 } else { 0 })
}

/// Calls `each(output, input)` for every element of fragments of 16 inputs, `per_lane` fragments of a lane side by side.
fn in_fragments(n_out: usize, n_in: usize, per_lane: usize, mut each: impl FnMut(usize, usize)) {
    for out in 0..n_out.div_ceil(16) {
        for vector in 0..n_in.div_ceil(16 * per_lane) {
            for lane in 0..32 {
                for fragment in 0..per_lane {
                    for i in 0..8 {
                        let (row, column) = place(lane, i);
                        each(out * 16 + row, (vector * per_lane + fragment) * 16 + column);
                    }
                }
            }
        }
    }
}

/// Packs `w: [n_out, n_in]` and gives what it became.
pub fn packed(kind: Kind, w: &[f32], n_out: usize, n_in: usize) -> (Weights, Vec<f32>) {
    let at = |w: &[f32], out: usize, input: usize| {
        if out < n_out && input < n_in { w[out * n_in + input] } else { 0.0 }
    };
    match kind {
        Kind::Bf16 => {
            let rounded: Vec<f32> = w.iter().map(|w| Bf16::from_f32(*w).to_f32()).collect();
            let mut elements = Vec::new();
            in_fragments(n_out, n_in, 1, |out, input| {
                elements.push(Bf16::from_f32(at(&rounded, out, input)))
            });
            (Weights::Bf16(elements), rounded)
        }
        Kind::Int8 => {
            let scales: Vec<f32> =
                w.chunks(n_in).map(|row| row.iter().fold(0_f32, |m, v| m.max(v.abs())) / 127.0).collect();
            let whole: Vec<f32> = w.iter().enumerate().map(|(i, w)| (w / scales[i / n_in]).round()).collect();
            let mut bytes = Vec::new();
            in_fragments(n_out, n_in, 2, |out, input| {
                bytes.push((at(&whole, out, input) as i8).cast_unsigned())
            });
            let expect = whole.iter().enumerate().map(|(i, w)| w * scales[i / n_in]).collect();
            (Weights::Int8(bytes, scales), expect)
        }
        Kind::Int4 => {
            let n_groups = n_in.div_ceil(64) * 2;
            let scale = |out: usize, group: usize| {
                let largest = (group * 32..group * 32 + 32).fold(0_f32, |m, i| m.max(at(w, out, i).abs()));
                Bf16::from_f32(largest.max(1e-3) / 7.0)
            };
            let scales: Vec<Bf16> = (0..n_out.div_ceil(16))
                .flat_map(|tile| (0..n_groups).flat_map(move |g| (0..16).map(move |r| (tile * 16 + r, g))))
                .map(|(out, group)| scale(out, group))
                .collect();
            let whole =
                |out: usize, i: usize| (at(w, out, i) / scale(out, i / 32).to_f32()).round().clamp(-8.0, 7.0);
            let mut nibbles = Vec::new();
            in_fragments(n_out, n_in, 4, |out, input| nibbles.push((whole(out, input) as i32 + 8) as u8));
            let bytes = nibbles
                .chunks(16)
                .flat_map(|pair| (0..8).map(|i| pair[i] | pair[i + 8] << 4).collect::<Vec<u8>>())
                .collect();
            let expect = (0..n_out * n_in)
                .map(|i| whole(i / n_in, i % n_in) * scale(i / n_in, i % n_in / 32).to_f32())
                .collect();
            (Weights::Int4(bytes, scales), expect)
        }
    }
}

/// `act(x Wᵀ + bias) + residual` on a device.
fn product(
    device: &Device,
    weights: &Weights,
    [x, residual]: [&[Bf16]; 2],
    bias: &[f32],
    (n_in, n_out, activation): (usize, usize, u32),
) -> Vec<Bf16> {
    let n_tokens = x.len() / n_in;
    let (from, r, b) = (device.upload(x), device.upload(residual), device.upload(bias));
    let y = device.poisoned::<Bf16>(n_tokens * n_out);
    let epilogue = Epilogue {
        y: address(device, &y),
        bias: if bias.is_empty() { 0 } else { address(device, &b) },
        residual: if residual.is_empty() { 0 } else { address(device, &r) },
        activation,
        gap: 0,
    };
    let product = Product {
        x: address(device, &from),
        n_tokens: n_tokens as u32,
        n_in: n_in as u32,
        n_out: n_out as u32,
        gap: 0,
    };
    let grid = [n_out.div_ceil(16) as u32, n_tokens.div_ceil(8) as u32, 1];
    match weights {
        Weights::Bf16(w) => launch!(device, "linear_bf16", grid, 128, 0; epilogue, product, device.upload(w)),
        Weights::Int8(w, scales) => {
            launch!(device, "linear_int8", grid, 128, 0; epilogue, product, device.upload(w), device.upload(scales));
        }
        Weights::Int4(w, scales) => {
            launch!(device, "linear_int4", grid, 128, 0; epilogue, product, device.upload(w), device.upload(scales));
        }
    }
    device.download(&y, n_tokens * n_out)
}

/// `(tokens, inputs, outputs)`: around a tile of each.
const SIZES: [(usize, usize, usize); 9] = [
    (0, 16, 16),
    (1, 1, 1),
    (1, 15, 17),
    (7, 16, 16),
    (8, 33, 15),
    (9, 64, 32),
    (3, 65, 31),
    (17, 127, 48),
    (1, 300, 16),
];

fn products_are_the_oracles(kind: Kind) {
    let device = Device::new(1);
    for (n_tokens, n_in, n_out) in SIZES {
        let x = elements::<Bf16>(1, n_tokens * n_in);
        let (weights, expect) = packed(kind, &values(2, n_out * n_in), n_out, n_in);
        let got = product(&device, &weights, [&x, &[]], &[], (n_in, n_out, 0));
        let zeros = vec![0.0; n_out];
        let expect = oracle::linear(&widened(&x), &expect, Some(&zeros), n_in, Activation::None);
        close(&format!("{kind:?} {n_tokens} {n_in} {n_out}"), &got, &expect, 1e-2);
    }
    device.finish();
}

#[test]
fn products_of_bf16_are_the_oracles() {
    products_are_the_oracles(Kind::Bf16);
}

#[test]
fn products_of_int8_are_the_oracles() {
    products_are_the_oracles(Kind::Int8);
}

#[test]
fn products_of_int4_are_the_oracles() {
    products_are_the_oracles(Kind::Int4);
}

#[test]
fn bias_activation_and_residual_come_after_the_product() {
    let device = Device::new(2);
    let (n_tokens, n_in, n_out) = (9, 40, 20);
    let (x, residual) = (elements::<Bf16>(1, n_tokens * n_in), elements::<Bf16>(3, n_tokens * n_out));
    let bias = values(4, n_out);
    let (weights, w) = packed(Kind::Bf16, &values(2, n_out * n_in), n_out, n_in);
    for (number, act) in
        [(0, Activation::None), (1, Activation::Gelu), (4, Activation::Silu), (5, Activation::Relu)]
    {
        let got = product(&device, &weights, [&x, &residual], &bias, (n_in, n_out, number));
        let mut expect = oracle::linear(&widened(&x), &w, Some(&bias), n_in, act);
        expect.iter_mut().zip(&residual).for_each(|(e, r)| *e += r.to_f32());
        close("epilogue", &got, &expect, 1e-2);
    }
}

#[test]
fn a_row_of_a_product_is_the_same_alone() {
    let device = Device::new(3);
    let (n_tokens, n_in, n_out) = (19, 200, 33);
    let x = elements::<Bf16>(1, n_tokens * n_in);
    for kind in [Kind::Bf16, Kind::Int8, Kind::Int4] {
        let (weights, _) = packed(kind, &values(2, n_out * n_in), n_out, n_in);
        let together = product(&device, &weights, [&x, &[]], &[], (n_in, n_out, 0));
        for row in [0, 7, 8, 18] {
            let alone = product(&device, &weights, [&x[row * n_in..][..n_in], &[]], &[], (n_in, n_out, 0));
            assert_eq!(alone, together[row * n_out..][..n_out], "{kind:?}");
        }
    }
}
