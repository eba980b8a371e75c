//! Progress of an encode, as its task reports it to those who wait.

use crate::request_machine::output::{Announced, Outcome};

/// Progress of an encode.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    pub(super) announced: Option<Announced>,
    pub(super) outcome: Option<Outcome>,
}
