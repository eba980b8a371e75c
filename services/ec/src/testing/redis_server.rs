//! One Redis server.

use super::process::{Folder, Process, START_LIMIT, becomes, free_port};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A Redis server on a free port of 127.0.0.1 that keeps nothing on disk. Dropping it kills it.
///
/// Its working directory is a folder of its own: a replica writes down what its primary sends.
#[derive(Debug)]
pub struct RedisServer {
    port: u16,
    tls_port: Option<u16>,
    args: Vec<String>,
    process: Option<Process>,
    is_paused: AtomicBool,
    folder: Folder,
}

/// Options of a server.
#[derive(Clone, Debug, Default)]
pub struct RedisOptions {
    args: Vec<String>,
    has_tls: bool,
}

impl RedisOptions {
    /// A directive of `redis.conf` with its values.
    pub fn with(mut self, directive: &str, values: &[&str]) -> Self {
        self.args.push(format!("--{directive}"));
        self.args.extend(values.iter().map(|value| (*value).to_owned()));
        self
    }

    /// TLS on a second port, which [`RedisServer::url`] then names: PEM files of the server's certificate and key, and
    /// of who signs the clients' certificates. These are wanted if `wants_client` says so.
    pub fn with_tls(self, cert: &Path, key: &Path, ca: &Path, wants_client: TlsClients) -> Self {
        let file = |path: &Path| path.display().to_string();
        let clients = match wants_client {
            TlsClients::Anyone => "no",
            TlsClients::WithCertificate => "yes",
        };
        let mut with = self
            .with("tls-cert-file", &[&file(cert)])
            .with("tls-key-file", &[&file(key)])
            .with("tls-ca-cert-file", &[&file(ca)])
            .with("tls-auth-clients", &[clients]);
        with.has_tls = true;
        with
    }
}

/// Clients that a server with TLS accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsClients {
    /// Any client.
    Anyone,
    /// Clients with a certificate.
    WithCertificate,
}

impl RedisServer {
    /// Starts a server and waits until it answers.
    ///
    /// # Panics
    /// If `redis-server` is not installed or does not start: a test that needs it must fail, not be skipped.
    pub fn start() -> Self {
        Self::start_with(&RedisOptions::default())
    }

    /// As [`Self::start`], with options.
    ///
    /// # Panics
    /// As [`Self::start`].
    pub fn start_with(options: &RedisOptions) -> Self {
        Self::start_at(options, free_port)
    }

    /// On a port that `choose` gives; if another process took it meanwhile, on the next one.
    pub(super) fn start_at(options: &RedisOptions, mut choose: impl FnMut() -> u16) -> Self {
        for _ in 0..5 {
            let tls_port = options.has_tls.then(free_port);
            let args = options.args.clone();
            let mut server = Self {
                port: choose(),
                tls_port,
                args,
                process: None,
                is_paused: AtomicBool::new(false),
                folder: Folder::new(),
            };
            if server.spawn() {
                return server;
            }
        }
        panic!("redis-server does not start; run the tests with `cargo xtask test`, which checks for it");
    }

    /// The address in the form of the EC store setting.
    pub fn url(&self) -> String {
        match self.tls_port {
            Some(port) => format!("rediss://localhost:{port}"),
            None => format!("redis://127.0.0.1:{}", self.port),
        }
    }

    /// The port without TLS, the same for the whole life of the guard.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The port with TLS.
    pub fn tls_port(&self) -> Option<u16> {
        self.tls_port
    }

    /// True if it was started and not killed.
    pub fn is_running(&self) -> bool {
        self.process.is_some()
    }

    /// True between [`Self::pause`] and [`Self::resume`].
    pub fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Relaxed)
    }

    /// Kills the server with SIGKILL: everything in it is lost.
    pub fn kill(&mut self) {
        self.process = None;
        self.is_paused.store(false, Ordering::Relaxed);
    }

    /// Kills the server and starts an empty one on the same port.
    ///
    /// # Panics
    /// If it does not start.
    pub fn restart(&mut self) {
        self.kill();
        assert!(self.spawn(), "redis-server does not start again on port {}", self.port);
    }

    /// Stops the server without closing its connections: it accepts and never answers.
    ///
    /// # Panics
    /// If the server is not running.
    pub fn pause(&self) {
        self.process.as_ref().expect("the server is running").pause();
        self.is_paused.store(true, Ordering::Relaxed);
    }

    /// Ends [`Self::pause`].
    ///
    /// # Panics
    /// If the server is not running.
    pub fn resume(&self) {
        self.process.as_ref().expect("the server is running").signal("-CONT");
        self.is_paused.store(false, Ordering::Relaxed);
    }

    fn spawn(&mut self) -> bool {
        let mut args: Vec<String> =
            ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--daemonize", "no"]
                .map(str::to_owned)
                .into();
        args.extend(["--port".to_owned(), self.port.to_string()]);
        args.extend(["--dir".to_owned(), self.folder.path().display().to_string()]);
        if let Some(port) = self.tls_port {
            args.extend(["--tls-port".to_owned(), port.to_string()]);
        }
        args.extend(self.args.iter().cloned());
        let mut process = Process::redis(&args);
        let started = becomes(START_LIMIT, || answers(self.port) || !process.is_running());
        let is_up = started && process.is_running();
        self.process = is_up.then_some(process);
        is_up
    }
}

/// True if a server on the port answers, also with an authentication error.
pub(super) fn answers(port: u16) -> bool {
    let ask = || -> std::io::Result<bool> {
        let limit = Duration::from_secs(1);
        let mut stream = TcpStream::connect_timeout(&SocketAddr::from(([127, 0, 0, 1], port)), limit)?;
        stream.set_read_timeout(Some(limit))?;
        stream.write_all(b"PING\r\n")?;
        let mut answer = [0; 7];
        stream.read_exact(&mut answer)?;
        Ok(matches!(&answer, b"+PONG\r\n" | b"-NOAUTH"))
    };
    ask().unwrap_or(false)
}

/// The answer to a command as text; empty if there is none.
pub(super) fn ask(server: &RedisServer, command: &[&str]) -> String {
    query(server.port(), command).unwrap_or_default()
}

pub(super) fn query<T: redis::FromRedisValue>(port: u16, command: &[&str]) -> Option<T> {
    query_as("", port, command)
}

/// The answer to a command on a port, with a password unless it is empty.
pub(super) fn query_as<T: redis::FromRedisValue>(password: &str, port: u16, command: &[&str]) -> Option<T> {
    let who = if password.is_empty() { String::new() } else { format!(":{password}@") };
    let client = redis::Client::open(format!("redis://{who}127.0.0.1:{port}")).ok()?;
    let mut connection = client.get_connection_with_timeout(Duration::from_secs(1)).ok()?;
    connection.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    let (name, args) = command.split_first()?;
    redis::cmd(name).arg(args).query(&mut connection).ok()
}
