//! Adapters that a worker loads: those of the start, and those that requests may name, below a directory that the operator allows.

use super::LoraAdapter;
use crate::error::ModelError;
use std::path::{Path, PathBuf};
use triptych_core::Failure;

/// Most bytes of an adapter's name.
const MAX_NAME: usize = 256;

/// Adapters of a worker.
#[derive(Clone, Debug)]
pub struct LoraSettings {
    /// Adapters to load at the start.
    pub adapters: Vec<LoraSource>,
    /// Highest rank of an adapter. Default 16.
    pub max_rank: usize,
    /// Most adapters of a model that are loaded at once. Default 32. 0: none.
    pub max_loaded: usize,
    /// Directory below which requests may name adapters to load. Default `None`: requests load and unload none.
    pub updates: Option<PathBuf>,
}

impl Default for LoraSettings {
    fn default() -> Self {
        Self { adapters: Vec::new(), max_rank: 16, max_loaded: 32, updates: None }
    }
}

/// An adapter to load at the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraSource {
    /// The name that clients use.
    pub name: String,
    /// Name of its base model; `None`: the only model of the worker.
    pub model: Option<String>,
    /// Directory that PEFT wrote.
    pub dir: PathBuf,
}

impl LoraSource {
    /// True if it is of a model.
    pub fn is_of(&self, model: &str) -> bool {
        self.model.as_deref().is_none_or(|own| own == model)
    }
}

impl LoraSettings {
    /// True if there are adapters, or may be.
    pub fn is_used(&self) -> bool {
        !self.adapters.is_empty() || self.updates.is_some()
    }

    /// Refuses requests that load and unload adapters, if they are not allowed.
    ///
    /// # Errors
    /// Invalid, naming the flag.
    pub fn check_updates(&self) -> Result<&Path, Failure> {
        self.updates.as_deref().ok_or_else(|| {
            Failure::invalid("adapters are not loaded or unloaded by requests here; --lora-updates allows it")
        })
    }

    /// Refuses one more adapter of a model than may be loaded.
    ///
    /// # Errors
    /// Invalid, with the number that is loaded.
    pub fn check_room(&self, n_loaded: usize) -> Result<(), Failure> {
        if n_loaded < self.max_loaded {
            return Ok(());
        }
        let message = format!("{n_loaded} adapters are loaded, which is the limit; unload one first");
        Err(Failure::invalid(message).with_param("lora_name"))
    }

    /// Opens an adapter that a request names by its directory. Reads files: not for an async worker's thread.
    ///
    /// # Errors
    /// Invalid for a directory that is not below the allowed one, or an adapter that is not served.
    pub fn open(&self, named: &Path) -> Result<LoraAdapter, Failure> {
        let dir = below(self.check_updates()?, named)?;
        LoraAdapter::open(&dir, self.max_rank).map_err(|e| refused_by_request(&e))
    }
}

/// Refuses the name of an adapter that a request would load; `is_model` tells the names of models.
///
/// # Errors
/// Invalid for a name that is empty, too long, or that of a model.
pub fn check_adapter_name(name: &str, is_model: impl Fn(&str) -> bool) -> Result<(), Failure> {
    let refuse = |text: String| Err(Failure::invalid(text).with_param("lora_name"));
    match name.len() {
        1..=MAX_NAME if is_model(name) => refuse(format!("{name:?} is the name of a model")),
        1..=MAX_NAME => Ok(()),
        n => refuse(format!("lora_name has {n} bytes, allowed are 1 to {MAX_NAME}")),
    }
}

/// The failure of a request whose adapter is not served.
pub fn refused_by_request(error: &ModelError) -> Failure {
    match error {
        ModelError::Kernel(error) => Failure::internal(error),
        // Paths are for the operator's log.
        ModelError::File { source, .. } => Failure::invalid(format!("a file of the adapter: {source}"))
            .with_param("lora_path")
            .with_detail(error.to_string()),
        other => Failure::invalid(other.to_string()).with_param("lora_path"),
    }
}

/// The directory that a request names, which lies below `root` whatever links it has.
fn below(root: &Path, named: &Path) -> Result<PathBuf, Failure> {
    let refuse = |text: String| Failure::invalid(text).with_param("lora_path");
    let root = root.canonicalize().map_err(|e| Failure::internal(format!("--lora-updates: {e}")))?;
    let outside = || refuse("lora_path names no directory below the one of --lora-updates".into());
    let dir = root.join(named).canonicalize().map_err(|_| outside())?;
    if dir.starts_with(&root) && dir.is_dir() { Ok(dir) } else { Err(outside()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_outside_the_allowed_one_are_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let (root, other) = (dir.path().join("root"), dir.path().join("other"));
        for made in [root.join("a/b"), other.clone()] {
            std::fs::create_dir_all(made).expect("a directory");
        }
        std::fs::write(root.join("file"), "x").expect("a file");
        std::os::unix::fs::symlink(&other, root.join("link")).expect("a link");
        let check = |named: &str, is_allowed: bool| {
            assert_eq!(below(&root, Path::new(named)).is_ok(), is_allowed, "{named}");
        };
        check("a", true);
        check("a/b/../b", true);
        check(root.join("a").to_str().expect("a path"), true);
        check("..", false);
        check("../other", false);
        check("a/../../other", false);
        check("link", false);
        check("file", false);
        check("missing", false);
        check(other.to_str().expect("a path"), false);
    }
}
