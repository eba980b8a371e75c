//! Reads from the memory of the worker that encoded an output: the [`PeerCache`] in which a worker holds its published
//! outputs, and the [`Peers`] that another worker reads from.
//!
//! The proxy tells a reader the peers, and every object is verified under its key. A peer that does not answer is
//! skipped for a while, so that a dead one costs its timeout once and not once an item. Both ends use the settings of
//! [`crate::wire`]: frames of 1 MiB that are slices of the object, windows of 16 and 32 MiB, keep-alive.

mod cache;

pub use cache::{PeerCache, PeerCacheSettings, Pin};

use super::EcStore;
use super::remote::{Dial, Inject, RemoteStore, RemoteTuning};
use crate::error::EcError;
use crate::settings::text::is_authority;
use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem};

/// Most peers asked for one item.
pub const MAX_PEERS: usize = 4;
/// Longest name of a host, and a port.
const MAX_ADDRESS: usize = 253 + 6;

/// Timeouts and bounds of connections to peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerTuning {
    /// Timeout of reading one object. Default 5 s.
    pub op_timeout: Duration,
    /// Timeout of connecting without a dialer. Default 500 ms.
    pub connect_timeout: Duration,
    /// Time for which an unresponsive peer is skipped. Default 3 s.
    pub forget_for: Duration,
    /// Most open connections; the least recently used is closed. Default 256.
    pub max_peers: usize,
}

impl Default for PeerTuning {
    fn default() -> Self {
        Self {
            op_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_millis(500),
            forget_for: Duration::from_secs(3),
            max_peers: 256,
        }
    }
}

/// Connections to the peer caches of other workers.
pub struct Peers {
    dial: Option<Dial>,
    inject: Option<Inject>,
    tuning: PeerTuning,
    limits: Limits,
    known: Mutex<HashMap<String, Peer>>,
}

struct Peer {
    client: Arc<RemoteStore>,
    last_asked: Instant,
    /// It is not asked before.
    away_until: Option<Instant>,
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peers").field("known", &self.known().len()).finish_non_exhaustive()
    }
}

impl Peers {
    /// A pool whose channels `dial` makes; `None`: over TCP, without TLS.
    pub fn new(dial: Option<Dial>, tuning: PeerTuning, limits: &Limits) -> Self {
        Self { dial, inject: None, tuning, limits: limits.clone(), known: Mutex::default() }
    }

    /// Writes a trace context into each call.
    pub fn injecting(self, inject: Inject) -> Self {
        Self { inject: Some(inject), ..self }
    }

    /// Reads an object from a peer. `None`: it does not have it, is not answering these days, or is no address that is
    /// asked.
    ///
    /// # Errors
    /// The transport's; the peer is forgotten for a moment then.
    pub async fn get(&self, authority: &str, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        let Some(client) = self.client(authority) else { return Ok(None) };
        self.note(authority, client.get(key).await)
    }

    /// Waits until a peer has an object, but not longer than `patience`; `None` may come early.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub async fn wait(
        &self,
        authority: &str,
        key: &ContentKey,
        patience: Duration,
    ) -> Result<Option<EncodedItem>, EcError> {
        let Some(client) = self.client(authority) else { return Ok(None) };
        self.note(authority, client.wait(key, patience).await)
    }

    /// Does not ask a peer for a moment: what it gave does not verify.
    pub fn forget(&self, authority: &str) {
        let away_until = Some(Instant::now() + self.tuning.forget_for);
        if let Some(peer) = self.known().get_mut(authority) {
            peer.away_until = away_until;
        }
    }

    fn note<T>(&self, authority: &str, answer: Result<T, EcError>) -> Result<T, EcError> {
        if answer.is_err() {
            self.forget(authority);
        }
        answer
    }

    fn client(&self, authority: &str) -> Option<Arc<RemoteStore>> {
        if !may_be_asked(authority) {
            return None;
        }
        let now = Instant::now();
        let mut known = self.known();
        if let Some(peer) = known.get_mut(authority) {
            peer.last_asked = now;
            return peer.away_until.is_none_or(|until| until <= now).then(|| peer.client.clone());
        }
        let client = Arc::new(self.connect(authority).ok()?);
        if known.len() >= self.tuning.max_peers.max(1) {
            let oldest = known.iter().min_by_key(|(_, peer)| peer.last_asked).map(|(name, _)| name.clone());
            oldest.and_then(|name| known.remove(&name));
        }
        let peer = Peer { client: client.clone(), last_asked: now, away_until: None };
        known.insert(authority.to_owned(), peer);
        Some(client)
    }

    fn connect(&self, authority: &str) -> Result<RemoteStore, EcError> {
        let PeerTuning { op_timeout, connect_timeout, .. } = self.tuning;
        let tuning = RemoteTuning { op_timeout, connect_timeout, ..RemoteTuning::default() };
        let store = match &self.dial {
            Some(dial) => RemoteStore::with_dial(authority, tuning, &self.limits, dial.clone()),
            None => RemoteStore::new(authority, tuning, &self.limits),
        };
        Ok(store?.injecting(self.inject))
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, Peer>> {
        self.known.lock()
    }
}

/// True if a text is an address that a worker can have: `host:port` and nothing else, and not an address
/// that stands for many, for none, or for the machine's own surroundings (where clouds answer with credentials).
pub fn may_be_asked(authority: &str) -> bool {
    if authority.len() > MAX_ADDRESS || !is_authority(authority) || authority.ends_with(":0") {
        return false;
    }
    let Ok(address) = authority.parse::<SocketAddr>() else {
        // A name; one of digits and dots alone would be read as an address by some resolvers.
        return authority.contains(|c: char| c.is_ascii_alphabetic()) && !authority.starts_with(['[', '0']);
    };
    match address.ip().to_canonical() {
        IpAddr::V4(ip) => {
            !(ip.is_unspecified() || ip.is_multicast() || ip.is_broadcast() || ip.is_link_local())
        }
        IpAddr::V6(ip) => !(ip.is_unspecified() || ip.is_multicast() || ip.is_unicast_link_local()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_that_a_worker_can_have_are_asked() {
        let workers = [
            "127.0.0.1:7001",
            "10.1.2.3:7001",
            "[::1]:7001",
            "encoder-0.encoders.ns.svc:7001",
            "[fd00::1]:9",
        ];
        for address in workers {
            assert!(may_be_asked(address), "{address}");
        }
        let others = [
            "",
            "host",
            "host:",
            ":1",
            "host:0",
            "0.0.0.0:1",
            "[::]:1",
            "169.254.169.254:80",
            "[fe80::1]:80",
            "[::ffff:169.254.169.254]:80",
            "224.0.0.1:1",
            "255.255.255.255:1",
            "http://h:1",
            "h/x:1",
            "u@h:1",
            "h:1?x",
            "h h:1",
            "2130706433:80",
            "0x7f.1:80",
            "h:99999",
            "h:1\n",
        ];
        for address in others {
            assert!(!may_be_asked(address), "{address}");
        }
        assert!(!may_be_asked(&format!("{}:1", "a".repeat(300))));
    }
}
