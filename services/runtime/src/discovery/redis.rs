//! A registry of workers in Redis. Each worker is a field of one hash, `triptych:workers`: role and address, its expiry
//! by the server's clock, and its description for operators (`HGETALL triptych:workers`). One key is one slot of a
//! cluster, and one query reads all workers.
//!
//! Proxies poll every second. There is no subscription: it would need the same query afterwards, a new worker loads its
//! model for longer than a second, and a dead one is noticed sooner by its connection.
//!
//! Redis may lose its data (a restart), or be away for longer than an announcement's time to live. So the hash has a
//! generation that is lost with it: after a new generation or an outage, known workers are kept until all had the time
//! to announce themselves again. An empty Redis does not empty the fleet.
//!
//! This file knows the commands; the caller provides the connection to a server, sentinels or a cluster.

use super::announce::ANNOUNCEMENT_TTL;
use super::setting::checked_address;
use super::{Announcement, DiscoveryError, Endpoint, EndpointSink, Registry, Role, Source};
use futures::future::BoxFuture;
use redis::{Cmd, Value, cmd};
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};
use triptych_core::backoff::jitter;

/// Key of the hash, the only key of every command.
pub const KEY: &str = "triptych:workers";
/// Mean interval between polls.
const INTERVAL: Duration = Duration::from_secs(1);
/// Relative spread of the interval, so that many proxies do not poll at the same moment.
const JITTER: f64 = 0.2;
/// Timeout of a command.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Most workers read; further ones are left out with a warning.
const MAX_WORKERS: usize = 4096;
/// Time to live of the hash without announcements, in seconds.
const HASH_TTL_S: u64 = 24 * 3600;

/// The field `mark` holds the generation. ARGV: field, time to live in ms, description, new generation, time to live of
/// the hash in s.
const ANNOUNCE: &str = "
local time = redis.call('TIME')
local ends = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2]
redis.call('HSETNX', KEYS[1], 'mark', ARGV[4])
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', ends) .. ' ' .. ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[5])
return 1";

/// Returns the generation and the live fields; removes expired ones. ARGV: most fields.
const LIVE_WORKERS: &str = "
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local all, out = redis.call('HGETALL', KEYS[1]), {''}
for i = 1, #all, 2 do
  local ends = tonumber(string.match(all[i + 1], '^%d+'))
  if all[i] == 'mark' then out[1] = all[i + 1]
  elseif not ends or ends <= now then redis.call('HDEL', KEYS[1], all[i])
  elseif #out <= tonumber(ARGV[1]) then out[#out + 1] = all[i] end
end
return out";

/// Runs a Redis command: its key, which selects the node of a cluster, and the command, which may run more than once.
pub type RedisQuery =
    Arc<dyn Fn(&'static str, Cmd) -> BoxFuture<'static, Result<Value, String>> + Send + Sync>;

/// The registry of workers in a Redis: for a worker a [`Registry`], for a proxy a [`Source`].
#[derive(Clone)]
pub struct RedisRegistry {
    query: RedisQuery,
    shown: String,
    about: About,
}

/// Description of a worker in Redis, for operators. Proxies ask the worker itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct About {
    /// Names of its models, and the fingerprints of their encoders.
    pub models: Vec<(String, String)>,
    /// Concurrent requests or jobs.
    pub capacity: Option<u32>,
}

/// Value of a worker's field.
#[derive(Serialize)]
struct RegistryEntry<'a> {
    role: &'a str,
    address: &'a str,
    worker: String,
    #[serde(flatten)]
    about: &'a About,
}

impl RedisRegistry {
    /// A registry in the Redis that `query` reaches; `shown` is its address without passwords.
    pub fn new(query: RedisQuery, shown: String) -> Self {
        Self { query, shown, about: About::default() }
    }

    /// Sets the description of announced workers.
    pub fn with_about(self, about: About) -> Self {
        Self { about, ..self }
    }

    async fn run_command(&self, command: Cmd) -> Result<Value, DiscoveryError> {
        let failed = |why| DiscoveryError::Unreachable { what: self.describe_it(), why };
        match timeout(TIMEOUT, (self.query)(KEY, command)).await {
            Ok(answer) => answer.map_err(failed),
            Err(_) => Err(failed(format!("no answer within {TIMEOUT:?}"))),
        }
    }

    fn describe_it(&self) -> String {
        format!("registry {}", self.shown)
    }

    /// The generation, and the live workers.
    async fn live_workers(&self) -> Result<(Vec<u8>, BTreeSet<Endpoint>), DiscoveryError> {
        let malformed =
            |why: &str| DiscoveryError::Unreachable { what: self.describe_it(), why: why.to_owned() };
        let mut command = eval(LIVE_WORKERS);
        command.arg(MAX_WORKERS);
        let Value::Array(fields) = self.run_command(command).await? else {
            return Err(malformed("the reply is no list"));
        };
        let mut fields = fields.into_iter();
        let Some(Value::BulkString(mark)) = fields.next() else {
            return Err(malformed("the reply has no generation"));
        };
        if fields.len() >= MAX_WORKERS {
            tracing::warn!(MAX_WORKERS, "the registry has more workers than are read");
        }
        let workers = fields.filter_map(|field| match field {
            Value::BulkString(field) => endpoint(std::str::from_utf8(&field).ok()?),
            _ => None,
        });
        Ok((mark, workers.collect()))
    }
}

impl Registry for RedisRegistry {
    fn describe(&self) -> String {
        self.describe_it()
    }

    fn announce<'a>(
        &'a self,
        announcement: &'a Announcement,
        ttl: Duration,
    ) -> BoxFuture<'a, Result<(), DiscoveryError>> {
        Box::pin(async move {
            let Endpoint { role, address } = &announcement.endpoint;
            let entry = RegistryEntry {
                role: role.as_str(),
                address,
                worker: announcement.worker.to_string(),
                about: &self.about,
            };
            let entry = serde_json::to_string(&entry).unwrap_or_default();
            let mark = format!("{:032x}", rand::random::<u128>());
            let mut announce = eval(ANNOUNCE);
            let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX).min(HASH_TTL_S * 1000);
            announce.arg(field(&announcement.endpoint)).arg(ttl_ms).arg(entry).arg(mark).arg(HASH_TTL_S);
            self.run_command(announce).await.map(drop)
        })
    }

    fn withdraw<'a>(&'a self, announcement: &'a Announcement) -> BoxFuture<'a, Result<(), DiscoveryError>> {
        Box::pin(async move {
            let mut remove = cmd("HDEL");
            remove.arg(KEY).arg(field(&announcement.endpoint));
            self.run_command(remove).await.map(drop)
        })
    }
}

impl Source for RedisRegistry {
    fn describe(&self) -> String {
        self.describe_it()
    }

    fn run(self: Box<Self>, sink: EndpointSink) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let mut view = RegistryView::default();
            loop {
                let was_failing = view.is_failing;
                match self.live_workers().await {
                    Ok((mark, present)) => {
                        if was_failing {
                            tracing::info!(registry = self.shown, "the registry answers again");
                        }
                        sink.publish(view.update(mark, present, Instant::now()));
                    }
                    Err(e) => {
                        if !was_failing {
                            tracing::warn!(error = %e, "the registry does not answer; the known workers stay");
                        }
                        view.is_failing = true;
                    }
                }
                sleep(jitter(INTERVAL, JITTER, rand::random())).await;
            }
        })
    }
}

/// A proxy's view of the registry between two polls.
#[derive(Debug, Default)]
struct RegistryView {
    mark: Option<Vec<u8>>,
    present: BTreeSet<Endpoint>,
    /// End of the time in which known workers are kept.
    keep_until: Option<Instant>,
    is_failing: bool,
}

impl RegistryView {
    /// The workers after a reply.
    fn update(&mut self, mark: Vec<u8>, mut present: BTreeSet<Endpoint>, now: Instant) -> BTreeSet<Endpoint> {
        let is_another = self.mark.as_ref().is_some_and(|known| *known != mark);
        if is_another || self.is_failing {
            self.keep_until = Some(now + ANNOUNCEMENT_TTL);
        }
        self.is_failing = false;
        self.mark = Some(mark);
        if self.keep_until.is_some_and(|until| now < until) {
            present.extend(self.present.iter().cloned());
        } else {
            self.keep_until = None;
        }
        self.present.clone_from(&present);
        present
    }
}

fn eval(script: &str) -> Cmd {
    let mut eval = cmd("EVAL");
    eval.arg(script).arg(1).arg(KEY);
    eval
}

fn field(endpoint: &Endpoint) -> String {
    format!("{}@{}", endpoint.role, endpoint.address)
}

/// The endpoint that a field names; `None` for the generation and for malformed fields.
fn endpoint(field: &str) -> Option<Endpoint> {
    let (role, address) = field.split_once('@')?;
    let role = Role::ALL.into_iter().find(|r| r.as_str() == role)?;
    Some(Endpoint { role, address: checked_address(address)?.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(addresses: &[&str]) -> BTreeSet<Endpoint> {
        addresses.iter().map(|a| Endpoint { role: Role::Pd, address: (*a).to_owned() }).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_restarted_registry_keeps_workers_until_they_could_announce_again() {
        let (mut view, start) = (RegistryView::default(), Instant::now());
        let mut update = |mark: &str, present: &[&str], after: Duration| {
            view.update(mark.into(), set(present), start + after)
        };
        let at = Duration::from_secs;
        assert_eq!(update("1", &["a:1", "b:1"], at(0)), set(&["a:1", "b:1"]));
        assert_eq!(update("1", &["b:1"], at(1)), set(&["b:1"]), "withdrawn is gone");
        assert_eq!(update("1", &["b:1", "c:1"], at(2)), set(&["b:1", "c:1"]));
        assert_eq!(update("", &[], at(3)), set(&["b:1", "c:1"]), "restarted");
        assert_eq!(update("2", &["c:1"], at(4)), set(&["b:1", "c:1"]), "not all are back");
        assert_eq!(update("2", &["c:1"], at(4) + ANNOUNCEMENT_TTL), set(&["c:1"]));
    }

    #[tokio::test(start_paused = true)]
    async fn workers_known_before_an_outage_have_time_to_announce_again() {
        let (mut view, now) = (RegistryView::default(), Instant::now());
        view.update("1".into(), set(&["a:1"]), now);
        view.is_failing = true;
        let back = now + 10 * ANNOUNCEMENT_TTL;
        assert_eq!(view.update("1".into(), set(&[]), back), set(&["a:1"]));
        assert_eq!(view.update("1".into(), set(&[]), back + ANNOUNCEMENT_TTL), set(&[]));
    }

    #[test]
    fn fields_parse_and_malformed_ones_are_left_out() {
        for role in Role::ALL {
            let worker = Endpoint { role, address: "[::1]:7001".into() };
            assert_eq!(endpoint(&field(&worker)), Some(worker));
        }
        for none in ["mark", "", "pd", "pd@", "pd@host", "queen@h:1", "pd@http://h:1", "pd@a b:1"] {
            assert_eq!(endpoint(none), None, "{none}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_or_malformed_registry_is_unreachable() {
        let silent: RedisQuery = Arc::new(|_, _| Box::pin(std::future::pending()));
        let e = RedisRegistry::new(silent, "redis://h".into()).live_workers().await.unwrap_err().to_string();
        assert!(e.contains("redis://h") && e.contains("no answer within 3s"), "{e}");
        for answer in [Value::Nil, Value::Array(vec![]), Value::Array(vec![Value::Int(1)])] {
            let query: RedisQuery = Arc::new(move |_, _| {
                let answer = answer.clone();
                Box::pin(async move { Ok(answer) })
            });
            assert!(RedisRegistry::new(query, String::new()).live_workers().await.is_err());
        }
    }
}
