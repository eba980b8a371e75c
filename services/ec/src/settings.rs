//! Settings of stores, and opening them.
//!
//! | setting | store |
//! |---|---|
//! | `memory[:MIB]` | in this process; `triptych up` makes it a process that the others share |
//! | `shm[:NAME_OR_PATH][?mib=N]` | a slab of memory that the processes of this host share |
//! | `disk:DIR[?mib=N]` | a directory |
//! | `redis://[user:password@]host[:port][/db][?ttl_s=N]`, `rediss://…` with TLS | a Redis server |
//! | `redis+sentinel://[user:password@]h1:p1,h2:p2/MASTER[/db]`, `rediss+sentinel://…` | the master of that name |
//! | `redis+cluster://[user:password@]h1:p1,h2:p2`, `rediss+cluster://…` | a Redis cluster |
//! | `s3://BUCKET[/PREFIX][?endpoint=URL&region=R&allow_http=true&tenant=T]`, `gs://…`, `az://…` | a bucket |
//! | `grpc://host:port` | a store process |
//!
//! `s3://` and `az://` are tested against servers that check signatures. `gs://` is untried: no emulator in a package
//! registry has conditional writes (`x-goog-if-generation-match`).
//!
//! Several, separated by white space, are tiers, the fastest first:
//! `memory:256 redis://cache`.

mod split;
pub(crate) mod text;

use self::text::{is_authority, without_password};
use crate::breaker::BreakerTuning;
use crate::error::EcError;
use crate::guarded::Guarded;
use crate::limit::{Bounds, Limited};
use crate::metered::{EcObserver, Metered, NoObserver};
use crate::read_only::ReadOnly;
use crate::retry::{RetryBudget, RetryPolicy, Retrying};
use crate::store::bucket::{BucketService, BucketSetting, BucketStore, BucketTuning};
use crate::store::disk::{DiskSetting, DiskStore};
use crate::store::memory::{DEFAULT_BUDGET_BYTES, MemoryStore};
use crate::store::redis::{RedisSetting, RedisStore, RedisTuning};
use crate::store::remote::{Dial, Inject, RemoteStore, RemoteTuning};
use crate::store::shm::{ShmSetting, ShmStore};
use crate::store::tiered::{Tier, Tiered, TieredTuning};
use crate::store::{Access, EcStore, Scope, StoreKind};
use crate::traced::{Place, Traced};
use futures::future::BoxFuture;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use triptych_core::limits::Limits;

/// Allowed settings, for error texts and `--help`.
pub const ALLOWED: &str = "`memory[:MIB]`, `shm[:NAME_OR_PATH][?mib=N]`, `disk:DIR[?mib=N]`, \
     `redis://[user:password@]host[:port][/db][?ttl_s=N]`, \
     `redis+sentinel://[user:password@]host:port,…/MASTER[/db]`, `redis+cluster://[user:password@]host:port,…`, \
     `rediss…://` for TLS, `s3://BUCKET[/PREFIX][?endpoint=URL&region=R&allow_http=true&tenant=T]`, `gs://…`, `az://…`, \
     `grpc://host:port`, or several of them with spaces between, the fastest first";

/// Setting of a store. No passwords in `Display` and `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub enum EcSetting {
    /// In this process.
    Memory(MemorySetting),
    /// A slab of memory that the processes of this host share.
    Shm(ShmSetting),
    /// A directory.
    Disk(DiskSetting),
    /// A Redis server.
    Redis(RedisSetting),
    /// A bucket of an object store.
    Bucket(BucketSetting),
    /// A store process at `host:port`.
    Remote(String),
    /// Two or more tiers, the fastest first.
    Tiered(Vec<EcSetting>),
}

/// Budget of a memory store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySetting {
    /// Most bytes of all objects. Default [`DEFAULT_BUDGET_BYTES`].
    pub budget_bytes: usize,
}

impl Default for MemorySetting {
    fn default() -> Self {
        Self { budget_bytes: DEFAULT_BUDGET_BYTES }
    }
}

impl MemorySetting {
    fn parse(text: &str, mib: &str) -> Result<Self, EcError> {
        let bytes = mib.parse::<usize>().ok().filter(|n| *n > 0).and_then(|n| n.checked_mul(1 << 20));
        let budget_bytes = bytes.ok_or_else(|| EcError::Config {
            setting: text.to_owned(),
            reason: format!("{mib:?} is no size; allowed are integer MiB, 1 or more, as in `memory:256`"),
        })?;
        Ok(Self { budget_bytes })
    }
}

impl FromStr for EcSetting {
    type Err = EcError;

    fn from_str(text: &str) -> Result<Self, EcError> {
        let mut tiers = split::split(text).into_iter().map(Self::parse_one).collect::<Result<Vec<_>, _>>()?;
        if let Some(twice) = tiers.iter().enumerate().find_map(|(i, t)| tiers[..i].contains(t).then_some(t)) {
            let reason = "it is named twice; each store can be one tier".into();
            return Err(EcError::Config { setting: twice.to_string(), reason });
        }
        match tiers.len() {
            0 => Self::parse_one(""),
            1 => Ok(tiers.remove(0)),
            _ => Ok(Self::Tiered(tiers)),
        }
    }
}

impl EcSetting {
    fn parse_one(text: &str) -> Result<Self, EcError> {
        let wrong = |reason: String| Err(EcError::Config { setting: without_password(text), reason });
        if text == "memory" {
            return Ok(Self::Memory(MemorySetting::default()));
        }
        if let Some(mib) = text.strip_prefix("memory:") {
            return MemorySetting::parse(text, mib).map(Self::Memory);
        }
        if text.starts_with("disk:") {
            return DiskSetting::parse(text).map(Self::Disk);
        }
        if text == "shm" || text.starts_with("shm:") || text.starts_with("shm?") {
            return ShmSetting::parse(text).map(Self::Shm);
        }
        if let Some(authority) = text.strip_prefix("grpc://") {
            return match is_authority(authority) {
                true => Ok(Self::Remote(authority.to_owned())),
                false => wrong("`grpc://` needs a host and a port, as in `grpc://127.0.0.1:7400`".into()),
            };
        }
        if RedisSetting::is_meant(text) {
            return text.parse().map(Self::Redis);
        }
        if BucketSetting::is_meant(text) {
            return text.parse().map(Self::Bucket);
        }
        wrong(format!("not a store; allowed are {ALLOWED}"))
    }

    /// Visibility of the store's objects; of several tiers, the widest.
    pub fn scope(&self) -> Scope {
        match self {
            Self::Memory(_) => Scope::Process,
            Self::Shm(_) | Self::Disk(_) => Scope::Host,
            Self::Redis(_) | Self::Bucket(_) | Self::Remote(_) => Scope::Cluster,
            Self::Tiered(tiers) => tiers.iter().map(Self::scope).max().unwrap_or(Scope::Process),
        }
    }
}

impl fmt::Display for EcSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(memory) if *memory == MemorySetting::default() => f.write_str("memory"),
            Self::Memory(memory) => write!(f, "memory:{}", memory.budget_bytes >> 20),
            Self::Shm(shm) => shm.fmt(f),
            Self::Disk(disk) => disk.fmt(f),
            Self::Redis(redis) => redis.fmt(f),
            Self::Bucket(bucket) => bucket.fmt(f),
            Self::Remote(authority) => write!(f, "grpc://{authority}"),
            Self::Tiered(tiers) => {
                let texts: Vec<_> = tiers.iter().map(ToString::to_string).collect();
                f.write_str(&texts.join(" "))
            }
        }
    }
}

impl fmt::Debug for EcSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Options for opening a store, beside its setting.
#[derive(Clone, Default)]
pub struct OpenOptions {
    /// Size limits.
    pub limits: Limits,
    /// Use of the store: by default a directory or slab that is not there is made.
    pub access: Access,
    /// Opens channels to store processes; `None`: plain TCP.
    pub dial: Option<Dial>,
    /// Observer of each tier's operations; `None`: no observer.
    pub observer: Option<Arc<dyn EcObserver>>,
    /// Bounds on each tier's load; `None`: unbounded.
    pub bounds: Option<Bounds>,
    /// Circuit breaker of each tier; `None`: none for a single store, the default one for a tier, which must be skipped
    /// without a wait while it is away.
    pub breaker: Option<BreakerTuning>,
    /// Gives each tier's operations spans, and writes their context into calls of store processes; `None`: no spans.
    pub trace: Option<Inject>,
    /// Retries of each tier's operations, within one budget for all tiers; `None`: no retries.
    pub retry: Option<RetryPolicy>,
}

/// Opens the store as [`open_with`] does, with plain TCP.
///
/// # Errors
/// As [`open_with`].
pub async fn open(setting: &EcSetting, limits: &Limits) -> Result<Arc<dyn EcStore>, EcError> {
    open_with(setting, &OpenOptions { limits: limits.clone(), ..OpenOptions::default() }).await
}

/// Opens the store. An unreachable server is not an error: its operations are `Unavailable` until it is
/// reachable, which [`EcStore::ping`] checks. Must be called inside a tokio runtime.
///
/// # Errors
/// [`EcError::Config`] if the setting cannot be used: a directory that cannot be written, TLS that was not
/// built in, a URL that is none. [`EcError::NoStore`] if it must be there and is not.
pub fn open_with<'a>(
    setting: &'a EcSetting,
    with: &'a OpenOptions,
) -> BoxFuture<'a, Result<Arc<dyn EcStore>, EcError>> {
    Box::pin(open_and_decorate(setting, with))
}

async fn open_and_decorate(setting: &EcSetting, with: &OpenOptions) -> Result<Arc<dyn EcStore>, EcError> {
    let budget = RetryBudget::default();
    let EcSetting::Tiered(settings) = setting else {
        let store = guard(open_one(setting, with).await?, with.breaker, with);
        return Ok(decorate(store, setting, with, &budget));
    };
    let mut tiers = Vec::with_capacity(settings.len());
    for setting in settings {
        let breaker = Some(with.breaker.unwrap_or_default());
        let store = guard(open_one(setting, with).await?, breaker, with);
        let store = decorate(store, setting, with, &budget);
        tiers.push(Tier { store, scope: setting.scope() });
    }
    Ok(Arc::new(Tiered::new(tiers, TieredTuning::default(), &with.limits)))
}

/// Wraps a store with a circuit breaker, if it has one.
fn guard(store: Arc<dyn EcStore>, breaker: Option<BreakerTuning>, with: &OpenOptions) -> Arc<dyn EcStore> {
    let Some(tuning) = breaker else { return store };
    let tuning = if store.kind() == StoreKind::Object { tuning.for_bucket() } else { tuning };
    let observer = with.observer.clone().unwrap_or_else(|| Arc::new(NoObserver));
    Arc::new(Guarded::new(store, tuning, observer))
}

/// Wraps a store with bounds, retries, the observer and spans. Each attempt waits for its own permit; the observer and
/// the spans see the caller's view.
fn decorate(
    mut store: Arc<dyn EcStore>,
    setting: &EcSetting,
    with: &OpenOptions,
    budget: &RetryBudget,
) -> Arc<dyn EcStore> {
    if let Some(bounds) = with.bounds {
        store = Arc::new(Limited::new(store, bounds));
    }
    if let Some(policy) = &with.retry {
        store = Arc::new(Retrying::with_budget(store, policy.clone(), budget.clone()));
    }
    if let Some(observer) = &with.observer {
        store = Arc::new(Metered::new(store, observer.clone()));
    }
    if with.trace.is_some() {
        store = Arc::new(Traced::new(store, place_of(setting)));
    }
    store
}

/// The store's place, for spans.
fn place_of(setting: &EcSetting) -> Place {
    match setting {
        EcSetting::Memory(_) => Place::local(StoreKind::Memory),
        EcSetting::Shm(_) => Place::local(StoreKind::Shm),
        EcSetting::Disk(_) => Place::local(StoreKind::Disk),
        EcSetting::Tiered(_) => Place::local(StoreKind::Tiered),
        EcSetting::Remote(authority) => Place::at(StoreKind::Remote, authority),
        // Of several servers the link knows which one it asks.
        EcSetting::Redis(redis) => match redis.single() {
            Some((host, port)) => {
                Place { host: Some(host.to_owned()), port: Some(port), ..Place::local(StoreKind::Redis) }
            }
            None => Place::local(StoreKind::Redis),
        },
        EcSetting::Bucket(bucket) => {
            let name = (bucket.service() == BucketService::S3).then(|| bucket.bucket().to_owned());
            Place { bucket: name, ..Place::local(StoreKind::Object) }
        }
    }
}

async fn open_one(setting: &EcSetting, with: &OpenOptions) -> Result<Arc<dyn EcStore>, EcError> {
    let limits = &with.limits;
    let store: Arc<dyn EcStore> = match setting {
        EcSetting::Memory(memory) => Arc::new(MemoryStore::new(memory.budget_bytes, limits)),
        EcSetting::Shm(shm) => Arc::new(ShmStore::open_for(shm, limits, with.access).await?),
        EcSetting::Disk(disk) => Arc::new(DiskStore::open_for(disk, limits, with.access).await?),
        EcSetting::Redis(redis) => {
            let redis = redis.clone().with_environment(|name| std::env::var_os(name));
            Arc::new(RedisStore::open(&redis, RedisTuning::default(), limits)?)
        }
        EcSetting::Bucket(bucket) => {
            let environment: Vec<(String, String)> = std::env::vars_os()
                .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
                .collect();
            Arc::new(BucketStore::open(bucket, environment, BucketTuning::default(), limits).await?)
        }
        EcSetting::Remote(authority) => {
            let tuning = RemoteTuning::default();
            let store = match &with.dial {
                Some(dial) => RemoteStore::with_dial(authority, tuning, limits, dial.clone())?,
                None => RemoteStore::new(authority, tuning, limits)?,
            };
            Arc::new(store.injecting(with.trace))
        }
        EcSetting::Tiered(_) => {
            let reason = "a tier cannot have tiers".into();
            return Err(EcError::Config { setting: setting.to_string(), reason });
        }
    };
    Ok(if with.access == Access::ReadOnly { Arc::new(ReadOnly::new(store)) } else { store })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::chain;

    #[test]
    fn settings_parse_and_never_show_a_password() {
        let cases = [
            ("memory", "memory"),
            ("memory:256", "memory:256"),
            ("memory:1024", "memory"),
            (
                " memory:64   disk:/tmp/my cache  redis://:s3cret@h ",
                "memory:64 disk:/tmp/my cache redis://***@h",
            ),
            ("disk:/tmp/ec", "disk:/tmp/ec"),
            ("disk:relative dir", "disk:relative dir"),
            ("disk:/tmp/ec?mib=64", "disk:/tmp/ec?mib=64"),
            ("shm:/mnt/slab?mib=8", "shm:/mnt/slab?mib=8"),
            ("shm:mine", "shm:/dev/shm/mine?mib=1024"),
            ("shm:mine disk:/tmp/ec", "shm:/dev/shm/mine?mib=1024 disk:/tmp/ec"),
            ("redis://localhost", "redis://localhost"),
            ("redis://:s3cret@cache:6379/2?ttl_s=60", "redis://***@cache:6379/2"),
            ("rediss://me:s3cret@cache:6379", "rediss://***@cache:6379"),
            ("redis://me:s3/c?r@et@cache?ttl_s=1", "redis://***@cache"),
            ("redis+sentinel://me:s3cret@a:1,b:2/main/3", "redis+sentinel://***@a:1,b:2/main/3"),
            ("rediss+cluster://me:s3cret@a:1,b:2", "rediss+cluster://***@a:1,b:2"),
            ("grpc://127.0.0.1:7400", "grpc://127.0.0.1:7400"),
            ("grpc://[::1]:7400", "grpc://[::1]:7400"),
        ];
        for (text, shown) in cases {
            let setting: EcSetting = text.parse().unwrap();
            assert_eq!(setting.to_string(), shown);
            assert_eq!(format!("{setting:?}"), shown);
        }
    }

    #[test]
    fn places_for_spans_have_host_and_bucket_and_no_secret() {
        let cases = [
            ("redis://me:s3cret@cache:6380/2", (StoreKind::Redis, Some("cache"), Some(6380), None)),
            ("redis+cluster://:s3cret@a:1,b:2", (StoreKind::Redis, None, None, None)),
            ("s3://outputs/prefix", (StoreKind::Object, None, None, Some("outputs"))),
            ("gs://outputs", (StoreKind::Object, None, None, None)),
            ("grpc://store:7400", (StoreKind::Remote, Some("store"), Some(7400), None)),
            ("shm:mine", (StoreKind::Shm, None, None, None)),
        ];
        for (text, (kind, host, port, bucket)) in cases {
            let (host, bucket) = (host.map(str::to_owned), bucket.map(str::to_owned));
            assert_eq!(place_of(&text.parse().unwrap()), Place { kind, host, port, bucket }, "{text}");
        }
    }

    #[test]
    fn errors_of_settings_name_the_allowed_values() {
        let cases = [
            ("", "allowed are `memory"),
            ("mem", "allowed are `memory"),
            ("memory:", "integer MiB"),
            ("memory:0", "integer MiB"),
            ("memory:x", "integer MiB"),
            ("redis://h memory redis://h", "named twice"),
            ("memory rubbish", "allowed are `memory"),
            ("disk:/a b:c", "allowed are `memory"),
            ("grpc://u:p@h:1", "needs a host and a port"),
            ("grpc://a:b:1", "needs a host and a port"),
            ("s3://bucket:s3cret@host", "credentials come from the environment"),
            ("disk:", "needs a directory"),
            ("disk:?mib=4", "needs a directory"),
            ("disk:/tmp?mib=0", "allowed is `mib=N`"),
            ("disk:/tmp?mb=5", "allowed is `mib=N`"),
            ("shm:?mib=99999999", "allowed is `mib=N`"),
            ("shm:", "needs a name or a path"),
            ("shmem", "allowed are `memory"),
            ("grpc://host", "needs a host and a port"),
            ("grpc://host:port", "needs a host and a port"),
            ("grpc://:80", "needs a host and a port"),
            ("redis://:s3cret@h?ttl_s=0", "integer seconds, 1 or more"),
            ("redis://:s3cret@host:notaport", "redis://***@host:notaport"),
        ];
        for (text, part) in cases {
            let e = chain(&text.parse::<EcSetting>().unwrap_err());
            assert!(e.contains(part), "{text}: {e}");
            assert!(!e.contains("s3cret"), "{e}");
        }
    }
}
