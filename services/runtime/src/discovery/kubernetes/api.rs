//! The two requests to the API server: a list in pages, and a watch, a line of JSON for each event.

use super::Service;
use super::slices::{Change, Metadata, Slice, Slices};
use crate::discovery::DiscoveryError;
use bytes::{Buf, BytesMut};
use reqwest::{Certificate, Client, Response, StatusCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::path::PathBuf;
use std::time::Duration;

/// Where a pod finds what it needs to talk to its API server.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The longest line of a watch and the largest page of a list. A slice has at most 1000 endpoints of a few hundred
/// bytes each.
const MAX_BYTES: usize = 16 << 20;
/// Slices of a page.
const PAGE: usize = 250;
/// How long the server is asked to keep a watch open, and how much longer silence is believed.
const WATCH: (Duration, Duration) = (Duration::from_secs(240), Duration::from_secs(15));
/// For an answer to a list, and for the beginning of one to a watch.
pub(super) const PATIENCE: Duration = Duration::from_secs(15);

/// How to reach an API server.
#[derive(Clone, Debug)]
pub struct ApiServer {
    /// `https://host:port`.
    pub url: String,
    /// Whom to believe, in PEM. `None`: those that the machine believes.
    pub ca: Option<Vec<u8>>,
    /// A file with a bearer token, read anew for each request, since it is replaced now and then.
    pub token: Option<PathBuf>,
}

impl ApiServer {
    /// The server of the cluster that this process runs in, as Kubernetes tells each pod.
    ///
    /// # Errors
    /// [`DiscoveryError::NotInCluster`] if it does not.
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

/// A client that believes the server's certificate and no other.
pub(super) fn client(server: &ApiServer) -> Result<Client, DiscoveryError> {
    let unusable = |e: reqwest::Error| DiscoveryError::NotInCluster(format!("{}: {e}", server.url));
    crate::tls::install_provider();
    let mut client = Client::builder().no_proxy().connect_timeout(PATIENCE).tcp_keepalive(PATIENCE);
    if let Some(pem) = &server.ca {
        client = client.tls_certs_only(Certificate::from_pem_bundle(pem).map_err(unusable)?);
    }
    client.build().map_err(unusable)
}

/// Asks for the slices of one service.
pub(super) struct Api {
    client: Client,
    /// Up to the query.
    url: String,
    selector: String,
    token: Option<PathBuf>,
}

/// What came of asking for a watch.
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

    /// Every slice, and the version of the list.
    pub(super) async fn list(&self) -> Result<(Slices, String), DiscoveryError> {
        let (mut all, mut next_page) = (Vec::new(), String::new());
        loop {
            let query = format!("limit={PAGE}&continue={}", encoded(&next_page));
            let page = tokio::time::timeout(PATIENCE, async { self.page(self.get(&query).await?).await });
            let page = page.await.map_err(|_| self.unreachable(format!("no list within {PATIENCE:?}")))??;
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

    /// What happens after `version`.
    pub(super) async fn watch(&self, version: &str) -> Result<Watched, DiscoveryError> {
        let query = format!(
            "watch=true&allowWatchBookmarks=true&timeoutSeconds={}&resourceVersion={}",
            WATCH.0.as_secs(),
            encoded(version)
        );
        let response = tokio::time::timeout(PATIENCE, self.get(&query)).await;
        let response = response.map_err(|_| self.unreachable(format!("no watch within {PATIENCE:?}")))??;
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

/// Page tokens and versions are opaque: whatever is not plain is escaped.
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
    /// The next event; `None` at the end of the watch. A silence of longer than the watch was to last is trouble: the
    /// connection may be wedged.
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
                // Cut off: what was said so far holds, and the next watch goes on from there.
                Err(e) => {
                    tracing::debug!(error = %e, "a watch was cut off");
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
        "ADDED" | "MODIFIED" => changed(line.object, Change::Is),
        "DELETED" => changed(line.object, Change::IsNoMore),
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
