//! The sample models of the repository, carried in the binary and unpacked into the user's cache folder.
//!
//! The folder is named after the hash of its contents, so another version of the binary unpacks beside it and
//! never into it. It appears whole by a rename or not at all; one that was damaged since is replaced.

use super::location::{ModelLocation, cache_root};
use crate::error::CliError;
use std::io;
use std::path::{Path, PathBuf};

/// A directory as it was when the binary was built.
pub struct SampleModel {
    /// Name of the directory, and of the model.
    pub name: &'static str,
    /// Name and bytes of each file.
    pub files: &'static [(&'static str, &'static [u8])],
}

include!(concat!(env!("OUT_DIR"), "/samples.rs"));

/// Unpacks what is not there yet.
///
/// # Errors
/// [`CliError`] if the binary carries none, or the cache folder cannot be written.
pub(super) fn unpack() -> Result<Vec<ModelLocation>, CliError> {
    if SAMPLES.is_empty() {
        return Err(CliError::Setting(
            "this build carries no sample models; name one with --model DIR (a Hugging Face directory)"
                .into(),
        ));
    }
    SAMPLES.iter().map(place).collect()
}

/// Unpacks one, if it is not there yet.
///
/// # Errors
/// [`CliError`] if the binary carries none of that name, or the cache folder cannot be written.
pub(super) fn unpack_named(name: &str) -> Result<PathBuf, CliError> {
    match SAMPLES.iter().find(|sample| sample.name == name) {
        Some(sample) => place(sample).map(|found| found.dir),
        None => {
            let names: Vec<_> = SAMPLES.iter().map(|sample| sample.name).collect();
            let names = if names.is_empty() { "none".into() } else { names.join(", ") };
            Err(CliError::Setting(format!("--model sample:{name}: this build carries {names}")))
        }
    }
}

fn place(sample: &SampleModel) -> Result<ModelLocation, CliError> {
    let root = cache_root().join("models");
    unpack_one(sample, &root).map(|dir| ModelLocation { name: None, dir }).map_err(|e| {
        let what = format!(
            "cannot unpack the sample model {} under {} (XDG_CACHE_HOME sets another place)",
            sample.name,
            root.display()
        );
        CliError::setting(what, &e)
    })
}

fn unpack_one(sample: &SampleModel, root: &Path) -> io::Result<PathBuf> {
    let parent = root.join(digest(sample));
    let dir = parent.join(sample.name);
    if is_whole(sample, &dir) {
        return Ok(dir);
    }
    std::fs::create_dir_all(&parent)?;
    let fresh = tempfile::Builder::new().prefix(".unpacking-").tempdir_in(&parent)?;
    for (name, bytes) in sample.files {
        std::fs::write(fresh.path().join(name), bytes)?;
    }
    if dir.exists() {
        // Damaged. Moved aside first, since a rename does not replace a directory that holds files.
        let aside = tempfile::Builder::new().prefix(".damaged-").tempdir_in(&parent)?;
        let _ = std::fs::rename(&dir, aside.path().join(sample.name));
    }
    match std::fs::rename(fresh.path(), &dir) {
        Ok(()) => Ok(dir),
        // Another process unpacked the same at the same moment.
        Err(_) if is_whole(sample, &dir) => Ok(dir),
        Err(e) => Err(e),
    }
}

/// A hash over names and contents, every part with its length.
fn digest(sample: &SampleModel) -> String {
    let mut hasher = blake3::Hasher::new();
    for (name, bytes) in sample.files {
        for part in [name.as_bytes(), bytes] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
    }
    hasher.finalize().to_hex().to_string()
}

/// True if every file has its size. Other damage is found by the worker that reads the file.
fn is_whole(sample: &SampleModel, dir: &Path) -> bool {
    sample.files.iter().all(|(name, bytes)| {
        std::fs::metadata(dir.join(name)).is_ok_and(|m| m.is_file() && m.len() == bytes.len() as u64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: SampleModel =
        SampleModel { name: "tiny", files: &[("config.json", b"{}"), ("a.bin", &[1, 2, 3])] };

    #[test]
    fn unpacked_once_and_again_when_damaged() {
        let root = tempfile::tempdir().unwrap();
        let dir = unpack_one(&SAMPLE, root.path()).unwrap();
        assert!(dir.ends_with("tiny") && is_whole(&SAMPLE, &dir));
        std::fs::write(dir.join("kept"), "").unwrap();
        assert_eq!(unpack_one(&SAMPLE, root.path()).unwrap(), dir);
        assert!(dir.join("kept").exists(), "a whole directory is left alone");
        std::fs::write(dir.join("a.bin"), [1]).unwrap();
        unpack_one(&SAMPLE, root.path()).unwrap();
        assert!(is_whole(&SAMPLE, &dir) && !dir.join("kept").exists());
        let left = std::fs::read_dir(dir.parent().unwrap()).unwrap().count();
        assert_eq!(left, 1, "temporary directories are gone");
    }

    #[test]
    fn other_contents_go_to_another_place() {
        let other = SampleModel { name: "tiny", files: &[("config.json", b"{}"), ("a.bin", &[1, 2, 4])] };
        assert_ne!(digest(&SAMPLE), digest(&other));
    }
}
