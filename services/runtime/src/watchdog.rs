//! Watchdog of a worker: notices work that does not end and memory that grows without bound, while the process can
//! still say so.
//!
//! A thread that computes cannot be stopped from outside, and a machine that swaps stops everybody. So the process ends
//! itself with a code of its own, its supervisor starts it again, and the proxy sends its requests elsewhere. The
//! watchdog decides and reports; ending the process is the caller's part.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::io;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Exit code of a process whose work did not end.
pub const STUCK_EXIT_CODE: u8 = 3;
/// Exit code of a process that took more memory than its limit.
pub const MEMORY_EXIT_CODE: u8 = 4;
/// Exit code of a process whose device is lost.
pub const DEVICE_LOST_EXIT_CODE: u8 = 5;
/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(50);
/// Most time that counts between two looks. A process that was paused, on a machine that was suspended or gives it nothing, comes
/// late to its next look: its work was not stuck meanwhile.
const MAX_COUNTED: Duration = Duration::from_millis(200);
/// Share of the machine's memory, or of the container's, that a process may take by default, in percent.
const DEFAULT_SHARE: u64 = 90;

/// Limits that the watchdog holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WatchdogLimits {
    /// The longest time of a piece of work without progress, in time that the process runs. `None`: no limit.
    pub work: Option<Duration>,
    /// Most anonymous memory of the process in bytes. `None`: no limit.
    pub memory_bytes: Option<u64>,
}

/// A limit that was passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overrun {
    /// Work that did not end.
    Stuck {
        /// The kind of work.
        what: &'static str,
        /// Its time so far, without pauses of the process.
        since: Duration,
    },
    /// Memory.
    Memory {
        /// Taken, in bytes.
        taken: u64,
        /// Allowed, in bytes.
        limit: u64,
    },
    /// A compute device that was lost.
    DeviceLost,
}

impl Overrun {
    /// Exit code of the process that ends for it.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Stuck { .. } => STUCK_EXIT_CODE,
            Self::Memory { .. } => MEMORY_EXIT_CODE,
            Self::DeviceLost => DEVICE_LOST_EXIT_CODE,
        }
    }
}

impl fmt::Display for Overrun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stuck { what, since } => {
                write!(f, "{what} has made no progress for {:.1} s", since.as_secs_f64())
            }
            Self::Memory { taken, limit } => {
                write!(f, "the process takes {} MiB of memory, its limit is {}", taken >> 20, limit >> 20)
            }
            Self::DeviceLost => f.write_str("the compute device is lost"),
        }
    }
}

/// The watchdog of a process. Clones share it; its thread ends with the last one.
#[derive(Clone, Debug, Default)]
pub struct Watchdog(Arc<Mutex<WorkTable>>);

#[derive(Debug, Default)]
struct WorkTable {
    next_id: u64,
    /// Time since the start, without pauses of the process.
    now: Duration,
    /// Kind and start of each.
    running: HashMap<u64, (&'static str, Duration)>,
    device_lost: bool,
}

/// A piece of work that is watched until it is dropped.
#[derive(Debug)]
pub struct WatchedWork {
    table: Watchdog,
    id: u64,
}

impl Watchdog {
    /// Starts the thread, which calls `end` once for the first limit that is passed.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(limits: WatchdogLimits, end: impl FnOnce(Overrun) + Send + 'static) -> io::Result<Self> {
        let watchdog = Self::default();
        let table = Arc::downgrade(&watchdog.0);
        thread::Builder::new().name("watchdog".into()).spawn(move || watch(limits, &table, end))?;
        Ok(watchdog)
    }

    /// Watches a piece of work.
    pub fn begin(&self, what: &'static str) -> WatchedWork {
        let mut table = self.0.lock();
        let (id, now) = (table.next_id, table.now);
        table.next_id += 1;
        table.running.insert(id, (what, now));
        WatchedWork { table: self.clone(), id }
    }

    /// Reports that the compute device is lost: the process ends.
    pub fn device_lost(&self) {
        self.0.lock().device_lost = true;
    }

    /// Counts the time since the last look, as far as it counts.
    fn pass(&self, time: Duration) {
        self.0.lock().now += time.min(MAX_COUNTED);
    }

    /// The work that has run for longest, if that is longer than the limit.
    fn stuck(&self, limit: Duration) -> Option<Overrun> {
        let table = self.0.lock();
        let (what, began) = table.running.values().min_by_key(|(_, began)| *began).copied()?;
        let since = table.now.saturating_sub(began);
        (since > limit).then_some(Overrun::Stuck { what, since })
    }
}

impl WatchedWork {
    /// It goes on: its time begins again.
    pub fn progress(&self) {
        let mut table = self.table.0.lock();
        let now = table.now;
        if let Some((_, began)) = table.running.get_mut(&self.id) {
            *began = now;
        }
    }
}

impl Drop for WatchedWork {
    fn drop(&mut self) {
        self.table.0.lock().running.remove(&self.id);
    }
}

fn watch(limits: WatchdogLimits, table: &Weak<Mutex<WorkTable>>, end: impl FnOnce(Overrun)) {
    let mut last = Instant::now();
    loop {
        thread::park_timeout(INTERVAL);
        let Some(table) = table.upgrade() else { return };
        if table.lock().device_lost {
            return end(Overrun::DeviceLost);
        }
        let (watchdog, now) = (Watchdog(table), Instant::now());
        watchdog.pass(now - last);
        last = now;
        let stuck = limits.work.and_then(|limit| watchdog.stuck(limit));
        let memory = || {
            let (limit, taken) = (limits.memory_bytes?, anonymous_bytes()?);
            (taken > limit).then_some(Overrun::Memory { taken, limit })
        };
        // Work that takes memory takes time too: the memory is the cause.
        if let Some(overrun) = memory().or(stuck) {
            return end(overrun);
        }
    }
}

/// Anonymous memory of this process in bytes: what it allocated, without mapped files, which cost nothing under pressure.
pub fn anonymous_bytes() -> Option<u64> {
    kib_of(&fs::read_to_string("/proc/self/status").ok()?, "RssAnon:")
}

/// A line `name 123 kB` in bytes.
fn kib_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1 << 10)
}

/// The default limit on memory: nine tenths of the machine's, or of what the container may have.
pub fn default_memory_bytes() -> Option<u64> {
    let machine = kib_of(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:");
    let least = [machine, container_bytes()].into_iter().flatten().min()?;
    Some(least / 100 * DEFAULT_SHARE)
}

/// Limit of the process's control group, if it has one.
fn container_bytes() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = groups.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default();
    let files = [
        format!("/sys/fs/cgroup{}/memory.max", own.trim_end_matches('/')),
        "/sys/fs/cgroup/memory.max".to_owned(),
        "/sys/fs/cgroup/memory/memory.limit_in_bytes".to_owned(),
    ];
    files.iter().find_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const LIMIT: Duration = Duration::from_secs(5);

    /// Looks for as long as `time` without a pause.
    fn look_for(watchdog: &Watchdog, time: Duration) {
        (0..time.as_millis() / INTERVAL.as_millis()).for_each(|_| watchdog.pass(INTERVAL));
    }

    #[test]
    fn work_is_stuck_after_its_time_unless_it_makes_progress_or_ends() {
        let watchdog = Watchdog::default();
        let step = watchdog.begin("a step");
        look_for(&watchdog, LIMIT);
        assert_eq!(watchdog.stuck(LIMIT), None);
        look_for(&watchdog, INTERVAL);
        let stuck = watchdog.stuck(LIMIT).expect("it is late");
        assert_eq!(stuck, Overrun::Stuck { what: "a step", since: LIMIT + INTERVAL });
        assert_eq!(stuck.exit_code(), STUCK_EXIT_CODE);
        step.progress();
        assert_eq!(watchdog.stuck(LIMIT), None);
        look_for(&watchdog, LIMIT * 2);
        assert!(watchdog.stuck(LIMIT).is_some());
        drop(step);
        assert_eq!(watchdog.stuck(LIMIT), None);
    }

    #[test]
    fn work_is_not_stuck_while_its_process_is_paused() {
        let watchdog = Watchdog::default();
        let _step = watchdog.begin("a step");
        watchdog.pass(LIMIT * 100);
        assert_eq!(watchdog.stuck(LIMIT), None);
        look_for(&watchdog, LIMIT);
        assert!(watchdog.stuck(LIMIT).is_some());
    }

    #[test]
    fn the_thread_reports_the_first_limit_that_is_passed() {
        let (sender, receiver) = channel();
        let limits = WatchdogLimits { work: None, memory_bytes: Some(1) };
        let watchdog = Watchdog::start(limits, move |overrun| sender.send(overrun).unwrap()).unwrap();
        let overrun = receiver.recv().unwrap();
        assert!(matches!(overrun, Overrun::Memory { taken, limit: 1 } if taken > 1), "{overrun}");
        drop(watchdog);
        let (sender, receiver) = channel();
        let limits = WatchdogLimits { work: Some(Duration::from_millis(1)), memory_bytes: None };
        let watchdog = Watchdog::start(limits, move |overrun| sender.send(overrun).unwrap()).unwrap();
        let _step = watchdog.begin("a step");
        assert!(matches!(receiver.recv().unwrap(), Overrun::Stuck { what: "a step", .. }));
        let (sender, receiver) = channel();
        let watchdog =
            Watchdog::start(WatchdogLimits::default(), move |overrun| sender.send(overrun).unwrap()).unwrap();
        watchdog.device_lost();
        assert_eq!(receiver.recv().unwrap(), Overrun::DeviceLost);
    }

    #[test]
    fn sizes_are_read_from_the_system() {
        assert_eq!(kib_of("Name:\tx\nRssAnon:\t    1024 kB\n", "RssAnon:"), Some(1 << 20));
        assert_eq!(kib_of("RssAnon:\tmany kB\n", "RssAnon:"), None);
        assert!(anonymous_bytes().unwrap() > 0 && default_memory_bytes().unwrap() > 0);
    }
}
