//! Cores of this process and of its children, by affinity.

use crate::error::CliError;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io;
use triptych_bench::topology::CoreList;

/// Cores that this thread may use.
///
/// # Errors
/// [`CliError::Failed`] if the kernel does not say.
pub fn own_cores() -> Result<CoreList, CliError> {
    let failed = |e: &dyn std::error::Error| CliError::failed("cannot find out which cores there are", e);
    let set = sched_getaffinity(None).map_err(|e| failed(&e))?;
    let cores = (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core));
    CoreList::new(cores).map_err(|e| failed(&e))
}

/// Puts this thread, and those that it starts later, on these cores.
///
/// # Errors
/// The kernel's.
pub fn set_own(cores: &CoreList) -> io::Result<()> {
    let mut set = CpuSet::new();
    cores.iter().filter(|core| *core < CpuSet::MAX_CPU).for_each(|core| set.set(core));
    Ok(sched_setaffinity(None, &set)?)
}

/// Does something on other cores: what is started meanwhile by this thread stays there.
///
/// # Errors
/// The kernel's; then nothing was done.
pub fn on<T>(cores: &CoreList, work: impl FnOnce() -> T) -> io::Result<T> {
    let before = sched_getaffinity(None)?;
    set_own(cores)?;
    let done = work();
    sched_setaffinity(None, &before)?;
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_child_stays_where_it_was_started_and_this_thread_goes_back() {
        let own = own_cores().unwrap();
        let one = CoreList::new(own.iter().last()).unwrap();
        let command = || Command::new("sh").args(["-c", "grep Cpus_allowed_list /proc/self/status"]).output();
        let output = on(&one, command).unwrap().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(said.split_whitespace().last(), Some(one.to_string().as_str()), "{said}");
        assert_eq!(own_cores().unwrap(), own);
    }
}
