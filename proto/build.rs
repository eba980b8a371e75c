//! Compiles the schema without protoc: protox parses, tonic-prost-build writes the Rust.

use std::{env, fs, path::PathBuf};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["triptych/v1/types.proto", "triptych/v1/triptych.proto", "triptych/v1/worker.proto"];
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("triptych_descriptor.bin"), prost::Message::encode_to_vec(&descriptors))?;
    let mut config = tonic_prost_build::Config::new();
    config.bytes(["."]);
    tonic_prost_build::configure().build_transport(true).compile_fds_with_config(descriptors, config)?;
    Ok(())
}
