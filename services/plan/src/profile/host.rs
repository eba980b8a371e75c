//! The machine, and the cores that are measured on.

use super::busy::Busy;
use crate::curves::Provenance;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};
use triptych_bench::error::MeasureError;

/// Cores of the frontend while its cost is measured.
const FRONTEND_CORES: usize = 4;
/// Variable of the bound process: a system that binds other cores than asked must not cause an endless loop.
const BOUND: &str = "TRIPTYCH_BOUND_TO";

/// Binds this program to the cores: it becomes `taskset`, and then itself again. A process that is bound from its start
/// has no thread elsewhere. Returns in the bound process.
///
/// # Errors
/// [`MeasureError::Setting`] for a core that is not there, one named twice, fewer than threads, or without `taskset`.
pub fn bind(cores: &[usize], threads: usize) -> Result<(), MeasureError> {
    if cores.is_empty() {
        return Ok(());
    }
    check(cores, threads, machine_cores())?;
    let list = cores.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    if std::env::var(BOUND).is_ok_and(|bound| bound == list) {
        return Ok(());
    }
    let binary = std::env::current_exe().map_err(|e| MeasureError::failed("cannot find this binary", &e))?;
    let mut taskset = Command::new("taskset");
    taskset.args(["-c", &list]).arg(binary).args(std::env::args_os().skip(1)).env(BOUND, &list);
    // Only a failure returns.
    Err(MeasureError::setting("--cores needs `taskset` of util-linux", &taskset.exec()))
}

fn check(cores: &[usize], threads: usize, n_cores: usize) -> Result<(), MeasureError> {
    if let Some(core) = cores.iter().find(|core| **core >= n_cores) {
        let last = n_cores - 1;
        return Err(MeasureError::Setting(format!("--cores: there is no core {core}, they are 0 to {last}")));
    }
    if let Some(i) = (1..cores.len()).find(|i| cores[..*i].contains(&cores[*i])) {
        return Err(MeasureError::Setting(format!("--cores: core {} is named twice", cores[i])));
    }
    match threads > cores.len() {
        true => Err(MeasureError::Setting(format!(
            "--threads {threads} on {} cores: name as many cores as there are threads",
            cores.len()
        ))),
        false => Ok(()),
    }
}

/// Extends the process to cores beside its own, for the frontend, which uses the cores of others too. A few are enough to
/// see its cost, and more would hide it.
///
/// # Errors
/// [`MeasureError::Failed`] if it was bound, and cannot be freed.
pub fn spread(cores: &[usize]) -> Result<(), MeasureError> {
    let list = beside(cores, machine_cores()).iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let mut taskset = Command::new("taskset");
    taskset.args(["-a", "-c", "-p", &list, &std::process::id().to_string()]);
    let done = taskset.stdout(Stdio::null()).stderr(Stdio::null()).status();
    match done {
        Err(e) if !cores.is_empty() => Err(MeasureError::failed("cannot run `taskset`", &e)),
        Ok(status) if !cores.is_empty() && !status.success() => {
            Err(MeasureError::Failed(format!("`taskset` cannot bind this process to cores {list}: {status}")))
        }
        // An unbound process needs no more cores.
        _ => Ok(()),
    }
}

/// The named cores first, then others, up to [`FRONTEND_CORES`].
fn beside(cores: &[usize], n_cores: usize) -> Vec<usize> {
    let others = (0..n_cores).filter(|core| !cores.contains(core));
    cores.iter().copied().chain(others).take(FRONTEND_CORES).collect()
}

/// Number of compute threads, where 0 means all cores.
pub fn threads(threads: usize, cores: &[usize]) -> usize {
    match (threads, cores.len()) {
        (0, 0) => std::thread::available_parallelism().map_or(1, usize::from),
        (0, n) => n,
        (n, _) => n,
    }
}

/// Provenance of curves that were measured now, on this machine.
pub fn provenance(cores: &[usize], rounds: u32, busy: Option<Busy>, built_from: Build) -> Provenance {
    Provenance {
        host: processor().unwrap_or_else(|| "unknown".to_owned()),
        n_cores: machine_cores(),
        cores: cores.to_vec(),
        commit: built_from.commit.unwrap_or_else(|| "unknown".to_owned()),
        at_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs()),
        rounds: usize::try_from(rounds).unwrap_or(0),
        busy: busy.map_or(0.0, Busy::total),
        store: built_from.store,
    }
}

/// Provenance that the caller knows.
#[derive(Clone, Debug)]
pub struct Build {
    /// Commit of the binary, if it is known.
    pub commit: Option<String>,
    /// The store, without its password.
    pub store: String,
}

fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(line.trim_start_matches([' ', '\t', ':']).to_owned())
}

/// Cores of the machine, whether this process may use them or not.
pub(super) fn machine_cores() -> usize {
    let listed = std::fs::read_to_string("/proc/cpuinfo")
        .map_or(0, |text| text.lines().filter(|line| line.starts_with("processor")).count());
    listed.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_that_cannot_be_are_named() {
        let refused = |cores: &[usize], threads| check(cores, threads, 4).unwrap_err().to_string();
        assert!(refused(&[4], 0).contains("no core 4, they are 0 to 3"));
        assert!(refused(&[1, 2, 1], 0).contains("core 1 is named twice"));
        assert!(refused(&[1], 2).contains("--threads 2 on 1 cores"));
        assert!(check(&[0, 3], 2, 4).is_ok());
        assert_eq!(beside(&[1], 2), [1, 0]);
        assert_eq!(beside(&[], 64), [0, 1, 2, 3]);
        assert_eq!(beside(&[5, 2], 64), [5, 2, 0, 1]);
    }
}
