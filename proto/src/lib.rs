//! The wire: `triptych.v1`, generated without protoc (`cargo xtask proto`), and its conversion to core types.
//!
//! `convert` is the only place where a wire enum or message becomes one of ours. It never panics: an unknown
//! number or a missing field is a [`convert::WireError`] that names the field.
#![forbid(unsafe_code)]

pub mod bounded;
pub mod codec;
pub mod convert;

/// Generated messages, clients and servers.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod v1 {
    include!("generated/triptych.v1.rs");
}

/// The lists of each message.
mod shapes {
    use crate::bounded::{Field, Kind, Shape, Shaped};
    use crate::v1;
    include!("generated/shapes.rs");
}

/// The encoded descriptor set, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!("generated/descriptors.bin");
