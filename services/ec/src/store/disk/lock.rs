//! A lock between processes that share a directory, which ends with its holder. Blocking, for a limited time.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::{Duration, Instant};

/// Holders have it for as long as removing files takes.
const LIMIT: Duration = Duration::from_secs(10);

/// The lock, while this lives.
#[derive(Debug)]
pub(super) struct DirLock {
    _file: File,
}

impl DirLock {
    /// Waits for the lock that is the file at `path`.
    pub(super) fn take(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let until = Instant::now() + LIMIT;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { _file: file }),
                Err(TryLockError::WouldBlock) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(TryLockError::WouldBlock) => {
                    let text = format!("{} was not free within {LIMIT:?}", path.display());
                    return Err(io::Error::new(ErrorKind::TimedOut, text));
                }
                Err(TryLockError::Error(e)) => return Err(e),
            }
        }
    }
}

/// Whether a process that lives holds the lock of the file. Where the file system has no locks nobody knows: `None`.
pub(super) fn is_locked(path: &Path) -> Option<bool> {
    match File::open(path).ok()?.try_lock() {
        Ok(()) => Some(false),
        Err(TryLockError::WouldBlock) => Some(true),
        Err(TryLockError::Error(_)) => None,
    }
}
