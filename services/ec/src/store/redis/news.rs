//! Waiting for objects of others. A put and a lease given back are published on one channel, which this process
//! subscribes to once, with a connection of its own, from the first wait on; whoever waits for a key is woken by its
//! message and asks. Messages only save time: who waits also asks by himself, seldom while the subscription lives and
//! often while it does not, because a message may be lost (a failover, a connection that breaks, a user who may not
//! publish) and none is sent when a lease ends by itself.
//!
//! In a cluster a message goes to every node, so that a subscription to any of them hears all. That costs each node a
//! small message per object; objects are megabytes.

use super::dial::Dialer;
use super::scripts::NEWS;
use futures::StreamExt;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use triptych_core::ContentKey;

/// How often a waiter asks while the subscription lives.
const SELDOM: Duration = Duration::from_millis(500);
/// The first and the longest pause between questions while it does not.
const OFTEN: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));
/// The first and the longest pause before the subscription is tried again.
const AGAIN: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// What this process hears.
pub(super) struct News {
    heard: Arc<Heard>,
    listener: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Heard {
    /// Of every key that someone waits for.
    waiting: Mutex<HashMap<ContentKey, Arc<Notify>>>,
    is_live: AtomicBool,
}

impl News {
    pub(super) fn new() -> Self {
        Self { heard: Arc::default(), listener: Mutex::new(None) }
    }

    /// Begins to wait for a key. Messages from now on are heard.
    pub(super) fn wait_for(&self, key: &ContentKey, dialer: &Arc<Dialer>) -> Waiting {
        let mut listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner);
        if listener.as_ref().is_none_or(JoinHandle::is_finished) {
            *listener = Some(tokio::spawn(listen(dialer.clone(), self.heard.clone())));
        }
        drop(listener);
        let word = self.heard.waiting().entry(*key).or_default().clone();
        Waiting { heard: self.heard.clone(), key: *key, word, pause: OFTEN.0 }
    }
}

impl Drop for News {
    fn drop(&mut self) {
        if let Some(listener) = self.listener.get_mut().unwrap_or_else(PoisonError::into_inner) {
            listener.abort();
        }
    }
}

impl Heard {
    fn waiting(&self) -> MutexGuard<'_, HashMap<ContentKey, Arc<Notify>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_live(&self, is_live: bool) {
        self.is_live.store(is_live, Ordering::Relaxed);
        // What was said between two subscriptions was not heard.
        for word in self.waiting().values() {
            word.notify_waiters();
        }
    }
}

/// Someone who waits for a key.
pub(super) struct Waiting {
    heard: Arc<Heard>,
    key: ContentKey,
    word: Arc<Notify>,
    pause: Duration,
}

impl Waiting {
    /// To be made before asking: a message that comes between asking and waiting is heard.
    pub(super) fn word(&self) -> OwnedNotified {
        self.word.clone().notified_owned()
    }

    /// Waits until it is time to ask again, `left` at most.
    pub(super) async fn until_it_is_time(&mut self, word: OwnedNotified, left: Duration) {
        let pause = if self.heard.is_live.load(Ordering::Relaxed) { SELDOM } else { self.pause };
        self.pause = (self.pause * 2).min(OFTEN.1);
        tokio::select! {
            () = word => {}
            () = sleep(pause.min(left)) => {}
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut waiting = self.heard.waiting();
        // The map's and this one: nobody else waits.
        if Arc::strong_count(&self.word) <= 2 {
            waiting.remove(&self.key);
        }
    }
}

async fn listen(dialer: Arc<Dialer>, heard: Arc<Heard>) {
    let mut pause = AGAIN.0;
    loop {
        match dialer.subscribe(NEWS).await {
            Ok(news) => {
                pause = AGAIN.0;
                heard.set_live(true);
                let mut messages = news.into_on_message();
                while let Some(message) = messages.next().await {
                    let key = ContentKey::from_slice(message.get_payload_bytes());
                    if let Some(word) = key.and_then(|key| heard.waiting().get(&key).cloned()) {
                        word.notify_waiters();
                    }
                }
                heard.set_live(false);
            }
            Err(e) => tracing::debug!(error = %e, "no subscription to what other writers store"),
        }
        sleep(pause).await;
        pause = (pause * 2).min(AGAIN.1);
    }
}
