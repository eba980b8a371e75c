//! Fetches items by URL, and nothing else: a guard against requests that would reach inside (SSRF).
//!
//! A name is resolved once, by the connection that uses the answer, and every address is judged before it is
//! connected to; so there is no second lookup that could say something else. Redirects are followed by hand, each
//! judged as if it were the first. No proxy is taken from the environment. Size, time and type are held while the
//! body streams. Idea: OWASP, "Server-Side Request Forgery Prevention Cheat Sheet".

mod address;
mod policy;
mod resolver;

pub use policy::{AllowRule, FetchPolicy, NotARule, Reach};

use crate::config::ProxyError;
use crate::items::byte_budget::ByteBudget;
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use http::header;
use policy::Refused;
use reqwest::{Client, Response, Url, redirect};
use resolver::{GuardedResolver, Lookup};
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;
use triptych_core::limits::Limits;
use triptych_core::{Failure, Modality};
use triptych_ec::error::chain;
use triptych_runtime::tls;

/// Most redirects of one item.
const MAX_REDIRECTS: usize = 5;
/// The longest time in which a connection is made.
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// The guarded fetcher. Cheap to clone.
#[derive(Clone)]
pub struct Fetcher {
    client: Client,
    policy: Arc<FetchPolicy>,
    limits: Limits,
}

impl Fetcher {
    /// A fetcher under `policy`.
    ///
    /// # Errors
    /// [`ProxyError::Fetcher`] if TLS cannot be set up.
    pub fn new(policy: FetchPolicy, limits: Limits) -> Result<Self, ProxyError> {
        Self::resolving(resolver::system(), policy, limits)
    }

    fn resolving(lookup: Lookup, policy: FetchPolicy, limits: Limits) -> Result<Self, ProxyError> {
        tls::install_provider();
        let policy = Arc::new(policy);
        let builder = || {
            Client::builder()
                .no_proxy()
                .referer(false)
                .redirect(redirect::Policy::none())
                .dns_resolver(GuardedResolver::new(Arc::clone(&policy), Arc::clone(&lookup)))
                .connect_timeout(CONNECT_TIME)
                .pool_idle_timeout(Duration::from_secs(15))
                .user_agent(concat!("triptych/", env!("CARGO_PKG_VERSION")))
        };
        let without_certificates = || builder().tls_certs_only([]).build();
        // Where no URL may be reached, the machine's certificates are not read: that takes tens of milliseconds.
        let built = if policy.reaches_nothing() { without_certificates() } else { builder().build() };
        let client = match built {
            Ok(client) => client,
            // Slim containers have no certificates. That must not keep the proxy from starting: it costs https URLs.
            Err(e) => {
                tracing::warn!(error = chain(&e), "no CA certificates: items cannot be fetched over https");
                without_certificates()?
            }
        };
        Ok(Self { client, policy, limits })
    }

    /// The bytes behind a URL.
    ///
    /// # Errors
    /// InvalidArgument that says why the URL was refused or what it answered; TooLarge over a limit.
    pub async fn fetch(&self, url: &str, modality: Modality, budget: &ByteBudget) -> Result<Bytes, Failure> {
        let limit = self.policy.timeout;
        let fetching = self.follow(url, modality, budget);
        let too_slow =
            |_| Failure::invalid(format!("the URL did not answer within {} s", limit.as_secs_f32()));
        tokio::time::timeout(limit, fetching).await.map_err(too_slow)?
    }

    async fn follow(&self, url: &str, modality: Modality, budget: &ByteBudget) -> Result<Bytes, Failure> {
        let mut url =
            Url::parse(url).map_err(|e| Failure::invalid(format!("the URL cannot be read: {e}")))?;
        for _ in 0..=MAX_REDIRECTS {
            let response = self.ask(&url).await?;
            if let Some(next) = redirection(&url, &response)? {
                url = next;
                continue;
            }
            check_status(&response)?;
            check_type(&response, modality)?;
            return self.read(response, budget).await;
        }
        Err(Failure::invalid(format!("the URL redirects more than {MAX_REDIRECTS} times")))
    }

    async fn ask(&self, url: &Url) -> Result<Response, Failure> {
        self.policy.judge_url(url).map_err(|refused| Failure::invalid(refused.to_string()))?;
        self.client.get(url.clone()).send().await.map_err(explain)
    }

    async fn read(&self, response: Response, budget: &ByteBudget) -> Result<Bytes, Failure> {
        let limit = self.limits.max_item_bytes;
        if let Some(len) = response.content_length()
            && usize::try_from(len).is_ok_and(|len| len > limit)
        {
            return Err(crate::request::too_large(usize::try_from(len).unwrap_or(usize::MAX), &self.limits));
        }
        let mut body = response.bytes_stream();
        let mut bytes = BytesMut::new();
        while let Some(piece) = body.next().await {
            let piece = piece.map_err(explain)?;
            let len = bytes.len() + piece.len();
            if len > limit {
                return Err(crate::request::too_large(len, &self.limits));
            }
            budget.take(piece.len())?;
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes.freeze())
    }
}

/// Target of a redirect, if the response is one.
fn redirection(from: &Url, response: &Response) -> Result<Option<Url>, Failure> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return Ok(None);
    }
    let target = response.headers().get(header::LOCATION).and_then(|l| l.to_str().ok());
    let target = target.ok_or_else(|| Failure::invalid("the URL redirects to nowhere"))?;
    let next = from.join(target);
    next.map(Some).map_err(|e| Failure::invalid(format!("the URL redirects to what cannot be read: {e}")))
}

fn check_status(response: &Response) -> Result<(), Failure> {
    let status = response.status();
    if status.is_success() {
        Ok(())
    } else {
        Err(Failure::invalid(format!("the URL answered with status {}", status.as_u16())))
    }
}

/// Content types that a server may give an item. Many call everything a stream of octets; the encoder looks at the bytes.
fn check_type(response: &Response, modality: Modality) -> Result<(), Failure> {
    let Some(value) = response.headers().get(header::CONTENT_TYPE) else { return Ok(()) };
    let value = value.to_str().unwrap_or_default().to_ascii_lowercase();
    let essence = value.split(';').next().unwrap_or_default().trim();
    let expected: &[&str] = match modality {
        Modality::Image => &["image/"],
        Modality::Audio => &["audio/", "video/", "application/ogg"],
        Modality::Text => &["text/"],
        // A GIF and a WebP may move.
        Modality::Video => &["video/", "image/gif", "image/webp"],
    };
    let octets = ["application/octet-stream", "binary/octet-stream"];
    if octets.contains(&essence) || expected.iter().any(|prefix| essence.starts_with(prefix)) {
        Ok(())
    } else {
        Err(Failure::invalid(format!("the URL answered with type {essence:?}, expected is {modality}")))
    }
}

/// The failure of a request, for the client: the guard's own words, or the kind of failure.
fn explain(e: reqwest::Error) -> Failure {
    let mut cause: Option<&(dyn Error + 'static)> = Some(&e);
    while let Some(error) = cause {
        if let Some(refused) = error.downcast_ref::<Refused>() {
            return Failure::invalid(refused.to_string());
        }
        cause = error.source();
    }
    let what = if e.is_connect() {
        "the URL's server cannot be reached"
    } else if e.is_timeout() {
        "the URL did not answer in time"
    } else {
        "the URL's answer broke off"
    };
    // The text of reqwest's error has the URL in it, which is the client's own and stays out of the log.
    Failure::invalid(what).with_detail(e.without_url())
}

#[cfg(test)]
mod tests;
