//! Lists the sample models of the repository for the binary to carry.
//!
//! Each file becomes an `include_bytes!` in `samples.rs` of the output folder. A directory that is not there is
//! left out, so the crate builds outside the repository too.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// The directories under `tests/models` that `triptych up` serves by default.
const SAMPLES: [&str; 2] = ["shapes-qwen2-vl", "digits-whisper"];

fn main() -> io::Result<()> {
    let models = path_from_env("CARGO_MANIFEST_DIR").join("../../tests/models");
    let mut code =
        String::from("/// Name and files of each sample model.\npub static SAMPLES: &[Sample] = &[\n");
    for name in SAMPLES {
        let dir = models.join(name);
        println!("cargo::rerun-if-changed={}", dir.display());
        if dir.join("config.json").is_file() {
            list(&mut code, name, &dir)?;
        }
    }
    code.push_str("];\n");
    fs::write(path_from_env("OUT_DIR").join("samples.rs"), code)
}

fn list(code: &mut String, name: &str, dir: &Path) -> io::Result<()> {
    let mut files = fs::read_dir(dir)?.map(|e| e.map(|e| e.path())).collect::<io::Result<Vec<PathBuf>>>()?;
    files.retain(|f| f.is_file());
    files.sort();
    // Writing to a String cannot fail.
    let _ = writeln!(code, "Sample {{ name: {name:?}, files: &[");
    for file in files {
        let path = file.canonicalize()?;
        let file_name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let _ = writeln!(code, "({file_name:?}, include_bytes!({path:?})),");
    }
    code.push_str("] },\n");
    Ok(())
}

fn path_from_env(name: &str) -> PathBuf {
    PathBuf::from(env::var_os(name).unwrap_or_default())
}
