//! Flags of an orderly stop.

use clap::Args;
use std::ffi::OsString;
use std::time::Duration;
use triptych_runtime::drain::DrainTimes;

/// Times of a stop.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Stopping")]
pub struct DrainArgs {
    /// Milliseconds between reporting "not ready" and refusing connections: as long as the senders of requests take
    /// to notice
    #[arg(long, value_name = "MS", env = "TRIPTYCH_LAME_DUCK", default_value_t = 200)]
    pub lame_duck: u64,
    /// Seconds for what runs to end; then it is cancelled. Whatever stops this process should wait a little longer
    #[arg(long, value_name = "S", env = "TRIPTYCH_DRAIN_GRACE", default_value_t = 20)]
    pub drain_grace: u64,
}

/// Time beyond the two drain times, to close files and to deregister.
const BEYOND: Duration = Duration::from_secs(5);

impl DrainArgs {
    /// Time that a supervisor should wait for the end of the process.
    pub fn patience(&self) -> Duration {
        let DrainTimes { lame_duck, grace } = self.times();
        lame_duck.saturating_add(grace).saturating_add(BEYOND)
    }

    /// The flags, for a child.
    pub fn to_flags(self) -> Vec<OsString> {
        let number = |n: u64| OsString::from(n.to_string());
        vec!["--lame-duck".into(), number(self.lame_duck), "--drain-grace".into(), number(self.drain_grace)]
    }

    /// Settings of `runtime::drain`.
    pub fn times(&self) -> DrainTimes {
        DrainTimes {
            lame_duck: Duration::from_millis(self.lame_duck),
            grace: Duration::from_secs(self.drain_grace),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        drain: DrainArgs,
    }

    #[test]
    fn the_flags_default_to_the_times_of_the_library() {
        assert_eq!(Flags::parse_from(["x"]).drain.times(), DrainTimes::default());
        let set = Flags::parse_from(["x", "--lame-duck", "5000", "--drain-grace", "0"]).drain.times();
        assert_eq!(set, DrainTimes { lame_duck: Duration::from_secs(5), grace: Duration::ZERO });
    }

    #[test]
    fn a_child_stops_as_its_supervisor_was_told_and_is_waited_for() {
        let drain = DrainArgs { lame_duck: 1500, drain_grace: 60 };
        let child = Flags::parse_from(std::iter::once(OsString::from("x")).chain(drain.to_flags())).drain;
        assert_eq!(child.times(), drain.times());
        assert!(drain.patience() > drain.times().lame_duck + drain.times().grace);
    }
}
