//! Folders of models on this machine.

use std::path::PathBuf;
use triptych_core::ModelName;

/// A model directory, and the model's name if it is not the directory's.
#[derive(Debug, PartialEq, Eq)]
pub struct ModelLocation {
    /// Name to serve it under; `None`: the directory's.
    pub name: Option<ModelName>,
    /// Absolute path.
    pub dir: PathBuf,
}

/// The user's cache folder for data that can be made again.
pub fn cache_root() -> PathBuf {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    absolute("XDG_CACHE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
        .join("triptych")
}
