//! Liveness of the processes that use a slab: each holds the lock of a file of its own beside the slab.
//!
//! The kernel releases the lock however the process ends. A process id does not work: containers that share a mount
//! have their own ids, and ids are reused. Needs the slab's lock, so that a probe is not taken for a live process.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Membership of this process; ends when dropped.
#[derive(Debug)]
pub(super) struct SlabMember {
    id: u64,
    dir: PathBuf,
    /// Its lock is held until the drop.
    _file: File,
}

impl SlabMember {
    /// Joins under a fresh number.
    pub(super) fn join(dir: PathBuf, id: u64) -> io::Result<Self> {
        let file = File::create(dir.join(id.to_string()))?;
        file.try_lock().map_err(io::Error::from)?;
        Ok(Self { id, dir, _file: file })
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// True if the process with this number is alive, or if that is unknown: its slots are then freed later.
    pub(super) fn is_alive(&self, id: u64) -> bool {
        id == self.id || is_locked(&self.dir.join(id.to_string()))
    }

    /// Removes the files of dead processes.
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

impl Drop for SlabMember {
    fn drop(&mut self) {
        // The next process that joins removes the rest.
        let _ = fs::remove_file(self.dir.join(self.id.to_string()));
    }
}

/// True if the lock of the file is held.
pub(super) fn is_locked(path: &Path) -> bool {
    match File::open(path) {
        Ok(file) => file.try_lock().is_err(),
        Err(e) => e.kind() != ErrorKind::NotFound,
    }
}
