//! Arithmetic: the ops with their shapes, and one trait for the back ends.
//!
//! It knows no model by name and no request: a caller brings weights once and activations every step.
//! Three back ends implement [`ops::Backend`]: [`cpu`], packed weights and attention over paged KV as it lies; [`cuda`],
//! kernels of its own and cublasLt for large products; and `reference` on candle-core, slow and plain, the oracle of tests,
//! built with the feature `reference` only. All run the same suite of tests over odd sizes, CUDA without a GPU too: on
//! libraries that stand in for the driver and run the same kernels on the CPU.

pub mod ops;
mod precision;

pub mod logits;
pub mod sampling;

mod check;
mod experts;
mod host;
mod states;
mod stored;

#[cfg(feature = "reference")]
pub mod reference;

pub mod cpu;
pub mod cuda;

pub use cpu::{CpuBackend, CpuConfig, Isa};
pub use cuda::{CudaBackend, CudaConfig};
pub use experts::HostExperts;
pub use host::HostBias;
pub use ops::{Backend, KernelError};
pub use precision::Precision;
#[cfg(feature = "reference")]
pub use reference::ReferenceBackend;
pub use states::HostStates;
