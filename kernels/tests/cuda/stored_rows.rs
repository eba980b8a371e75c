//! Rows of encoder outputs, from their stored types to activations and back.

use triptych_core::DType;
use triptych_core::item::{rows_from_f32, to_f32};

use crate::device::Device;
use crate::element::{Bf16, Element, close, elements, values, widened};
use crate::launch;

const SIZES: [(usize, usize); 6] = [(0, 4), (1, 1), (3, 7), (2, 255), (4, 256), (2, 300)];

fn grid(n_rows: usize) -> [u32; 3] {
    [(n_rows as u32).min(2), 1, 1]
}

#[test]
fn floats_are_widened_and_narrowed() {
    let device = Device::new(1);
    for (n_rows, width) in SIZES {
        let (narrow, wide) = (elements::<Bf16>(1, n_rows * width), values(2, n_rows * width));
        let (y, z) = (device.poisoned::<f32>(wide.len()), device.poisoned::<Bf16>(wide.len()));
        let (from_narrow, from_wide) = (device.upload(&narrow), device.upload(&wide));
        launch!(device, "widen_bf16", grid(n_rows), 256, 0; y, from_narrow, n_rows as u32, width as u32);
        launch!(device, "narrow_bf16", grid(n_rows), 256, 0; z, from_wide, n_rows as u32, width as u32);
        assert_eq!(device.download(&y, wide.len()), widened(&narrow));
        let expect: Vec<Bf16> = wide.iter().copied().map(Bf16::from_f32).collect();
        assert_eq!(device.download(&z, wide.len()), expect);
    }
    device.finish();
}

fn bytes_are_read_with_the_scale_of_their_row<T: Element>() {
    let device = Device::new(2);
    for (dtype, (n_rows, width)) in
        [DType::I8, DType::F8].into_iter().flat_map(|d| SIZES.map(|size| (d, size)))
    {
        let bytes: Vec<u8> = (0..n_rows * width).map(|i| (i * 37 + 11) as u8).collect();
        let scales: Vec<f32> = values(1, n_rows).iter().map(|v| v.abs() / 64.0).collect();
        let y = device.poisoned::<T>(bytes.len());
        let (from, with) = (device.upload(&bytes), device.upload(&scales));
        launch!(device, format!("read_bytes_{}", T::NAME), grid(n_rows), 256, 0;
            y, from, with, u32::from(dtype == DType::F8), n_rows as u32, width as u32);
        let expect: Vec<T> = to_f32(&bytes, dtype)
            .iter()
            .enumerate()
            .map(|(i, v)| T::from_f32(v * scales[i / width]))
            .collect();
        for (a, e) in device.download(&y, bytes.len()).iter().zip(&expect) {
            let (a, e) = (a.to_f32(), e.to_f32());
            assert!(a == e || a.is_nan() && e.is_nan(), "{a} for {e}");
        }
    }
    device.finish();
}

fn rows_are_stored_as_bytes<T: Element>() {
    let device = Device::new(3);
    for (n_rows, width) in SIZES {
        let mut x = elements::<T>(1, n_rows * width);
        // A row of zeros, and one with what is not a number.
        if n_rows > 1 {
            x[..width].fill(T::from_f32(0.0));
            x[width + width / 2] = T::poison();
        }
        let (y, scales) = (device.poisoned::<u8>(x.len()), device.poisoned::<f32>(n_rows));
        let from = device.upload(&x);
        launch!(device, format!("write_bytes_{}", T::NAME), [n_rows as u32, 1, 1], 256, 0; y, scales, from, width as u32);
        let (bytes, scales) = (device.download(&y, x.len()), device.download(&scales, n_rows));
        for (i, row) in x.chunks(width).enumerate() {
            let row = widened(row);
            // Scale and bytes of one row.
            let stored = rows_from_f32(&row, width, DType::I8);
            let scale = f32::from_le_bytes(stored[..4].try_into().expect("four bytes"));
            assert!(scales[i] == scale || scales[i].is_nan() && scale.is_nan());
            for (j, (a, e)) in bytes[i * width..][..width].iter().zip(&stored[4..]).enumerate() {
                // One step, where the inverse of a scale is rounded.
                let near = (i32::from(a.cast_signed()) - i32::from(e.cast_signed())).abs() <= 1;
                assert!(near || scale.is_nan(), "row {i}, {j}: {a} for {e}");
            }
        }
    }
    device.finish();
}

fn bytes_read_back_are_near_the_row<T: Element>() {
    let device = Device::new(4);
    let (n_rows, width) = (3, 70);
    let x = elements::<T>(1, n_rows * width);
    let (bytes, scales) = (device.poisoned::<u8>(x.len()), device.poisoned::<f32>(n_rows));
    let (from, y) = (device.upload(&x), device.poisoned::<T>(x.len()));
    launch!(device, format!("write_bytes_{}", T::NAME), [n_rows as u32, 1, 1], 256, 0; bytes, scales, from, width as u32);
    launch!(device, format!("read_bytes_{}", T::NAME), [1, 1, 1], 256, 0;
        y, bytes, scales, 0_u32, n_rows as u32, width as u32);
    close("rows", &device.download(&y, x.len()), &widened(&x), 1.0 / 127.0);
}

for_each_element! {
    bytes_are_read_with_the_scale_of_their_row,
    rows_are_stored_as_bytes,
    bytes_read_back_are_near_the_row,
}
