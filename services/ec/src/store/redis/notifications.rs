//! Notifications of stored objects and released leases. Writers publish both on one channel. This process subscribes to
//! it once, with a connection of its own, at the first wait; a waiter for a key is woken by its message and polls.
//! Messages only save time: a waiter also polls by itself, slowly while the subscription is alive and fast while it is
//! not, because a message may be lost (a failover, a broken connection, a user without permission to publish) and none
//! is sent when a lease expires.
//!
//! In a cluster a message goes to every node, so a subscription to any node receives all. That costs each node a
//! small message per object; objects are megabytes.

use super::dial::Dialer;
use super::scripts::CHANNEL;
use futures::StreamExt;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use triptych_core::backoff::Pauses;
use triptych_core::{Backoff, ContentKey};

/// Poll interval of a waiter while the subscription is alive.
const POLL_WHILE_SUBSCRIBED: Duration = Duration::from_millis(500);
/// Pauses between polls while it is not.
const POLL_BACKOFF: Backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(100));
/// Pauses before the subscription is retried.
const SUBSCRIBE_BACKOFF: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));

/// The subscription of this process, and its waiters.
pub(super) struct KeyNotifications {
    waiters: Arc<Waiters>,
    subscriber: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Waiters {
    /// Waiters by key.
    waiting: Mutex<HashMap<ContentKey, Arc<Notify>>>,
    is_live: AtomicBool,
}

impl KeyNotifications {
    pub(super) fn new() -> Self {
        Self { waiters: Arc::default(), subscriber: Mutex::new(None) }
    }

    /// Starts a wait for a key. Messages from now on wake it.
    pub(super) fn wait_for(&self, key: &ContentKey, dialer: &Arc<Dialer>) -> KeyWait {
        let mut subscriber = self.subscriber.lock();
        if subscriber.as_ref().is_none_or(JoinHandle::is_finished) {
            *subscriber = Some(tokio::spawn(listen(dialer.clone(), self.waiters.clone())));
        }
        drop(subscriber);
        let notify = self.waiters.waiting().entry(*key).or_default().clone();
        KeyWait { waiters: self.waiters.clone(), key: *key, notify, pauses: POLL_BACKOFF.pauses() }
    }
}

impl Drop for KeyNotifications {
    fn drop(&mut self) {
        if let Some(subscriber) = self.subscriber.get_mut() {
            subscriber.abort();
        }
    }
}

impl Waiters {
    fn waiting(&self) -> MutexGuard<'_, HashMap<ContentKey, Arc<Notify>>> {
        self.waiting.lock()
    }

    fn set_live(&self, is_live: bool) {
        self.is_live.store(is_live, Ordering::Relaxed);
        // Messages between two subscriptions are lost.
        for notify in self.waiting().values() {
            notify.notify_waiters();
        }
    }
}

/// A wait for a key.
pub(super) struct KeyWait {
    waiters: Arc<Waiters>,
    key: ContentKey,
    notify: Arc<Notify>,
    pauses: Pauses,
}

impl KeyWait {
    /// Must be created before a poll, so that a message between the poll and the wait is not lost.
    pub(super) fn notified(&self) -> OwnedNotified {
        self.notify.clone().notified_owned()
    }

    /// Waits until the next poll, at most `left`.
    pub(super) async fn until_next_poll(&mut self, notify: OwnedNotified, left: Duration) {
        let pause = self.pauses.next_pause();
        let pause = if self.waiters.is_live.load(Ordering::Relaxed) { POLL_WHILE_SUBSCRIBED } else { pause };
        tokio::select! {
            () = notify => {}
            () = sleep(pause.min(left)) => {}
        }
    }
}

impl Drop for KeyWait {
    fn drop(&mut self) {
        let mut waiting = self.waiters.waiting();
        // References of the map and of this wait only: there are no other waiters.
        if Arc::strong_count(&self.notify) <= 2 {
            waiting.remove(&self.key);
        }
    }
}

async fn listen(dialer: Arc<Dialer>, waiters: Arc<Waiters>) {
    let mut pauses = SUBSCRIBE_BACKOFF.pauses();
    loop {
        match dialer.subscribe(CHANNEL).await {
            Ok(subscription) => {
                pauses.reset();
                waiters.set_live(true);
                let mut messages = subscription.into_on_message();
                while let Some(message) = messages.next().await {
                    let key = ContentKey::from_slice(message.get_payload_bytes());
                    if let Some(notify) = key.and_then(|key| waiters.waiting().get(&key).cloned()) {
                        notify.notify_waiters();
                    }
                }
                waiters.set_live(false);
            }
            Err(e) => tracing::debug!(error = %e, "no subscription to notifications of other writers"),
        }
        sleep(pauses.next_pause()).await;
    }
}
