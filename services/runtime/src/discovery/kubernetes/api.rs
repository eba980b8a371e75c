//! The two requests to the API server: a paged list, and a watch with one line of JSON for each event.

use super::service::Service;
use super::slices::{Change, Metadata, Slice, Slices};
use crate::discovery::DiscoveryError;
use bytes::{Buf, BytesMut};
use reqwest::{Certificate, Client, Response, StatusCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::path::PathBuf;
use std::time::Duration;

/// Folder with a pod's credentials for its API server.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Largest line of a watch and largest page of a list, in bytes. A slice has at most 1000 endpoints of a few hundred
/// bytes each.
const MAX_BYTES: usize = 16 << 20;
/// Slices a page.
const PAGE: usize = 250;
/// Requested duration of a watch, and the extra silence after which the connection counts as broken.
const WATCH: (Duration, Duration) = (Duration::from_secs(240), Duration::from_secs(15));
/// Timeout of a list, and of the beginning of a watch.
pub(super) const TIMEOUT: Duration = Duration::from_secs(15);

/// Address and credentials of an API server.
#[derive(Clone, Debug)]
pub struct ApiServer {
    /// `https://host:port`.
    pub url: String,
    /// Trusted CA certificates in PEM. `None`: those of the system.
    pub ca: Option<Vec<u8>>,
    /// File with a bearer token, read for each request, since it is rotated.
    pub token: Option<PathBuf>,
}

impl ApiServer {
    /// The server of the cluster that this process runs in, from the pod's environment.
    ///
    /// # Errors
    /// [`DiscoveryError::NotInCluster`] outside of a cluster.
    pub fn in_cluster() -> Result<Self, DiscoveryError> {
        let variable = |name: &str| {
            std::env::var(name).map_err(|_| DiscoveryError::NotInCluster(format!("{name} is not set")))
        };
        let (host, port) = (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let ca = format!("{ACCOUNT}/ca.crt");
        let ca = std::fs::read(&ca).map_err(|e| DiscoveryError::NotInCluster(format!("{ca}: {e}")))?;
        let token = PathBuf::from(format!("{ACCOUNT}/token"));
        Ok(Self { url: format!("https://{host}:{port}"), ca: Some(ca), token: Some(token) })
    }
}

/// A client that trusts the server's CA only.
pub(super) fn client(server: &ApiServer) -> Result<Client, DiscoveryError> {
    let unusable = |e: reqwest::Error| DiscoveryError::NotInCluster(format!("{}: {e}", server.url));
    crate::tls::install_provider();
    let mut client = Client::builder().no_proxy().connect_timeout(TIMEOUT).tcp_keepalive(TIMEOUT);
    if let Some(pem) = &server.ca {
        client = client.tls_certs_only(Certificate::from_pem_bundle(pem).map_err(unusable)?);
    }
    client.build().map_err(unusable)
}

/// Client for the slices of one service.
pub(super) struct Api {
    client: Client,
    /// URL without the query.
    url: String,
    selector: String,
    token: Option<PathBuf>,
}

/// Outcome of a watch request.
pub(super) enum Watched {
    Stream(Lines),
    Gone,
}

/// An event of a watch.
#[derive(Debug)]
pub(super) enum Event {
    Slices { change: Change, version: String },
    Bookmark { version: String },
    Gone,
}

impl Api {
    pub(super) fn new(server: ApiServer, service: &Service) -> Result<Self, DiscoveryError> {
        Ok(Self {
            client: client(&server)?,
            url: format!(
                "{}/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices",
                server.url, service.namespace
            ),
            selector: format!("labelSelector=kubernetes.io%2Fservice-name%3D{}", service.name),
            token: server.token,
        })
    }

    /// All slices, and the version of the list.
    pub(super) async fn list(&self) -> Result<(Slices, String), DiscoveryError> {
        let (mut all, mut next_page) = (Vec::new(), String::new());
        loop {
            let query = format!("limit={PAGE}&continue={}", encoded(&next_page));
            let page = tokio::time::timeout(TIMEOUT, async { self.page(self.get(&query).await?).await });
            let page = page.await.map_err(|_| self.unreachable(format!("no list within {TIMEOUT:?}")))??;
            all.extend(page.items);
            next_page = page.metadata.next_page;
            if next_page.is_empty() {
                return Ok((all.into_iter().collect(), page.metadata.resource_version));
            }
        }
    }

    async fn page(&self, mut response: Response) -> Result<List, DiscoveryError> {
        if !response.status().is_success() {
            return Err(self.unreachable(format!("status {}", response.status())));
        }
        let mut body = BytesMut::new();
        while let Some(bytes) = response.chunk().await.map_err(|e| self.unreachable(e))? {
            if body.len() + bytes.len() > MAX_BYTES {
                return Err(self.unreachable(format!("a page of more than {MAX_BYTES} bytes")));
            }
            body.extend_from_slice(&bytes);
        }
        serde_json::from_slice(&body)
            .map_err(|e| self.unreachable(format!("a list that cannot be read: {e}")))
    }

    /// Opens a watch of the changes after `version`.
    pub(super) async fn watch(&self, version: &str) -> Result<Watched, DiscoveryError> {
        let query = format!(
            "watch=true&allowWatchBookmarks=true&timeoutSeconds={}&resourceVersion={}",
            WATCH.0.as_secs(),
            encoded(version)
        );
        let response = tokio::time::timeout(TIMEOUT, self.get(&query)).await;
        let response = response.map_err(|_| self.unreachable(format!("no watch within {TIMEOUT:?}")))??;
        match response.status() {
            StatusCode::GONE => Ok(Watched::Gone),
            status if status.is_success() => {
                Ok(Watched::Stream(Lines { response, buffer: BytesMut::new(), url: self.url.clone() }))
            }
            status => Err(self.unreachable(format!("status {status}"))),
        }
    }

    async fn get(&self, query: &str) -> Result<Response, DiscoveryError> {
        let mut request = self.client.get(format!("{}?{}&{query}", self.url, self.selector));
        if let Some(file) = &self.token {
            let token = tokio::fs::read_to_string(file).await;
            request = request.bearer_auth(token.map_err(|e| self.unreachable(format!("token: {e}")))?.trim());
        }
        request.send().await.map_err(|e| self.unreachable(e))
    }

    fn unreachable(&self, why: impl ToString) -> DiscoveryError {
        DiscoveryError::Unreachable { what: self.url.clone(), why: why.to_string() }
    }
}

/// Percent-encodes a page token or version, which are opaque.
fn encoded(text: &str) -> String {
    let byte = |b: u8| match b {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(b).to_string(),
        other => format!("%{other:02X}"),
    };
    text.bytes().map(byte).collect()
}

#[derive(Deserialize)]
struct List {
    metadata: Metadata,
    #[serde(default)]
    items: Vec<Slice>,
}

/// A running watch.
pub(super) struct Lines {
    response: Response,
    buffer: BytesMut,
    url: String,
}

impl Lines {
    /// The next event; `None` at the end of the watch. A silence longer than the watch is an error: the connection may
    /// be wedged.
    pub(super) async fn next(&mut self) -> Result<Option<Event>, DiscoveryError> {
        loop {
            if let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
                let line = self.buffer.split_to(end);
                self.buffer.advance(1);
                if line.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
                return read(&line).map(Some).map_err(|why| self.unreachable(why));
            }
            if self.buffer.len() > MAX_BYTES {
                return Err(self.unreachable(format!("a line of more than {MAX_BYTES} bytes")));
            }
            let chunk = tokio::time::timeout(WATCH.0 + WATCH.1, self.response.chunk()).await;
            match chunk.map_err(|_| self.unreachable("a watch without an end"))? {
                Ok(Some(bytes)) => self.buffer.extend_from_slice(&bytes),
                Ok(None) => return Ok(None),
                // The events so far hold, and the next watch resumes after them.
                Err(e) => {
                    tracing::debug!(error = %e, "watch interrupted");
                    return Ok(None);
                }
            }
        }
    }

    fn unreachable(&self, why: impl ToString) -> DiscoveryError {
        DiscoveryError::Unreachable { what: self.url.clone(), why: why.to_string() }
    }
}

fn read(line: &[u8]) -> Result<Event, String> {
    #[derive(Deserialize)]
    struct Line {
        #[serde(rename = "type")]
        kind: String,
        object: Value,
    }
    #[derive(Deserialize)]
    struct OnlyMetadata {
        metadata: Metadata,
    }
    #[derive(Deserialize)]
    struct Status {
        #[serde(default)]
        code: u16,
        #[serde(default)]
        message: String,
    }
    fn of<T: DeserializeOwned>(object: Value) -> Result<T, String> {
        serde_json::from_value(object).map_err(|e| format!("an event that cannot be read: {e}"))
    }
    let line: Line =
        serde_json::from_slice(line).map_err(|e| format!("an event that cannot be read: {e}"))?;
    let changed = |object: Value, change: fn(Slice) -> Change| {
        let slice: Slice = of(object)?;
        Ok(Event::Slices { version: slice.metadata.resource_version.clone(), change: change(slice) })
    };
    match line.kind.as_str() {
        "ADDED" | "MODIFIED" => changed(line.object, Change::Updated),
        "DELETED" => changed(line.object, Change::Removed),
        "BOOKMARK" => {
            Ok(Event::Bookmark { version: of::<OnlyMetadata>(line.object)?.metadata.resource_version })
        }
        "ERROR" => match of::<Status>(line.object)? {
            Status { code: 410, .. } => Ok(Event::Gone),
            Status { code, message } => Err(format!("error {code} in a watch: {message}")),
        },
        other => Err(format!("an event of type {other:?}")),
    }
}
