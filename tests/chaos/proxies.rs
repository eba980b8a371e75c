//! The ends of proxies that clients may know of: kills, and replacements.
//!
//! A proxy that is told to end ends what it has accepted, and takes nothing more. One that is killed takes
//! its connections with it: its answers break off, and their clients send them again elsewhere.

use crate::names::PROXIES;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Kills and replacements of each proxy, as the drills make them.
#[derive(Default)]
pub struct ProxyEnds([ProxyEnd; PROXIES.len()]);

#[derive(Default)]
struct ProxyEnd {
    n_killed: AtomicUsize,
    n_rolled: AtomicUsize,
    /// True from its end to its successor's readiness.
    is_away: AtomicBool,
    /// The same of an end by a kill: it may be counted before a request is sent that it breaks.
    is_killed: AtomicBool,
}

/// Ends of a proxy so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenEnds {
    n_killed: usize,
    n_rolled: usize,
    is_killed: bool,
}

impl ProxyEnds {
    /// A proxy is about to be killed.
    pub fn killed(&self, name: &str) {
        self.of(name, |end| {
            end.is_killed.store(true, Ordering::SeqCst);
            end.n_killed.fetch_add(1, Ordering::SeqCst)
        });
    }

    /// A proxy is about to be told to end.
    pub fn rolled(&self, name: &str) {
        self.of(name, |end| end.n_rolled.fetch_add(1, Ordering::SeqCst));
    }

    /// Its successor is ready.
    pub fn is_back(&self, name: &str) {
        if let Some(i) = PROXIES.iter().position(|proxy| *proxy == name) {
            self.0[i].is_away.store(false, Ordering::SeqCst);
            self.0[i].is_killed.store(false, Ordering::SeqCst);
        }
    }

    fn of(&self, name: &str, count: impl Fn(&ProxyEnd) -> usize) {
        if let Some(i) = PROXIES.iter().position(|proxy| *proxy == name) {
            self.0[i].is_away.store(true, Ordering::SeqCst);
            count(&self.0[i]);
        }
    }

    pub fn seen(&self, proxy: usize) -> SeenEnds {
        let ProxyEnd { n_killed, n_rolled, is_killed, .. } = &self.0[proxy];
        SeenEnds {
            n_killed: n_killed.load(Ordering::SeqCst),
            n_rolled: n_rolled.load(Ordering::SeqCst),
            is_killed: is_killed.load(Ordering::SeqCst),
        }
    }

    /// True if a request that broke may do so, which was sent when so much had been seen of its proxy.
    pub fn excuses(&self, proxy: usize, before: SeenEnds, is_begun: bool) -> bool {
        let now = self.seen(proxy);
        let is_replaced = now != before || self.0[proxy].is_away.load(Ordering::SeqCst);
        before.is_killed || now.n_killed != before.n_killed || is_replaced && !is_begun
    }
}
