//! A program that may hang: its output in a file, and an end for it and all that it started when its time is over.

use anyhow::{Context, Result};
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::shell::show;

/// Between two looks at a program.
const LOOK: Duration = Duration::from_millis(20);

/// A program that ended, or was ended.
pub struct Ended {
    /// Standard output and errors.
    pub text: String,
    /// `None`: its time was over.
    pub status: Option<ExitStatus>,
}

/// A program while it runs.
pub struct Running {
    child: Child,
    log: Log,
}

impl Running {
    /// Starts it, with a process group of its own.
    pub fn start(command: &mut Command) -> Result<Self> {
        let shown = show(command);
        println!("$ {shown}");
        let log = Log::new()?;
        command.stdin(Stdio::null()).stdout(log.writer()?).stderr(log.writer()?).process_group(0);
        let child = command.spawn().with_context(|| format!("cannot start `{shown}`"))?;
        Ok(Self { child, log })
    }

    /// Output so far.
    pub fn text(&self) -> Result<String> {
        self.log.text()
    }

    /// Waits for its end.
    pub fn wait(mut self, until: Instant) -> Result<Ended> {
        let mut status = self.child.try_wait()?;
        while status.is_none() && Instant::now() < until {
            sleep(LOOK);
            status = self.child.try_wait()?;
        }
        Ok(Ended { text: self.text()?, status })
    }

    /// Waits until its output has a text; `false` if it ends, or its time is over, before.
    pub fn wait_for(&mut self, text: &str, until: Instant) -> Result<bool> {
        while Instant::now() < until && self.child.try_wait()?.is_none() {
            if self.text()?.contains(text) {
                return Ok(true);
            }
            sleep(LOOK);
        }
        Ok(false)
    }

    /// Sends a signal to it and all that it started.
    pub fn signal(&self, signal: &str) {
        let group = format!("kill -{signal} -- -{}", self.child.id());
        let _ = Command::new("bash").args(["-c", &group]).stderr(Stdio::null()).status();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.signal("KILL");
        let _ = self.child.wait();
    }
}

/// Runs a program to its end, or to the end of its time.
pub fn run(command: &mut Command, until: Instant) -> Result<Ended> {
    Running::start(command)?.wait(until)
}

/// A file that is gone with its program.
struct Log(PathBuf);

impl Log {
    fn new() -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("cuda-check-{}-{number}.log", std::process::id()));
        File::create(&path).with_context(|| path.display().to_string())?;
        Ok(Self(path))
    }

    /// Both streams append to it.
    fn writer(&self) -> Result<File> {
        Ok(File::options().append(true).open(&self.0)?)
    }

    fn text(&self) -> Result<String> {
        Ok(String::from_utf8_lossy(&fs::read(&self.0)?).into_owned())
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bash(script: &str, limit: Duration) -> Ended {
        run(Command::new("bash").args(["-c", script]), Instant::now() + limit).expect("bash")
    }

    #[test]
    fn a_program_that_hangs_is_ended_with_what_it_said_and_started() {
        let start = Instant::now();
        let ended = bash("echo one; sleep 1000 & echo two >&2; wait", Duration::from_millis(500));
        assert!(ended.status.is_none() && start.elapsed() < Duration::from_secs(30));
        assert_eq!(ended.text, "one\ntwo\n");
    }

    #[test]
    fn a_program_that_ends_has_a_status() {
        let ended = bash("exit 3", Duration::from_secs(60));
        assert_eq!(ended.status.and_then(|status| status.code()), Some(3));
    }
}
