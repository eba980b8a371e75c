//! A real server of Azure Blob Storage for tests: Azurite, Microsoft's emulator, which checks the signature of every
//! request (SharedKey).

use super::process::{Folder, Process, becomes, free_port};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{env, io};

/// Timeout of the server's start; generous, since test machines are busy.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Its account and the account's key: any Base64.
const CREDENTIALS: (&str, &str) = ("triptych", "czNjcmV0L3dpdGgrc2lnbnM9");
/// The container that every server has.
const CONTAINER: &str = "triptych";
/// Path of the program from the root of the repository, as `cargo xtask test` installs it.
const PROGRAM: &str = ".cache/azurite/node_modules/azurite/dist/src/blob/main.js";
/// Makes a container. The store makes none, and nobody else here can sign the request.
const MAKE_CONTAINER: &str = r#"
const [endpoint, account, key, container] = process.argv.slice(1);
const date = new Date().toUTCString(), version = '2021-12-02';
const headers = `x-ms-date:${date}\nx-ms-version:${version}`;
const resource = `/${account}/${account}/${container}\nrestype:container`;
const text = `PUT${'\n'.repeat(12)}${headers}\n${resource}`;
const signature = require('crypto').createHmac('sha256', Buffer.from(key, 'base64')).update(text).digest('base64');
fetch(`${endpoint}/${container}?restype=container`, {
  method: 'PUT',
  headers: { 'x-ms-date': date, 'x-ms-version': version, Authorization: `SharedKey ${account}:${signature}` },
}).then(async answer => {
  if (answer.status !== 201) { console.error(answer.status, await answer.text()); process.exit(1); }
});
"#;

/// An Azurite on a free port of 127.0.0.1, with one account and one container, its data in a folder that the guard owns.
/// Dropping it kills it and removes the folder.
#[derive(Debug)]
pub struct Azurite {
    port: u16,
    _process: Process,
    _folder: Folder,
}

impl Azurite {
    /// Starts a server and makes its container.
    ///
    /// # Panics
    /// If the program is not there or does not start: a test that needs it must fail, not be skipped.
    pub fn start() -> Self {
        // Another process may take the port between choosing and starting; then others are tried.
        let server = (0..5).find_map(|_| Self::spawn(free_port()));
        let server = server.expect("Azurite starts; `cargo xtask test` installs it");
        let (account, key) = CREDENTIALS;
        let made = Command::new("node")
            .args(["-e", MAKE_CONTAINER, &server.endpoint(), account, key, CONTAINER])
            .stdin(Stdio::null())
            .status();
        assert!(made.is_ok_and(|status| status.success()), "Azurite does not make a container");
        server
    }

    /// The account's address. Azurite has the account in the path.
    fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}/{}", self.port, CREDENTIALS.0)
    }

    /// Its container in the form of the EC store setting. Takes [`Self::environment`] too.
    pub fn url(&self) -> String {
        format!("az://{CONTAINER}/ec?endpoint={}&allow_http=true", self.endpoint())
    }

    /// The variables that a process needs to use it.
    pub fn environment(&self) -> Vec<(String, String)> {
        let (account, key) = CREDENTIALS;
        let variables = [("AZURE_STORAGE_ACCOUNT_NAME", account), ("AZURE_STORAGE_ACCOUNT_KEY", key)];
        variables.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
    }

    fn spawn(port: u16) -> Option<Self> {
        let folder = Folder::new();
        let (account, key) = CREDENTIALS;
        let mut command = Command::new("node");
        command
            .arg(program())
            .args(["--blobHost", "127.0.0.1", "--blobPort", &port.to_string(), "--location"])
            .arg(folder.path())
            .args(["--silent", "--disableTelemetry", "--disableProductStyleUrl"])
            .env("AZURITE_ACCOUNTS", format!("{account}:{key}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut process = Process::start("Azurite", command);
        becomes(START_LIMIT, || answers(port).unwrap_or(false) || !process.is_running());
        let is_up = process.is_running() && answers(port).unwrap_or(false);
        is_up.then_some(Self { port, _process: process, _folder: folder })
    }
}

/// True if it refuses a request without a signature.
fn answers(port: u16) -> io::Result<bool> {
    use std::io::{Read, Write};
    let limit = Duration::from_secs(5);
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from(([127, 0, 0, 1], port)), limit)?;
    stream.set_read_timeout(Some(limit))?;
    let (account, _) = CREDENTIALS;
    let request =
        format!("GET /{account}?comp=list HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut status = [0; 12];
    stream.read_exact(&mut status)?;
    Ok(&status == b"HTTP/1.1 403")
}

/// The program: where `TRIPTYCH_AZURITE` says, or where `cargo xtask test` puts it.
fn program() -> PathBuf {
    if let Some(path) = env::var_os("TRIPTYCH_AZURITE") {
        return path.into();
    }
    let starts = [env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from), env::current_dir().ok()];
    let found = starts.iter().flatten().flat_map(|dir| dir.ancestors()).map(|dir| dir.join(PROGRAM));
    found.into_iter().find(|path| Path::is_file(path)).unwrap_or_else(|| {
        panic!(
            "no Azurite for tests: neither TRIPTYCH_AZURITE nor {PROGRAM}; `cargo xtask servers` installs it"
        )
    })
}
