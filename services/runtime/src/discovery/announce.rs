//! A worker's part of discovery: announced when it is ready, again and again while it is, withdrawn first thing when
//! it stops.

use super::{Announcement, Registry};
use crate::drain::Drain;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// How long an announcement lasts.
pub const LASTS: Duration = Duration::from_secs(10);
/// Between two announcements: two may be lost before one is missed.
const AGAIN: Duration = Duration::from_secs(3);
/// The longest that the registry may take; a withdrawal must not hold up a drain.
const PATIENCE: Duration = Duration::from_secs(2);

/// Keeps the worker announced from when it is ready to the beginning of drain.
pub fn keep(registry: Arc<dyn Registry>, who: Announcement, drain: &Drain) {
    let process = drain.clone();
    drain.tasks().spawn(async move {
        tokio::select! {
            () = process.ready() => {}
            // It was never there.
            () = process.stopping() => return,
        }
        tokio::select! {
            () = announce_again_and_again(&*registry, &who) => {}
            () = process.stopping() => {}
        }
        match timeout(PATIENCE, registry.withdraw(&who)).await {
            Ok(Ok(())) => tracing::info!(registry = registry.describe(), "withdrawn"),
            Ok(Err(e)) => tracing::warn!(error = %e, "cannot withdraw; the announcement runs out by itself"),
            Err(_) => tracing::warn!(patience = ?PATIENCE, "the registry is slow; the announcement runs out by itself"),
        }
    });
}

async fn announce_again_and_again(registry: &dyn Registry, who: &Announcement) {
    // Unknown at first, so that the first outcome is told.
    let mut was_heard = None;
    loop {
        let heard = match timeout(PATIENCE, registry.announce(who, LASTS)).await {
            Ok(Ok(())) => None,
            Ok(Err(e)) => Some(e.to_string()),
            Err(_) => Some(format!("no answer within {PATIENCE:?}")),
        };
        match (&heard, was_heard) {
            (None, None | Some(false)) => {
                tracing::info!(registry = registry.describe(), address = who.endpoint.address, "announced");
            }
            (Some(why), None | Some(true)) => {
                tracing::warn!(why, "cannot announce this worker; it is tried again")
            }
            _ => {}
        }
        was_heard = Some(heard.is_none());
        sleep(AGAIN).await;
    }
}
