//! Files of a directory that are no objects: unfinished files of writers, and quarantined objects. Blocking.
//!
//! A writer holds the lock of its file, so a free lock means that the writer died. A new file may not be locked yet.

use super::entry::{age, found};
use super::lock::is_locked;
use crate::store::{Tidy, nonce};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Time within which a writer locks its file.
const LOCKED_WITHIN: Duration = Duration::from_secs(60);
/// Longest write of one file, for file systems without locks.
const WRITTEN_WITHIN: Duration = Duration::from_secs(15 * 60);
/// Bounds of the quarantine: age, number and bytes.
const QUARANTINE_MAX_AGE: Duration = Duration::from_secs(24 * 3600);
const QUARANTINE_MAX_FILES: usize = 64;
const QUARANTINE_MAX_BYTES: u64 = 256 << 20;

/// A file under `tmp`, removed when dropped; hard links to it stay.
pub(super) struct TmpFile {
    pub(super) path: PathBuf,
    pub(super) file: File,
}

impl TmpFile {
    pub(super) fn create(dir: &Path) -> io::Result<Self> {
        let path = dir.join(format!("{:032x}", nonce()));
        let file = File::create_new(&path)
            .map_err(|e| io::Error::new(e.kind(), format!("cannot write in {}: {e}", dir.display())))?;
        // Without locks its age decides.
        let _ = file.try_lock();
        Ok(Self { path, file })
    }
}

impl Drop for TmpFile {
    fn drop(&mut self) {
        // Already renamed away, or left for a later sweep: both are fine.
        let _ = fs::remove_file(&self.path);
    }
}

/// Counts or removes unfinished files of dead writers: number and bytes.
pub(super) fn unfinished(dir: &Path, tidy: Tidy) -> io::Result<(usize, u64)> {
    let is_left = |path: &Path, age| match is_locked(path) {
        Some(is_locked) => !is_locked && age > LOCKED_WITHIN,
        None => age > WRITTEN_WITHIN,
    };
    let left: Vec<_> = files(dir)?.into_iter().filter(|f| is_left(&f.path, age(f.modified))).collect();
    sum(&left, tidy)
}

/// Counts or removes quarantined objects: number and bytes.
pub(super) fn quarantined(dir: &Path, tidy: Tidy) -> io::Result<(usize, u64)> {
    sum(&files(dir)?, tidy)
}

/// Removes expired objects from quarantine, and the oldest over its bounds.
pub(super) fn bound_quarantine(dir: &Path) -> io::Result<()> {
    let mut files = files(dir)?;
    files.sort_by_key(|file| std::cmp::Reverse(file.modified));
    let mut bytes = 0;
    let is_kept = |file: &Leftover, bytes: &mut u64| {
        *bytes += file.len;
        *bytes <= QUARANTINE_MAX_BYTES && age(file.modified) <= QUARANTINE_MAX_AGE
    };
    let n_kept = files.iter().take(QUARANTINE_MAX_FILES).take_while(|f| is_kept(f, &mut bytes)).count();
    sum(&files[n_kept..], Tidy::Remove).map(drop)
}

/// Starts an object's time in quarantine.
pub(super) fn note_quarantined(path: &Path) {
    // A file of another user keeps its time, and is removed earlier.
    let _ = File::open(path).and_then(|file| file.set_modified(SystemTime::now()));
}

struct Leftover {
    path: PathBuf,
    len: u64,
    modified: SystemTime,
}

/// The files of a folder that are still there.
fn files(dir: &Path) -> io::Result<Vec<Leftover>> {
    let mut all = Vec::new();
    let entries = match fs::read_dir(dir) {
        // A directory that is only read may not have the folder.
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(all),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let Ok(meta) = entry.metadata() else { continue };
        if let (true, Ok(modified)) = (meta.is_file(), meta.modified()) {
            all.push(Leftover { path: entry.path(), len: meta.len(), modified });
        }
    }
    Ok(all)
}

/// Another process may be removing the same files.
fn sum(files: &[Leftover], tidy: Tidy) -> io::Result<(usize, u64)> {
    for file in files.iter().filter(|_| tidy == Tidy::Remove) {
        tracing::info!(path = %file.path.display(), "removed a leftover of the EC store");
        found(fs::remove_file(&file.path))?;
    }
    Ok((files.len(), files.iter().map(|f| f.len).sum()))
}
