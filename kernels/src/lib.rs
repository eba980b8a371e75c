//! Arithmetic: the ops with their shapes, and one trait for the back ends.
//!
//! It knows no model by name and no request: a caller brings weights once and activations every step.
//! Two back ends implement [`ops::Backend`]: [`cpu`], packed weights and attention over paged KV as it lies; and
//! `reference` on candle-core, slow and plain, the oracle of tests, built with the feature `reference` only.
//! Both run the same suite of tests over odd sizes. Of a third, on CUDA, the kernels are there, with the feature `cuda`; tests run
//! them without a GPU.

pub mod ops;
mod precision;

mod check;
mod host;
mod stored;

#[cfg(feature = "reference")]
pub mod reference;

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

pub use cpu::{CpuBackend, CpuConfig, Isa};
#[cfg(feature = "cuda")]
pub use cuda::{CudaBackend, CudaConfig};
pub use host::HostBias;
pub use ops::{Backend, KernelError};
pub use precision::Precision;
#[cfg(feature = "reference")]
pub use reference::ReferenceBackend;
