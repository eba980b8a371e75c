//! The clock of the file system, with which times of files are compared: on a network file system it is the server's,
//! and so the same for every host that mounts it, whatever the hosts' own clocks show.
//!
//! It is read by touching a file (`UTIME_NOW`) and looking at the time that it got; from there this host's monotonic
//! clock carries it on. A file system that stamps files with its clients' clocks gives this host's time, as without it.
//! Leases do not depend on it ([`crate::store::lease_clock`]); ages of objects and of leftovers do.

use parking_lot::Mutex;
use rustix::fs::{Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, futimens};
use std::fs::File;
use std::io;
use std::time::{Duration, Instant, SystemTime};

/// Time after which it is read again.
const READ_AGAIN: Duration = Duration::from_secs(60);

/// The last reading.
#[derive(Debug, Default)]
pub(super) struct FsClock(Mutex<Option<Reading>>);

#[derive(Clone, Copy, Debug)]
struct Reading {
    at: Instant,
    shown: SystemTime,
}

impl FsClock {
    /// Reads the clock by touching a file of this process, unless that was done a moment ago.
    pub(super) fn read_by(&self, file: &File) -> io::Result<()> {
        let at = Instant::now();
        if self.0.lock().is_some_and(|last| at.duration_since(last.at) < READ_AGAIN) {
            return Ok(());
        }
        touch(file)?;
        let shown = file.metadata()?.modified()?;
        *self.0.lock() = Some(Reading { at, shown });
        Ok(())
    }

    /// The time; before the first reading, that of this host.
    pub(super) fn now(&self) -> SystemTime {
        let reading = *self.0.lock();
        let now = reading.and_then(|last| last.shown.checked_add(last.at.elapsed()));
        now.unwrap_or_else(SystemTime::now)
    }

    /// A file's time as this host's clock would have shown it.
    pub(super) fn by_host(&self, time: SystemTime) -> SystemTime {
        let age = self.now().duration_since(time).unwrap_or_default();
        SystemTime::now().checked_sub(age).unwrap_or(time)
    }
}

/// Sets the modification time of a file to the file system's own.
pub(super) fn touch(file: &File) -> io::Result<()> {
    let at = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
    Ok(futimens(file, &Timestamps { last_access: at(UTIME_OMIT), last_modification: at(UTIME_NOW) })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_shows_the_time_that_the_file_system_gives_and_goes_on_from_there() {
        let file = tempfile::tempfile().unwrap();
        let clock = FsClock::default();
        clock.read_by(&file).unwrap();
        let stamped = file.metadata().unwrap().modified().unwrap();
        let (first, second) = (clock.now(), clock.now());
        assert!(stamped <= first && first <= second);
    }

    /// As on a host whose clock is an hour off.
    #[test]
    fn ages_are_those_of_the_file_system_on_any_host() {
        let hour = Duration::from_secs(3600);
        for server in [SystemTime::now() - hour, SystemTime::now() + hour] {
            let clock = FsClock(Mutex::new(Some(Reading { at: Instant::now(), shown: server })));
            let age = SystemTime::now().duration_since(clock.by_host(server - hour)).unwrap();
            // The two clocks are read one after the other.
            assert!(age > hour / 2 && age < hour + hour / 2, "{age:?}");
        }
    }
}
