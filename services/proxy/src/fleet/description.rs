//! A worker's description of itself.

use super::catalog::Served;

/// The models that a worker serves, and whether it encodes items of them.
pub(super) struct Description {
    pub(super) models: Vec<Served>,
    pub(super) encodes: bool,
}
