//! Which processes that use a slab are alive: each holds the lock of a file of its own beside the slab.
//!
//! The kernel gives the lock back however the process ends. A process id would not do: containers that share a mount
//! have their own numbers, and numbers are used again. Only for whoever has the slab's lock, so that nobody takes a
//! look for a life.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// This process as one of them; dropping it is leaving.
#[derive(Debug)]
pub(super) struct Owner {
    id: u64,
    dir: PathBuf,
    /// Locked while this lives.
    _file: File,
}

impl Owner {
    /// Joins under a number that nobody had.
    pub(super) fn join(dir: PathBuf, id: u64) -> io::Result<Self> {
        let file = File::create(dir.join(id.to_string()))?;
        file.try_lock().map_err(io::Error::from)?;
        Ok(Self { id, dir, _file: file })
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Whether the process with this number lives. Who cannot be asked is taken to live: its work then waits for a
    /// later look, and is not lost.
    pub(super) fn is_alive(&self, id: u64) -> bool {
        id == self.id || is_locked(&self.dir.join(id.to_string()))
    }

    /// Removes the files of processes that are gone.
    pub(super) fn sweep(&self) {
        let Ok(entries) = fs::read_dir(&self.dir) else { return };
        for path in entries.flatten().map(|entry| entry.path()) {
            let is_other = path.file_name().is_some_and(|name| *name != *self.id.to_string());
            if is_other && !is_locked(&path) {
                // Another may have swept it.
                let _ = fs::remove_file(path);
            }
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // What is left is swept by whoever joins next.
        let _ = fs::remove_file(self.dir.join(self.id.to_string()));
    }
}

/// Whether someone holds the lock of the file.
pub(super) fn is_locked(path: &Path) -> bool {
    match File::open(path) {
        Ok(file) => file.try_lock().is_err(),
        Err(e) => e.kind() != ErrorKind::NotFound,
    }
}
