//! Cores of this process and of its children, by affinity. Linux binds it to a thread and gives it on to what the thread
//! starts; `taskset` of util-linux sets it, since nothing that we link does so without unsafe code.

use super::cores::CoreList;
use crate::error::MeasureError;
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::Command;

const TASKSET: &str = "taskset";

/// Cores that this process may use.
///
/// # Errors
/// [`MeasureError::Failed`] if the kernel does not say.
pub fn own_cores() -> Result<CoreList, MeasureError> {
    let failed = |e: &dyn std::error::Error| MeasureError::failed("cannot find out which cores there are", e);
    let status = std::fs::read_to_string("/proc/self/status").map_err(|e| failed(&e))?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.unwrap_or_default().trim().parse().map_err(|e| failed(&e))
}

/// Puts this process, with all its threads, on these cores.
///
/// # Errors
/// [`MeasureError::Failed`] if `taskset` cannot.
pub fn set_own(cores: &CoreList) -> Result<(), MeasureError> {
    let pid = std::process::id().to_string();
    let args = ["-a", "-c", "-p", &cores.to_string(), &pid];
    let said = Command::new(TASKSET).args(args).output().map_err(|e| missing(&e))?;
    match said.status.success() {
        true => Ok(()),
        false => {
            let why = String::from_utf8_lossy(&said.stderr);
            Err(MeasureError::Failed(format!("cannot run on cores {cores}: {}", why.trim())))
        }
    }
}

/// The program and the arguments that start `exe` on these cores.
pub fn command_on(cores: &CoreList, exe: &Path) -> (OsString, Vec<OsString>) {
    (TASKSET.into(), vec!["-c".into(), cores.to_string().into(), exe.into()])
}

/// Error for a missing `taskset`.
pub fn missing(e: &io::Error) -> MeasureError {
    MeasureError::failed("cannot start `taskset`, which puts processes on cores; it is part of util-linux", e)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_stays_where_it_was_started() {
        let one = CoreList::new(own_cores().unwrap().iter().last()).unwrap();
        let (program, mut args) = command_on(&one, Path::new("grep"));
        args.extend(["Cpus_allowed_list", "/proc/self/status"].map(OsString::from));
        let output = Command::new(program).args(args).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(said.split_whitespace().last(), Some(one.to_string().as_str()), "{said}");
    }

    #[test]
    fn cores_that_are_not_there_are_refused() {
        let error = set_own(&"8000".parse().unwrap()).unwrap_err().to_string();
        assert!(error.contains("8000"), "{error}");
    }
}
