//! The stand-in's cublasLt: products with plain loops, on a stream, for the layouts that the product uses.

use std::ffi::c_void;

use cudarc::cublaslt::result::{
    create_handle, create_matmul_desc, create_matmul_pref, create_matrix_layout, destroy_handle,
    destroy_matmul_desc, destroy_matmul_pref, destroy_matrix_layout, get_matmul_algo_heuristic, matmul,
    set_matmul_desc_attribute,
};
use cudarc::cublaslt::sys::cublasComputeType_t::{self, *};
use cudarc::cublaslt::sys::cublasLtMatmulDescAttributes_t::*;
use cudarc::cublaslt::sys::cublasStatus_t;
use cudarc::cublaslt::sys::cudaDataType_t::{self, *};

use crate::cache::address;
use crate::device::Device;
use crate::element::{Bf16, Element, close, elements, widened};
use crate::oracle;

/// Types of a product: operands, result, sums.
#[derive(Clone, Copy)]
struct Types {
    operand: cudaDataType_t,
    result: cudaDataType_t,
    compute: cublasComputeType_t,
    scale: cudaDataType_t,
}

/// Addresses and sizes of `y = x Wᵀ`: `x: [n_tokens, n_in]`, `w: [n_out, n_in]`, row-major.
#[derive(Clone, Copy)]
struct Product {
    x: u64,
    w: u64,
    y: u64,
    n_tokens: usize,
    n_in: usize,
    n_out: usize,
}

/// One product as row-major matrices: cublasLt's columns are our rows, so it computes `yᵀ = W xᵀ`.
fn run(device: &Device, types: Types, p: Product) -> Result<(), cublasStatus_t> {
    let (one, zero) = (1_f32, 0_f32);
    let (one_s32, zero_s32) = (1_i32, 0_i32);
    let is_s32 = types.scale == CUDA_R_32I;
    let alpha: *const c_void = if is_s32 { (&raw const one_s32).cast() } else { (&raw const one).cast() };
    let beta: *const c_void = if is_s32 { (&raw const zero_s32).cast() } else { (&raw const zero).cast() };
    device.context.bind_to_thread().expect("a context");
    let layout = |kind, rows: usize, columns: usize| {
        create_matrix_layout(kind, rows as u64, columns as u64, rows as i64).expect("a layout")
    };
    let [w, x] = [layout(types.operand, p.n_in, p.n_out), layout(types.operand, p.n_in, p.n_tokens)];
    let y = layout(types.result, p.n_out, p.n_tokens);
    let (handle, how) = (create_handle().expect("a handle"), create_matmul_desc(types.compute, types.scale));
    let (how, preference) = (how.map_err(|e| e.0)?, create_matmul_pref().expect("preferences"));
    let transposed = 1_i32;
    let stream = device.stream.cu_stream();
    // SAFETY: handles, layouts and addresses are alive until the stream has ended.
    let result = unsafe {
        set_matmul_desc_attribute(how, CUBLASLT_MATMUL_DESC_TRANSA, (&raw const transposed).cast(), 4)
            .expect("a setting");
        get_matmul_algo_heuristic(handle, how, w, x, y, y, preference).and_then(|found| {
            matmul(
                handle,
                how,
                alpha,
                beta,
                p.w as *const c_void,
                w,
                p.x as *const c_void,
                x,
                p.y as *const c_void,
                y,
                p.y as *mut c_void,
                y,
                &found.algo,
                std::ptr::null_mut(),
                0,
                stream.cast(),
            )
        })
    };
    // SAFETY: nothing uses them any more.
    unsafe {
        for layout in [w, x, y] {
            destroy_matrix_layout(layout).expect("an end");
        }
        destroy_matmul_desc(how).expect("an end");
        destroy_matmul_pref(preference).expect("an end");
        destroy_handle(handle).expect("an end");
    }
    result.map_err(|e| e.0)
}

const F32: Types =
    Types { operand: CUDA_R_32F, result: CUDA_R_32F, compute: CUBLAS_COMPUTE_32F, scale: CUDA_R_32F };

fn products_are_the_oracles<T: Element>() {
    let device = Device::of_standin(1);
    let kind = if T::NAME == "f32" { CUDA_R_32F } else { CUDA_R_16BF };
    for (n_tokens, n_in, n_out) in [(1, 1, 1), (3, 17, 5), (9, 64, 33)] {
        let (x, w) = (elements::<T>(1, n_tokens * n_in), elements::<T>(2, n_out * n_in));
        let (xs, ws) = (device.upload(&x), device.upload(&w));
        let ys = device.poisoned::<T>(n_tokens * n_out);
        let [x_at, w_at, y_at] = [&xs, &ws, &ys].map(|s| address(&device, s));
        let product = Product { x: x_at, w: w_at, y: y_at, n_tokens, n_in, n_out };
        run(&device, Types { operand: kind, result: kind, ..F32 }, product).expect("a product");
        let zeros = vec![0.0; n_out];
        let expect = oracle::linear(&widened(&x), &widened(&w), Some(&zeros), n_in, Default::default());
        close("product", &device.download(&ys, n_tokens * n_out), &expect, T::STEP * 2.0);
    }
}

for_each_element! {
    products_are_the_oracles,
}

#[test]
fn products_of_bytes_are_exact() {
    let device = Device::of_standin(2);
    let (n_tokens, n_in, n_out) = (5, 64, 12);
    let byte = |i: usize| (i * 37 % 255) as u8 as i8;
    let (x, w): (Vec<i8>, Vec<i8>) =
        ((0..n_tokens * n_in).map(byte).collect(), (0..n_out * n_in).map(|i| byte(i + 3)).collect());
    let (xs, ws, ys) = (device.upload(&x), device.upload(&w), device.poisoned::<i32>(n_tokens * n_out));
    let product = Product {
        x: address(&device, &xs),
        w: address(&device, &ws),
        y: address(&device, &ys),
        n_tokens,
        n_in,
        n_out,
    };
    let types =
        Types { operand: CUDA_R_8I, result: CUDA_R_32I, compute: CUBLAS_COMPUTE_32I, scale: CUDA_R_32I };
    run(&device, types, product).expect("a product");
    let dot = |token: usize, out: usize| -> i32 {
        (0..n_in).map(|k| i32::from(x[token * n_in + k]) * i32::from(w[out * n_in + k])).sum()
    };
    let expect: Vec<i32> = (0..n_tokens * n_out).map(|i| dot(i / n_out, i % n_out)).collect();
    assert_eq!(device.download(&ys, expect.len()), expect);
}

#[test]
fn what_the_product_may_not_use_is_refused() {
    let device = Device::of_standin(3);
    let x = device.upload(&[Bf16::from_f32(1.0); 4]);
    let at = address(&device, &x);
    let product = Product { x: at, w: at, y: at, n_tokens: 2, n_in: 2, n_out: 2 };
    let tf32 = Types { compute: CUBLAS_COMPUTE_32F_FAST_TF32, ..F32 };
    assert_eq!(run(&device, tf32, product), Err(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED));
    let bytes =
        Types { operand: CUDA_R_8I, result: CUDA_R_32I, compute: CUBLAS_COMPUTE_32I, scale: CUDA_R_32I };
    let narrow = Product { n_in: 3, ..product };
    assert_eq!(run(&device, bytes, narrow), Err(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED));
    // A matrix that is longer than its memory.
    run(&device, F32, product).expect("a launch");
    let error = device.stream.synchronize().expect_err("an operand outside");
    assert!(device.fault().contains("cublasLtMatmul"), "{error}: {}", device.fault());
}
