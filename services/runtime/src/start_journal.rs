//! The requests that a worker is starting, in a file that outlives the process.
//!
//! A process that dies of a request cannot say so. It writes the id of each request into a slot of a small file before
//! it begins with it, and clears the slot once the request is answered, refused or given up. Its successor, which opens
//! the same file, finds the slots that were never cleared, and reports them when it describes itself. Writes go to the
//! page cache and cost microseconds; they are lost with the machine, and then nobody needs them. The file holds ids
//! that the proxy drew, and nothing of a request.

use bytes::Bytes;
use parking_lot::Mutex;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use triptych_core::RequestId;

/// Requests that are written down at the same time; one more is not. As many as a PD worker has by default.
const N_SLOTS: usize = 512;
const SLOT_BYTES: usize = 16;
/// Age at which a journal that no process has is removed: its worker does not come back under that name.
const STALE: Duration = Duration::from_secs(24 * 60 * 60);

/// The journal of a process. Clones share it.
#[derive(Clone, Debug)]
pub struct StartJournal(Arc<JournalState>);

#[derive(Debug)]
struct JournalState {
    instance: Bytes,
    suspects: Vec<RequestId>,
    /// The file and its name; `None`: nothing is written down.
    file: Option<(File, PathBuf)>,
    /// True if the process is about to end because of what is written down: it stays.
    is_kept: AtomicBool,
    /// Numbers of the free slots.
    free: Mutex<Vec<usize>>,
}

/// A request that is being started. Dropping it says that the process survived that.
#[derive(Debug)]
pub struct Starting {
    journal: Arc<JournalState>,
    slot: Option<usize>,
}

impl StartJournal {
    /// A journal that writes nothing down.
    pub fn without_file() -> Self {
        Self::of(None, Vec::new())
    }

    /// Opens a journal, and reads what the process before was starting when it ended. Its folder is made if it is not
    /// there, for this user alone.
    ///
    /// # Errors
    /// If the file cannot be written, if its folder is another user's, or if another process has it.
    pub fn open(path: &Path) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            own_folder(folder)?;
            sweep(folder);
        }
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        file.try_lock().map_err(|e| match e {
            TryLockError::Error(e) => e,
            TryLockError::WouldBlock => io::Error::from(io::ErrorKind::ResourceBusy),
        })?;
        let mut slots = [0; N_SLOTS * SLOT_BYTES];
        let n_read = file.read_at(&mut slots, 0)?;
        let (slots, _) = slots[..n_read].as_chunks::<SLOT_BYTES>();
        let ids = slots.iter().map(|slot| u128::from_be_bytes(*slot)).filter(|bits| *bits != 0);
        let suspects = ids.map(RequestId::from_bits).collect();
        file.write_all_at(&[0; N_SLOTS * SLOT_BYTES], 0)?;
        Ok(Self::of(Some((file, path.to_owned())), suspects))
    }

    fn of(file: Option<(File, PathBuf)>, suspects: Vec<RequestId>) -> Self {
        let instance = Bytes::copy_from_slice(&rand::random::<u128>().to_be_bytes());
        let free = Mutex::new((0..N_SLOTS).rev().collect());
        let is_kept = AtomicBool::new(false);
        Self(Arc::new(JournalState { instance, suspects, file, is_kept, free }))
    }

    /// Random name of this process.
    pub fn instance(&self) -> Bytes {
        self.0.instance.clone()
    }

    /// Requests that the process before was starting when it ended.
    pub fn suspects(&self) -> &[RequestId] {
        &self.0.suspects
    }

    /// The same as they travel: 16 bytes each, big-endian.
    pub fn suspects_to_wire(&self) -> Vec<Bytes> {
        let wire = |id: &RequestId| Bytes::copy_from_slice(&id.to_bits().to_be_bytes());
        self.0.suspects.iter().map(wire).collect()
    }

    /// Keeps what is written down for the successor: requests that end from now on end with the process.
    pub fn keep(&self) {
        self.0.is_kept.store(true, Ordering::SeqCst);
    }

    /// Writes down that a request is being started, until the guard is dropped.
    pub fn begin(&self, request: RequestId) -> Starting {
        let slot = self.0.file.as_ref().and_then(|_| self.0.free.lock().pop());
        if let Some(slot) = slot {
            self.0.write(slot, request.to_bits());
        }
        Starting { journal: Arc::clone(&self.0), slot }
    }
}

impl JournalState {
    /// A slot that cannot be written is a request that nobody hears of.
    fn write(&self, slot: usize, bits: u128) {
        if let Some((file, _)) = &self.file
            && let Err(e) = file.write_all_at(&bits.to_be_bytes(), (slot * SLOT_BYTES) as u64)
        {
            tracing::debug!(error = %e, "a request is not written down");
        }
    }
}

impl Drop for JournalState {
    /// Removes the file of a process that ends in order; its successor makes it again.
    fn drop(&mut self) {
        if let Some((_, path)) = self.file.take().filter(|_| !self.is_kept.load(Ordering::SeqCst)) {
            let _ = fs::remove_file(path);
        }
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.filter(|_| !self.journal.is_kept.load(Ordering::SeqCst)) {
            self.journal.write(slot, 0);
            self.journal.free.lock().push(slot);
        }
    }
}

/// Makes a folder for this user alone, or checks that it is: names under a folder that all may write can be anybody's.
fn own_folder(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    let (found, own) = (fs::symlink_metadata(folder)?, fs::metadata("/proc/self")?.uid());
    if found.is_dir() && found.uid() == own {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "its folder is another user's"))
}

/// Removes journals of workers that were killed and did not come back. One that cannot be removed is left.
fn sweep(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let written = entry.metadata().and_then(|meta| meta.modified());
        let age = written.ok().and_then(|at| at.elapsed().ok()).unwrap_or_default();
        if age > STALE && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    fn id(bits: u128) -> RequestId {
        RequestId::from_bits(bits)
    }

    #[test]
    fn a_successor_finds_what_was_being_started_and_nothing_that_had_ended() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("starts/pd-0");
        let first = StartJournal::open(&path).unwrap();
        assert!(first.suspects().is_empty());
        drop(first.begin(id(1)));
        let (_two, _three) = (first.begin(id(2)), first.begin(id(u128::MAX)));
        assert!(StartJournal::open(&path).is_err(), "it is in use");
        // As the end of a process leaves it: guards are not dropped, the lock is gone.
        let left = fs::read(&path).unwrap();
        let other = folder.path().join("starts/pd-1");
        fs::write(&other, left).unwrap();
        let successor = StartJournal::open(&other).unwrap();
        let mut suspects = successor.suspects().to_vec();
        suspects.sort();
        assert_eq!(suspects, [id(2), id(u128::MAX)]);
        assert_ne!(successor.instance(), first.instance());
        drop(successor.begin(id(4)));
        let starting = successor.begin(id(5));
        successor.keep();
        drop((starting, successor));
        let successor = StartJournal::open(&other).unwrap();
        assert_eq!(successor.suspects(), [id(5)], "it ended with the process");
        drop(successor);
        assert!(!other.exists(), "a process that ends in order leaves nothing");
        assert!(StartJournal::open(&other).unwrap().suspects().is_empty(), "they are reported once");
    }

    #[test]
    fn more_requests_than_slots_are_not_all_written_down_and_slots_are_used_again() {
        let folder = tempfile::tempdir().unwrap();
        let journal = StartJournal::open(&folder.path().join("starts/pd-0")).unwrap();
        for round in 1..4_u128 {
            let many: Vec<_> = (0..600).map(|i| journal.begin(id(round * 1000 + i))).collect();
            assert_eq!(many.iter().filter(|starting| starting.slot.is_some()).count(), N_SLOTS);
        }
        assert_eq!(journal.0.free.lock().len(), N_SLOTS);
        drop(StartJournal::without_file().begin(id(7)));
    }

    #[test]
    fn journals_of_workers_that_do_not_come_back_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let [alive, killed] = ["alive", "killed"].map(|name| folder.path().join("starts").join(name));
        let _alive = StartJournal::open(&alive).unwrap();
        fs::write(&killed, [1; SLOT_BYTES]).unwrap();
        let other = folder.path().join("starts/other");
        for (age, is_left) in [(STALE / 2, true), (STALE * 2, false)] {
            for path in [&alive, &killed] {
                let file = File::options().write(true).open(path).unwrap();
                file.set_modified(SystemTime::now() - age).unwrap();
            }
            drop(StartJournal::open(&other).unwrap());
            assert_eq!((alive.exists(), killed.exists()), (true, is_left), "{age:?}");
        }
    }

    #[test]
    fn a_folder_that_is_a_link_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("starts");
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        assert!(StartJournal::open(&link.join("pd-0")).is_err());
    }
}
