//! The proxies of a cluster over HTTP: their counters, the workers that they know, and roles that they are told to give.
//!
//! A URL whose name has several addresses is as many proxies. Roles are each proxy's own, so that an order goes to all.

use super::flexible::ProxyView;
use super::load::Reading;
use reqwest::header::CONTENT_TYPE;
use reqwest::{Client, RequestBuilder, Response, Url};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;
use tokio::time::timeout;
use triptych_bench::error::{MeasureError, chain};
use triptych_proxy::ElasticRole;

/// Limit for one answer of a proxy, and for a name lookup.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);
/// Larger answers are not read.
const MAX_BYTES: usize = 16 << 20;
/// Most characters of a refusal that are shown.
const MAX_SHOWN: usize = 200;

/// Proxies by the URL of their metrics.
#[derive(Clone, Debug)]
pub struct Proxies {
    client: Client,
    url: String,
    token: Option<String>,
}

/// A proxy and the workers that it knows.
#[derive(Clone, Debug)]
pub struct SeenProxy {
    /// URL of its metrics, with an address for the name.
    url: Url,
    /// Its workers.
    pub view: ProxyView,
}

#[cfg(test)]
impl SeenProxy {
    /// A proxy without an address.
    pub(super) fn of(view: ProxyView) -> Self {
        let url = Url::parse("http://127.0.0.1:9/metrics").expect("a URL");
        Self { url, view }
    }
}

impl Proxies {
    /// The proxies behind the URL of their metrics. `token`: the word of their admin API.
    ///
    /// # Errors
    /// [`MeasureError`] if there can be no client.
    pub fn new(url: String, token: Option<String>) -> Result<Self, MeasureError> {
        let client = Client::builder().no_proxy().timeout(FETCH_TIMEOUT).build();
        let client = client.map_err(|e| MeasureError::setting("--watch", &e))?;
        Ok(Self { client, url, token })
    }

    /// Added counters of all proxies. All must answer: without one of them the sum would seem to fall.
    ///
    /// # Errors
    /// A text for people.
    pub async fn reading(&self) -> Result<Reading, String> {
        let mut metrics = String::new();
        for url in each(&self.url).await? {
            metrics.push_str(&body(self.client.get(url)).await?);
            metrics.push('\n');
        }
        Reading::of(&metrics).map_err(|e| e.to_string())
    }

    /// The workers that each proxy knows, by the admin API at the port of its metrics.
    ///
    /// # Errors
    /// A text for people, also where the admin API is off.
    pub async fn workers(&self) -> Result<Vec<SeenProxy>, String> {
        let mut seen = Vec::new();
        for url in each(&self.url).await? {
            let answer = body(self.authorized(self.client.get(admin(&url, &["workers"])))).await?;
            seen.push(SeenProxy { url, view: ProxyView::read(&answer)? });
        }
        Ok(seen)
    }

    /// Has a proxy give a worker a role.
    ///
    /// # Errors
    /// A text for people.
    pub async fn assign(&self, proxy: &SeenProxy, worker: &str, role: ElasticRole) -> Result<(), String> {
        let order = self.client.put(admin(&proxy.url, &["workers", worker, "role"]));
        let order =
            order.header(CONTENT_TYPE, "application/json").body(json!({"role": role.as_str()}).to_string());
        body(self.authorized(order)).await.map(drop).map_err(|e| format!("{worker}: {e}"))
    }

    fn authorized(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }
}

/// URL of the admin API at the same port.
fn admin(metrics: &Url, path: &[&str]) -> Url {
    let mut url = metrics.clone();
    url.set_query(None);
    if let Ok(mut segments) = url.path_segments_mut() {
        segments.clear().push("admin").extend(path);
    }
    url
}

/// The body of an answer that is a success, or what was refused.
async fn body(request: RequestBuilder) -> Result<String, String> {
    let answer = request.send().await.map_err(|e| chain(&e))?;
    let (status, url) = (answer.status(), answer.url().clone());
    let text = text_within(answer, MAX_BYTES).await?;
    if status.is_success() {
        return Ok(text);
    }
    let said = serde_json::from_str::<Value>(&text).ok();
    let said = said.and_then(|body| Some(body["error"]["message"].as_str()?.to_owned()));
    let said: String = said.unwrap_or_default().chars().take(MAX_SHOWN).collect();
    Err(format!("{}: {status}{}{said}", url.path(), if said.is_empty() { "" } else { ", " }))
}

async fn text_within(mut answer: Response, max_bytes: usize) -> Result<String, String> {
    let mut bytes = Vec::new();
    while let Some(chunk) = answer.chunk().await.map_err(|e| chain(&e))? {
        if bytes.len() + chunk.len() > max_bytes {
            return Err(format!("an answer of more than {max_bytes} bytes"));
        }
        bytes.extend_from_slice(&chunk);
    }
    String::from_utf8(bytes).map_err(|e| e.to_string())
}

/// The URL with each address of its name: a headless service has one for each proxy. Loopback names and HTTPS are requested
/// once: the former have several addresses for one listener, and a certificate is for the name.
async fn each(url: &str) -> Result<Vec<Url>, String> {
    let url = Url::parse(url).map_err(|e| e.to_string())?;
    let (Some(name), "http") = (url.domain().map(str::to_owned), url.scheme()) else { return Ok(vec![url]) };
    let port = url.port_or_known_default().unwrap_or(80);
    let found = timeout(FETCH_TIMEOUT, tokio::net::lookup_host((name.as_str(), port))).await;
    let found = found.map_err(|_| format!("{name} was not looked up in {} s", FETCH_TIMEOUT.as_secs()))?;
    let addresses: BTreeSet<IpAddr> = found.map_err(|e| e.to_string())?.map(|at| at.ip()).collect();
    if addresses.iter().all(IpAddr::is_loopback) {
        return Ok(vec![url]);
    }
    let with = |ip: IpAddr| {
        let mut url = url.clone();
        url.set_ip_host(ip).ok().map(|()| url)
    };
    Ok(addresses.into_iter().filter_map(with).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn loopback_names_and_addresses_are_requested_once() {
        for url in [
            "http://127.0.0.1:8080/metrics",
            "http://localhost:8080/metrics",
            "https://proxy.example/metrics",
        ] {
            let urls = each(url).await.unwrap();
            assert_eq!(urls.iter().map(Url::as_str).collect::<Vec<_>>(), [url]);
        }
        assert!(each("no url").await.is_err());
    }

    #[test]
    fn the_admin_api_is_at_the_port_of_the_metrics() {
        let metrics = Url::parse("http://10.0.0.1:9090/metrics?x=y").unwrap();
        assert_eq!(admin(&metrics, &["workers"]).as_str(), "http://10.0.0.1:9090/admin/workers");
        let role = admin(&metrics, &["workers", "pd@10.0.0.3:7002", "role"]);
        assert_eq!(role.as_str(), "http://10.0.0.1:9090/admin/workers/pd@10.0.0.3:7002/role");
        assert_eq!(admin(&metrics, &["workers", "a/../b", "role"]).path(), "/admin/workers/a%2F..%2Fb/role");
    }
}
