//! Polling for an object, for stores without notifications.

use crate::error::EcError;
use std::future::Future;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use triptych_core::{Backoff, EncodedItem};

/// Pauses between polls.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(100));

/// Polls for the head of one object with growing pauses, until it exists or `patience` is over.
///
/// # Errors
/// Those of `heads`.
pub(super) async fn poll_head<F>(
    patience: Duration,
    heads: impl Fn() -> F,
) -> Result<Option<EncodedItem>, EcError>
where
    F: Future<Output = Result<Vec<Option<EncodedItem>>, EcError>>,
{
    let until = Instant::now() + patience;
    let mut pauses = BACKOFF.pauses();
    loop {
        if let Some(Some(item)) = heads().await?.pop() {
            return Ok(Some(item));
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        sleep(pauses.next_pause().min(left)).await;
    }
}
