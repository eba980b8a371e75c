//! A submitted step.

use triptych_kernels::ops::Choices;

/// A step that a decoder was given.
#[derive(Debug)]
pub enum Pending {
    /// It was computed at once.
    Done(Choices),
    /// It is under way, by its number.
    UnderWay(u64),
}
