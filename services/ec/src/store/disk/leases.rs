//! Encode leases as files: `DIR/leases/<hex>` with token and end, read and written under a lock. Blocking.
//!
//! The last token is kept in a file too, and is never behind the time of day in microseconds: tokens grow even if
//! the whole folder was removed.

use super::lock::DirLock;
use crate::store::lease::{Acquired, EncodeLease};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use triptych_core::ContentKey;

/// The leases of a directory.
#[derive(Debug)]
pub(super) struct Leases {
    dir: PathBuf,
}

/// Content of a lease file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LeaseRecord {
    token: u64,
    until_ms: u64,
}

impl Leases {
    pub(super) fn new(dir: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&dir)?;
        Ok(Self { dir })
    }

    /// Those of a directory that is not changed.
    pub(super) fn read_only(dir: PathBuf) -> Self {
        Self { dir }
    }

    pub(super) fn acquire(&self, key: &ContentKey, ttl: Duration) -> io::Result<Acquired> {
        let _lock = self.lock()?;
        let now = now();
        if let Some(left) = self.left(key, now)? {
            return Ok(Acquired::Held { left });
        }
        let last = self.dir.join("last");
        let before = fs::read_to_string(&last).ok().and_then(|text| text.trim().parse::<u64>().ok());
        let token = before.unwrap_or(0).saturating_add(1).max(millis(now).saturating_mul(1000));
        self.write(&last, &token.to_string())?;
        self.note(key, LeaseRecord { token, until_ms: millis(now.saturating_add(ttl)) })?;
        Ok(Acquired::Granted(EncodeLease { key: *key, token }))
    }

    pub(super) fn renew(&self, lease: &EncodeLease, ttl: Duration) -> io::Result<bool> {
        let _lock = self.lock()?;
        let now = now();
        let is_ours =
            self.read(&lease.key)?.is_some_and(|r| r.token == lease.token && r.until_ms > millis(now));
        if is_ours {
            self.note(
                &lease.key,
                LeaseRecord { token: lease.token, until_ms: millis(now.saturating_add(ttl)) },
            )?;
        }
        Ok(is_ours)
    }

    pub(super) fn release(&self, lease: &EncodeLease) -> io::Result<bool> {
        let _lock = self.lock()?;
        match self.read(&lease.key)? {
            Some(record) if record.token == lease.token => {
                remove_if_there(&self.path_of(&lease.key))?;
                Ok(record.until_ms > millis(now()))
            }
            _ => Ok(false),
        }
    }

    /// Needs no lock: records are replaced atomically.
    pub(super) fn is_held(&self, key: &ContentKey) -> io::Result<bool> {
        Ok(self.left(key, now())?.is_some())
    }

    /// Removes expired leases.
    pub(super) fn sweep(&self) -> io::Result<()> {
        let _lock = self.lock()?;
        for entry in fs::read_dir(&self.dir)?.flatten() {
            let key = entry.file_name().to_str().and_then(ContentKey::from_hex);
            if let Some(key) = key
                && self.left(&key, now())?.is_none()
            {
                remove_if_there(&entry.path())?;
            }
        }
        Ok(())
    }

    fn lock(&self) -> io::Result<DirLock> {
        DirLock::take(&self.dir.join("lock"))
    }

    fn path_of(&self, key: &ContentKey) -> PathBuf {
        self.dir.join(key.to_string())
    }

    fn left(&self, key: &ContentKey, now: Duration) -> io::Result<Option<Duration>> {
        let left = self.read(key)?.map_or(0, |record| record.until_ms.saturating_sub(millis(now)));
        Ok((left > 0).then(|| Duration::from_millis(left)))
    }

    /// Reads a lease file; a malformed one is no lease.
    fn read(&self, key: &ContentKey) -> io::Result<Option<LeaseRecord>> {
        let text = match fs::read_to_string(self.path_of(key)) {
            Ok(text) => text,
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::InvalidData) => return Ok(None),
            Err(e) => return Err(e),
        };
        let record = text.split_once(' ').and_then(|(token, until)| {
            Some(LeaseRecord { token: token.parse().ok()?, until_ms: until.trim().parse().ok()? })
        });
        Ok(record)
    }

    fn note(&self, key: &ContentKey, record: LeaseRecord) -> io::Result<()> {
        self.write(&self.path_of(key), &format!("{} {}", record.token, record.until_ms))
    }

    /// Replaces a file atomically. Called under the lock, so one temporary name is enough.
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        let new = self.dir.join("new");
        fs::write(&new, text)?;
        fs::rename(&new, path)
    }
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Time since 1970.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
