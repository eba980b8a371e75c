//! Errors of the driver and of cublasLt, as those of ops.

use cudarc::cublaslt::result::CublasError;
use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

use crate::ops::{KernelError, Result};

/// Gives a library's result the op in which it came.
pub(super) trait InOp<T> {
    /// The result of an op.
    fn op(self, op: &'static str) -> Result<T>;
}

impl<T> InOp<T> for Result<T, DriverError> {
    fn op(self, op: &'static str) -> Result<T> {
        self.map_err(|error| {
            let message = describe(error);
            match error.0 {
                CUresult::CUDA_ERROR_OUT_OF_MEMORY => KernelError::OutOfMemory { op, message },
                code if is_lost(code) => KernelError::DeviceLost { op, message },
                _ => KernelError::Library { op, message },
            }
        })
    }
}

impl<T> InOp<T> for Result<T, CublasError> {
    fn op(self, op: &'static str) -> Result<T> {
        self.map_err(|error| KernelError::Library { op, message: format!("cublasLt: {:?}", error.0) })
    }
}

/// `true` for errors after which every call fails: the context is gone, and with it all memory of the process.
fn is_lost(code: CUresult) -> bool {
    use CUresult::*;
    matches!(
        code,
        CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_DEVICE_UNAVAILABLE
            | CUDA_ERROR_DEINITIALIZED
            | CUDA_ERROR_UNKNOWN
    )
}

/// Name and text of an error, from the driver.
pub(super) fn describe(error: DriverError) -> String {
    let text = |found: Result<&std::ffi::CStr, DriverError>| {
        found.map_or_else(|_| format!("error {}", error.0 as u32), |text| text.to_string_lossy().into_owned())
    };
    format!("{}: {}", text(error.error_name()), text(error.error_string()))
}
