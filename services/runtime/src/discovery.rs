//! Who is there: sources that tell at which addresses workers answer, and how workers announce themselves.
//!
//! A [`Source`] tells the whole set that it sees, again and again; [`Discovery`] holds the union of several. What a
//! worker serves, and whether it is well, is for whoever talks to it: an address in the set is a hint and no promise,
//! and an address that leaves the set is one that gets nothing new. A source that cannot ask keeps its last answer,
//! since a registry that is down says nothing about the workers.

pub mod announce;
pub mod dns;
pub mod fixed;
pub mod kubernetes;
pub mod redis;
pub mod setting;

use futures::future::BoxFuture;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use thiserror::Error;
use tokio::sync::watch;
use tokio::task::JoinSet;
use triptych_core::WorkerId;

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Encodes items.
    Encoder,
    /// Prefills and decodes.
    Pd,
}

impl Role {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Encoder, Self::Pd];

    /// As it is written in names, labels and registries.
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

/// Where a worker answers gRPC.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    /// What it does.
    pub role: Role,
    /// `host:port`.
    pub address: String,
}

/// Everybody who is there.
pub type Present = Arc<BTreeSet<Endpoint>>;

/// Something that knows addresses of workers.
pub trait Source: Send + 'static {
    /// What it is, for the log. No secrets.
    fn describe(&self) -> String;

    /// Whether what it tells can change. A proxy whose sources are all fixed and name no PD worker has no use.
    fn is_dynamic(&self) -> bool {
        true
    }

    /// Tells the set that it sees, whenever it changes, until it is dropped. It never ends by itself and never gives
    /// up: trouble is logged once when it begins and once when it ends.
    fn run(self: Box<Self>, tell: Tell) -> BoxFuture<'static, ()>;
}

/// Where a source tells what it sees.
#[derive(Debug)]
pub struct Tell {
    place: usize,
    all: Arc<Seen>,
}

impl Tell {
    /// The whole set that the source sees, in place of the one before.
    pub fn present(&self, set: BTreeSet<Endpoint>) {
        let mut sets = self.all.sets.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = sets.get_mut(self.place) {
            *own = set;
        }
        let union: BTreeSet<_> = sets.iter().flatten().cloned().collect();
        // Still under the lock, so that unions go out in the order in which they were made.
        self.all.union.send_if_modified(|current| {
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
struct Seen {
    sets: Mutex<Vec<BTreeSet<Endpoint>>>,
    union: watch::Sender<Present>,
}

/// Running sources. Dropping it ends them.
#[derive(Debug)]
pub struct Discovery {
    present: watch::Receiver<Present>,
    _sources: JoinSet<()>,
}

impl Discovery {
    /// Starts the sources. Must be called inside a tokio runtime.
    pub fn start(sources: Vec<Box<dyn Source>>) -> Self {
        let sets = Mutex::new(vec![BTreeSet::new(); sources.len()]);
        let (union, present) = watch::channel(Present::default());
        let all = Arc::new(Seen { sets, union });
        let mut running = JoinSet::new();
        for (place, source) in sources.into_iter().enumerate() {
            tracing::debug!(source = source.describe(), "discovery");
            running.spawn(source.run(Tell { place, all: Arc::clone(&all) }));
        }
        Self { present, _sources: running }
    }

    /// The present set as it changes. With no source it stays empty and its sender is gone.
    pub fn present(&self) -> watch::Receiver<Present> {
        self.present.clone()
    }
}

/// A worker that announces itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// Where it answers, as others reach it.
    pub endpoint: Endpoint,
    /// Its name, for people.
    pub worker: WorkerId,
}

/// Something that workers announce themselves to; the other side is a [`Source`].
pub trait Registry: Send + Sync + 'static {
    /// What it is, for the log. No secrets.
    fn describe(&self) -> String;

    /// Says that the worker is there, until `lasts` from now: it is said again before that, and a worker that died is
    /// forgotten. Said twice, it is as good as once.
    fn announce<'a>(
        &'a self,
        who: &'a Announcement,
        lasts: Duration,
    ) -> BoxFuture<'a, Result<(), DiscoveryError>>;

    /// Says that it gets nothing new from now on. For one that was not announced, nothing happens.
    fn withdraw<'a>(&'a self, who: &'a Announcement) -> BoxFuture<'a, Result<(), DiscoveryError>>;
}

/// A source or a registry that cannot be used.
#[derive(Debug, Error)]
pub enum DiscoveryError {
    /// What was written is no setting.
    #[error("{text:?} is not {allowed}")]
    Setting {
        /// As written.
        text: String,
        /// What may be written.
        allowed: &'static str,
    },
    /// The process does not run where this source is.
    #[error("not inside a Kubernetes cluster: {0}")]
    NotInCluster(String),
    /// A name that Kubernetes has for nothing.
    #[error("{0:?} is no name of Kubernetes: a-z, 0-9, - and .")]
    Name(String),
    /// It did not answer as it should; another try may help.
    #[error("{what} does not answer: {why}")]
    Unreachable {
        /// Which.
        what: String,
        /// Why.
        why: String,
    },
}

#[cfg(test)]
mod tests;
