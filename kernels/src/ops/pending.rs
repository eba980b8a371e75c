//! Choices that a device makes while the host goes on.

use std::convert::Infallible;

use super::choose::Choices;
use super::error::Result;
use super::stage::Indices;

/// Choices that were asked for: made at once, or under way on a device.
#[derive(Clone, Debug, PartialEq)]
pub enum Submitted<P> {
    /// The result.
    Done(Choices),
    /// To be waited for.
    UnderWay(P),
}

/// A token of a step that an earlier step chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CarriedToken {
    /// Row of the step, whose id is replaced.
    pub row: u32,
    /// Index of the choice in the earlier step's batch.
    pub choice: u32,
}

/// Choices under way on a device, whose staged steps are `S`.
pub trait PendingChoices<S>: Send {
    /// Waits for the choices, and for no later work.
    ///
    /// # Errors
    /// Those of the device.
    fn wait(self) -> Result<Choices>;

    /// Replaces ids of a staged step by tokens that are being chosen; a choice that cannot be made gives token 0.
    ///
    /// # Errors
    /// [`KernelError::Index`](super::KernelError::Index) for a row or a choice that is not there.
    fn carry_tokens(&self, step: &S, ids: Indices, carried: &[CarriedToken]) -> Result<()>;
}

/// No choice is under way where all are made at once.
impl<S> PendingChoices<S> for Infallible {
    fn wait(self) -> Result<Choices> {
        match self {}
    }

    fn carry_tokens(&self, _: &S, _: Indices, _: &[CarriedToken]) -> Result<()> {
        match *self {}
    }
}
