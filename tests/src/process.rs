//! Processes of the product, found in `/proc`, signalled, and waited for.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use triptych_ec::testing::free_port;

/// Timeout of every wait. Generous: exceeding it means "never", not "slow".
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The product's binary, built by `cargo xtask test` and by `cargo test --workspace`.
pub fn binary() -> PathBuf {
    let path = std::env::var_os("TRIPTYCH_BIN").map(PathBuf::from).unwrap_or_else(|| {
        // target/<profile>/deps/<this test> → target/<profile>/triptych
        let test = std::env::current_exe().expect("a test knows its own path");
        test.ancestors().nth(2).expect("target/<profile>").join("triptych")
    });
    assert!(
        path.is_file(),
        "{} is missing: run `cargo build -p triptych` or `cargo xtask test`",
        path.display()
    );
    path
}

/// Polls `ready` until it returns a value.
pub async fn eventually<T, F: AsyncFnMut() -> Option<T>>(what: &str, mut ready: F) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = ready().await {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A running process of the product, with its log. Drop kills it and its descendants.
pub struct Process {
    child: Child,
    log: Arc<Mutex<VecDeque<String>>>,
}

impl Process {
    /// Starts `triptych` with arguments; `RUST_LOG`-like settings come by flags.
    pub fn start(args: &[&str]) -> Self {
        Self::spawn(Command::new(binary()).args(args))
    }

    /// Starts `triptych` in a network namespace, with further variables.
    pub fn start_in(namespace: &str, args: &[String], variables: &[(String, String)]) -> Self {
        let mut command = Command::new("ip");
        let variables = variables.iter().map(|(name, value)| (name, value));
        Self::spawn(command.args(["netns", "exec", namespace]).arg(binary()).args(args).envs(variables))
    }

    /// Starts a command that becomes the product, or another program.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn spawn(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let log = Arc::default();
        tail(child.stdout.take().expect("piped"), &log);
        tail(child.stderr.take().expect("piped"), &log);
        Self { child, log }
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Output of it and its children so far: the last 2000 lines.
    pub fn log(&self) -> String {
        let log = self.log.lock();
        log.iter().cloned().collect::<Vec<_>>().join("\n")
    }

    /// Exit status, if it has ended.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("own child")
    }

    /// Waits for its end.
    pub async fn wait(&mut self) -> ExitStatus {
        let status = eventually("the process ends", async || self.child.try_wait().expect("own child"));
        status.await
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        for pid in descendants(self.pid()) {
            signal(pid, "KILL");
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- log of {}\n{}", self.pid(), self.log());
        }
    }
}

fn tail(stream: impl std::io::Read + Send + 'static, log: &Arc<Mutex<VecDeque<String>>>) {
    let log = log.clone();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let mut log = log.lock();
            log.push_back(line);
            if log.len() > 2000 {
                log.pop_front();
            }
        }
    });
}

/// Sends a signal by name. A process that is gone already is fine.
pub fn signal(pid: u32, name: &str) {
    let _ = Command::new("kill").arg(format!("-{name}")).arg(pid.to_string()).stderr(Stdio::null()).status();
}

/// True if a process is alive; a zombie is not.
pub fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

/// Children of a process whose command line has `word` as an argument.
pub fn children_of(parent: u32, word: &str) -> Vec<u32> {
    let command = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let is_role = |pid: &u32| command(pid).split('\0').any(|arg| arg == word);
    children(parent).into_iter().filter(is_role).collect()
}

fn descendants(of: u32) -> Vec<u32> {
    let mut all = children(of);
    let mut next = 0;
    while let Some(&pid) = all.get(next) {
        all.extend(children(pid));
        next += 1;
    }
    all
}

fn children(of: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    let parent = |pid: u32| -> Option<u32> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
    };
    pids.filter(|&pid| parent(pid) == Some(of) && is_alive(pid)).collect()
}

/// Resident memory of a process in bytes.
pub fn resident_bytes(pid: u32) -> u64 {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

/// Peak resident memory of a process, in bytes.
pub fn peak_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024
}
