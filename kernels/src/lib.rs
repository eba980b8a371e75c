//! Arithmetic: the ops with their shapes, and one trait for the back ends.
//!
//! It knows no model by name and no request: a caller brings weights once and activations every step.
//! Two back ends implement [`ops::Backend`]: [`reference`] on candle-core, slow and plain, the oracle; and
//! [`cpu`], packed weights and attention over paged KV as it lies. Which one runs is the caller's choice;
//! both run the same suite of tests over odd sizes.

pub mod ops;
mod precision;

mod check;
mod stored;

pub mod reference;

pub mod cpu;

pub use cpu::{CpuBackend, CpuConfig, Isa};
pub use ops::{Backend, KernelError};
pub use precision::Precision;
pub use reference::ReferenceBackend;
