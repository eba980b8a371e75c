//! `cargo xtask proto`: compiles the schema without protoc, into the files that `triptych-proto` includes.
//!
//! protox parses, tonic-prost-build writes the Rust. A test fails while what is checked in is not what the schema gives.
#![forbid(unsafe_code)]

mod shapes;

use protox::prost_reflect::DescriptorPool;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

const SCHEMA: [&str; 3] =
    ["triptych/v1/types.proto", "triptych/v1/triptych.proto", "triptych/v1/worker.proto"];
const RUST: &str = "triptych.v1.rs";
const DESCRIPTORS: &str = "descriptors.bin";
const SHAPES: &str = "shapes.rs";
/// The codec of every method.
const CODEC: &str = "crate::codec::BoundedCodec";

fn main() -> Result<(), Box<dyn Error>> {
    let folder = schema_folder().join("src/generated");
    fs::create_dir_all(&folder)?;
    for (name, bytes) in generated()? {
        let path = folder.join(name);
        if fs::read(&path).is_ok_and(|there| there == bytes) {
            println!("{name}: as it was");
            continue;
        }
        fs::write(path, bytes)?;
        println!("{name}: written");
    }
    Ok(())
}

/// The folder of `triptych-proto`.
fn schema_folder() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// A file of `src/generated`: its name and its bytes.
type NamedFile = (&'static str, Vec<u8>);

/// The files to check in.
fn generated() -> Result<[NamedFile; 3], Box<dyn Error>> {
    let descriptors = protox::compile(SCHEMA, [schema_folder()])?;
    let encoded = prost::Message::encode_to_vec(&descriptors);
    let shapes = shapes::rust(&DescriptorPool::from_file_descriptor_set(descriptors.clone())?);
    let out = tempfile::tempdir()?;
    let mut config = tonic_prost_build::Config::new();
    config.bytes(["."]).out_dir(out.path());
    let build = tonic_prost_build::configure().build_transport(true).codec_path(CODEC).out_dir(out.path());
    build.compile_fds_with_config(descriptors, config)?;
    Ok([(RUST, fs::read(out.path().join(RUST))?), (DESCRIPTORS, encoded), (SHAPES, shapes.into_bytes())])
}

#[test]
fn files_in_the_repository_are_what_the_schema_gives() {
    for (name, bytes) in generated().expect("the schema compiles") {
        let there = fs::read(schema_folder().join("src/generated").join(name)).unwrap_or_default();
        assert!(there == bytes, "{name} is stale: run `cargo xtask proto`");
    }
}
