//! Flags of the limits at which a worker ends itself, to be started again.

use crate::error::CliError;
use clap::Args;
use std::ffi::OsString;
use std::io::Write;
use std::time::Duration;
use triptych_runtime::watchdog::{Overrun, Watchdog, WatchdogLimits, default_memory_bytes};

/// Least limit of a stated memory, in MiB.
const LEAST_MIB: u64 = 256;

/// Limits at which a worker ends itself.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Limits at which a worker ends itself")]
pub struct WatchdogArgs {
    /// Seconds that one engine step, encoder forward or preprocessing may take: a worker that is stuck for longer exits
    /// with code 3, and its requests go on elsewhere. 0: no limit
    #[arg(long, value_name = "S", env = "TRIPTYCH_STEP_TIMEOUT", default_value_t = 300)]
    pub step_timeout: u64,
    /// MiB of memory that a worker may allocate; one that takes more exits with code 4, before the machine swaps.
    /// Default: nine tenths of the machine's or the container's. 0: no limit
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_MEMORY_LIMIT_MIB")]
    pub memory_limit_mib: Option<u64>,
}

impl WatchdogArgs {
    /// The limits.
    pub fn limits(&self) -> WatchdogLimits {
        let memory_bytes = match self.memory_limit_mib {
            None => default_memory_bytes(),
            Some(0) => None,
            Some(mib) => Some(mib.saturating_mul(1 << 20)),
        };
        let work = (self.step_timeout > 0).then(|| Duration::from_secs(self.step_timeout));
        WatchdogLimits { work, memory_bytes }
    }

    /// The same within a stated memory, unless a limit is set. A memory that is too small is refused when it is divided, which
    /// takes some itself.
    pub fn within(self, memory_mib: Option<u32>) -> Self {
        let stated = memory_mib.map(|mib| u64::from(mib).max(LEAST_MIB));
        Self { memory_limit_mib: self.memory_limit_mib.or(stated), ..self }
    }

    /// Starts the watchdog of this process, which ends it.
    ///
    /// # Errors
    /// [`CliError::Failed`] if the system refuses a thread.
    pub fn start(&self) -> Result<Watchdog, CliError> {
        let started = Watchdog::start(self.limits(), |overrun: Overrun| {
            // A closed stderr must not keep it alive, nor may a log that waits.
            let _ = writeln!(std::io::stderr(), "error: {overrun}; this worker ends itself");
            std::process::exit(overrun.exit_code().into());
        });
        started.map_err(|e| CliError::failed("cannot start the watchdog", &e))
    }

    /// The flags, for a child.
    pub fn to_flags(self) -> Vec<OsString> {
        let mut flags = vec!["--step-timeout".into(), self.step_timeout.to_string().into()];
        if let Some(mib) = self.memory_limit_mib {
            flags.extend(["--memory-limit-mib".into(), mib.to_string().into()]);
        }
        flags
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        watchdog: WatchdogArgs,
    }

    fn limits(flags: &[&str]) -> WatchdogLimits {
        Flags::parse_from([&["x"], flags].concat()).watchdog.limits()
    }

    #[test]
    fn zero_is_no_limit_and_memory_is_limited_by_default() {
        assert_eq!(limits(&[]).work, Some(Duration::from_secs(300)));
        assert!(limits(&[]).memory_bytes.is_some_and(|bytes| bytes > 0));
        let none = limits(&["--step-timeout", "0", "--memory-limit-mib", "0"]);
        assert_eq!(none, WatchdogLimits::default());
    }

    #[test]
    fn a_stated_memory_is_the_limit_unless_one_is_set() {
        let within = |set: Option<u64>, stated| {
            let given = WatchdogArgs { step_timeout: 7, memory_limit_mib: set };
            given.within(stated).memory_limit_mib
        };
        assert_eq!([within(None, Some(1000)), within(None, Some(64))], [Some(1000), Some(256)]);
        assert_eq!([within(Some(64), Some(1000)), within(None, None)], [Some(64), None]);
    }

    #[test]
    fn a_child_has_the_limits_of_its_supervisor() {
        let given = WatchdogArgs { step_timeout: 7, memory_limit_mib: Some(512) };
        let child = Flags::parse_from(std::iter::once(OsString::from("x")).chain(given.to_flags()));
        assert_eq!(child.watchdog.limits(), given.limits());
    }
}
