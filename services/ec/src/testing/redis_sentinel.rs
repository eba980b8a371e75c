//! A Redis primary with a replica, watched by three sentinels.

use super::process::{AGREE_LIMIT, Folder, Process, START_LIMIT, becomes, free_port};
use super::redis_server::{RedisOptions, RedisServer, answers, query_as};
use std::collections::HashMap;
use std::path::Path;

const N_SENTINELS: usize = 3;
/// The name that the sentinels know the primary by.
const MASTER: &str = "main";
/// A server is down when it was silent for so long.
const DOWN_AFTER_MS: u32 = 500;
/// Retry interval of a failed failover.
const FAILOVER_MS: u32 = 3000;

/// One primary, one replica, three sentinels on free ports of 127.0.0.1. A killed primary is replaced by the replica
/// within a few seconds. Dropping it kills all.
#[derive(Debug)]
pub struct RedisSentinel {
    servers: Vec<RedisServer>,
    sentinels: Vec<(u16, Process)>,
    password: String,
    _folder: Folder,
}

impl RedisSentinel {
    /// Starts them and waits until they know each other, which takes a second or two.
    ///
    /// # Panics
    /// If `redis-server` is not installed, or they do not come to know each other.
    pub fn start() -> Self {
        Self::start_with_password("")
    }

    /// As [`Self::start`], where everyone, sentinels included, wants a password unless it is empty.
    ///
    /// # Panics
    /// As [`Self::start`].
    pub fn start_with_password(password: &str) -> Self {
        let folder = Folder::new();
        let mut plain = RedisOptions::default().with("repl-diskless-sync-delay", &["0"]);
        if !password.is_empty() {
            plain = plain.with("requirepass", &[password]).with("masterauth", &[password]);
        }
        let primary = RedisServer::start_with(&plain);
        let port = primary.port();
        let replica = RedisServer::start_with(&plain.with("replicaof", &["127.0.0.1", &port.to_string()]));
        let up = || {
            let info: Option<String> = query_as(password, replica.port(), &["INFO", "replication"]);
            info.is_some_and(|info| info.contains("master_link_status:up"))
        };
        assert!(becomes(AGREE_LIMIT, up), "the replica does not come into step");
        let sentinels = (0..N_SENTINELS).map(|i| sentinel(folder.path(), i, port, password)).collect();
        let password = password.to_owned();
        let all = Self { servers: vec![primary, replica], sentinels, password, _folder: folder };
        assert!(becomes(AGREE_LIMIT, || all.is_known()), "the sentinels do not come to know each other");
        all
    }

    /// The same, where the primary may be silent for as long as it likes: for tests without failovers, so that a busy
    /// machine makes none.
    ///
    /// # Panics
    /// If a sentinel refuses.
    pub fn without_failover(self) -> Self {
        for (port, _) in &self.sentinels {
            let set = ["SENTINEL", "SET", MASTER, "down-after-milliseconds", "600000"];
            let answer: Option<String> = query_as(&self.password, *port, &set);
            assert_eq!(answer.as_deref(), Some("OK"), "a sentinel does not take the time");
        }
        self
    }

    /// The setting of an EC store behind them.
    pub fn url(&self) -> String {
        let sentinels: Vec<_> = self.sentinels.iter().map(|(port, _)| format!("127.0.0.1:{port}")).collect();
        let who = if self.password.is_empty() { String::new() } else { format!(":{}@", self.password) };
        format!("redis+sentinel://{who}{}/{MASTER}", sentinels.join(","))
    }

    /// The port of the primary as the sentinels see it.
    ///
    /// # Panics
    /// If no sentinel answers.
    pub fn primary(&self) -> u16 {
        let named = self.sentinels.iter().find_map(|(port, _)| {
            let (_, primary): (String, u16) =
                query_as(&self.password, *port, &["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER])?;
            Some(primary)
        });
        named.expect("a sentinel names the primary")
    }

    /// Kills the primary. Its port.
    pub fn kill_primary(&mut self) -> u16 {
        let port = self.primary();
        self.server(port).kill();
        port
    }

    /// Waits until the sentinels name another primary than the one at `port`.
    ///
    /// # Panics
    /// If they do not within a minute.
    pub fn wait_for_another_than(&self, port: u16) {
        assert!(becomes(AGREE_LIMIT, || self.primary() != port), "the sentinels keep the dead primary");
    }

    /// The server at a port, to pause or restart it.
    ///
    /// # Panics
    /// If none was started there.
    pub fn server(&mut self, port: u16) -> &mut RedisServer {
        self.servers
            .iter_mut()
            .find(|server| server.port() == port)
            .expect("a server was started at the port")
    }

    fn is_known(&self) -> bool {
        self.sentinels.iter().all(|(port, _)| {
            let fields: HashMap<String, String> =
                query_as(&self.password, *port, &["SENTINEL", "MASTER", MASTER]).unwrap_or_default();
            let is = |name: &str, n: usize| fields.get(name).is_some_and(|value| *value == n.to_string());
            is("num-other-sentinels", N_SENTINELS - 1) && is("num-slaves", 1)
        })
    }
}

fn sentinel(folder: &Path, i: usize, primary: u16, password: &str) -> (u16, Process) {
    for _ in 0..5 {
        let port = free_port();
        let file = folder.join(format!("sentinel-{i}-{port}.conf"));
        let secret = match password {
            "" => String::new(),
            word => format!(
                "requirepass {word}\nsentinel sentinel-pass {word}\nsentinel auth-pass {MASTER} {word}\n"
            ),
        };
        let config = format!(
            "port {port}\nbind 127.0.0.1\ndaemonize no\n\
             sentinel monitor {MASTER} 127.0.0.1 {primary} 2\n\
             sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}\n\
             sentinel failover-timeout {MASTER} {FAILOVER_MS}\n{secret}"
        );
        std::fs::write(&file, config).expect("the guard's folder can be written");
        let mut process = Process::redis(&[file.display().to_string(), "--sentinel".to_owned()]);
        if becomes(START_LIMIT, || answers(port) || !process.is_running()) && process.is_running() {
            // Sentinels meet by messages that they send every two seconds; not here.
            let _: Option<String> = query_as(
                password,
                port,
                &["SENTINEL", "DEBUG", "PUBLISH-PERIOD", "100", "INFO-PERIOD", "200"],
            );
            return (port, process);
        }
    }
    panic!("redis-server does not start as a sentinel");
}
