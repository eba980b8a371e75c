//! Norms of rows and of sequences.

use triptych_kernels::ops::NormKind;

use crate::device::Device;
use crate::element::{Element, close, elements, values, widened};
use crate::{launch, oracle};

const THREADS: u32 = 256;
const EPS: f32 = 1e-5;

/// `(rows, width)`: around a vector and a block of threads.
const SIZES: [(usize, usize); 9] =
    [(0, 8), (1, 1), (3, 7), (2, 8), (4, 33), (2, 255), (1, 2048), (2, 2049), (3, 2056)];

const KINDS: [NormKind; 2] = [NormKind::Rms, NormKind::Layer];

fn rows_are_normalised<T: Element>() {
    let device = Device::new(1);
    let name = format!("norm_{}", T::NAME);
    for ((n_rows, width), (kind, has_bias)) in SIZES
        .iter()
        .flat_map(|size| KINDS.iter().flat_map(move |kind| [true, false].map(|bias| (*size, (*kind, bias)))))
    {
        let x = elements::<T>(1, n_rows * width);
        let (scale, bias) = (values(2, width), values(3, width));
        let (from, y, none) = (device.upload(&x), device.poisoned::<T>(x.len()), 0_u64);
        let (scales, biases) = (device.upload(&scale), device.upload(&bias));
        let (grid, is_layer) = ([n_rows as u32, 1, 1], u32::from(kind == NormKind::Layer));
        if has_bias {
            launch!(device, name, grid, THREADS, 0; y, none, from, none, scales, biases, EPS, is_layer, width as u32);
        } else {
            launch!(device, name, grid, THREADS, 0; y, none, from, none, scales, none, EPS, is_layer, width as u32);
        }
        let expect = oracle::norm(&widened(&x), kind, &scale, has_bias.then_some(&bias[..]), EPS);
        close("norm", &device.download(&y, x.len()), &expect, T::STEP * 4.0);
    }
    device.finish();
}

fn a_residual_is_added_before_and_kept<T: Element>() {
    let device = Device::new(2);
    let name = format!("norm_{}", T::NAME);
    for (n_rows, width) in SIZES {
        let (x, residual) = (elements::<T>(1, n_rows * width), elements::<T>(4, n_rows * width));
        let scale = values(2, width);
        let (from, kept, y) = (device.upload(&x), device.upload(&residual), device.poisoned::<T>(x.len()));
        let (scales, none, grid) = (device.upload(&scale), 0_u64, [n_rows as u32, 1, 1]);
        // The sum takes the residual's place.
        launch!(device, name, grid, THREADS, 0; y, kept, from, kept, scales, none, EPS, 0_u32, width as u32);
        let sum: Vec<T> =
            x.iter().zip(&residual).map(|(a, b)| T::from_f32(a.to_f32() + b.to_f32())).collect();
        close("sum", &device.download(&kept, x.len()), &widened(&sum), 0.0);
        let expect = oracle::norm(&widened(&sum), NormKind::Rms, &scale, None, EPS);
        close("norm of a sum", &device.download(&y, x.len()), &expect, T::STEP * 4.0);
    }
    device.finish();
}

fn sequences_are_normalised_as_a_whole<T: Element>() {
    let device = Device::new(3);
    for (rows, width) in [(&[][..], 4), (&[1], 1), (&[3, 1, 0, 40], 7), (&[2, 65], 64)] {
        let starts: Vec<u32> = std::iter::once(0)
            .chain(rows.iter().scan(0, |sum, n| {
                *sum += *n as u32;
                Some(*sum)
            }))
            .collect();
        let n = *starts.last().expect("an end") as usize * width;
        let x = elements::<T>(1, n);
        let (scale, bias) = (values(2, width), values(3, width));
        for kind in KINDS {
            let (y, from, at) = (device.poisoned::<T>(n), device.upload(&x), device.upload(&starts));
            let (scales, biases) = (device.upload(&scale), device.upload(&bias));
            launch!(device, format!("group_norm_{}", T::NAME), [rows.len() as u32, 1, 1], THREADS, 0;
                y, from, at, scales, biases, EPS, u32::from(kind == NormKind::Layer), width as u32);
            let expect = oracle::group_norm(&widened(&x), kind, [&scale, &bias], rows);
            close("sequences", &device.download(&y, n), &expect, T::STEP * 4.0);
        }
    }
    device.finish();
}

fn a_row_is_the_same_alone<T: Element>() {
    let device = Device::new(4);
    let (n_rows, width) = (5, 300);
    let x = elements::<T>(1, n_rows * width);
    let scale = device.upload(&values(2, width));
    let run = |rows: &[T]| {
        let (from, y, none) = (device.upload(rows), device.poisoned::<T>(rows.len()), 0_u64);
        launch!(device, format!("norm_{}", T::NAME), [(rows.len() / width) as u32, 1, 1], THREADS, 0;
            y, none, from, none, scale, none, EPS, 1_u32, width as u32);
        device.download(&y, rows.len())
    };
    let together = run(&x);
    for (row, expect) in x.chunks(width).zip(together.chunks(width)) {
        assert_eq!(run(row), expect);
    }
}

for_each_element! {
    rows_are_normalised,
    a_residual_is_added_before_and_kept,
    sequences_are_normalised_as_a_whole,
    a_row_is_the_same_alone,
}
