//! A proxy in this process, in front of fake vLLM servers.

use serde_json::Value;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use triptych_core::limits::Limits;
use triptych_ec::settings::MemorySetting;
use triptych_ec::{EcSetting, EcStore};
use triptych_proxy::fetch::FetchPolicy;
use triptych_proxy::{ClientTimes, EncodePolicy, ProxyConfig};
use triptych_runtime::grpc::Dialer;
use triptych_runtime::{Drain, MetricsRegistry};
use triptych_vllm::{VllmSettings, dialer};

pub const CHAT: &str = "/v1/chat/completions";

pub struct Proxy {
    http: SocketAddr,
    pub store: Arc<dyn EcStore>,
    pub client: reqwest::Client,
}

impl Proxy {
    /// A proxy that is ready.
    pub async fn start(encoders: Vec<String>, pds: Vec<String>) -> Self {
        let proxy = Self::unready(encoders, pds, Self::store().await).await;
        eventually("the proxy is ready", async || proxy.status("/readyz").await == 200).await;
        proxy
    }

    /// A store in memory.
    pub async fn store() -> Arc<dyn EcStore> {
        let setting = EcSetting::Memory(MemorySetting::default());
        triptych_ec::open(&setting, &Limits::default()).await.unwrap()
    }

    /// A proxy that was started.
    pub async fn unready(encoders: Vec<String>, pds: Vec<String>, store: Arc<dyn EcStore>) -> Self {
        let limits = Limits::default();
        let settings = VllmSettings {
            api_key: Some("secret".into()),
            store: Arc::clone(&store),
            max_item_bytes: limits.max_body_bytes,
        };
        let (http, grpc) = (listener().await, listener().await);
        let address = http.local_addr().unwrap();
        let config = ProxyConfig {
            http: http.into(),
            grpc: grpc.into(),
            admin: None,
            admin_token: None,
            accounting_log: None,
            encoders,
            pds,
            discovery: Vec::new(),
            seed: None,
            encode_slo: None,
            dialer: dialer(Dialer::default(), settings).unwrap(),
            store: Arc::clone(&store),
            limits,
            fetch: FetchPolicy::default(),
            tenant_salt: Vec::new(),
            auth: Default::default(),
            quota_store: None,
            max_in_flight: 64,
            encodes: EncodePolicy::default(),
            roles: Default::default(),
            client_times: ClientTimes::default(),
            bounds: Default::default(),
            connections: Default::default(),
            allowed_origins: Vec::new(),
            sessions: Default::default(),
            request_log: Default::default(),
        };
        tokio::spawn(triptych_proxy::run(config, Drain::new(), MetricsRegistry::default()));
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let proxy = Self { http: address, store, client };
        eventually("the proxy listens", async || proxy.status("/healthz").await != 0).await;
        proxy
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.http)
    }

    pub async fn status(&self, path: &str) -> u16 {
        self.client.get(self.url(path)).send().await.map_or(0, |response| response.status().as_u16())
    }

    pub async fn get(&self, path: &str) -> Value {
        self.client.get(self.url(path)).send().await.unwrap().json().await.unwrap()
    }

    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let response = self.client.post(self.url(path)).json(body).send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    /// Text and status of a chat.
    pub async fn chat(&self, body: &Value) -> (u16, String) {
        let (status, answer) = self.post(CHAT, body).await;
        let text = answer["choices"][0]["message"]["content"].as_str().map(str::to_owned);
        (status, text.unwrap_or_else(|| answer.to_string()))
    }
}

async fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.unwrap()
}

/// Polls until the condition holds. The limit ends a test that fails.
pub async fn eventually(what: &str, condition: impl AsyncFn() -> bool) {
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < Duration::from_secs(60), "never true: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
