//! A real S3 server: SeaweedFS, one process with everything in it.

use super::free_port;
use super::process::{Folder, Process, becomes, free_port_with};
use parking_lot::Mutex;
use std::fs::File;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Weak};
use std::time::Duration;
use std::{env, fs, io};

/// Timeout of a server's start; generous, since test machines are busy.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Key and secret of a server that checks signatures, with what signatures and URLs trip over.
const CREDENTIALS: (&str, &str) = ("triptych", "s3cret/with+signs=");
/// The bucket that every server has.
const BUCKET: &str = "triptych";
/// Path of the program from the root of the repository, as `cargo xtask test` installs it.
const PROGRAM: &str = ".cache/seaweedfs/weed";
/// Fixed offset at which its worker looks for the admin's second port.
const ADMIN_GRPC_OFFSET: u16 = 10_000;

/// An S3 server on free ports of 127.0.0.1, with one bucket, its data in a folder that the guard owns. Dropping it kills
/// it and removes the folder.
#[derive(Debug)]
pub struct S3Server {
    folder: Folder,
    ports: Ports,
    access: Access,
    process: Option<Process>,
}

/// Clients that a server serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Anyone,
    /// Those that sign with [`CREDENTIALS`].
    Signed,
}

#[derive(Clone, Copy, Debug)]
struct Ports {
    s3: u16,
    admin: u16,
    /// Of the parts inside: they talk to each other over the network.
    others: [u16; 7],
}

impl S3Server {
    /// Starts a server that anybody may read and write, and waits until its bucket answers.
    ///
    /// # Panics
    /// If the program is not there or does not start: a test that needs it must fail, not be skipped.
    pub fn start() -> Self {
        Self::start_for(Access::Anyone)
    }

    /// Starts a server that checks the signature (SigV4) of every request, and waits until it answers.
    ///
    /// # Panics
    /// As [`Self::start`].
    pub fn start_signed() -> Self {
        Self::start_for(Access::Signed)
    }

    fn start_for(access: Access) -> Self {
        // Another process may take a port between choosing and starting; then others are tried.
        for _ in 0..5 {
            let mut server = Self { folder: Folder::new(), ports: Ports::free(), access, process: None };
            if server.spawn() {
                return server;
            }
        }
        panic!("the S3 server does not start; run the tests with `cargo xtask test`, which installs it");
    }

    /// A server that tests of one process share while they run. Tests share its data, and must not stop
    /// it.
    ///
    /// # Panics
    /// As [`Self::start`].
    pub fn shared() -> Arc<Self> {
        static SHARED: Mutex<Weak<S3Server>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock();
        shared.upgrade().unwrap_or_else(|| {
            let server = Arc::new(Self::start());
            *shared = Arc::downgrade(&server);
            server
        })
    }

    /// The server's address, `http://127.0.0.1:PORT`.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.ports.s3)
    }

    /// The name of its bucket.
    pub fn bucket(&self) -> &'static str {
        BUCKET
    }

    /// Its bucket in the form of the EC store setting. Takes [`Self::environment`] too.
    pub fn url(&self) -> String {
        format!("s3://{BUCKET}/ec?endpoint={}&allow_http=true", self.endpoint())
    }

    /// The variables that a process needs to use it.
    pub fn environment(&self) -> Vec<(String, String)> {
        let (key, secret) = CREDENTIALS;
        let variables = match self.access {
            Access::Anyone => vec![("AWS_SKIP_SIGNATURE", "true")],
            Access::Signed => vec![("AWS_ACCESS_KEY_ID", key), ("AWS_SECRET_ACCESS_KEY", secret)],
        };
        variables.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    /// The port of its S3 face, the same for the whole life of the guard.
    pub fn port(&self) -> u16 {
        self.ports.s3
    }

    /// Kills the server with SIGKILL. Its data stays.
    pub fn kill(&mut self) {
        self.process = None;
        self.remove_sockets();
    }

    /// Kills the server and starts it again on the same ports, with the data that it had.
    ///
    /// # Panics
    /// If it does not start.
    pub fn restart(&mut self) {
        self.kill();
        // A port may be in use for a moment by a connection that someone else opened.
        let started = (0..5).any(|_| self.spawn());
        assert!(started, "the S3 server does not start again on port {}", self.ports.s3);
    }

    /// Stops the server without closing its connections: it accepts and never answers.
    ///
    /// # Panics
    /// If the server is not running.
    pub fn pause(&self) {
        self.process.as_ref().expect("the server is running").pause();
    }

    /// Ends [`Self::pause`].
    ///
    /// # Panics
    /// If the server is not running.
    pub fn resume(&self) {
        self.process.as_ref().expect("the server is running").signal("-CONT");
    }

    fn spawn(&mut self) -> bool {
        let dir = self.folder.path();
        let log = File::create(dir.join("log")).expect("its folder can be written");
        let mut command = Command::new(program());
        command
            .arg(format!("-logdir={}", dir.display()))
            .arg("mini")
            .arg(format!("-dir={}", dir.display()))
            .args(["-ip=127.0.0.1", "-ip.bind=127.0.0.1"])
            .args(self.ports.arguments())
            .arg(format!("-bucket={BUCKET}"))
            // No second face, no page for people, and no report of itself to its makers.
            .args(["-webdav=false", "-admin.ui=false", "-master.telemetry=false"])
            .args(["-s3.port.iceberg=0", "-s3.port.lance=0"])
            .env_remove("AWS_ACCESS_KEY_ID")
            .env_remove("AWS_SECRET_ACCESS_KEY")
            .stdout(Stdio::null())
            .stderr(log);
        if self.access == Access::Signed {
            command.envs(self.environment());
        }
        let mut process = Process::start("the S3 server", command);
        let (port, access) = (self.ports.s3, self.access);
        becomes(START_LIMIT, || answers(port, access).unwrap_or(false) || !process.is_running());
        if process.is_running() && answers(port, access).unwrap_or(false) {
            self.process = Some(process);
            return true;
        }
        drop(process);
        self.remove_sockets();
        false
    }

    /// It makes sockets outside of its folder, with its ports in their names, and a killed one leaves them.
    fn remove_sockets(&self) {
        let ports: Vec<_> = self.ports.all().map(|port| format!("-{port}.sock")).into();
        for entry in fs::read_dir("/tmp").into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with("seaweedfs-") && ports.iter().any(|port| name.ends_with(port)) {
                // What is not there any more is as it should be.
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Ports {
    fn free() -> Self {
        Self {
            s3: free_port(),
            admin: free_port_with(ADMIN_GRPC_OFFSET),
            others: [(); 7].map(|()| free_port()),
        }
    }

    fn arguments(&self) -> Vec<String> {
        let names = [
            "s3.port.grpc",
            "master.port",
            "master.port.grpc",
            "filer.port",
            "filer.port.grpc",
            "volume.port",
            "volume.port.grpc",
        ];
        let mut arguments = vec![
            format!("-s3.port={}", self.s3),
            format!("-admin.port={}", self.admin),
            format!("-admin.port.grpc={}", self.admin + ADMIN_GRPC_OFFSET),
        ];
        arguments.extend(names.iter().zip(self.others).map(|(name, port)| format!("-{name}={port}")));
        arguments
    }

    fn all(&self) -> [u16; 10] {
        let [a, b, c, d, e, f, g] = self.others;
        [self.s3, self.admin, self.admin + ADMIN_GRPC_OFFSET, a, b, c, d, e, f, g]
    }
}

/// True if the bucket exists, or the request is refused for its lack of a signature. One request in plain HTTP,
/// independent of the product's code.
fn answers(port: u16, access: Access) -> io::Result<bool> {
    use std::io::{Read, Write};
    let limit = Duration::from_secs(5);
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from(([127, 0, 0, 1], port)), limit)?;
    stream.set_read_timeout(Some(limit))?;
    let request = format!("HEAD /{BUCKET} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut status = [0; 12];
    stream.read_exact(&mut status)?;
    Ok(match access {
        Access::Anyone => &status == b"HTTP/1.1 200",
        Access::Signed => &status == b"HTTP/1.1 403",
    })
}

/// The program: where `TRIPTYCH_WEED` says, or where `cargo xtask test` puts it.
fn program() -> PathBuf {
    if let Some(path) = env::var_os("TRIPTYCH_WEED") {
        return path.into();
    }
    let starts = [env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from), env::current_dir().ok()];
    let found = starts.iter().flatten().flat_map(|dir| dir.ancestors()).map(|dir| dir.join(PROGRAM));
    found.into_iter().find(|path| Path::is_file(path)).unwrap_or_else(|| {
        panic!(
            "no S3 server for tests: neither TRIPTYCH_WEED nor {PROGRAM}; `cargo xtask servers` installs it"
        )
    })
}
