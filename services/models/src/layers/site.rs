//! Layers that adapters can be added to, by the names of what was packed into them.

use std::ops::Range;

/// Number of a layer that adapters can be added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site(pub(super) usize);

/// A loaded layer that adapters can be added to.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearSite {
    /// Width of its input.
    pub n_in: usize,
    /// Its outputs, in order.
    pub parts: Vec<SitePart>,
}

/// Outputs of a loaded layer that are outputs of one stored layer.
#[derive(Clone, Debug, PartialEq)]
pub struct SitePart {
    /// Full names of the stored layer, without `.weight`; none if adapters of it are not served.
    pub modules: Vec<String>,
    /// Number of outputs of the stored layer.
    pub n_stored: usize,
    /// Those that are here.
    pub rows: Range<usize>,
    /// Factor on them.
    pub scale: f32,
}
