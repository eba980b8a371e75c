//! The process that tries out a grammar: it limits itself, reads a job, compiles, and prints what it found.
//!
//! A constraint that goes beyond a limit ends the process, by a signal or an abort; the parent names the limit
//! ([`super::trial`]).

use super::trial::{CPU_LIMIT, MEMORY_LIMIT, VERDICT};
use rustix::process::{Resource, Rlimit, getrlimit, nice, setrlimit};
use std::io::{Read, Write};
use std::process::ExitCode;
use std::thread;
use triptych_core::Failure;
use triptych_engine::constraint::trial::{MAX_JOB_BYTES, STACK_BYTES, Trial, Verdict};

/// Stack of the thread that follows the grammar: half of an engine thread's.
const WALK_STACK_BYTES: usize = 1 << 20;
/// Priority below the worker's, whose steps are for other requests.
const NICE: i32 = 5;

/// Runs the trial whose job is on stdin, and prints its verdict.
pub fn run() -> ExitCode {
    let trial = match read() {
        Ok(trial) => trial,
        Err(e) => {
            let _ = writeln!(std::io::stderr(), "{e}; a PD worker starts this command, with a job on stdin");
            return ExitCode::from(2);
        }
    };
    limit();
    let verdict = match compile_and_walk(trial) {
        Ok(n_bytes) => Verdict::Fits { n_bytes },
        Err(failure) => Verdict::Refused(failure),
    };
    match writeln!(std::io::stdout(), "{VERDICT}{}", verdict.to_line()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn read() -> Result<Trial, Failure> {
    let mut job = Vec::new();
    std::io::stdin().take(MAX_JOB_BYTES).read_to_end(&mut job).map_err(Failure::internal)?;
    Trial::read(&job)
}

/// Compiles on a thread with a large stack; walks on one with less than an engine's, whose death is not cheap. Returns
/// the memory of the compiled grammar in bytes.
fn compile_and_walk(trial: Trial) -> Result<u64, Failure> {
    let before = status_bytes("VmRSS:");
    let compiled = on_thread(STACK_BYTES, move || trial.compile())??;
    let n_bytes = status_bytes("VmRSS:").saturating_sub(before);
    on_thread(WALK_STACK_BYTES, move || compiled.walk())?;
    Ok(n_bytes)
}

fn on_thread<T: Send + 'static>(
    stack_bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    let thread = thread::Builder::new().stack_size(stack_bytes).spawn(work).map_err(Failure::internal)?;
    thread.join().map_err(|_| Failure::invalid("the grammar cannot be used: the grammar library fails on it"))
}

/// Limits this process from here on. A limit that the system does not know is not set.
fn limit() {
    let (address_space, data) = (status_bytes("VmSize:"), status_bytes("VmData:"));
    let limits = [
        (Resource::Cpu, cpu_seconds().saturating_add(CPU_LIMIT.as_secs())),
        (Resource::As, address_space.saturating_add(MEMORY_LIMIT)),
        // What is reserved and not written does not count here.
        (Resource::Data, data.saturating_add(MEMORY_LIMIT)),
        // No dump of the model's vocabulary on somebody's disk.
        (Resource::Core, 0),
    ];
    for (resource, limit) in limits {
        // One more for the hard limit: at the soft one the signal says which limit it was.
        let hard = getrlimit(resource).maximum.map_or(limit + 1, |most| most.min(limit + 1));
        let _ = setrlimit(resource, Rlimit { current: Some(limit.min(hard)), maximum: Some(hard) });
    }
    let _ = nice(NICE);
    // Where memory is short, this process is to go, not the worker.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
}

/// CPU time of this process so far in seconds, rounded up: indexing a vocabulary does not count for its grammar.
fn cpu_seconds() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Behind the name of the binary, which may hold anything: user and system time, in ticks of 10 ms.
    let fields = stat.rsplit(')').next().unwrap_or_default();
    let ticks = fields.split_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok());
    ticks.fold(0, u64::saturating_add).div_ceil(100)
}

/// A size of this process, as Linux reports it. 0: it does not.
fn status_bytes(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let kib = line.and_then(|line| line.split_whitespace().next()).and_then(|kib| kib.parse::<u64>().ok());
    kib.map_or(0, |kib| kib.saturating_mul(1024))
}
