//! One object as its file is, and helpers over files.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};
use triptych_core::ContentKey;

/// One object, as its file is.
#[derive(Clone, Debug)]
pub(super) struct StoredFile {
    pub(super) key: ContentKey,
    pub(super) path: PathBuf,
    pub(super) len: u64,
    /// When it was stored.
    pub(super) stored: SystemTime,
    /// Until when it is worth keeping.
    pub(super) worth: SystemTime,
}

/// Whether there was a file.
pub(super) fn found(result: io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

/// How long ago a time was; zero for one that is to come.
pub(super) fn age(time: SystemTime) -> Duration {
    time.elapsed().unwrap_or_default()
}
