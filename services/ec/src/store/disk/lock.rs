//! A lock between processes that share a directory, which ends with its holder. Blocking, for a limited time.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::{Duration, Instant};

/// Timeout; holders remove files meanwhile.
const LIMIT: Duration = Duration::from_secs(10);

/// The lock, released when dropped.
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

/// True if a live process holds the lock of the file. `None` on a file system without locks.
pub(super) fn is_locked(path: &Path) -> Option<bool> {
    match File::open(path).ok()?.try_lock() {
        Ok(()) => Some(false),
        Err(TryLockError::WouldBlock) => Some(true),
        Err(TryLockError::Error(_)) => None,
    }
}
