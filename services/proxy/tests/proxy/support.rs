//! A proxy between two fake workers, and clients for it.

use crate::fakes::{Encoder, Pd, Process, model};
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::Status;
use triptych_core::Modality;
use triptych_core::limits::Limits;
use triptych_ec::settings::MemorySetting;
use triptych_ec::{EcSetting, EcStore};
use triptych_proto::v1;
use triptych_proto::v1::generate_response::Kind;
use triptych_proto::v1::triptych_client::TriptychClient;
use triptych_proxy::fetch::FetchPolicy;
use triptych_proxy::{ClientTimes, EncodePolicy, ProxyConfig, ProxyError};
use triptych_runtime::{Drain, MetricsRegistry, grpc};

/// Bytes of an image that no test decodes; long and distinctive enough to be found in a recording.
pub const IMAGE: &[u8] = b"pixels:0123456789abcdefghijklmnopqrstuvwxyz:are never seen by a PD worker";

/// A proxy that runs in this process.
pub struct Proxy {
    pub http: SocketAddr,
    pub grpc: SocketAddr,
    pub drain: Drain,
    pub running: JoinHandle<Result<(), ProxyError>>,
}

/// The two listeners of a proxy.
pub struct Listeners {
    pub http: TcpListener,
    pub grpc: TcpListener,
}

impl Listeners {
    pub async fn bind() -> Self {
        Self { http: listener().await, grpc: listener().await }
    }
}

/// Settings of tests: the defaults, with the addresses of the workers.
pub fn settings(
    encoders: &[SocketAddr],
    pds: &[SocketAddr],
    store: Arc<dyn EcStore>,
    listeners: Listeners,
) -> ProxyConfig {
    let text = |addresses: &[SocketAddr]| addresses.iter().map(ToString::to_string).collect();
    ProxyConfig {
        http: listeners.http.into(),
        grpc: listeners.grpc.into(),
        admin: None,
        admin_token: None,
        accounting_log: None,
        encoders: text(encoders),
        pds: text(pds),
        discovery: Vec::new(),
        seed: None,
        encode_slo: None,
        dialer: Default::default(),
        store,
        limits: Limits::default(),
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
    }
}

pub async fn memory() -> Arc<dyn EcStore> {
    triptych_ec::open(&EcSetting::Memory(MemorySetting::default()), &Limits::default()).await.unwrap()
}

impl Proxy {
    pub async fn start(
        encoders: &[SocketAddr],
        pds: &[SocketAddr],
        store: Arc<dyn EcStore>,
        change: impl FnOnce(&mut ProxyConfig),
    ) -> Self {
        Self::draining(Drain::new(), encoders, pds, store, change).await
    }

    /// A proxy with a drain of the test's own.
    pub async fn draining(
        drain: Drain,
        encoders: &[SocketAddr],
        pds: &[SocketAddr],
        store: Arc<dyn EcStore>,
        change: impl FnOnce(&mut ProxyConfig),
    ) -> Self {
        let listeners = Listeners::bind().await;
        let http = listeners.http.local_addr().unwrap();
        let grpc = listeners.grpc.local_addr().unwrap();
        let mut config = settings(encoders, pds, store, listeners);
        change(&mut config);
        let running = tokio::spawn(triptych_proxy::run(config, drain.clone(), MetricsRegistry::default()));
        Self { http, grpc, drain, running }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.http)
    }

    pub fn client(&self) -> TriptychClient<tonic::transport::Channel> {
        TriptychClient::new(grpc::channel(&self.grpc.to_string()).unwrap())
    }

    pub async fn get(&self, path: &str) -> (u16, String) {
        let response = client().get(self.url(path)).send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }

    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let response = client().post(self.url(path)).json(body).send().await.unwrap();
        let status = response.status().as_u16();
        (status, response.json().await.unwrap())
    }

    pub async fn ready(&self) {
        eventually("the proxy is ready", async || self.get("/readyz").await.0 == 200).await;
    }

    /// Value of the series; 0 while it does not exist.
    pub async fn metric(&self, line: &str) -> f64 {
        let (_, text) = self.get("/metrics").await;
        let value = text.lines().find_map(|l| l.strip_prefix(line)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or(0.0)
    }
}

pub async fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.unwrap()
}

pub fn client() -> reqwest::Client {
    triptych_runtime::tls::install_provider();
    reqwest::Client::builder().no_proxy().build().unwrap()
}

/// Polls until the condition holds. The limit ends a test that fails.
pub async fn eventually(what: &str, condition: impl AsyncFn() -> bool) {
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < Duration::from_secs(60), "never true: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// One encoder, one PD worker, one proxy; `vl` reads images, `asr` reads audio.
pub struct Cluster {
    pub encoder: Encoder,
    pub pd: Pd,
    pub encoder_process: Process,
    pub pd_process: Process,
    pub proxy: Proxy,
}

pub fn models() -> Vec<v1::WorkerModel> {
    vec![model("vl", Modality::Image, 1), model("asr", Modality::Audio, 2)]
}

impl Cluster {
    pub async fn start() -> Self {
        Self::with(|_| {}).await
    }

    pub async fn with(change: impl FnOnce(&mut ProxyConfig)) -> Self {
        Self::serving(models(), change).await
    }

    /// A cluster of other models.
    pub async fn serving(models: Vec<v1::WorkerModel>, change: impl FnOnce(&mut ProxyConfig)) -> Self {
        Self::made_of(models, memory().await, change).await
    }

    /// A cluster over the given store.
    pub async fn over(store: Arc<dyn EcStore>, change: impl FnOnce(&mut ProxyConfig)) -> Self {
        Self::made_of(models(), store, change).await
    }

    async fn made_of(
        models: Vec<v1::WorkerModel>,
        store: Arc<dyn EcStore>,
        change: impl FnOnce(&mut ProxyConfig),
    ) -> Self {
        let encoder = Encoder::new(models.clone(), Arc::clone(&store));
        let pd = Pd::new(models);
        let encoder_process = encoder.serve();
        let pd_process = pd.serve();
        let proxy = Proxy::start(&[encoder_process.address], &[pd_process.address], store, change).await;
        proxy.ready().await;
        Self { encoder, pd, encoder_process, pd_process, proxy }
    }
}

/// A gRPC request: a question about these images, in order.
pub fn question(images: &[&[u8]]) -> v1::GenerateRequest {
    use v1::part::Kind as Part;
    let part = |kind| v1::Part { kind: Some(kind) };
    let items = (0..images.len() as u32).map(|i| part(Part::Item(i)));
    let parts = items.chain([part(Part::Text("what is it?".into()))]).collect();
    let message = v1::Message { role: v1::Role::User.into(), parts };
    let item = |image: &&[u8]| v1::Item {
        modality: v1::Modality::Image.into(),
        source: Some(v1::item::Source::Data(image.to_vec().into())),
        options: None,
    };
    v1::GenerateRequest {
        model: "vl".into(),
        prompt: Some(v1::Prompt {
            kind: Some(v1::prompt::Kind::Chat(v1::prompt::Chat {
                messages: vec![message],
                ..Default::default()
            })),
        }),
        items: images.iter().map(item).collect(),
        ..v1::GenerateRequest::default()
    }
}

/// A complete gRPC answer.
#[derive(Debug)]
pub struct Answer {
    pub text: String,
    pub summary: v1::Summary,
}

impl Answer {
    pub fn sources(&self) -> Vec<v1::ItemSource> {
        self.summary.item_sources().collect()
    }
}

pub async fn ask(proxy: &Proxy, request: v1::GenerateRequest) -> Result<Answer, Status> {
    let mut stream = proxy.client().generate(request).await?.into_inner();
    let mut text = String::new();
    let mut accepted = false;
    loop {
        match stream.message().await?.expect("a stream ends with a summary").kind.unwrap() {
            Kind::Accepted(a) => {
                assert!(!accepted && text.is_empty() && a.request_id.starts_with("req-"));
                accepted = true;
            }
            Kind::Delta(delta) => text.push_str(&delta.text),
            Kind::Summary(summary) => {
                assert!(accepted && stream.message().await?.is_none());
                return Ok(Answer { text, summary });
            }
        }
    }
}
