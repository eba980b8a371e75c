//! A real Redis server for tests and drills of any crate. Plain `std::process`; not for serving.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a server may take to start; generous, since test machines are busy.
const START_LIMIT: Duration = Duration::from_secs(20);

/// A Redis server on a free port of 127.0.0.1 that keeps nothing on disk. Dropping it kills it.
#[derive(Debug)]
pub struct RedisServer {
    port: u16,
    child: Option<Child>,
}

impl RedisServer {
    /// Starts a server and waits until it answers.
    ///
    /// # Panics
    /// If `redis-server` is not installed or does not start: a test that needs it must fail, not be skipped.
    pub fn start() -> Self {
        // Another process may take the port between choosing and starting; then the next one is tried.
        for _ in 0..5 {
            let mut server = Self { port: free_port(), child: None };
            if server.spawn() {
                return server;
            }
        }
        panic!("redis-server does not start; run the tests with `cargo xtask test`, which checks for it");
    }

    /// The address in the form of the EC store setting.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The port, the same for the whole life of the guard.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Kills the server with SIGKILL: everything in it is lost.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // An error means that it is gone already.
            let _ = child.kill();
            let _ = child.wait();
        }
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
        self.signal("-STOP");
    }

    /// Ends [`Self::pause`].
    ///
    /// # Panics
    /// If the server is not running.
    pub fn resume(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        let pid = self.child.as_ref().expect("the server is running").id();
        let sent = Command::new("kill").args([signal, &pid.to_string()]).status();
        assert!(sent.is_ok_and(|s| s.success()), "cannot send {signal} to redis-server");
    }

    fn spawn(&mut self) -> bool {
        let child = Command::new("redis-server")
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no", "--daemonize", "no"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        match child {
            Ok(child) => self.child = Some(child),
            Err(e) => panic!(
                "cannot run redis-server ({e}); run the tests with `cargo xtask test`, which says how to install it"
            ),
        }
        let deadline = Instant::now() + START_LIMIT;
        while Instant::now() < deadline {
            if answers(self.port) {
                return true;
            }
            let exited = self.child.as_mut().is_none_or(|c| !matches!(c.try_wait(), Ok(None)));
            if exited {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.kill();
        false
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A port that nobody listened on a moment ago.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("the loopback interface has a free port");
    listener.local_addr().expect("a bound listener has an address").port()
}

fn answers(port: u16) -> bool {
    let ask = || -> std::io::Result<bool> {
        let limit = Duration::from_secs(1);
        let mut stream = TcpStream::connect_timeout(&SocketAddr::from(([127, 0, 0, 1], port)), limit)?;
        stream.set_read_timeout(Some(limit))?;
        stream.write_all(b"PING\r\n")?;
        let mut answer = [0; 7];
        stream.read_exact(&mut answer)?;
        Ok(&answer == b"+PONG\r\n")
    };
    ask().unwrap_or(false)
}
