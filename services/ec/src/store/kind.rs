//! Kinds, scopes and operations of stores: the labels of errors, logs and metrics.

use std::fmt;

/// Kind of a back end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreKind {
    /// Memory of this process.
    Memory,
    /// A directory.
    Disk,
    /// A Redis server.
    Redis,
    /// A store process behind gRPC.
    Remote,
    /// A shared-memory slab of one host.
    Shm,
    /// S3, Google Cloud Storage or Azure Blob Storage.
    Object,
    /// Memory of the worker that encoded it.
    Peer,
    /// Several tiers.
    Tiered,
}

impl StoreKind {
    /// Label in metrics and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Disk => "disk",
            Self::Redis => "redis",
            Self::Remote => "grpc",
            Self::Shm => "shm",
            Self::Object => "object",
            Self::Peer => "peer",
            Self::Tiered => "tiered",
        }
    }
}

/// Visibility of a store's objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// This process alone.
    Process,
    /// The processes of this host, or of all hosts that mount the same directory.
    Host,
    /// All processes that reach its network address.
    Cluster,
}

impl StoreKind {
    /// Visibility of such a store's objects.
    pub const fn scope(self) -> Scope {
        match self {
            Self::Memory => Scope::Process,
            Self::Shm | Self::Disk => Scope::Host,
            Self::Redis | Self::Remote | Self::Object | Self::Peer | Self::Tiered => Scope::Cluster,
        }
    }
}

impl fmt::Display for StoreKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Operation of a store, for errors, metrics and fault injection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// [`EcStore::put_if_absent`].
    Put,
    /// [`EcStore::get`].
    Get,
    /// [`EcStore::heads`].
    Heads,
    /// [`EcStore::delete`].
    Delete,
    /// [`EcStore::quarantine`].
    Quarantine,
    /// [`EcStore::ping`].
    Ping,
    /// [`EcStore::acquire`], [`EcStore::renew`], [`EcStore::release`].
    Lease,
    /// [`EcStore::wait`].
    Wait,
    /// [`EcStore::list`].
    List,
}

impl Op {
    /// Label in metrics and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::Get => "get",
            Self::Heads => "heads",
            Self::Delete => "delete",
            Self::Quarantine => "quarantine",
            Self::Ping => "ping",
            Self::Lease => "lease",
            Self::Wait => "wait",
            Self::List => "list",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
