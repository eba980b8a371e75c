//! The parts of the CUDA back end that exist: the kernels as they are built.
//!
//! Sources, launches and registers of the kernels: `cuda/README.md` beside this file. Nothing of CUDA is needed to build this,
//! nor to start it: cudarc looks a library up when it is first called.

mod images;

pub use images::{IMAGES, Image};
