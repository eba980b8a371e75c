//! Settings of a measurement.

use super::rounds::Rounds;
use triptych_models::compute::ComputeConfig;

/// Settings of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProfileSettings {
    /// Compute settings of the workers.
    pub compute: ComputeConfig,
    /// Repeats of every point.
    pub rounds: Rounds,
    /// Number of points.
    pub extent: Extent,
    /// Memory for keys and values, in bytes; points that need more are left out.
    pub kv_bytes: usize,
}

/// Number of points of each curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Enough to see that everything runs.
    Quick,
    /// Enough to plan by.
    Full,
}
