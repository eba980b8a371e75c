//! Encode leases as files: `DIR/leases/<hex>` with token, number of renewals and time to live in milliseconds, written
//! under a lock. Blocking.
//!
//! Hosts that share a directory share no clock, and not every network file system stamps files with its server's; a
//! difference of 15 s would be duplicate work or a stall. So a file holds no time: whoever looks counts by its own
//! monotonic clock how long the record did not change ([`crate::store::lease_clock`]). After its holder died a lease so
//! lasts for one time to live from the first look of each observer on; one that was forgotten for hours, by the times of
//! the files, ends at once.
//!
//! The last token is kept in a file too, and is never behind the time of the file system in microseconds: tokens grow
//! even if the whole folder was removed.

use super::fs_clock::FsClock;
use super::lock::DirLock;
use crate::store::lease::{Acquired, EncodeLease};
use crate::store::lease_clock::{LeaseClock, MAX_TTL};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::Instant;
use triptych_core::ContentKey;

/// Longest lease file that is read, in bytes.
const MAX_BYTES: u64 = 128;

/// The clocks of a host.
pub(super) trait HostClock: fmt::Debug + Send + Sync {
    /// Its monotonic clock.
    fn monotonic(&self) -> Instant;
    /// The time that it takes for the file system's.
    fn of_files(&self) -> SystemTime;
}

impl HostClock for FsClock {
    fn monotonic(&self) -> Instant {
        Instant::now()
    }

    fn of_files(&self) -> SystemTime {
        self.now()
    }
}

/// The leases of a directory.
#[derive(Debug)]
pub(super) struct Leases {
    dir: PathBuf,
    clock: Arc<dyn HostClock>,
    seen: LeaseClock<LeaseRecord>,
}

/// Content of a lease file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LeaseRecord {
    token: u64,
    renewals: u64,
    ttl_ms: u64,
}

impl LeaseRecord {
    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split_whitespace().map(|number| number.parse().ok());
        let mut next = || numbers.next().flatten();
        let record = Self { token: next()?, renewals: next()?, ttl_ms: next()? };
        numbers.next().is_none().then_some(record)
    }

    fn ttl(&self) -> Duration {
        Duration::from_millis(self.ttl_ms).min(MAX_TTL)
    }
}

impl Leases {
    pub(super) fn new(dir: PathBuf, clock: Arc<dyn HostClock>) -> io::Result<Self> {
        fs::create_dir_all(&dir)?;
        Ok(Self { dir, clock, seen: LeaseClock::default() })
    }

    /// Those of a directory that is not changed.
    pub(super) fn read_only(dir: PathBuf, clock: Arc<dyn HostClock>) -> Self {
        Self { dir, clock, seen: LeaseClock::default() }
    }

    pub(super) fn acquire(&self, key: &ContentKey, ttl: Duration) -> io::Result<Acquired> {
        let _lock = self.lock()?;
        if let Some((_, left)) = self.held(key)? {
            return Ok(Acquired::Held { left });
        }
        let last = self.dir.join("last");
        let before = fs::read_to_string(&last).ok().and_then(|text| text.trim().parse::<u64>().ok());
        let since_epoch = self.clock.of_files().duration_since(UNIX_EPOCH).unwrap_or_default();
        let token = before.unwrap_or(0).saturating_add(1).max(millis(since_epoch).saturating_mul(1000));
        self.write(&last, &token.to_string())?;
        self.note(key, LeaseRecord { token, renewals: 0, ttl_ms: millis(ttl) })?;
        Ok(Acquired::Granted(EncodeLease { key: *key, token }))
    }

    pub(super) fn renew(&self, lease: &EncodeLease, ttl: Duration) -> io::Result<bool> {
        let _lock = self.lock()?;
        let Some(record) = self.held_by(lease)? else { return Ok(false) };
        let renewals = record.renewals.saturating_add(1);
        self.note(&lease.key, LeaseRecord { renewals, ttl_ms: millis(ttl), ..record })?;
        Ok(true)
    }

    pub(super) fn release(&self, lease: &EncodeLease) -> io::Result<bool> {
        let _lock = self.lock()?;
        let is_held = self.held_by(lease)?.is_some();
        if self.read(&lease.key)?.is_some_and(|(record, _)| record.token == lease.token) {
            remove_if_there(&self.path_of(&lease.key))?;
            self.seen.forget(&lease.key);
        }
        Ok(is_held)
    }

    /// Needs no lock: records are replaced atomically.
    pub(super) fn is_held(&self, key: &ContentKey) -> io::Result<bool> {
        Ok(self.held(key)?.is_some())
    }

    /// Removes leases that are over, as far as this process knows.
    pub(super) fn sweep(&self) -> io::Result<()> {
        let _lock = self.lock()?;
        for entry in fs::read_dir(&self.dir)?.flatten() {
            let key = entry.file_name().to_str().and_then(ContentKey::from_hex);
            if let Some(key) = key
                && self.held(&key)?.is_none()
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

    /// The record of a lease that is not over, and the time left.
    fn held(&self, key: &ContentKey) -> io::Result<Option<(LeaseRecord, Duration)>> {
        let Some((record, by_files)) = self.read(key)? else { return Ok(None) };
        // After the read: a record is never taken for older than it is.
        let age = self.seen.age(key, record, by_files, self.clock.monotonic());
        let left = record.ttl().checked_sub(age).filter(|left| !left.is_zero());
        Ok(left.map(|left| (record, left)))
    }

    /// The record of this lease, if its holder still has it.
    fn held_by(&self, lease: &EncodeLease) -> io::Result<Option<LeaseRecord>> {
        if self.seen.has_ended(lease, self.clock.monotonic()) {
            return Ok(None);
        }
        let record = self.held(&lease.key)?.map(|(record, _)| record);
        Ok(record.filter(|record| record.token == lease.token))
    }

    /// Reads a lease file and its age by the times of files; a malformed one is no lease.
    fn read(&self, key: &ContentKey) -> io::Result<Option<(LeaseRecord, Duration)>> {
        let file = match File::open(self.path_of(key)) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let written = file.metadata()?.modified()?;
        let mut text = String::new();
        match file.take(MAX_BYTES).read_to_string(&mut text) {
            Err(e) if e.kind() != ErrorKind::InvalidData => return Err(e),
            _ => {}
        }
        let age = self.clock.of_files().duration_since(written).unwrap_or_default();
        Ok(LeaseRecord::parse(&text).map(|record| (record, age)))
    }

    /// Writes a record of this process's own lease.
    fn note(&self, key: &ContentKey, record: LeaseRecord) -> io::Result<()> {
        let start = self.clock.monotonic();
        let LeaseRecord { token, renewals, ttl_ms } = record;
        self.write(&self.path_of(key), &format!("{token} {renewals} {ttl_ms}"))?;
        self.seen.granted(&EncodeLease { key: *key, token }, start + record.ttl(), start);
        self.seen.age(key, record, Duration::ZERO, start);
        Ok(())
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

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
