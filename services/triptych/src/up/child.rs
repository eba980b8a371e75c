//! The life of one child: start it, relay its lines, restart it when it ends, stop it on request.

use super::plan::ChildSpec;
use super::restarts::{End, Phase, RestartDecision, Restarts};
use super::screen::Screen;
use crate::args::{EC_VARIABLE, tls};
use crate::error::SETTING_EXIT_CODE;
use rustix::process::{Pid, Signal, kill_process};
use std::fmt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStderr, Command};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// For the last lines of a child that ended.
const LAST_LINES: Duration = Duration::from_millis(500);
/// Time for a child to end its requests with errors, after the second signal.
const CANCEL_TIME: Duration = Duration::from_secs(4);
/// A longer line is passed on in pieces.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// Signals to a keeper, each sent once.
#[derive(Clone, Debug, Default)]
pub struct Orders {
    /// All children were ready at the same time.
    pub ready: CancellationToken,
    /// End the child, with time to drain.
    pub stop: CancellationToken,
    /// Leave the child no time to drain, once it is to stop.
    pub kill: CancellationToken,
}

/// A child that cannot start.
#[derive(Clone, Debug)]
pub struct Lost {
    name: String,
    how: String,
    reason: Option<String>,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.reason {
            Some(reason) => write!(f, "{} cannot start: {reason}", self.name),
            None => write!(f, "{} cannot start: {}", self.name, self.how),
        }
    }
}

/// Keeps one child running.
pub struct Keeper {
    /// Process to run.
    pub spec: ChildSpec,
    /// The binary, this one.
    pub exe: PathBuf,
    /// Log for its lines.
    pub screen: Screen,
    /// Signals from the supervisor.
    pub orders: Orders,
}

/// End of one process.
enum RunEnd {
    /// It was stopped. The error with which it ended, if it was not well.
    Stopped(Option<String>),
    /// Unexpectedly.
    Early(Ended),
}

/// Unexpected end of a process.
struct Ended {
    end: End,
    how: String,
    reason: Option<String>,
}

impl Keeper {
    /// Keeps the child running until `stop`. Returns the error with which it then ended, if it had one.
    ///
    /// # Errors
    /// [`Lost`] if the child cannot start and the cluster was never ready.
    pub async fn keep(self) -> Result<Option<String>, Lost> {
        let mut restarts = Restarts::new();
        while !self.orders.stop.is_cancelled() {
            let start = Instant::now();
            let ended = match self.run_once().await {
                RunEnd::Stopped(error) => return Ok(error),
                RunEnd::Early(ended) => ended,
            };
            let phase = if self.orders.ready.is_cancelled() { Phase::Running } else { Phase::Starting };
            match restarts.after(ended.end, start.elapsed(), phase) {
                RestartDecision::GiveUp => {
                    let Ended { how, reason, .. } = ended;
                    return Err(Lost { name: self.spec.name, how, reason });
                }
                RestartDecision::Again(pause) => self.wait_to_restart(&ended.how, pause).await,
            }
        }
        Ok(None)
    }

    async fn wait_to_restart(&self, how: &str, pause: Duration) {
        let name = &self.spec.name;
        self.screen.warn(&format!("{name} ended ({how}), it comes back in {:.1} s", pause.as_secs_f64()));
        tokio::select! {
            () = sleep(pause) => {}
            () = self.orders.stop.cancelled() => {}
        }
    }

    /// Runs one process to its end.
    async fn run_once(&self) -> RunEnd {
        let mut process = match self.spawn() {
            Ok(process) => process,
            Err(e) => {
                let how = format!("{}: {e}", self.exe.display());
                return RunEnd::Early(Ended { end: End::Other, how, reason: None });
            }
        };
        let pid = process.id().unwrap_or_default();
        let ChildSpec { name, grpc, admin, .. } = &self.spec;
        self.screen.say(&format!("{name} started, pid {pid}, gRPC {grpc}, http://{admin}/metrics"));
        let lines = process.stderr.take().map(|stderr| self.pass_on(stderr));
        let status = tokio::select! {
            status = process.wait() => status,
            () = self.orders.stop.cancelled() => {
                let status = self.end(&mut process).await;
                // A child that was killed, or is gone already, has nothing to report.
                let failed = status.and_then(|status| status.code()).is_some_and(|code| code != 0);
                return RunEnd::Stopped(if failed { last_error(lines).await } else { None });
            }
        };
        RunEnd::Early(describe(pid, status, last_error(lines).await))
    }

    fn spawn(&self) -> std::io::Result<Child> {
        let mut command = Command::new(&self.exe);
        command.args(&self.spec.flags).arg("--supervised-by").arg(std::process::id().to_string());
        match &self.spec.ec {
            Some(setting) => command.env(EC_VARIABLE, setting),
            None => command.env_remove(EC_VARIABLE),
        };
        // A cluster of one machine is plain on its loopback address, whatever is set for the roles of another.
        for variable in tls::VARIABLES {
            command.env_remove(variable);
        }
        if !self.screen.is_coloured() {
            command.env("NO_COLOR", "1");
        }
        // An own process group: Ctrl-C in the terminal reaches the supervisor alone, which stops in order.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
        command.kill_on_drop(true).spawn()
    }

    /// Relays lines until the child closes them; returns the last error line.
    fn pass_on(&self, stderr: ChildStderr) -> JoinHandle<Option<String>> {
        let screen = self.screen.clone();
        let name = self.spec.name.clone();
        tokio::spawn(async move {
            let mut reader = BufReader::new(stderr);
            let mut line = Vec::new();
            let mut error = None;
            loop {
                line.clear();
                match (&mut reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut line).await {
                    Ok(0) | Err(_) => return error,
                    Ok(_) => {}
                }
                let text = String::from_utf8_lossy(&line);
                let text = text.trim_end();
                screen.relay(&name, text);
                error = text.strip_prefix("error: ").map(str::to_owned).or(error);
            }
        })
    }

    /// SIGTERM, patience, SIGKILL. When the user asks a second time, a second SIGTERM first: requests then end with an
    /// error, and not with a broken connection. Returns the child's own end, if it had one.
    async fn end(&self, process: &mut Child) -> Option<ExitStatus> {
        if self.orders.kill.is_cancelled() {
            // The proxy has ended by now, so nothing runs here that anybody waits for.
            let _ = process.kill().await;
            return None;
        }
        terminate(process);
        tokio::select! {
            status = process.wait() => return status.ok(),
            () = sleep(self.spec.stop_patience) => {
                self.screen.warn(&format!("{} did not end in {} s, killing it", self.spec.name, self.spec.stop_patience.as_secs()));
            }
            () = self.orders.kill.cancelled() => {
                terminate(process);
                if let Ok(status) = timeout(CANCEL_TIME, process.wait()).await {
                    return status.ok();
                }
            }
        }
        let _ = process.kill().await;
        None
    }
}

fn terminate(process: &Child) {
    if let Some(pid) = process.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
        // A process that is gone already cannot be signalled, and need not be.
        let _ = kill_process(pid, Signal::TERM);
    }
}

async fn last_error(lines: Option<JoinHandle<Option<String>>>) -> Option<String> {
    // A process that inherited the pipe may hold it open for longer than the child lives.
    timeout(LAST_LINES, lines?).await.ok()?.ok()?
}

fn describe(pid: u32, status: std::io::Result<ExitStatus>, reason: Option<String>) -> Ended {
    match status {
        Ok(status) => {
            let wrong_setting = status.code() == Some(i32::from(SETTING_EXIT_CODE));
            let end = if wrong_setting { End::WrongSetting } else { End::Other };
            Ended { end, how: format!("pid {pid}, {status}"), reason }
        }
        Err(e) => Ended { end: End::Other, how: format!("pid {pid}, its end is unknown: {e}"), reason },
    }
}
