//! One object as its file is, and helpers over files.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};
use triptych_core::ContentKey;

/// Metadata of one object's file.
#[derive(Clone, Debug)]
pub(super) struct StoredFile {
    pub(super) key: ContentKey,
    pub(super) path: PathBuf,
    pub(super) len: u64,
    /// Time at which it was stored.
    pub(super) stored: SystemTime,
    /// Eviction priority, as a time.
    pub(super) priority: SystemTime,
}

/// Maps a removal or rename to true if the file existed.
pub(super) fn found(result: io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

/// Time from `time` to `now`; zero for a time in the future.
pub(super) fn age(time: SystemTime, now: SystemTime) -> Duration {
    now.duration_since(time).unwrap_or_default()
}
