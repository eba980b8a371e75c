//! How a process stops when it is told to.

use clap::Args;
use std::time::Duration;
use triptych_runtime::drain::DrainTimes;

/// Times of a stop.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Stopping")]
pub struct DrainArgs {
    /// Milliseconds between saying "not ready" and refusing connections: as long as whoever sends requests here takes
    /// to notice
    #[arg(long, value_name = "MS", env = "TRIPTYCH_LAME_DUCK", default_value_t = 200)]
    pub lame_duck: u64,
    /// Seconds for what runs to end; then it is cancelled. Whatever stops this process should wait a little longer
    #[arg(long, value_name = "S", env = "TRIPTYCH_DRAIN_GRACE", default_value_t = 20)]
    pub drain_grace: u64,
}

impl DrainArgs {
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

    #[test]
    fn the_flags_default_to_the_times_of_the_library() {
        #[derive(Parser)]
        struct Flags {
            #[command(flatten)]
            drain: DrainArgs,
        }
        assert_eq!(Flags::parse_from(["x"]).drain.times(), DrainTimes::default());
        let set = Flags::parse_from(["x", "--lame-duck", "5000", "--drain-grace", "0"]).drain.times();
        assert_eq!(set, DrainTimes { lame_duck: Duration::from_secs(5), grace: Duration::ZERO });
    }
}
