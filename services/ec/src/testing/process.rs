//! Helpers of the server guards: a child process, free ports, a temporary folder, waiting.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// Timeout of a server's start; generous, since test machines are busy.
pub(super) const START_LIMIT: Duration = Duration::from_secs(20);
/// Timeout of several servers to agree.
pub(super) const AGREE_LIMIT: Duration = Duration::from_secs(60);
/// Poll interval.
const PAUSE: Duration = Duration::from_millis(10);
/// Range of the ports.
const FIRST_PORT: u16 = 8_192;
const N_PORTS: u16 = 11_808;

/// A running server. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    program: &'static str,
}

impl Process {
    /// # Panics
    /// If the program cannot be run.
    pub(super) fn redis(args: &[String]) -> Self {
        let quiet = Stdio::null;
        let mut command = Command::new("redis-server");
        command.args(args).stdout(quiet()).stderr(quiet());
        Self::start("redis-server", command)
    }

    /// # Panics
    /// If the program cannot be run.
    pub(super) fn start(program: &'static str, mut command: Command) -> Self {
        let child = command.stdin(Stdio::null()).spawn();
        let child = child.unwrap_or_else(|e| {
            panic!(
                "cannot run {program} ({e}); run the tests with `cargo xtask test`, which says how to install it"
            )
        });
        Self { child, program }
    }

    pub(super) fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// # Panics
    /// If the signal cannot be sent.
    pub(super) fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status();
        assert!(sent.is_ok_and(|s| s.success()), "cannot send {signal} to {}", self.program);
    }

    /// Suspends it, and waits until all of its threads are stopped: one that was about to answer may do so first.
    ///
    /// # Panics
    /// If the signal cannot be sent, or it goes on.
    pub(super) fn pause(&self) {
        self.signal("-STOP");
        let pause = Duration::from_millis(1);
        let stands = (0..10_000).any(|_| {
            let all_stopped = self.thread_states().is_some_and(|mut states| states.all(|state| state == "T"));
            if !all_stopped {
                std::thread::sleep(pause);
            }
            all_stopped
        });
        assert!(stands, "{} goes on after a SIGSTOP", self.program);
    }

    /// As in the third field of `/proc/PID/task/TID/stat`, behind a name that may hold anything but ends at the last
    /// parenthesis.
    fn thread_states(&self) -> Option<impl Iterator<Item = String>> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).ok()?;
        // A thread that has gone meanwhile does nothing any more.
        let stats = tasks.flatten().filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
        Some(stats.map(|stat| {
            let behind_name = stat.rsplit(')').next().unwrap_or_default();
            behind_name.split_whitespace().next().unwrap_or_default().to_owned()
        }))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A temporary folder, removed when dropped.
#[derive(Debug)]
pub(super) struct Folder(PathBuf);

impl Folder {
    /// # Panics
    /// If the system's temporary folder cannot be written.
    pub(super) fn new() -> Self {
        let path = std::env::temp_dir().join(format!("triptych-server-{:032x}", crate::store::nonce()));
        std::fs::create_dir(&path).expect("the folder for temporary files can be written");
        Self(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Polls until a condition holds; false on timeout.
pub(super) fn becomes(limit: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + limit;
    loop {
        if is_so() {
            return true;
        }
        if Instant::now() > until {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
}

/// A port of the loopback address that nobody listened on a moment ago, and that this process was not given before.
///
/// It lies below the range from which the kernel takes the ports of outgoing connections (32 768 and up on Linux), so
/// that none of them has it while its server is being restarted; and below the ports from 20 000 up that `triptych up`
/// chooses from, since a cluster's processes start a moment after their ports were found free.
///
/// # Panics
/// If all of them are taken.
pub fn free_port() -> u16 {
    free_port_with(0)
}

/// The same, where the port that is `offset` above is free too: for servers that take a second one by themselves.
pub(super) fn free_port_with(offset: u16) -> u16 {
    static TURN: LazyLock<AtomicU16> = LazyLock::new(|| AtomicU16::new(rand::random()));
    let is_free = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    (0..N_PORTS)
        .map(|_| FIRST_PORT + TURN.fetch_add(1, Ordering::Relaxed) % (N_PORTS - offset))
        .find(|port| is_free(*port) && (offset == 0 || is_free(port + offset)))
        .expect("the loopback address has free ports")
}
