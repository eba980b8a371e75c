//! The things outside one encode, or one request, that its steps read and change.

use super::deaths::Deaths;
use super::pace::Pace;
use super::retry_budget::RetryWindow;
use std::time::Instant;

/// The things outside one encode that its steps read and change.
pub struct Surroundings<'a> {
    /// The time.
    pub now: Instant,
    /// Pays for second attempts.
    pub budget: &'a mut RetryWindow,
    /// Times of earlier jobs.
    pub pace: &'a mut Pace,
}

/// The things outside one request that its steps read and change.
pub struct RequestSurroundings<'a> {
    /// The time.
    pub now: Instant,
    /// Pays for second attempts.
    pub budget: &'a mut RetryWindow,
    /// Workers that died of requests.
    pub deaths: &'a mut Deaths,
}
