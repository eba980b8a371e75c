//! Byte budget of a directory, shared by all processes that have it open. Blocking.
//!
//! The used bytes are a number in the file `DIR/used`, updated under the lock `DIR/lock` before an object gets its
//! name. So it is never too small if a process dies. Where it is too large, because a process died or files were
//! removed, the next eviction corrects it, since it counts all files. Priorities ([`crate::policy`]) are in the files'
//! times: the access time is the priority, the modification time is when the object was stored.

use super::entry::StoredFile;
use super::lock::DirLock;
use crate::policy::{BY_TIME, EvictionCandidate, is_young, order};
use std::cmp::Reverse;
use std::fs::{self, File, FileTimes};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Fraction of the budget freed by one eviction, as a divisor, since counting all files is expensive.
const EVICTED_AT_ONCE: u64 = 64;

/// The budget of a directory.
#[derive(Debug)]
pub(super) struct DirBudget {
    bytes: u64,
    lock: PathBuf,
    used: PathBuf,
}

impl DirBudget {
    pub(super) fn new(dir: &Path, bytes: u64) -> Self {
        Self { bytes, lock: dir.join("lock"), used: dir.join("used") }
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Counts all objects, and evicts down to the budget.
    pub(super) fn hold(&self, count: impl Fn() -> io::Result<Vec<StoredFile>>) -> io::Result<()> {
        let _lock = DirLock::take(&self.lock)?;
        let used = self.make_room(0, count()?)?;
        fs::write(&self.used, used.to_string())
    }

    /// Evicts until an object of `len` bytes fits, then calls `store`, which gives it its name.
    pub(super) fn admit<T>(
        &self,
        len: u64,
        count: impl Fn() -> io::Result<Vec<StoredFile>>,
        store: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        let _lock = DirLock::take(&self.lock)?;
        let recorded = fs::read_to_string(&self.used).ok().and_then(|text| text.parse::<u64>().ok());
        let used = match recorded.filter(|used| used.saturating_add(len) <= self.bytes) {
            Some(used) => used,
            None => self.make_room(len, count()?)?,
        };
        fs::write(&self.used, (used + len).to_string())?;
        store()
    }

    /// Evicts until `len` more bytes fit. Returns the used bytes.
    fn make_room(&self, len: u64, stored: Vec<StoredFile>) -> io::Result<u64> {
        let mut used = stored.iter().map(|s| s.len).sum::<u64>();
        let goal = self.bytes.saturating_sub(len);
        if used <= goal {
            return Ok(used);
        }
        let plenty = goal.saturating_sub(self.bytes / EVICTED_AT_ONCE);
        for victim in order(self.bytes, candidates(self.bytes, stored)) {
            if used <= plenty || (victim.is_young && used <= goal) {
                break;
            }
            match fs::remove_file(&victim.what) {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
                _ => used -= victim.bytes,
            }
        }
        Ok(used)
    }
}

/// Eviction candidates from the files' times, the newest first.
fn candidates(budget: u64, mut stored: Vec<StoredFile>) -> Vec<EvictionCandidate<PathBuf>> {
    stored.sort_by_key(|s| Reverse(s.stored));
    let mut since = 0;
    let candidate = |s: StoredFile| {
        let is_young = is_young(budget, since);
        since += s.len;
        let (priority, born) = (millis_of(s.priority), millis_of(s.stored));
        EvictionCandidate { what: s.path, key: s.key, bytes: s.len, priority, born, is_young }
    };
    stored.into_iter().map(candidate).collect()
}

/// Records in the file's times that it was stored `now`, by the file system's clock.
pub(super) fn note_stored(file: &File, len: u64, now: SystemTime) -> io::Result<()> {
    let priority = time_of(BY_TIME.stored(millis_of(now), len));
    file.set_times(FileTimes::new().set_modified(now).set_accessed(priority))
}

/// Records a use in the file's times; ignored for files of other users.
pub(super) fn note_use(file: &File, now: SystemTime) {
    let Ok(meta) = file.metadata() else { return };
    let before = meta.accessed().map_or(0, millis_of);
    let priority = BY_TIME.used(millis_of(now), before, meta.len());
    let _ = file.set_times(FileTimes::new().set_accessed(time_of(priority)));
}

fn millis_of(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn time_of(millis: u64) -> SystemTime {
    UNIX_EPOCH.checked_add(Duration::from_millis(millis)).unwrap_or_else(SystemTime::now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_core::ContentKey;

    #[test]
    fn priority_and_age_are_the_files_times_and_the_newest_is_young() {
        let stored = |n: u8, stored_ms: u64, worth_ms: u64| StoredFile {
            key: ContentKey::from_bytes([n; 32]),
            path: n.to_string().into(),
            len: 10,
            stored: time_of(stored_ms),
            priority: time_of(worth_ms),
        };
        let all = vec![stored(1, 100, 9000), stored(2, 300, 1500), stored(3, 200, 700)];
        let read: Vec<_> =
            candidates(36, all).into_iter().map(|c| (c.what, c.born, c.priority, c.is_young)).collect();
        let expect = [("2", 300, 1500, true), ("3", 200, 700, false), ("1", 100, 9000, false)];
        assert_eq!(read, expect.map(|(name, born, priority, young)| (name.into(), born, priority, young)));
    }
}
