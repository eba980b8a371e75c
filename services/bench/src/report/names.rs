//! Names of results and rates in tables.

use crate::result::SweepResult;

/// Name of a result among others of its kind.
pub(super) fn name(sweep: &SweepResult) -> String {
    sweep.setup.topology.clone().unwrap_or_else(|| sweep.setup.target.clone())
}

/// A rate with about three digits.
pub(super) fn short(rate: f64) -> String {
    match rate {
        r if r >= 100.0 => format!("{r:.0}"),
        r if r >= 10.0 => format!("{r:.1}"),
        r => format!("{r:.2}"),
    }
}
