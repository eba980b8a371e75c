//! Processor time of a process, from `/proc`: that of its compute threads, and all of it.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

/// Ticks of a second in `/proc`: `USER_HZ` of every architecture that we build for.
const TICKS_PER_S: u64 = 100;
/// First parts of the names of threads that compute: engine loops, encoder loops and the kernels' pools.
const COMPUTE_THREADS: [&str; 3] = ["engine-", "encode-", "kernels-"];

/// Processor time since the start of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// Of its threads that compute.
    pub compute: Duration,
    /// Of all its threads, those that have ended included.
    pub all: Duration,
}

impl CpuTime {
    /// That of a process.
    ///
    /// # Errors
    /// [`io::Error`] where there is no such process, or no `/proc`.
    pub fn of(pid: u32) -> io::Result<Self> {
        Self::read(Path::new(&format!("/proc/{pid}")))
    }

    /// That of this process.
    ///
    /// # Errors
    /// [`io::Error`] where there is no `/proc`.
    pub fn of_self() -> io::Result<Self> {
        Self::read(Path::new("/proc/self"))
    }

    fn read(process: &Path) -> io::Result<Self> {
        let (_, all) = stat(&process.join("stat"))?;
        let mut compute = Duration::ZERO;
        for task in fs::read_dir(process.join("task"))? {
            // A thread may end meanwhile; those that compute do not.
            let Ok((name, used)) = stat(&task?.path().join("stat")) else { continue };
            if COMPUTE_THREADS.iter().any(|first| name.starts_with(first)) {
                compute += used;
            }
        }
        Ok(Self { compute, all })
    }

    /// Time since an earlier reading.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            compute: self.compute.saturating_sub(earlier.compute),
            all: self.all.saturating_sub(earlier.all),
        }
    }

    /// Time of its threads that do not compute.
    pub fn other(self) -> Duration {
        self.all.saturating_sub(self.compute)
    }
}

/// Name and processor time of a `stat` file.
fn stat(file: &Path) -> io::Result<(String, Duration)> {
    let text = fs::read_to_string(file)?;
    parse(&text)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("{}: no times", file.display())))
}

/// `pid (name) state ppid … utime stime …`; a name may hold spaces and parentheses.
fn parse(stat: &str) -> Option<(String, Duration)> {
    let (before, fields) = stat.rsplit_once(')')?;
    let name = before.split_once('(')?.1.to_owned();
    let mut fields = fields.split_whitespace().skip(11).map(str::parse::<u64>);
    let (user, system) = (fields.next()?.ok()?, fields.next()?.ok()?);
    Some((name, Duration::from_millis((user + system) * (1000 / TICKS_PER_S))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_stat_line_has_its_name_and_both_times() {
        let line = "7 (engine-a (b)) S 1 7 7 0 -1 4194560 5 0 0 0 120 30 0 0 20 0 9 0 12 1 2";
        assert_eq!(parse(line), Some(("engine-a (b)".to_owned(), Duration::from_millis(1500))));
        assert_eq!(parse("7 (x) S 1"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn threads_that_compute_are_told_apart_by_their_names() {
        // A thread that computes until its time shows, however little of a core it is given.
        let named = |name: &str, of: fn(CpuTime) -> Duration| {
            let before = CpuTime::of_self().unwrap();
            let spin = move || {
                let (start, mut n) = (Instant::now(), 0_u64);
                loop {
                    for _ in 0..100_000 {
                        n = std::hint::black_box(n.wrapping_add(1));
                    }
                    let spent = CpuTime::of_self().unwrap().since(before);
                    if of(spent) > Duration::ZERO || start.elapsed() > Duration::from_secs(60) {
                        return spent;
                    }
                }
            };
            std::thread::Builder::new().name(name.into()).spawn(spin).unwrap().join().unwrap()
        };
        let computing = named("engine-x", |spent| spent.compute);
        assert!(computing.compute > Duration::ZERO && computing.all >= computing.compute);
        let other = named("other", CpuTime::other);
        assert!(other.compute.is_zero() && other.other() > Duration::ZERO);
    }

    #[test]
    fn a_process_that_is_not_there_is_an_error() {
        assert!(CpuTime::of(u32::MAX).is_err());
    }
}
