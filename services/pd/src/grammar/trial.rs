//! The trial of a grammar, seen from the worker: a child process is started, given its job, and killed at its limit.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};
use tokio::time::timeout;
use triptych_core::{Failure, FailureClass};
use triptych_engine::constraint::trial::{Job, STACK_BYTES, Verdict};

/// Time that a trial may compute.
pub(super) const CPU_LIMIT: Duration = Duration::from_secs(4);
/// Memory that a trial may take beside its vocabulary, its stacks included, in bytes.
pub(super) const MEMORY_LIMIT: u64 = 256 << 20;
/// Before the verdict, since a test's own process writes lines of its own.
pub(super) const VERDICT: &str = "grammar-trial: ";
/// Time from start to verdict, on a machine where others compute too.
const WALL_LIMIT: Duration = Duration::from_secs(20);
/// Most bytes that are read of each stream of the child.
const MAX_OUTPUT: u64 = 64 << 10;

/// Linux' signal for a process that reached its limit on CPU time, SIGXCPU.
const CPU_SIGNAL: i32 = 24;
/// SIGKILL: for want of memory on the machine, since nobody else kills it.
const KILL_SIGNAL: i32 = 9;

/// The program that tries out grammars.
#[derive(Clone, Debug)]
pub struct TrialProgram {
    /// Its file.
    pub program: PathBuf,
    /// Arguments.
    pub args: Vec<OsString>,
    /// Its whole environment.
    pub env: Vec<(OsString, OsString)>,
}

impl TrialProgram {
    /// This binary under another command; [`super::run_trial`] is what it must run. The kernel's own name of the
    /// binary holds also when the file was replaced since, and where nothing else is mounted.
    pub fn this_binary(command: &str) -> Self {
        // The allocator would reserve an arena of more than the limit.
        let env = [("MIMALLOC_ARENA_RESERVE", "0"), ("MIMALLOC_ARENA_EAGER_COMMIT", "0")];
        Self {
            program: "/proc/self/exe".into(),
            args: vec![command.into()],
            env: env.into_iter().map(|(key, value)| (key.into(), value.into())).collect(),
        }
    }

    fn spawn(&self) -> io::Result<Child> {
        Command::new(&self.program)
            .args(&self.args)
            .env_clear()
            .envs(self.env.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Signals for the worker's group are not for it: the worker ends it.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
    }
}

/// Tries out a constraint of `field`; returns the memory of the compiled grammar in bytes.
///
/// # Errors
/// Invalid: the constraint cannot be compiled, or takes more than a limit. Overloaded: the machine is too busy.
/// Unavailable: the child cannot be started or written to.
pub(super) async fn run(program: &TrialProgram, job: Job, field: &'static str) -> Result<u64, Failure> {
    let failed = |e: io::Error| {
        Failure::unavailable("this worker cannot start a process to compile a grammar in").with_detail(e)
    };
    let child = program.spawn().map_err(failed)?;
    let output = timeout(WALL_LIMIT, communicate(child, job)).await.map_err(|_| {
        let text = format!("compiling {field} was not done after {} s", WALL_LIMIT.as_secs());
        Failure::new(FailureClass::Overloaded, text).with_param(field)
    })?;
    match output.map_err(failed)?.verdict(field)? {
        Verdict::Fits { n_bytes } => Ok(n_bytes),
        Verdict::Refused(failure) => Err(failure),
    }
}

/// Output and exit status of a child.
struct TrialOutput {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

async fn communicate(mut child: Child, job: Job) -> io::Result<TrialOutput> {
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let writing = async {
        let Some(mut stdin) = stdin else { return };
        // A child that ended early reads no further; its end says why.
        for part in [&job.head[..], &job.vocabulary] {
            if stdin.write_all(part).await.is_err() {
                return;
            }
        }
    };
    let ((), stdout, stderr) = tokio::join!(writing, read_text(stdout), read_text(stderr));
    Ok(TrialOutput { stdout: stdout?, stderr: stderr?, status: child.wait().await? })
}

async fn read_text(stream: Option<impl AsyncRead + Unpin>) -> io::Result<String> {
    let mut bytes = Vec::new();
    if let Some(stream) = stream {
        stream.take(MAX_OUTPUT).read_to_end(&mut bytes).await?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl TrialOutput {
    fn verdict(&self, field: &'static str) -> Result<Verdict, Failure> {
        let line = self.stdout.lines().find_map(|line| Some(line.split_once(VERDICT)?.1));
        match line.and_then(Verdict::from_line) {
            Some(verdict) if self.status.success() => Ok(verdict),
            _ => Err(self.limit(field)),
        }
    }

    /// The limit that the child reached, by the way it ended.
    fn limit(&self, field: &'static str) -> Failure {
        let more_than = |what: String| {
            let text = format!("{field} is too costly: compiling it takes more than {what}");
            Failure::invalid(text).with_param(field)
        };
        let failure = match self.status.signal() {
            Some(CPU_SIGNAL) => more_than(format!("{} s of CPU time", CPU_LIMIT.as_secs())),
            Some(KILL_SIGNAL) => Failure::unavailable("the process that compiles grammars was killed"),
            Some(_) if self.stderr.contains("overflowed its stack") => {
                more_than(format!("{} MiB of stack", STACK_BYTES >> 20))
            }
            Some(_) if self.stderr.contains("memory allocation") => {
                more_than(format!("{} MiB of memory", MEMORY_LIMIT >> 20))
            }
            Some(_) => Failure::invalid(format!("{field} cannot be used: the grammar library fails on it"))
                .with_param(field),
            None => Failure::unavailable("the process that compiles grammars failed"),
        };
        failure.with_detail(format!("{}: {}", self.status, self.stderr.trim()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(status: i32, stderr: &str, expect: &str, class: FailureClass) {
        let output = TrialOutput {
            status: ExitStatus::from_raw(status),
            stdout: String::new(),
            stderr: stderr.into(),
        };
        let failure = output.verdict("regex").unwrap_err();
        assert!(failure.message.contains(expect) && failure.class == class, "{failure}");
    }

    #[test]
    fn the_end_of_a_trial_names_its_limit() {
        let invalid = FailureClass::InvalidArgument;
        check(24, "", "regex is too costly: compiling it takes more than 4 s of CPU time", invalid);
        check(6, "thread '<unnamed>' has overflowed its stack", "64 MiB of stack", invalid);
        check(6, "memory allocation of 64 bytes failed", "256 MiB of memory", invalid);
        check(11, "", "the grammar library fails on it", invalid);
        check(9, "", "was killed", FailureClass::Unavailable);
        check(
            2 << 8,
            "stdin holds no trial",
            "process that compiles grammars failed",
            FailureClass::Unavailable,
        );
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_is_a_failure_of_the_worker() {
        let program = TrialProgram { program: "/nowhere".into(), args: Vec::new(), env: Vec::new() };
        let job = Job { head: Vec::new(), vocabulary: Vec::new().into() };
        let failure = run(&program, job, "regex").await.unwrap_err();
        assert_eq!(failure.class, FailureClass::Unavailable, "{failure}");
    }
}
