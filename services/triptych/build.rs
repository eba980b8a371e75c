//! Lists the sample models of the repository for the binary to carry, and says of which commit it is.
//!
//! Each file becomes an `include_bytes!` in `samples.rs` of the output folder. A directory that is not there is
//! left out, so the crate builds outside the repository too.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

/// The directories under `tests/models` that `triptych up` serves by default.
const SAMPLES: [&str; 2] = ["shapes-qwen2-vl", "digits-whisper"];

fn main() -> io::Result<()> {
    let models = path_from_env("CARGO_MANIFEST_DIR").join("../../tests/models");
    let mut code =
        String::from("/// Name and files of each sample model.\npub static SAMPLES: &[SampleModel] = &[\n");
    for name in SAMPLES {
        let dir = models.join(name);
        println!("cargo::rerun-if-changed={}", dir.display());
        if dir.join("config.json").is_file() {
            list(&mut code, name, &dir)?;
        }
    }
    code.push_str("];\n");
    println!("cargo::rustc-env=TRIPTYCH_COMMIT={}", commit().unwrap_or_default());
    fs::write(path_from_env("OUT_DIR").join("samples.rs"), code)
}

/// The commit in the environment, as an image's build sets it, or the one that is checked out; with `+` if files
/// differ from it. None outside a repository.
fn commit() -> Option<String> {
    println!("cargo::rerun-if-env-changed=TRIPTYCH_COMMIT");
    if let Some(said) = env::var("TRIPTYCH_COMMIT").ok().filter(|said| !said.is_empty()) {
        return Some(said);
    }
    // It changes with every commit, and with every change of branch. A path that is not there would be taken for one that
    // always changes.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    if Path::new(&log).is_file() {
        println!("cargo::rerun-if-changed={log}");
    }
    let commit = git(&["rev-parse", "--short=10", "HEAD"])?;
    let differs = git(&["status", "--porcelain", "--untracked-files=no"]).is_none_or(|said| !said.is_empty());
    Some(if differs { format!("{commit}+") } else { commit })
}

fn git(args: &[&str]) -> Option<String> {
    let answer = Command::new("git").args(args).output().ok().filter(|answer| answer.status.success())?;
    Some(String::from_utf8(answer.stdout).ok()?.trim().to_owned())
}

fn list(code: &mut String, name: &str, dir: &Path) -> io::Result<()> {
    let mut files = fs::read_dir(dir)?.map(|e| e.map(|e| e.path())).collect::<io::Result<Vec<PathBuf>>>()?;
    files.retain(|f| f.is_file());
    files.sort();
    // Writing to a String cannot fail.
    let _ = writeln!(code, "SampleModel {{ name: {name:?}, files: &[");
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
