//! Ops that move rows or treat each element alone.

use triptych_kernels::ops::Activation;

use crate::device::Device;
use crate::element::{Element, close, elements, indices, widened};
use crate::launch;
use crate::oracle;

/// `(rows, width)`: none, one, and around a vector of either element and a block of threads.
const SIZES: [(usize, usize); 12] = [
    (0, 8),
    (1, 1),
    (1, 7),
    (3, 8),
    (2, 9),
    (5, 16),
    (4, 31),
    (7, 64),
    (33, 33),
    (2, 2047),
    (2, 2048),
    (3, 2056),
];

/// Activations by their numbers in `activation.cuh`.
const ACTIVATIONS: [Activation; 8] = [
    Activation::None,
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::QuickGelu,
    Activation::Silu,
    Activation::Relu,
    Activation::Tanh,
    Activation::Sigmoid,
];

/// Blocks for a loop over elements; few, so that threads take several.
fn grid(n_rows: usize) -> [u32; 3] {
    [(n_rows as u32).min(3), 1, 1]
}

const THREADS: u32 = 256;

fn each_size(check: impl Fn(&Device, usize, usize)) {
    let device = Device::new(1);
    for (n_rows, width) in SIZES {
        check(&device, n_rows, width);
    }
    device.finish();
}

fn rows_are_gathered<T: Element>() {
    each_size(|device, n_rows, width| {
        let x = elements::<T>(1, 5 * width);
        let rows = indices(2, n_rows, 5);
        let y = device.poisoned::<T>(n_rows * width);
        let name = format!("gather_rows_{}", T::NAME);
        let (from, ids) = (device.upload(&x), device.upload(&rows));
        launch!(device, name, grid(n_rows), THREADS, 0; y, from, ids, n_rows as u32, width as u32);
        let expect: Vec<T> = rows.iter().flat_map(|&r| x[r as usize * width..][..width].to_vec()).collect();
        close("gathered rows", &device.download(&y, n_rows * width), &widened(&expect), 0.0);
    });
}

fn weighted_rows_are_summed<T: Element>() {
    each_size(|device, n_sums, width| {
        const N_TERMS: usize = 4;
        let x = elements::<T>(1, 5 * width);
        let rows = indices(2, n_sums * N_TERMS, 5);
        let weights: Vec<f32> = (0..rows.len()).map(|i| (i % 8) as f32 / 8.0 - 0.5).collect();
        let y = device.poisoned::<T>(n_sums * width);
        let (from, ids) = (device.upload(&x), device.upload(&rows));
        let factors = device.upload(&weights);
        let name = format!("weighted_rows_{}", T::NAME);
        launch!(device, name, grid(n_sums), THREADS, 0; y, from, ids, factors, n_sums as u32, N_TERMS as u32, width as u32);
        let value =
            |term: usize, column: usize| weights[term] * x[rows[term] as usize * width + column].to_f32();
        let sum =
            |i: usize| (i / width * N_TERMS..(i / width + 1) * N_TERMS).map(|t| value(t, i % width)).sum();
        let expect: Vec<f32> = (0..n_sums * width).map(sum).collect();
        close("weighted rows", &device.download(&y, n_sums * width), &expect, T::STEP * 2.0);
    });
}

fn rows_are_scattered<T: Element>() {
    each_size(|device, n_rows, width| {
        let (mut x, src) = (elements::<T>(1, (n_rows + 2) * width), elements::<T>(2, n_rows * width));
        // Each row once, in another order.
        let rows: Vec<u32> = (0..n_rows).map(|i| (i * 7 % n_rows.max(1)) as u32 + 1).collect();
        let rows = if n_rows.is_multiple_of(7) { (1..=n_rows as u32).rev().collect() } else { rows };
        let (to, from, ids) = (device.upload(&x), device.upload(&src), device.upload(&rows));
        let name = format!("scatter_rows_{}", T::NAME);
        launch!(device, name, grid(n_rows), THREADS, 0; to, from, ids, n_rows as u32, width as u32);
        for (i, &row) in rows.iter().enumerate() {
            x[row as usize * width..][..width].copy_from_slice(&src[i * width..][..width]);
        }
        close("scattered rows", &device.download(&to, x.len()), &widened(&x), 0.0);
    });
}

fn columns_are_cut<T: Element>() {
    each_size(|device, n_rows, width| {
        for (start, rest) in [(0, 0), (1, 3), (8, 8), (16, 5)] {
            let x_width = start + width + rest;
            let x = elements::<T>(1, n_rows * x_width);
            let (y, from) = (device.poisoned::<T>(n_rows * width), device.upload(&x));
            let name = format!("columns_{}", T::NAME);
            launch!(device, name, grid(n_rows), THREADS, 0;
                y, from, n_rows as u32, x_width as u32, start as u32, width as u32);
            let expect: Vec<T> =
                x.chunks(x_width).flat_map(|row| row[start..start + width].to_vec()).collect();
            close("columns", &device.download(&y, n_rows * width), &widened(&expect), 0.0);
        }
    });
}

fn rows_are_added<T: Element>() {
    each_size(|device, n_rows, width| {
        let (x, y) = (elements::<T>(1, n_rows * width), elements::<T>(2, n_rows * width));
        let (to, from) = (device.upload(&x), device.upload(&y));
        launch!(device, format!("add_{}", T::NAME), grid(n_rows), THREADS, 0; to, from, n_rows as u32, width as u32);
        let expect: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x.to_f32() + y.to_f32()).collect();
        close("sums", &device.download(&to, x.len()), &expect, T::STEP);
    });
}

fn a_product_is_finished<T: Element>() {
    each_size(|device, n_rows, width| {
        // Sums of products are in f32 whatever the element.
        let (x, r) = (crate::element::values(1, n_rows * width), elements::<T>(2, n_rows * width));
        let bias = crate::element::values(3, width);
        let (from, residual, b) = (device.upload(&x), device.upload(&r), device.upload(&bias));
        for (number, act) in ACTIVATIONS.into_iter().enumerate() {
            for (has_bias, has_residual) in [(true, true), (false, true), (true, false)] {
                let y = device.poisoned::<T>(x.len());
                let name = format!("finish_linear_{}", T::NAME);
                let (none, activation) = (0_u64, number as u32);
                let (rows, columns) = (n_rows as u32, width as u32);
                match (has_bias, has_residual) {
                    (true, true) => {
                        launch!(device, name, grid(n_rows), THREADS, 0; y, from, b, residual, activation, rows, columns);
                    }
                    (false, _) => {
                        launch!(device, name, grid(n_rows), THREADS, 0; y, from, none, residual, activation, rows, columns);
                    }
                    (true, false) => {
                        launch!(device, name, grid(n_rows), THREADS, 0; y, from, b, none, activation, rows, columns);
                    }
                }
                let expect: Vec<f32> = (0..x.len())
                    .map(|i| {
                        let sum = x[i] + if has_bias { bias[i % width] } else { 0.0 };
                        let residual = if has_residual { r[i].to_f32() } else { 0.0 };
                        oracle::activation(act, f64::from(sum)) as f32 + residual
                    })
                    .collect();
                close("finished product", &device.download(&y, x.len()), &expect, T::STEP * 2.0);
            }
        }
    });
}

fn a_gate_multiplies_its_halves<T: Element>() {
    each_size(|device, n_rows, width| {
        let x = elements::<T>(1, n_rows * 2 * width);
        for (number, act) in ACTIVATIONS.into_iter().enumerate() {
            let (y, from) = (device.poisoned::<T>(n_rows * width), device.upload(&x));
            let activation = number as u32;
            launch!(device, format!("gate_{}", T::NAME), grid(n_rows), THREADS, 0;
                y, from, activation, n_rows as u32, width as u32);
            let expect: Vec<f32> = (0..n_rows * width)
                .map(|i| {
                    let at = i / width * 2 * width + i % width;
                    (oracle::activation(act, f64::from(x[at].to_f32())) * f64::from(x[at + width].to_f32()))
                        as f32
                })
                .collect();
            close("gate", &device.download(&y, n_rows * width), &expect, T::STEP * 2.0);
        }
    });
}

fn rows_are_multiplied_by_an_activated_gate<T: Element>() {
    each_size(|device, n_rows, width| {
        let (x, gate) = (elements::<T>(1, n_rows * width), elements::<T>(2, n_rows * width));
        for (number, act) in ACTIVATIONS.into_iter().enumerate() {
            let (to, from) = (device.upload(&x), device.upload(&gate));
            let activation = number as u32;
            launch!(device, format!("multiply_gated_{}", T::NAME), grid(n_rows), THREADS, 0;
                to, from, activation, n_rows as u32, width as u32);
            let product = |(x, g): (&T, &T)| {
                (f64::from(x.to_f32()) * oracle::activation(act, g.to_f32().into())) as f32
            };
            let expect: Vec<f32> = x.iter().zip(&gate).map(product).collect();
            close("gated rows", &device.download(&to, x.len()), &expect, T::STEP * 2.0);
        }
    });
}

fn sequences_are_transposed<T: Element>() {
    let device = Device::new(2);
    for (n_seqs, t, width) in [(0, 3, 3), (1, 1, 1), (2, 31, 33), (1, 32, 32), (3, 33, 7), (2, 65, 64)] {
        let x = elements::<T>(1, n_seqs * t * width);
        let (y, from) = (device.poisoned::<T>(x.len()), device.upload(&x));
        let grid = [width.div_ceil(32) as u32, t.div_ceil(32) as u32, n_seqs as u32];
        launch!(device, format!("transpose_{}", T::NAME), grid, 256, 0; y, from, t as u32, width as u32);
        let at = |i: usize| (i / (t * width)) * t * width + i % t * width + i / t % width;
        let expect: Vec<f32> = (0..x.len()).map(|i| x[at(i)].to_f32()).collect();
        close("transposed", &device.download(&y, x.len()), &expect, 0.0);
    }
    device.finish();
}

for_each_element! {
    rows_are_gathered,
    weighted_rows_are_summed,
    rows_are_scattered,
    columns_are_cut,
    rows_are_added,
    a_product_is_finished,
    a_gate_multiplies_its_halves,
    rows_are_multiplied_by_an_activated_gate,
    sequences_are_transposed,
}
