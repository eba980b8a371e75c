//! The back end on CUDA devices: kernels of its own, large products by cublasLt.
//!
//! Sources, launches and registers of the kernels: `cuda/README.md` beside this file. Nothing of CUDA is needed to build this,
//! nor to start it: libraries are looked up when a device is asked for.

mod arguments;
mod attention;
mod backend;
mod bias;
mod choose;
mod cublaslt;
mod device;
mod element;
mod error;
mod experts;
mod graph;
mod images;
mod kv;
mod linear;
mod memory;
mod packing;
mod queue;
mod recording;
mod recurrent;
mod rows;
mod sharing;
mod staging;
mod tensor;

pub use backend::{CudaBackend, CudaConfig};
pub use bias::CudaBias;
pub use choose::CudaPending;
pub use device::{DeviceMemory, device_count};
pub use experts::CudaExperts;
pub use images::{IMAGES, Image};
pub use kv::{CudaHostKvCache, CudaKvCache};
pub use linear::CudaLinear;
pub use recurrent::{CudaCausalConv, CudaDecay, CudaStateCache};
pub use rows::{CudaDepthwise, CudaNorm, CudaTable};
pub use tensor::{CudaStep, CudaTensor};
