//! Products of matrices by cublasLt. An algorithm is chosen once for a layer, without split-K, and kept whatever the number of
//! rows: a row's value does not depend on how many there are. Only where the library does not take it for a number of rows is
//! one chosen for that.

use std::ffi::c_void;

use cudarc::cublaslt::result::{
    CublasError, create_handle, create_matmul_desc, create_matmul_pref, create_matrix_layout, destroy_handle,
    destroy_matmul_desc, destroy_matmul_pref, destroy_matrix_layout, get_matmul_algo_heuristic, matmul,
    set_matmul_desc_attribute, set_matmul_pref_attribute,
};
use cudarc::cublaslt::sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
use cudarc::cublaslt::sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
use cudarc::cublaslt::sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
use cudarc::cublaslt::sys::cublasStatus_t::{CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED};
use cudarc::cublaslt::sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_32F};
use cudarc::cublaslt::sys::{
    cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t, cublasLtMatmulPreference_t,
    cublasLtMatrixLayout_t,
};

use super::element::Element;
use super::error::InOp;
use super::queue::Queue;
use crate::ops::Result;

/// Rows for which the algorithm of a layer is chosen.
const TYPICAL_ROWS: usize = 256;

/// The library's handle.
#[derive(Debug)]
pub(super) struct Cublaslt(cublasLtHandle_t);

// SAFETY: the library allows one handle to be used by several threads at once.
unsafe impl Send for Cublaslt {}
// SAFETY: as above.
unsafe impl Sync for Cublaslt {}

/// A layer's product `y = x Wᵀ`: `w: [n_out, n_in]`, `x: [n_tokens, n_in]`, `y: [n_tokens, n_out]`, row-major.
pub(super) struct Algorithm {
    element: Element,
    n_in: usize,
    n_out: usize,
    /// For results in the element, and in f32.
    chosen: [cublasLtMatmulAlgo_t; 2],
}

impl std::fmt::Debug for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Algorithm")
            .field("n_in", &self.n_in)
            .field("n_out", &self.n_out)
            .finish_non_exhaustive()
    }
}

/// Addresses of a product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operands {
    pub(super) x: u64,
    pub(super) w: u64,
    pub(super) y: u64,
    /// Element of `y`: that of the operands, or f32.
    pub(super) result: Element,
    pub(super) n_tokens: usize,
}

/// Descriptions of a product, freed when they are dropped.
struct Descriptions {
    how: cublasLtMatmulDesc_t,
    w: cublasLtMatrixLayout_t,
    x: cublasLtMatrixLayout_t,
    y: cublasLtMatrixLayout_t,
}

impl Descriptions {
    /// The library's columns are our rows: it computes `yᵀ = W xᵀ`.
    fn new([element, result]: [Element; 2], [n_tokens, n_in, n_out]: [usize; 3]) -> Result<Self> {
        let op = "linear";
        let kind = |element| if element == Element::F32 { CUDA_R_32F } else { CUDA_R_16BF };
        let null = std::ptr::null_mut;
        let how = create_matmul_desc(CUBLAS_COMPUTE_32F, CUDA_R_32F).op(op)?;
        let mut all = Self { how, w: null(), x: null(), y: null() };
        let layout = |element, rows: usize, columns: usize| {
            create_matrix_layout(kind(element), rows as u64, columns as u64, rows as i64).op(op)
        };
        all.w = layout(element, n_in, n_out)?;
        all.x = layout(element, n_in, n_tokens)?;
        all.y = layout(result, n_out, n_tokens)?;
        let transposed = 1_i32;
        // SAFETY: the setting is an int.
        unsafe {
            set_matmul_desc_attribute(
                all.how,
                CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of::<i32>(),
            )
        }
        .op(op)?;
        Ok(all)
    }
}

impl Drop for Descriptions {
    fn drop(&mut self) {
        for layout in [self.w, self.x, self.y] {
            if !layout.is_null() {
                // SAFETY: made by `new`, freed once.
                let _ = unsafe { destroy_matrix_layout(layout) };
            }
        }
        // SAFETY: as above.
        let _ = unsafe { destroy_matmul_desc(self.how) };
    }
}

/// Preferences of a choice, freed when they are dropped.
struct Preference(cublasLtMatmulPreference_t);

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made once, freed once.
        let _ = unsafe { destroy_matmul_pref(self.0) };
    }
}

impl Cublaslt {
    /// A handle; the device is the current one of the thread.
    pub(super) fn new() -> Result<Self> {
        Ok(Self(create_handle().op("cuda")?))
    }

    /// Chooses the algorithms of a layer. No workspace, and no reduction of parts: each sum is in one order.
    pub(super) fn choose(&self, element: Element, n_in: usize, n_out: usize) -> Result<Algorithm> {
        let dims = [TYPICAL_ROWS, n_in, n_out];
        let chosen = [self.algorithm([element; 2], dims)?, self.algorithm([element, Element::F32], dims)?];
        Ok(Algorithm { element, n_in, n_out, chosen })
    }

    /// The algorithm for elements of operands and of the result, and `[n_tokens, n_in, n_out]`.
    fn algorithm(&self, elements: [Element; 2], dims: [usize; 3]) -> Result<cublasLtMatmulAlgo_t> {
        let op = "linear";
        let all = Descriptions::new(elements, dims)?;
        let preference = Preference(create_matmul_pref().op(op)?);
        let no_reduction = 0_u32;
        // SAFETY: the setting is a mask of 32 bits; the descriptions are alive.
        let found = unsafe {
            set_matmul_pref_attribute(
                preference.0,
                CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                (&raw const no_reduction).cast(),
                size_of::<u32>(),
            )
            .op(op)?;
            get_matmul_algo_heuristic(self.0, all.how, all.w, all.x, all.y, all.y, preference.0)
        };
        Ok(found.op(op)?.algo)
    }

    /// Computes a product on a stream.
    pub(super) fn multiply(&self, queue: &Queue, algorithm: &Algorithm, with: Operands) -> Result<()> {
        let op = "linear";
        let Algorithm { element, n_in, n_out, chosen: [same, wide] } = algorithm;
        let (elements, dims) = ([*element, with.result], [with.n_tokens, *n_in, *n_out]);
        let all = Descriptions::new(elements, dims)?;
        let chosen = if with.result == *element { same } else { wide };
        queue.device().bind(op)?;
        match self.submit(queue, &all, chosen, with) {
            Err(CublasError(CUBLAS_STATUS_NOT_SUPPORTED | CUBLAS_STATUS_INVALID_VALUE)) => {
                self.submit(queue, &all, &self.algorithm(elements, dims)?, with).op(op)
            }
            submitted => submitted.op(op),
        }
    }

    fn submit(
        &self,
        queue: &Queue,
        all: &Descriptions,
        chosen: &cublasLtMatmulAlgo_t,
        with: Operands,
    ) -> Result<(), CublasError> {
        let (one, zero) = (1_f32, 0_f32);
        // SAFETY: the caller's addresses have as many elements as the layouts say, until the stream has passed.
        unsafe {
            matmul(
                self.0,
                all.how,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                with.w as *const c_void,
                all.w,
                with.x as *const c_void,
                all.x,
                with.y as *const c_void,
                all.y,
                with.y as *mut c_void,
                all.y,
                chosen,
                std::ptr::null_mut(),
                0,
                queue.stream().cu_stream().cast(),
            )
        }
    }
}

impl Drop for Cublaslt {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        let _ = unsafe { destroy_handle(self.0) };
    }
}
