//! Workers that register themselves in Redis. Each is a field of one hash, `triptych:workers`: role and address, until
//! when it lasts by the server's clock, and what it says of itself, for operators (`HGETALL triptych:workers`). One key
//! is one slot of a cluster, and one question for everybody who is there.
//!
//! Proxies ask every second. There is no subscription: it would have to be followed by the same question, a new worker
//! loads its model for longer than a second, and one that went away is noticed sooner by its connection.
//!
//! Redis may lose everything (a restart), or be away for longer than an announcement lasts. So the hash has a mark that
//! is lost with it: when the mark is another one, or there was no answer for a while, whoever was there is kept until
//! all had the time to announce themselves again. An empty Redis empties no fleet.
//!
//! This file knows the commands; the connection, in whatever form Redis runs, is handed in.

use super::announce::LASTS;
use super::setting::checked_address;
use super::{Announcement, DiscoveryError, Endpoint, Registry, Role, Source, Tell};
use futures::future::BoxFuture;
use redis::{Cmd, Value, cmd};
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// The hash. Every command has this one key.
pub const KEY: &str = "triptych:workers";
/// Between two questions, on average.
const EVERY: Duration = Duration::from_secs(1);
/// Each pause is longer or shorter by up to this, so that many proxies do not ask in step.
const JITTER: f64 = 0.2;
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(3);
/// Workers that are read at most; what is above it is left out, and the log says so.
const MAX_WORKERS: usize = 4096;
/// The hash goes when nobody has announced anything for so long.
const FORGOTTEN_S: u64 = 24 * 3600;

/// The field `mark` is no worker. ARGV: field, how long it lasts in ms, what it says of itself, a mark, when the hash is forgotten.
const ANNOUNCE: &str = "
local time = redis.call('TIME')
local ends = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2]
redis.call('HSETNX', KEYS[1], 'mark', ARGV[4])
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', ends) .. ' ' .. ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[5])
return 1";

/// Fields that last; those that do not are removed. The first one is the mark. ARGV: most fields.
const PRESENT: &str = "
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

/// Asks Redis: the key that the command is about, for a cluster, and the command, which may run more than once.
pub type Ask = Arc<dyn Fn(&'static str, Cmd) -> BoxFuture<'static, Result<Value, String>> + Send + Sync>;

/// The registry of workers in a Redis: for a worker a [`Registry`], for a proxy a [`Source`].
#[derive(Clone)]
pub struct RedisRegistry {
    ask: Ask,
    shown: String,
    about: About,
}

/// What a worker says of itself, for whoever looks into Redis. Proxies ask the worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct About {
    /// Names of its models, and the fingerprints of their encoders.
    pub models: Vec<(String, String)>,
    /// Requests or jobs that it does at once.
    pub capacity: Option<u32>,
}

/// A field's value.
#[derive(Serialize)]
struct Entry<'a> {
    role: &'a str,
    address: &'a str,
    worker: String,
    #[serde(flatten)]
    about: &'a About,
}

impl RedisRegistry {
    /// A registry in the Redis that `ask` talks to; `shown` is its address without passwords.
    pub fn new(ask: Ask, shown: String) -> Self {
        Self { ask, shown, about: About::default() }
    }

    /// Announced workers say this of themselves.
    pub fn with_about(self, about: About) -> Self {
        Self { about, ..self }
    }

    async fn tell(&self, command: Cmd) -> Result<Value, DiscoveryError> {
        let failed = |why| DiscoveryError::Unreachable { what: self.describe_it(), why };
        match timeout(PATIENCE, (self.ask)(KEY, command)).await {
            Ok(answer) => answer.map_err(failed),
            Err(_) => Err(failed(format!("no answer within {PATIENCE:?}"))),
        }
    }

    fn describe_it(&self) -> String {
        format!("registry {}", self.shown)
    }

    /// The mark, and everybody who is there.
    async fn present(&self) -> Result<(Vec<u8>, BTreeSet<Endpoint>), DiscoveryError> {
        let strange =
            |why: &str| DiscoveryError::Unreachable { what: self.describe_it(), why: why.to_owned() };
        let mut present = eval(PRESENT);
        present.arg(MAX_WORKERS);
        let Value::Array(fields) = self.tell(present).await? else {
            return Err(strange("the answer is no list"));
        };
        let mut fields = fields.into_iter();
        let Some(Value::BulkString(mark)) = fields.next() else {
            return Err(strange("the answer has no mark"));
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
        who: &'a Announcement,
        lasts: Duration,
    ) -> BoxFuture<'a, Result<(), DiscoveryError>> {
        Box::pin(async move {
            let Endpoint { role, address } = &who.endpoint;
            let entry =
                Entry { role: role.as_str(), address, worker: who.worker.to_string(), about: &self.about };
            let entry = serde_json::to_string(&entry).unwrap_or_default();
            let mark = format!("{:032x}", rand::random::<u128>());
            let mut announce = eval(ANNOUNCE);
            let lasts_ms = u64::try_from(lasts.as_millis()).unwrap_or(u64::MAX).min(FORGOTTEN_S * 1000);
            announce.arg(field(&who.endpoint)).arg(lasts_ms).arg(entry).arg(mark).arg(FORGOTTEN_S);
            self.tell(announce).await.map(drop)
        })
    }

    fn withdraw<'a>(&'a self, who: &'a Announcement) -> BoxFuture<'a, Result<(), DiscoveryError>> {
        Box::pin(async move {
            let mut remove = cmd("HDEL");
            remove.arg(KEY).arg(field(&who.endpoint));
            self.tell(remove).await.map(drop)
        })
    }
}

impl Source for RedisRegistry {
    fn describe(&self) -> String {
        self.describe_it()
    }

    fn run(self: Box<Self>, tell: Tell) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let mut memory = Memory::default();
            loop {
                let was_failing = memory.is_failing;
                match self.present().await {
                    Ok((mark, present)) => {
                        if was_failing {
                            tracing::info!(registry = self.shown, "the registry answers again");
                        }
                        tell.present(memory.hear(mark, present, Instant::now()));
                    }
                    Err(e) => {
                        if !was_failing {
                            tracing::warn!(error = %e, "the workers that were there stay");
                        }
                        memory.is_failing = true;
                    }
                }
                sleep(EVERY.mul_f64(rand::random_range(1.0 - JITTER..1.0 + JITTER))).await;
            }
        })
    }
}

/// What a proxy remembers between two answers.
#[derive(Debug, Default)]
struct Memory {
    mark: Option<Vec<u8>>,
    present: BTreeSet<Endpoint>,
    /// Until then, whoever was there is still there.
    keep_until: Option<Instant>,
    is_failing: bool,
}

impl Memory {
    /// Who is there, after an answer.
    fn hear(&mut self, mark: Vec<u8>, mut present: BTreeSet<Endpoint>, now: Instant) -> BTreeSet<Endpoint> {
        let is_another = self.mark.as_ref().is_some_and(|known| *known != mark);
        if is_another || self.is_failing {
            self.keep_until = Some(now + LASTS);
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

/// What a field names; `None` for the mark and for what is no address, whoever wrote it.
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
    async fn an_empty_registry_empties_no_fleet_and_who_does_not_come_back_is_gone() {
        let (mut memory, start) = (Memory::default(), Instant::now());
        let mut hear = |mark: &str, present: &[&str], after: Duration| {
            memory.hear(mark.into(), set(present), start + after)
        };
        let at = Duration::from_secs;
        assert_eq!(hear("1", &["a:1", "b:1"], at(0)), set(&["a:1", "b:1"]));
        assert_eq!(hear("1", &["b:1"], at(1)), set(&["b:1"]), "withdrawn is gone");
        assert_eq!(hear("1", &["b:1", "c:1"], at(2)), set(&["b:1", "c:1"]));
        assert_eq!(hear("", &[], at(3)), set(&["b:1", "c:1"]), "restarted");
        assert_eq!(hear("2", &["c:1"], at(4)), set(&["b:1", "c:1"]), "not all are back");
        assert_eq!(hear("2", &["c:1"], at(4) + LASTS), set(&["c:1"]));
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_was_there_before_an_outage_has_time_to_come_back() {
        let (mut memory, now) = (Memory::default(), Instant::now());
        memory.hear("1".into(), set(&["a:1"]), now);
        memory.is_failing = true;
        let back = now + 10 * LASTS;
        assert_eq!(memory.hear("1".into(), set(&[]), back), set(&["a:1"]));
        assert_eq!(memory.hear("1".into(), set(&[]), back + LASTS), set(&[]));
    }

    #[test]
    fn fields_are_read_back_and_what_is_none_is_left_out() {
        for role in Role::ALL {
            let worker = Endpoint { role, address: "[::1]:7001".into() };
            assert_eq!(endpoint(&field(&worker)), Some(worker));
        }
        for none in ["mark", "", "pd", "pd@", "pd@host", "queen@h:1", "pd@http://h:1", "pd@a b:1"] {
            assert_eq!(endpoint(none), None, "{none}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_registry_that_says_nothing_or_nonsense_is_unreachable() {
        let silent: Ask = Arc::new(|_, _| Box::pin(std::future::pending()));
        let e = RedisRegistry::new(silent, "redis://h".into()).present().await.unwrap_err().to_string();
        assert!(e.contains("redis://h") && e.contains("no answer within 3s"), "{e}");
        for answer in [Value::Nil, Value::Array(vec![]), Value::Array(vec![Value::Int(1)])] {
            let ask: Ask = Arc::new(move |_, _| {
                let answer = answer.clone();
                Box::pin(async move { Ok(answer) })
            });
            assert!(RedisRegistry::new(ask, String::new()).present().await.is_err());
        }
    }
}
