//! A slab as a file mapped by several processes: created once, locked for short times, recovered after a process died.
//!
//! The lock is the file's (`flock`): the kernel releases it when its holder dies, in any container. A process that then
//! finds the object table marked as being changed recovers it first. Nothing here waits for the lock; a caller that
//! does not get it retries.

use super::layout::{Field, Geometry, MIN_BYTES};
use super::map::Map;
use super::object_table::IsAlive;
use super::owners::{SlabMember, is_locked};
use super::pages::Damaged;
use super::words::Words;
use crate::store::{Access, nonce};
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fallocate};
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Timeout of the lock while opening; holders keep it for milliseconds.
const OPEN_LIMIT: Duration = Duration::from_secs(10);
/// Only its owner may read and write a slab.
const MODE: u32 = 0o600;

/// A mapped slab.
#[derive(Debug)]
pub(super) struct Slab {
    path: PathBuf,
    file: File,
    map: Map,
    geometry: Geometry,
    /// Excludes other threads; the file's lock excludes other processes.
    turn: Mutex<()>,
    /// `None`: the slab is only read.
    member: Option<SlabMember>,
}

impl Slab {
    /// Maps the slab at `path`; creates one of `n_bytes` if there is none and the use allows it. The first process decides
    /// the size.
    pub(super) fn open(path: &Path, n_bytes: u64, access: Access) -> io::Result<Self> {
        if access == Access::Create {
            sweep_unfinished(path);
        }
        let file = loop {
            match OpenOptions::new().read(true).write(true).open(path) {
                Err(e) if e.kind() == ErrorKind::NotFound && access == Access::Create => make(path, n_bytes)?,
                opened => break opened?,
            }
        };
        check_owner(&file.metadata()?)?;
        let map = Map::new(&file)?;
        let geometry = Geometry::read(map.words()).map_err(io::Error::other)?;
        let member = match access {
            Access::Create | Access::Existing => {
                Some(join(&file, Words::new(map.words(), geometry), beside(path, ".owners"))?)
            }
            Access::ReadOnly => None,
        };
        Ok(Self { path: path.to_owned(), file, map, geometry, turn: Mutex::default(), member })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Number of this process; 0 of one that only reads.
    pub(super) fn owner(&self) -> u64 {
        self.member.as_ref().map_or(0, SlabMember::id)
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.member.is_none()
    }

    /// True if the process is alive, or if that is not known.
    fn is_alive(&self, id: u64) -> bool {
        self.member.as_ref().is_none_or(|member| member.is_alive(id))
    }

    /// The slab's words, for operations without the lock.
    pub(super) fn words(&self) -> Words<'_> {
        Words::new(self.map.words(), self.geometry)
    }

    /// Runs `work` on the object table under the lock. `None`: another holds it. If the table is damaged, it is
    /// recovered and `work` runs again; one that is only read is not recovered, and `work` must not change it.
    ///
    /// # Errors
    /// If the file was truncated, or the table is damaged again at once.
    pub(super) fn try_change<T>(
        &self,
        work: impl Fn(&Words<'_>, IsAlive<'_>) -> Result<T, Damaged>,
    ) -> io::Result<Option<T>> {
        let Some(_turn) = self.turn.try_lock() else { return Ok(None) };
        match self.file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(e)) => return Err(e),
        }
        let _lock = Unlock(&self.file);
        self.check_length()?;
        let (words, is_alive) = (self.words(), |id| self.is_alive(id));
        if self.is_read_only() {
            return work(&words, &is_alive).map(Some).map_err(|Damaged| damaged());
        }
        for _ in 0..2 {
            if words.field(Field::Dirty) != 0 {
                tracing::warn!(path = %self.path.display(), "who changed the slab last did not end; putting it in order");
                words.recover(&is_alive);
            }
            words.set(Field::Dirty, 1);
            if let Ok(done) = work(&words, &is_alive) {
                words.set(Field::Dirty, 0);
                return Ok(Some(done));
            }
        }
        Err(damaged())
    }

    /// Checks that the path still refers to this slab.
    pub(super) fn check_place(&self) -> io::Result<()> {
        let (ours, there) = (self.file.metadata()?, fs::metadata(&self.path)?);
        if (ours.dev(), ours.ino()) != (there.dev(), there.ino()) {
            return Err(io::Error::other(
                "another slab has taken its place; processes that started later use that one",
            ));
        }
        self.check_length()
    }

    fn check_length(&self) -> io::Result<()> {
        let (expected, actual) =
            (self.geometry.n_words().unwrap_or(0) as u64 * 8, self.file.metadata()?.len());
        if actual >= expected {
            return Ok(());
        }
        Err(io::Error::other(format!("it was shortened to {actual} bytes, {expected} are mapped")))
    }
}

fn damaged() -> io::Error {
    io::Error::other("its object table is damaged")
}

/// Joins the processes that change the slab.
fn join(file: &File, words: Words<'_>, owners: PathBuf) -> io::Result<SlabMember> {
    DirBuilder::new().recursive(true).mode(0o700).create(&owners)?;
    let until = Instant::now() + OPEN_LIMIT;
    while let Err(e) = file.try_lock() {
        match e {
            TryLockError::WouldBlock if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(1));
            }
            e => return Err(e.into()),
        }
    }
    // Time of day is ahead of any count, so a slab that is made anew has no number twice.
    let id = words.field(Field::Owner).saturating_add(1).max(now_ms().saturating_mul(1000));
    words.set(Field::Owner, id);
    let member = SlabMember::join(owners, id)?;
    member.sweep();
    file.unlock()?;
    Ok(member)
}

/// Releases the file's lock; the next holder sees all changes.
struct Unlock<'a>(&'a File);

impl Drop for Unlock<'_> {
    fn drop(&mut self) {
        fence(Ordering::SeqCst);
        // It fails only for a file that is not open.
        let _ = self.0.unlock();
    }
}

/// Checks that the file belongs to this user or root: a writer of the slab can put objects under any key.
fn check_owner(meta: &Metadata) -> io::Result<()> {
    let me = rustix::process::geteuid().as_raw();
    if !meta.is_file() {
        return Err(io::Error::other("it is no file"));
    }
    if me != 0 && ![0, me].contains(&meta.uid()) {
        return Err(io::Error::other(format!(
            "it belongs to user {}, this process runs as {me}",
            meta.uid()
        )));
    }
    if meta.mode() & 0o022 != 0 {
        return Err(io::Error::other(format!("its mode is {:o}, others may write it", meta.mode() & 0o777)));
    }
    Ok(())
}

/// Milliseconds since 1970.
pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Creates a slab and gives it its name, unless another process was first. Allocates all of its memory, so that a file
/// system that is too small fails here and not later at a write to the mapping.
fn make(path: &Path, n_bytes: u64) -> io::Result<()> {
    let geometry = Geometry::of_bytes(n_bytes.max(MIN_BYTES));
    let len = geometry.n_words().unwrap_or(0) as u64 * 8;
    let tmp = beside(path, &format!(".new-{:032x}", nonce()));
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(MODE).open(&tmp)?;
    let made = (|| {
        file.try_lock()?;
        fallocate(&file, FallocateFlags::empty(), 0, len).map_err(|e| {
            io::Error::new(io::Error::from(e).kind(), format!("cannot set aside {} MiB: {e}", len >> 20))
        })?;
        let map = Map::new(&file)?;
        Words::new(map.words(), geometry).recover(&|_| false);
        geometry.write(map.words());
        match fs::hard_link(&tmp, path) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => Err(e),
            _ => Ok(()),
        }
    })();
    // The slab has its name, or is not wanted.
    let _ = fs::remove_file(&tmp);
    made
}

/// Removes unfinished slabs of dead processes. One with a live creator is locked; a new one may not be locked yet.
fn sweep_unfinished(path: &Path) {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else { return };
    let start = [name.as_encoded_bytes(), b".new-"].concat();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let is_old = || {
            let modified = entry.metadata().and_then(|m| m.modified());
            modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > Duration::from_secs(60)))
        };
        if entry.file_name().as_encoded_bytes().starts_with(&start) && is_old() && !is_locked(&entry.path()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The slab's path with a suffix.
fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(ending);
    name.into()
}
