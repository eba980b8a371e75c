//! A worker's announcement: registered when it is ready, refreshed while it runs, withdrawn first in a drain.

use super::{Announcement, Registry};
use crate::drain::Drain;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Time to live of an announcement.
pub const ANNOUNCEMENT_TTL: Duration = Duration::from_secs(10);
/// Interval between announcements: two in a row may fail before one expires.
const REFRESH_INTERVAL: Duration = Duration::from_secs(3);
/// Timeout of a call to the registry; a withdrawal must not delay a drain.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Keeps the worker announced from its readiness to the beginning of the drain.
pub fn keep(registry: Arc<dyn Registry>, announcement: Announcement, drain: &Drain) {
    let process = drain.clone();
    drain.tasks().spawn(async move {
        tokio::select! {
            () = process.ready() => {}
            // It was never announced.
            () = process.stopping() => return,
        }
        tokio::select! {
            () = refresh(&*registry, &announcement) => {}
            () = process.stopping() => {}
        }
        match timeout(TIMEOUT, registry.withdraw(&announcement)).await {
            Ok(Ok(())) => tracing::info!(registry = registry.describe(), "withdrawn"),
            Ok(Err(e)) => tracing::warn!(error = %e, "cannot withdraw; the announcement expires"),
            Err(_) => tracing::warn!(timeout = ?TIMEOUT, "the registry is slow; the announcement expires"),
        }
    });
}

async fn refresh(registry: &dyn Registry, announcement: &Announcement) {
    // Unknown at first, so that the first outcome is logged.
    let mut had_succeeded = None;
    loop {
        let error = match timeout(TIMEOUT, registry.announce(announcement, ANNOUNCEMENT_TTL)).await {
            Ok(Ok(())) => None,
            Ok(Err(e)) => Some(e.to_string()),
            Err(_) => Some(format!("no answer within {TIMEOUT:?}")),
        };
        match (&error, had_succeeded) {
            (None, None | Some(false)) => {
                tracing::info!(
                    registry = registry.describe(),
                    address = announcement.endpoint.address,
                    "announced"
                );
            }
            (Some(why), None | Some(true)) => {
                tracing::warn!(why, "cannot announce this worker; retrying")
            }
            _ => {}
        }
        had_succeeded = Some(error.is_none());
        sleep(REFRESH_INTERVAL).await;
    }
}
