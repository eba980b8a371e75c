//! Service discovery: sources of worker addresses, and how workers announce themselves.
//!
//! A [`Source`] publishes the whole set that it sees whenever it changes; [`Discovery`] holds the union of several. An
//! address is only a hint: clients ask the worker itself what it serves and whether it is healthy. An address that
//! leaves the set gets no new work. A source that cannot be reached keeps its last set, since a registry that is down
//! says nothing about the workers.

pub mod announce;
pub mod dns;
pub mod fixed;
pub mod kubernetes;
pub mod redis;
pub mod setting;

use futures::future::BoxFuture;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::sync::watch;
use tokio::task::JoinSet;
use triptych_core::WorkerId;

/// Role of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Encodes items.
    Encoder,
    /// Prefills and decodes.
    Pd,
}

impl Role {
    /// Every role.
    pub const ALL: [Self; 2] = [Self::Encoder, Self::Pd];

    /// Name in labels, registries and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Encoder => "encoder",
            Self::Pd => "pd",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Address of a worker's gRPC server.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    /// Role of the worker.
    pub role: Role,
    /// `host:port`.
    pub address: String,
}

/// All known endpoints.
pub type EndpointSet = Arc<BTreeSet<Endpoint>>;

/// A source of worker addresses.
pub trait Source: Send + 'static {
    /// Description for the log, without secrets.
    fn describe(&self) -> String;

    /// True if its set can change. A proxy needs a PD worker or a dynamic source.
    fn is_dynamic(&self) -> bool {
        true
    }

    /// Publishes its set whenever it changes, until the future is dropped. Never completes and never gives up: a
    /// failure is logged once when it begins and once when it ends.
    fn run(self: Box<Self>, sink: EndpointSink) -> BoxFuture<'static, ()>;
}

/// Receiver of a source's set.
#[derive(Debug)]
pub struct EndpointSink {
    source_idx: usize,
    sets: Arc<SourceSets>,
}

impl EndpointSink {
    /// Replaces the source's set. Unions are sent in the order of these calls.
    pub fn publish(&self, set: BTreeSet<Endpoint>) {
        let mut sets = self.sets.of_source.lock();
        if let Some(own) = sets.get_mut(self.source_idx) {
            *own = set;
        }
        let union: BTreeSet<_> = sets.iter().flatten().cloned().collect();
        // Sent under the lock, which keeps unions in order.
        self.sets.union.send_if_modified(|current| {
            let changed = **current != union;
            if changed {
                *current = Arc::new(union);
            }
            changed
        });
    }
}

/// The set of each source, and the union.
#[derive(Debug)]
struct SourceSets {
    of_source: Mutex<Vec<BTreeSet<Endpoint>>>,
    union: watch::Sender<EndpointSet>,
}

/// Running sources. Dropping it aborts their tasks.
#[derive(Debug)]
pub struct Discovery {
    present: watch::Receiver<EndpointSet>,
    _sources: JoinSet<()>,
}

impl Discovery {
    /// Starts the sources. Must be called inside a tokio runtime.
    pub fn start(sources: Vec<Box<dyn Source>>) -> Self {
        let of_source = Mutex::new(vec![BTreeSet::new(); sources.len()]);
        let (union, present) = watch::channel(EndpointSet::default());
        let sets = Arc::new(SourceSets { of_source, union });
        let mut running = JoinSet::new();
        for (source_idx, source) in sources.into_iter().enumerate() {
            tracing::debug!(source = source.describe(), "discovery");
            running.spawn(source.run(EndpointSink { source_idx, sets: Arc::clone(&sets) }));
        }
        Self { present, _sources: running }
    }

    /// The union as it changes. Without sources it stays empty and its sender is dropped.
    pub fn present(&self) -> watch::Receiver<EndpointSet> {
        self.present.clone()
    }
}

/// A worker that announces itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// Address that others reach it at.
    pub endpoint: Endpoint,
    /// Its name, for operators.
    pub worker: WorkerId,
}

/// A registry that workers announce themselves to; its reader is a [`Source`].
pub trait Registry: Send + Sync + 'static {
    /// Description for the log, without secrets.
    fn describe(&self) -> String;

    /// Registers the worker for `ttl` from now. It is repeated before that, so a dead worker expires. Idempotent.
    fn announce<'a>(
        &'a self,
        announcement: &'a Announcement,
        ttl: Duration,
    ) -> BoxFuture<'a, Result<(), DiscoveryError>>;

    /// Removes the worker, which then gets no new work. Idempotent.
    fn withdraw<'a>(&'a self, announcement: &'a Announcement) -> BoxFuture<'a, Result<(), DiscoveryError>>;
}

/// A source or a registry that cannot be used.
#[derive(Debug, Error)]
pub enum DiscoveryError {
    /// A malformed setting.
    #[error("{text:?} is not {allowed}")]
    Setting {
        /// The text given.
        text: String,
        /// The allowed forms.
        allowed: &'static str,
    },
    /// The process does not run in a Kubernetes cluster.
    #[error("not inside a Kubernetes cluster: {0}")]
    NotInCluster(String),
    /// A text that cannot be a Kubernetes name.
    #[error("{0:?} is no name of Kubernetes: a-z, 0-9, - and .")]
    Name(String),
    /// No response, or an unexpected one; a retry may succeed.
    #[error("{what} does not answer: {why}")]
    Unreachable {
        /// Name of the source.
        what: String,
        /// Cause.
        why: String,
    },
}

#[cfg(test)]
mod tests;
