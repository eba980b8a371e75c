//! Kinds, scopes and operations of stores: the labels of errors, logs and metrics.

use std::fmt;

/// The back ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreKind {
    /// In this process.
    Memory,
    /// A directory.
    Disk,
    /// A Redis server.
    Redis,
    /// A store process behind gRPC.
    Remote,
    /// A slab of memory that the processes of a host share.
    Shm,
    /// S3, Google Cloud Storage or Azure Blob Storage.
    Object,
    /// The memory of the worker that encoded it.
    Peer,
    /// Several, one behind the other.
    Tiered,
}

impl StoreKind {
    /// The word used in metrics and logs.
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

/// Who sees what a store holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// This process alone.
    Process,
    /// The processes of this host, or of all hosts that mount the same directory.
    Host,
    /// Whoever reaches its network address.
    Cluster,
}

impl StoreKind {
    /// Who sees what such a store holds.
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

/// The operations of a store, for errors and drills.
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
    /// The word used in logs.
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
