//! The setting that names a store, and opening it.
//!
//! | setting | store |
//! |---|---|
//! | `memory` | in this process; `triptych up` makes it a process that the others share |
//! | `disk:DIR` | a directory |
//! | `redis://[user:password@]host[:port][/db][?ttl_s=N]`, `rediss://…` with TLS | a Redis server |
//! | `grpc://host:port` | a store process |

use crate::error::EcError;
use crate::store::EcStore;
use crate::store::disk::DiskStore;
use crate::store::memory::{DEFAULT_BUDGET_BYTES, MemoryStore};
use crate::store::redis::{RedisStore, RedisTuning};
use crate::store::remote::{RemoteStore, RemoteTuning};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;
use triptych_core::limits::Limits;

/// What is allowed, for error texts and `--help`.
pub const ALLOWED: &str = "`memory`, `disk:DIR`, `redis://[user:password@]host[:port][/db][?ttl_s=N]`, `rediss://…`, `grpc://host:port`";

/// Which store to use. Text without passwords in both `Display` and `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub enum EcSetting {
    /// In this process.
    Memory,
    /// A directory.
    Disk(PathBuf),
    /// A Redis server.
    Redis(RedisSetting),
    /// A store process at `host:port`.
    Remote(String),
}

/// Where a Redis server is.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisSetting {
    /// The URL, with its password: never print it.
    url: String,
    /// How long objects live; `None`: the default of [`RedisTuning`].
    ttl: Option<Duration>,
}

impl FromStr for EcSetting {
    type Err = EcError;

    fn from_str(text: &str) -> Result<Self, EcError> {
        let wrong = |reason: String| Err(EcError::Config { setting: without_password(text), reason });
        let text = text.trim();
        if text == "memory" {
            return Ok(Self::Memory);
        }
        if let Some(dir) = text.strip_prefix("disk:") {
            return match dir {
                "" => wrong("`disk:` needs a directory, as in `disk:/var/lib/triptych/ec`".into()),
                dir => Ok(Self::Disk(dir.into())),
            };
        }
        if let Some(authority) = text.strip_prefix("grpc://") {
            return match authority.rsplit_once(':') {
                Some((host, port))
                    if !host.is_empty() && !host.contains(['/', '@']) && port.parse::<u16>().is_ok() =>
                {
                    Ok(Self::Remote(authority.to_owned()))
                }
                _ => wrong("`grpc://` needs a host and a port, as in `grpc://127.0.0.1:7400`".into()),
            };
        }
        if text.starts_with("redis://") || text.starts_with("rediss://") {
            return RedisSetting::parse(text).map(Self::Redis);
        }
        wrong(format!("not a store; allowed are {ALLOWED}"))
    }
}

impl RedisSetting {
    fn parse(text: &str) -> Result<Self, EcError> {
        let Some((url, query)) = text.split_once('?') else {
            return Ok(Self { url: text.to_owned(), ttl: None });
        };
        let (mut ttl, mut rest) = (None, Vec::new());
        for pair in query.split('&') {
            match pair.split_once('=') {
                Some(("ttl_s", n)) => {
                    let seconds = n.parse().ok().filter(|n| *n > 0).ok_or_else(|| EcError::Config {
                        setting: without_password(text),
                        reason: format!("ttl_s is {n:?}, allowed are whole seconds, 1 or more"),
                    })?;
                    ttl = Some(Duration::from_secs(seconds));
                }
                _ => rest.push(pair),
            }
        }
        let url = if rest.is_empty() { url.to_owned() } else { format!("{url}?{}", rest.join("&")) };
        Ok(Self { url, ttl })
    }
}

impl fmt::Display for EcSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::Disk(dir) => write!(f, "disk:{}", dir.display()),
            Self::Redis(redis) => f.write_str(&without_password(&redis.url)),
            Self::Remote(authority) => write!(f, "grpc://{authority}"),
        }
    }
}

impl fmt::Debug for EcSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Opens the store. A server that is not there now is not an error: its operations are `Unavailable` until it is,
/// and [`EcStore::ping`] asks. Must be called inside a tokio runtime.
///
/// # Errors
/// [`EcError::Config`] if the setting cannot be followed: a directory that cannot be written, TLS that was not
/// built in, a URL that is none.
pub async fn open(setting: &EcSetting, limits: &Limits) -> Result<Arc<dyn EcStore>, EcError> {
    Ok(match setting {
        EcSetting::Memory => Arc::new(MemoryStore::new(DEFAULT_BUDGET_BYTES, limits)),
        EcSetting::Disk(dir) => Arc::new(DiskStore::open(dir, limits).await?),
        EcSetting::Redis(redis) => {
            let defaults = RedisTuning::default();
            let tuning = RedisTuning { ttl: redis.ttl.unwrap_or(defaults.ttl), ..defaults };
            Arc::new(RedisStore::new(&redis.url, tuning, limits)?)
        }
        EcSetting::Remote(authority) => {
            Arc::new(RemoteStore::new(authority, RemoteTuning::default(), limits)?)
        }
    })
}

/// A URL as an operator may see it: user and password become `***`, and so does the query.
pub(crate) fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    // The last `@` of everything: a password may hold unescaped `/`, `?` and `@`, and none of it may show.
    let (user, place) = match rest.rsplit_once('@') {
        Some((_, place)) => ("***@", place),
        None => ("", rest),
    };
    let place = place.split(['?', '#']).next().unwrap_or_default();
    format!("{scheme}://{user}{place}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::chain;

    #[test]
    fn settings_parse_and_never_show_a_password() {
        let cases = [
            ("memory", "memory"),
            ("disk:/tmp/ec", "disk:/tmp/ec"),
            ("disk:relative dir", "disk:relative dir"),
            ("redis://localhost", "redis://localhost"),
            ("redis://:s3cret@cache:6379/2?ttl_s=60", "redis://***@cache:6379/2"),
            ("rediss://me:s3cret@cache:6379", "rediss://***@cache:6379"),
            ("redis://me:s3/c?r@et@cache?x=1", "redis://***@cache"),
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
    fn the_time_to_live_is_read_and_not_passed_on() {
        let EcSetting::Redis(redis) = "redis://h?ttl_s=60&protocol=resp3".parse().unwrap() else { panic!() };
        assert_eq!(redis.ttl, Some(Duration::from_secs(60)));
        assert_eq!(redis.url, "redis://h?protocol=resp3");
    }

    #[test]
    fn wrong_settings_say_what_is_allowed() {
        let cases = [
            ("", "allowed are `memory`"),
            ("mem", "allowed are `memory`"),
            ("s3://bucket:s3cret@host", "allowed are `memory`"),
            ("disk:", "needs a directory"),
            ("grpc://host", "needs a host and a port"),
            ("grpc://host:port", "needs a host and a port"),
            ("grpc://:80", "needs a host and a port"),
            ("redis://:s3cret@h?ttl_s=0", "whole seconds, 1 or more"),
        ];
        for (text, part) in cases {
            let e = chain(&text.parse::<EcSetting>().unwrap_err());
            assert!(e.contains(part), "{text}: {e}");
            assert!(!e.contains("s3cret"), "{e}");
        }
    }

    #[tokio::test]
    async fn a_url_that_is_none_is_refused_when_opened() {
        let setting: EcSetting = "redis://:s3cret@host:notaport".parse().unwrap();
        let e = chain(&open(&setting, &Limits::default()).await.unwrap_err());
        assert!(e.contains("redis://***@host:notaport") && !e.contains("s3cret"), "{e}");
    }
}
