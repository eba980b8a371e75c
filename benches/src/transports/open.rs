//! The transports behind one interface, each with its server.

use crate::raw::{Memcpy, Tcp};
use anyhow::{Context, Result, bail};
use bytes::Bytes;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use triptych_core::ContentKey;
use triptych_core::limits::Limits;
use triptych_ec::store::bucket::{BucketStore, BucketTuning};
use triptych_ec::store::memory::MemoryStore;
use triptych_ec::store::peer::{PeerCache, PeerCacheSettings, PeerTuning, Peers};
use triptych_ec::testing::{RedisServer, S3Server};
use triptych_ec::{EcSetting, EcStore, open, server};

/// Transports, first the two that are no stores.
pub const NAMES: [&str; 10] = [
    "memcpy",
    "TCP loopback",
    "memory",
    "shm",
    "disk",
    "redis, one value",
    "redis, chunked",
    "gRPC store",
    "peer",
    "S3",
];
/// Memory of each store.
const BUDGET_BYTES: usize = 1 << 30;

/// One transport, open. Its server ends with it.
pub struct OpenTransport<'r> {
    name: &'static str,
    runtime: &'r Runtime,
    kind: Kind,
    /// Buffer of the transports that read into existing memory.
    read: Vec<u8>,
    /// Held until the end.
    _guards: Vec<Guard>,
}

enum Kind {
    Memcpy(Memcpy),
    Tcp(Tcp),
    Redis(Box<redis::Connection>),
    Store(Arc<dyn EcStore>),
    Peer(Box<Peer>),
}

/// An encoder worker's memory, and a PD worker's way to it.
struct Peer {
    peer_cache: Arc<PeerCache>,
    readers: Peers,
    address: String,
}

/// Never read: held for its drop.
#[expect(dead_code, reason = "servers and folders end when they are dropped")]
enum Guard {
    Redis(RedisServer),
    S3(S3Server),
    Folder(TempDir),
}

impl<'r> OpenTransport<'r> {
    /// Opens the transport of that name; `disk`: where the disk store shall lie.
    ///
    /// # Errors
    /// If its server, its memory or its folder is not to be had.
    pub fn open(name: &'static str, runtime: &'r Runtime, disk: Option<&Path>) -> Result<Self> {
        let limits = Limits::default();
        let store = |setting: String| -> Result<Kind> {
            let setting: EcSetting = setting.parse()?;
            Ok(Kind::Store(runtime.block_on(open(&setting, &limits))?))
        };
        let (kind, guards) = match name {
            "memcpy" => (Kind::Memcpy(Memcpy::default()), vec![]),
            "TCP loopback" => (Kind::Tcp(Tcp::connect()?), vec![]),
            "memory" => (Kind::Store(Arc::new(MemoryStore::new(BUDGET_BYTES, &limits))), vec![]),
            "shm" => {
                let folder = tempfile::tempdir_in("/dev/shm").context("shared memory")?;
                let slab = folder.path().join("slab");
                let kind = store(format!("shm:{}?mib={}", slab.display(), BUDGET_BYTES >> 20))?;
                (kind, vec![Guard::Folder(folder)])
            }
            "disk" => {
                let folder = disk.map_or_else(tempfile::tempdir, tempfile::tempdir_in)?;
                (store(format!("disk:{}", folder.path().display()))?, vec![Guard::Folder(folder)])
            }
            "redis, one value" => {
                let server = RedisServer::start();
                let connection = redis::Client::open(server.url())?.get_connection()?;
                (Kind::Redis(Box::new(connection)), vec![Guard::Redis(server)])
            }
            "redis, chunked" => {
                let server = RedisServer::start();
                (store(server.url())?, vec![Guard::Redis(server)])
            }
            "gRPC store" => {
                let held = Arc::new(MemoryStore::new(BUDGET_BYTES, &limits));
                (store(format!("grpc://{}", served(runtime, held, &limits)?))?, vec![])
            }
            "peer" => {
                let settings =
                    PeerCacheSettings { budget_bytes: BUDGET_BYTES, ..PeerCacheSettings::default() };
                let peer_cache = Arc::new(PeerCache::new(settings, &limits));
                let address = served(runtime, peer_cache.clone(), &limits)?;
                let readers = Peers::new(None, PeerTuning::default(), &limits);
                (Kind::Peer(Box::new(Peer { peer_cache, readers, address })), vec![])
            }
            "S3" => {
                let server = S3Server::start();
                let setting = server.url().parse()?;
                let environment = server.environment();
                let tuning = BucketTuning::default();
                let store = runtime.block_on(BucketStore::open(&setting, environment, tuning, &limits))?;
                (Kind::Store(Arc::new(store)), vec![Guard::S3(server)])
            }
            _ => bail!("no transport is called {name:?}"),
        };
        Ok(Self { name, runtime, kind, read: Vec::new(), _guards: guards })
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Publishes an object.
    ///
    /// # Errors
    /// If that does not take place.
    pub fn put(&mut self, key: &ContentKey, object: &Bytes) -> Result<()> {
        match &mut self.kind {
            Kind::Memcpy(memcpy) => memcpy.put(object),
            Kind::Tcp(tcp) => tcp.put(object)?,
            Kind::Redis(connection) => {
                redis::cmd("SET").arg(key.to_string()).arg(&object[..]).exec(connection)?;
            }
            Kind::Store(store) => {
                self.runtime.block_on(store.put_if_absent(key, object.clone()))?;
            }
            // Nothing leaves the worker: it is there to be read from the moment on in which the store has it.
            Kind::Peer(peer) => drop(peer.peer_cache.place(*key, object.clone())),
        }
        Ok(())
    }

    /// Loads it.
    ///
    /// # Errors
    /// If it is not there.
    pub fn get(&mut self, key: &ContentKey) -> Result<Bytes> {
        match &mut self.kind {
            Kind::Memcpy(memcpy) => memcpy.get(&mut self.read),
            Kind::Tcp(tcp) => tcp.get(&mut self.read)?,
            Kind::Redis(connection) => {
                self.read = redis::cmd("GET").arg(key.to_string()).query(connection)?;
            }
            Kind::Store(store) => {
                return self.runtime.block_on(store.get(key))?.context("the object is gone");
            }
            Kind::Peer(peer) => {
                let object = self.runtime.block_on(peer.readers.get(&peer.address, key))?;
                return object.context("the object is gone");
            }
        }
        Ok(std::mem::take(&mut self.read).into())
    }

    /// Makes room for the next; takes back the memory that was read into.
    ///
    /// # Errors
    /// If the store does not answer.
    pub fn remove(&mut self, key: &ContentKey, read: Bytes) -> Result<()> {
        match &mut self.kind {
            Kind::Memcpy(_) | Kind::Tcp(_) => self.read = Vec::from(read),
            Kind::Redis(connection) => redis::cmd("DEL").arg(key.to_string()).exec(connection)?,
            Kind::Store(store) => {
                self.runtime.block_on(store.delete(key))?;
            }
            Kind::Peer(peer) => {
                peer.peer_cache.remove(key);
            }
        }
        Ok(())
    }
}

/// Objects in memory behind gRPC, as `triptych store` and an encoder worker serve them; the address. Ends with the
/// runtime.
fn served(runtime: &Runtime, held: Arc<dyn EcStore>, limits: &Limits) -> Result<String> {
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
    let address = listener.local_addr()?.to_string();
    let limits = limits.clone();
    runtime.spawn(async move { server::serve(listener, held, &limits, std::future::pending()).await });
    Ok(address)
}
