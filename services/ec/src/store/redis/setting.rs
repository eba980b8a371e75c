//! Setting of a Redis store: servers and topology, credentials, certificates. Does no I/O except reading certificates.
//!
//! | setting | servers |
//! |---|---|
//! | `redis://[user:password@]host[:port][/db]` | one |
//! | `redis+sentinel://[user:password@]h1[:p1],h2[:p2]/MASTER[/db]` | sentinels, which know the master of that name |
//! | `redis+cluster://[user:password@]h1[:p1],h2[:p2]` | some nodes of a cluster, which know the others |
//!
//! `rediss://`, `rediss+sentinel://` and `rediss+cluster://` are the same over TLS. After a `?`: `ttl_s=N`, how long
//! objects live; `ca=FILE`, who signs the servers' certificates (otherwise the system's roots); `cert=FILE&key=FILE`,
//! the client's own; `protocol=resp2|resp3`. What stands in a URL in another meaning is written `%40` for `@` and so
//! on; in a password only `%` must be.

use crate::error::EcError;
use crate::settings::text::without_password;
use redis::{ClientTlsConfig, ProtocolVersion, TlsCertificates};
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// The query's names, for the error text.
const PARAMETERS: &str = "`ttl_s`, `ca`, `cert`, `key`, `protocol`";

/// Setting of a Redis store. No password in `Display` and `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisSetting {
    pub(super) servers: RedisServers,
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
    pub(super) db: i64,
    pub(super) resp3: bool,
    /// `None`: plain TCP.
    pub(super) tls: Option<TlsFiles>,
    ttl: Option<Duration>,
    shown: String,
}

/// The servers, by topology.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RedisServers {
    Single(Host),
    Sentinel { sentinels: Vec<Host>, master: String },
    Cluster(Vec<Host>),
}

/// A host name or address, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Host {
    pub name: String,
    pub port: u16,
}

/// PEM files; `None`: from the environment, or else the system's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TlsFiles {
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
}

impl RedisSetting {
    /// True if a text has the scheme of a Redis setting, valid or not.
    pub fn is_meant(text: &str) -> bool {
        text.split_once("://").is_some_and(|(scheme, _)| Topology::of(scheme).is_some())
    }

    /// Time to live of objects, if set.
    pub fn ttl(&self) -> Option<Duration> {
        self.ttl
    }

    /// Host and port of the only server; `None` for sentinels and clusters.
    pub fn single(&self) -> Option<(&str, u16)> {
        match &self.servers {
            RedisServers::Single(host) => Some((&host.name, host.port)),
            RedisServers::Sentinel { .. } | RedisServers::Cluster(_) => None,
        }
    }

    /// Fills missing certificate files from `TRIPTYCH_REDIS_CA`, `TRIPTYCH_REDIS_CERT` and `TRIPTYCH_REDIS_KEY`; `var`
    /// reads a variable. No effect without TLS.
    pub fn with_environment(mut self, var: impl Fn(&str) -> Option<OsString>) -> Self {
        if let Some(tls) = &mut self.tls {
            let or = |file: Option<PathBuf>, name| file.or_else(|| Some(var(name)?.into()));
            tls.ca = or(tls.ca.take(), "TRIPTYCH_REDIS_CA");
            if tls.cert.is_none() && tls.key.is_none() {
                tls.cert = or(None, "TRIPTYCH_REDIS_CERT");
                tls.key = or(None, "TRIPTYCH_REDIS_KEY");
            }
        }
        self
    }

    /// The certificates; `None` without TLS.
    ///
    /// # Errors
    /// [`EcError::Config`] for a file that cannot be read, and for a certificate without its key.
    pub(super) fn certificates(&self) -> Result<Option<TlsCertificates>, EcError> {
        let Some(tls) = &self.tls else { return Ok(None) };
        let read = |file: &PathBuf| {
            std::fs::read(file).map_err(|e| self.wrong(format!("cannot read {}: {e}", file.display())))
        };
        let client_tls = match (&tls.cert, &tls.key) {
            (Some(cert), Some(key)) => {
                Some(ClientTlsConfig { client_cert: read(cert)?, client_key: read(key)? })
            }
            (None, None) => None,
            _ => return Err(self.wrong("a client certificate needs both `cert` and `key`".into())),
        };
        let root_cert = tls.ca.as_ref().map(read).transpose()?;
        Ok(Some(TlsCertificates { client_tls, root_cert }))
    }

    pub(super) fn protocol(&self) -> ProtocolVersion {
        if self.resp3 { ProtocolVersion::RESP3 } else { ProtocolVersion::RESP2 }
    }

    pub(super) fn wrong(&self, reason: String) -> EcError {
        EcError::Config { setting: self.shown.clone(), reason }
    }
}

impl fmt::Display for RedisSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl fmt::Debug for RedisSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Topology {
    Single,
    Sentinel,
    Cluster,
}

impl Topology {
    /// The topology of a scheme, and true for TLS.
    fn of(scheme: &str) -> Option<(Self, bool)> {
        let (transport, form) = scheme.split_once('+').unwrap_or((scheme, ""));
        let tls = match transport {
            "redis" => false,
            "rediss" => true,
            _ => return None,
        };
        let form = match form {
            "" if !scheme.contains('+') => Self::Single,
            "sentinel" => Self::Sentinel,
            "cluster" => Self::Cluster,
            _ => return None,
        };
        Some((form, tls))
    }
}

impl FromStr for RedisSetting {
    type Err = EcError;

    fn from_str(text: &str) -> Result<Self, EcError> {
        let shown = without_password(text);
        parse(text, shown.clone()).map_err(|reason| EcError::Config { setting: shown, reason })
    }
}

fn parse(text: &str, shown: String) -> Result<RedisSetting, String> {
    let scheme = text.split_once("://").and_then(|(scheme, rest)| Some((Topology::of(scheme)?, rest)));
    let ((form, tls), rest) =
        scheme.ok_or("a Redis setting starts with `redis://`, `redis+sentinel://` or `redis+cluster://`, or `rediss…` for TLS")?;
    // The last `@`: a password may hold any of `/?@`.
    let (who, place) = rest.rsplit_once('@').map_or((None, rest), |(who, place)| (Some(who), place));
    let (user, password) = credentials(who)?;
    let (place, query) = place.split_once('?').unwrap_or((place, ""));
    let (hosts, path) = place.split_once('/').unwrap_or((place, ""));
    let (servers, db) = servers(form, hosts, path)?;
    let tls = tls.then(TlsFiles::default);
    let mut setting = RedisSetting { servers, user, password, db, resp3: false, tls, ttl: None, shown };
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        parameter(&mut setting, pair)?;
    }
    match &setting.tls {
        Some(tls) if tls.cert.is_some() != tls.key.is_some() => {
            Err("a client certificate needs both `cert` and `key`".into())
        }
        _ => Ok(setting),
    }
}

fn credentials(who: Option<&str>) -> Result<(Option<String>, Option<String>), String> {
    let Some(who) = who else { return Ok((None, None)) };
    let (user, password) = who.split_once(':').map_or((who, None), |(user, p)| (user, Some(p)));
    let decode = |text: &str| {
        decode(text).ok_or("user or password: a `%` is written `%25`, and two hexadecimal digits follow each")
    };
    let user = if user.is_empty() { None } else { Some(decode(user)?) };
    Ok((user, password.map(decode).transpose()?))
}

fn servers(form: Topology, hosts: &str, path: &str) -> Result<(RedisServers, i64), String> {
    let default_port = if form == Topology::Sentinel { 26379 } else { 6379 };
    let mut hosts: Vec<Host> =
        hosts.split(',').map(|text| host(text, default_port)).collect::<Result<_, _>>()?;
    let path = path.strip_suffix('/').unwrap_or(path);
    let db = |text: &str| match text {
        "" => Ok(0),
        n => n.parse::<u16>().map(i64::from).map_err(|_| format!("{n:?} is no number of a database")),
    };
    match form {
        Topology::Single if hosts.len() > 1 => {
            Err("several servers are `redis+sentinel://…/MASTER` or `redis+cluster://…`".into())
        }
        Topology::Single => Ok((RedisServers::Single(hosts.remove(0)), db(path)?)),
        Topology::Sentinel => {
            let (master, n) = path.split_once('/').unwrap_or((path, ""));
            let master = decode(master).filter(|name| !name.is_empty());
            let master = master
                .ok_or("sentinels need the name of a master, as in `redis+sentinel://h1,h2/mymaster`")?;
            Ok((RedisServers::Sentinel { sentinels: hosts, master }, db(n)?))
        }
        Topology::Cluster if path.is_empty() => Ok((RedisServers::Cluster(hosts), 0)),
        Topology::Cluster => Err("a cluster has no numbered databases: nothing follows its hosts".into()),
    }
}

fn host(text: &str, default_port: u16) -> Result<Host, String> {
    let wrong = || format!("{text:?} is no `host`, `host:port` or `[address]:port`");
    let (name, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (name, port) = rest.split_once(']').ok_or_else(wrong)?;
            (name, if port.is_empty() { None } else { Some(port.strip_prefix(':').ok_or_else(wrong)?) })
        }
        None => text.split_once(':').map_or((text, None), |(name, port)| (name, Some(port))),
    };
    let port = port.map_or(Ok(default_port), |port| port.parse().map_err(|_| wrong()))?;
    if name.is_empty() || port == 0 || name.contains(|c: char| c.is_whitespace() || c == '#') {
        return Err(wrong());
    }
    Ok(Host { name: name.to_owned(), port })
}

fn parameter(setting: &mut RedisSetting, pair: &str) -> Result<(), String> {
    let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
    match (name, &mut setting.tls) {
        ("ttl_s", _) => {
            let seconds = value.parse().ok().filter(|n| *n > 0);
            let seconds = seconds
                .ok_or_else(|| format!("ttl_s is {value:?}, allowed are integer seconds, 1 or more"))?;
            setting.ttl = Some(Duration::from_secs(seconds));
        }
        ("protocol", _) => {
            setting.resp3 = match value {
                "resp2" => false,
                "resp3" => true,
                _ => return Err(format!("protocol is {value:?}, allowed are `resp2` and `resp3`")),
            }
        }
        ("ca" | "cert" | "key", None) => {
            return Err(format!("`{name}` is for TLS: a scheme that starts with `rediss`"));
        }
        ("ca" | "cert" | "key", Some(tls)) => {
            let file = decode(value).filter(|file| !file.is_empty());
            let file = Some(file.ok_or_else(|| format!("`{name}` needs a file"))?.into());
            match name {
                "ca" => tls.ca = file,
                "cert" => tls.cert = file,
                _ => tls.key = file,
            }
        }
        _ => return Err(format!("unknown parameter; allowed are {PARAMETERS}")),
    }
    Ok(())
}

/// Percent-encoded text as it was; `None` if it is none.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = std::str::from_utf8(after.get(..2)?).ok()?;
        if digits.starts_with('+') {
            return None;
        }
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &after[2..];
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> RedisSetting {
        text.parse().unwrap_or_else(|e| panic!("{text}: {}", crate::error::chain(&e)))
    }

    fn at(name: &str, port: u16) -> Host {
        Host { name: name.to_owned(), port }
    }

    #[test]
    fn every_form_is_read() {
        let single = parsed("redis://localhost");
        assert_eq!(
            (single.servers, single.db, single.tls),
            (RedisServers::Single(at("localhost", 6379)), 0, None)
        );
        let single = parsed("rediss://me:p%40ss@[::1]:7000/3?ttl_s=60&ca=/etc/a%26b.pem");
        assert_eq!(single.servers, RedisServers::Single(at("::1", 7000)));
        assert_eq!((single.user.as_deref(), single.password.as_deref()), (Some("me"), Some("p@ss")));
        assert_eq!((single.db, single.ttl()), (3, Some(Duration::from_secs(60))));
        assert_eq!(single.tls.unwrap().ca, Some("/etc/a&b.pem".into()));
        let sentinel = parsed("redis+sentinel://:pw@a:1,b,[::2]:3/my%20master/4");
        let sentinels = vec![at("a", 1), at("b", 26379), at("::2", 3)];
        assert_eq!(sentinel.servers, RedisServers::Sentinel { sentinels, master: "my master".into() });
        assert_eq!((sentinel.user, sentinel.password.as_deref(), sentinel.db), (None, Some("pw"), 4));
        let cluster = parsed("rediss+cluster://a:1,b:2?cert=c&key=k&protocol=resp3");
        assert_eq!(cluster.servers, RedisServers::Cluster(vec![at("a", 1), at("b", 2)]));
        assert!(cluster.resp3);
        assert_eq!(parsed("redis://me:s3/c?r@et@cache").password.as_deref(), Some("s3/c?r@et"));
    }

    #[test]
    fn errors_do_not_contain_the_password() {
        let cases = [
            ("redis+both://:s3cret@h", "starts with `redis://`"),
            ("redis+://:s3cret@h", "starts with `redis://`"),
            ("redis://:s3cret@", "is no `host`"),
            ("redis://:s3cret@h:", "is no `host`"),
            ("redis://:s3cret@h:port", "is no `host`"),
            ("redis://:s3cret@[::1:6379", "is no `host`"),
            ("redis://:s3cret@h/first", "no number of a database"),
            ("redis://:s3cret@a,b", "several servers"),
            ("redis://:s3cret%zz@h", "`%25`"),
            ("redis+sentinel://:s3cret@a,b", "the name of a master"),
            ("redis+sentinel://:s3cret@a,b//1", "the name of a master"),
            ("redis+cluster://:s3cret@a,b/1", "no numbered databases"),
            ("redis+cluster://:s3cret@a,,b", "is no `host`"),
            ("redis://:s3cret@h?ttl_s=0", "integer seconds, 1 or more"),
            ("redis://:s3cret@h?password=s3cret", "allowed are `ttl_s`"),
            ("redis://:s3cret@h?protocol=3", "`resp2` and `resp3`"),
            ("redis://:s3cret@h?ca=/x", "`rediss`"),
            ("rediss://:s3cret@h?ca=", "needs a file"),
            ("rediss://:s3cret@h?cert=/x", "both `cert` and `key`"),
        ];
        for (text, part) in cases {
            let e = crate::error::chain(&text.parse::<RedisSetting>().unwrap_err());
            assert!(e.contains(part) && !e.contains("s3cret"), "{text}: {e}");
        }
        let shown = format!("{:?}", parsed("redis+cluster://me:s3cret@a,b:1?ttl_s=9"));
        assert_eq!(shown, "redis+cluster://***@a,b:1");
    }

    #[test]
    fn the_environment_fills_in_missing_certificate_files() {
        let var = |name: &str| Some(format!("/env/{}", &name["TRIPTYCH_REDIS_".len()..]).into());
        let files = |text| parsed(text).with_environment(var).tls;
        let env = |name: &str| Some(PathBuf::from(format!("/env/{name}")));
        assert_eq!(files("redis://h"), None);
        let tls = files("rediss://h?cert=c&key=k").unwrap();
        assert_eq!((tls.ca, tls.cert, tls.key), (env("CA"), Some("c".into()), Some("k".into())));
        let tls = files("rediss://h?ca=mine").unwrap();
        assert_eq!((tls.ca, tls.cert, tls.key), (Some("mine".into()), env("CERT"), env("KEY")));
        let e = crate::error::chain(&parsed("rediss://h?ca=/nowhere.pem").certificates().unwrap_err());
        assert!(e.contains("cannot read /nowhere.pem"), "{e}");
    }
}
