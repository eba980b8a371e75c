//! Pipelined steps: a PD worker with a device of its own submits a step before the one under way ends, so that what the host does
//! around a forward takes none of the device's time.

use super::CostCurves;
use serde::{Deserialize, Serialize};

/// Time of an engine step less the time from its start to the next one's where steps are pipelined, in microseconds, 0 or more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PipeliningSaves {
    /// Of any step.
    pub fixed_us: f64,
    /// Of each sequence that chooses a token.
    pub each_us: f64,
}

impl CostCurves {
    /// Time of a pipelined step in which so many sequences choose a token, from its time without pipelining, in microseconds.
    pub fn pipelined_us(&self, us: f64, n_choosing: u32) -> f64 {
        let PipeliningSaves { fixed_us, each_us } = self.pipelining.unwrap_or_default();
        (us - fixed_us - each_us * f64::from(n_choosing)).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::curves;
    use super::*;

    #[test]
    fn what_is_saved_depends_on_the_sequences_and_is_no_more_than_the_step() {
        let pipelining = Some(PipeliningSaves { fixed_us: 50.0, each_us: 2.0 });
        let pipelined = CostCurves { pipelining, ..curves() };
        assert_eq!(pipelined.pipelined_us(1000.0, 8), 934.0);
        assert_eq!(pipelined.pipelined_us(10.0, 8), 0.0);
        assert_eq!(curves().pipelined_us(1000.0, 8), 1000.0);
        let text = serde_json::to_string(&pipelined).expect("JSON");
        assert_eq!(CostCurves::read(&text).expect("curves"), pipelined);
    }

    #[test]
    fn savings_that_cannot_be_are_named() {
        let pipelining = Some(PipeliningSaves { fixed_us: -1.0, each_us: f64::NAN });
        let mistakes = CostCurves { pipelining, ..curves() }.mistakes().join("; ");
        assert!(mistakes.contains("pipelining.fixed_us is -1, allowed is 0 or more"), "{mistakes}");
        assert!(mistakes.contains("pipelining.each_us is NaN"), "{mistakes}");
    }
}
