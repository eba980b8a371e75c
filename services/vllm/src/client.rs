//! HTTP to vLLM servers: bounded bodies, no redirects, no proxy of the environment.

use crate::failure::{CallError, ServerError};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, header};
use reqwest::{Client, RequestBuilder, Response, redirect};
use std::time::Duration;
use triptych_runtime::tls;
use url::Url;

/// The longest time in which a connection is made.
const CONNECT: Duration = Duration::from_secs(3);
/// The longest wait for an answer that needs no model.
const PROBE: Duration = Duration::from_secs(4);
/// Largest body that is read whole.
const MAX_BODY: usize = 8 << 20;
/// Largest body of an error.
const MAX_ERROR: usize = 64 << 10;
/// Longest pause that a server may ask for.
const MAX_PAUSE: Duration = Duration::from_secs(3600);

/// A client of all vLLM servers. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct HttpClient {
    http: Client,
    /// `Authorization` of each request.
    key: Option<HeaderValue>,
}

impl HttpClient {
    /// A client that shows `key` to every server.
    ///
    /// # Errors
    /// If TLS cannot be set up.
    pub(crate) fn new(key: Option<&str>) -> Result<Self, reqwest::Error> {
        tls::install_provider();
        let builder = || {
            Client::builder()
                .no_proxy()
                .referer(false)
                .redirect(redirect::Policy::none())
                .connect_timeout(CONNECT)
                .tcp_keepalive(Duration::from_secs(15))
                .pool_idle_timeout(Duration::from_secs(15))
                .user_agent(concat!("triptych/", env!("CARGO_PKG_VERSION")))
        };
        let http = match builder().build() {
            Ok(http) => http,
            // Slim containers have no certificates. That costs https servers, not the start.
            Err(e) => {
                tracing::warn!(error = %e, "no CA certificates: vLLM servers cannot be reached over https");
                builder().tls_certs_only([]).build()?
            }
        };
        let key = key.and_then(|key| HeaderValue::from_str(&format!("Bearer {key}")).ok());
        let key = key.map(|mut key| {
            key.set_sensitive(true);
            key
        });
        Ok(Self { http, key })
    }

    /// The body behind a path, in a time that needs no model.
    ///
    /// # Errors
    /// [`CallError`].
    pub(crate) async fn get(&self, server: &Url, path: &str) -> Result<Bytes, CallError> {
        let request = self.http.get(at(server, path)).timeout(PROBE);
        whole(self.send(request).await?, MAX_BODY).await
    }

    /// The whole answer to a JSON body.
    ///
    /// # Errors
    /// [`CallError`].
    pub(crate) async fn post(
        &self,
        server: &Url,
        path: &str,
        (headers, body): (HeaderMap, Vec<u8>),
    ) -> Result<Bytes, CallError> {
        whole(self.open(server, path, (headers, body)).await?, MAX_BODY).await
    }

    /// The answer to a JSON body as it comes. Dropping it ends the request at the server.
    ///
    /// # Errors
    /// [`CallError`], if it does not begin with success.
    pub(crate) async fn open(
        &self,
        server: &Url,
        path: &str,
        (headers, body): (HeaderMap, Vec<u8>),
    ) -> Result<Response, CallError> {
        let request = self.http.post(at(server, path)).headers(headers);
        self.send(request.header(header::CONTENT_TYPE, "application/json").body(body)).await
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, CallError> {
        let request = match &self.key {
            Some(key) => request.header(header::AUTHORIZATION, key.clone()),
            None => request,
        };
        let response = request.send().await.map_err(lost)?;
        if response.status().is_success() {
            return Ok(response);
        }
        let (code, pause) = (response.status().as_u16(), pause(response.headers()));
        let body = whole(response, MAX_ERROR).await.unwrap_or_default();
        Err(CallError::Refused(ServerError::read(code, &body, pause)))
    }
}

/// A path on a server.
fn at(server: &Url, path: &str) -> Url {
    let mut url = server.clone();
    url.set_path(path);
    url
}

/// Reads a body to its end.
async fn whole(mut response: Response, most: usize) -> Result<Bytes, CallError> {
    let mut body = BytesMut::new();
    while let Some(piece) = response.chunk().await.map_err(lost)? {
        if body.len() + piece.len() > most {
            return Err(CallError::Unreadable(format!("it has more than {most} bytes")));
        }
        body.extend_from_slice(&piece);
    }
    Ok(body.freeze())
}

/// A connection that failed, with its causes.
pub(crate) fn lost(error: reqwest::Error) -> CallError {
    let error = error.without_url();
    let causes = std::iter::successors(Some(&error as &dyn std::error::Error), |cause| cause.source());
    let text = causes.map(ToString::to_string).collect::<Vec<_>>().join(": ");
    CallError::Lost(format!("vLLM server: {text}"))
}

/// The pause that a server asks for, in seconds.
fn pause(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds).min(MAX_PAUSE))
}
