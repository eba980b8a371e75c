//! The worker under test, jobs for it, and its metrics.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::Status;
use tonic::transport::Channel;
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, DType, ModelName, WorkerId};
use triptych_ec::fault::{Faults, Faulty};
use triptych_ec::store::memory::MemoryStore;
use triptych_ec::store::peer::PeerCacheSettings;
use triptych_encoder::{BatchLimits, EncoderConfig, EncoderError, ItemHook, LoraSettings, TowerChoice};
use triptych_models::compute::ComputeConfig;
use triptych_models::encoder::EncoderGraphConfig;
use triptych_models::{LoadFormat, ModelSource};
use triptych_proto::v1;
use triptych_proto::v1::encoder_worker_client::EncoderWorkerClient;
use triptych_runtime::start_journal::StartJournal;
use triptych_runtime::watchdog::Watchdog;
use triptych_runtime::{Drain, MetricsRegistry, grpc};

/// No wait takes longer; generous, since test machines are busy.
const PATIENCE: Duration = Duration::from_secs(60);

/// A worker that runs in this process and serves `vl`, which reads images, and `speech`.
pub struct Worker {
    pub address: SocketAddr,
    pub drain: Drain,
    pub metrics: MetricsRegistry,
    pub faults: Faults,
    pub store: Arc<MemoryStore>,
    pub running: JoinHandle<Result<(), EncoderError>>,
}

/// A path among the golden files.
pub fn golden(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(relative)
}

/// An image of 4 rows.
pub fn image() -> Vec<u8> {
    std::fs::read(golden("qwen2_vl_two_images/images/56x56.png")).expect("a golden file")
}

/// An audio clip.
pub fn audio() -> Vec<u8> {
    std::fs::read(golden("inputs/speech.wav")).expect("a golden file")
}

/// Folders of the models.
pub fn source(case: &str, name: &str) -> ModelSource {
    let dir = golden(case).join("model");
    ModelSource { dir, name: Some(ModelName::new(name)), format: LoadFormat::Safetensors, packed: None }
}

/// A worker that admits `max_jobs` jobs.
pub async fn start(max_jobs: usize) -> Worker {
    start_with(max_jobs, Drain::new(), Advertised::Nowhere).await
}

/// A worker stopped before it has loaded its models.
pub async fn start_stopping() -> Worker {
    let drain = Drain::new();
    drain.begin();
    start_with(1, drain, Advertised::Nowhere).await
}

/// Address at which PD workers read from the worker's memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Advertised {
    /// None.
    Nowhere,
    /// The address at which it listens.
    Here,
}

/// A worker whose outputs can be read from its memory.
pub async fn start_at(max_jobs: usize, advertised: Advertised) -> Worker {
    start_with(max_jobs, Drain::new(), advertised).await
}

/// A worker of a model with two towers, `towers`.
pub struct TowersOf(TowerChoice);

impl TowersOf {
    /// The tower of this name; all without one.
    pub fn named(name: &str) -> Self {
        Self(TowerChoice((!name.is_empty()).then(|| [name.to_owned()].into())))
    }
}

/// A worker that holds some towers of a model.
pub async fn start_towers(towers: TowersOf) -> Worker {
    let models = vec![source("cogagent_chat", "towers")];
    start_serving((models, towers.0), 8, Drain::new(), Advertised::Nowhere, Preprocessing::default()).await
}

/// The threads that preprocess, and what they call first with each item.
pub struct Preprocessing {
    pub threads: usize,
    pub hook: Option<ItemHook>,
}

impl Default for Preprocessing {
    fn default() -> Self {
        Self { threads: 4, hook: None }
    }
}

/// A worker that preprocesses in this way.
pub async fn start_preprocessing(preprocessing: Preprocessing) -> Worker {
    let models = vec![source("qwen2_vl_two_images", "vl")];
    start_serving((models, TowerChoice::default()), 64, Drain::new(), Advertised::Nowhere, preprocessing)
        .await
}

async fn start_with(max_jobs: usize, drain: Drain, advertised: Advertised) -> Worker {
    let models = vec![source("qwen2_vl_two_images", "vl"), source("whisper_multilingual", "speech")];
    let all = (models, TowerChoice::default());
    start_serving(all, max_jobs, drain, advertised, Preprocessing::default()).await
}

async fn start_serving(
    (models, towers): (Vec<ModelSource>, TowerChoice),
    max_jobs: usize,
    drain: Drain,
    advertised: Advertised,
    preprocessing: Preprocessing,
) -> Worker {
    let (metrics, faults) = (MetricsRegistry::default(), Faults::default());
    let store = Arc::new(MemoryStore::new(64 << 20, &Limits::default()));
    let grpc = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = grpc.local_addr().expect("an address");
    let advertise = (advertised == Advertised::Here).then(|| address.to_string());
    let config = EncoderConfig {
        towers,
        model_updates: None,
        worker_id: WorkerId::new("encoder-test"),
        grpc: grpc.into(),
        admin: None,
        models,
        lora: LoraSettings { updates: Some(golden("")), ..LoraSettings::default() },
        store: Arc::new(Faulty::new(store.clone(), faults.clone())),
        compute: ComputeConfig { threads: 1, ..ComputeConfig::default() },
        dtype: DType::F32.into(),
        mac_keys: Default::default(),
        limits: Limits::default(),
        graphs: Some(EncoderGraphConfig::default()),
        batch: BatchLimits::default(),
        cores: None,
        max_jobs,
        preprocess_threads: preprocessing.threads,
        rows_budget_bytes: 16 << 20,
        advertise,
        peer_cache: PeerCacheSettings::default(),
        journal: StartJournal::without_file(),
        watchdog: Watchdog::default(),
        fault: preprocessing.hook,
    };
    let running = tokio::spawn(triptych_encoder::run(config, drain.clone(), metrics.clone()));
    Worker { address, drain, metrics, faults, store, running }
}

impl Worker {
    /// A client with a connection of its own.
    pub fn client(&self) -> EncoderWorkerClient<Channel> {
        EncoderWorkerClient::new(grpc::channel(&self.address.to_string()).expect("an address"))
    }

    /// The worker's description.
    pub async fn describe(&self) -> v1::DescribeResponse {
        self.client().describe(v1::DescribeRequest {}).await.expect("it starts").into_inner()
    }

    /// A job for one of the models, under the key `[seed; 32]`.
    pub async fn job(&self, model: &str, seed: u8) -> v1::EncodeRequest {
        let models = self.describe().await.models;
        let encoder = models.into_iter().find(|m| m.name == model).expect("served").encoders.remove(0);
        v1::EncodeRequest {
            request_id: format!("req-{:032x}", 7),
            model: model.into(),
            key: vec![seed; 32].into(),
            modality: encoder.modality,
            item: if model == "speech" { audio() } else { image() }.into(),
            fingerprint: encoder.fingerprint,
            options: None,
            item_is_token_ids: false,
            item_is_embeddings: false,
            fence: 0,
            priority: 0,
            tower_index: encoder.tower_index,
        }
    }

    pub async fn encode(&self, job: v1::EncodeRequest) -> Result<v1::EncodeResponse, Status> {
        encode(self.client(), job).await
    }

    /// Value of a metric, with its labels if it has some; 0 without one.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.metrics.encode();
        let value = |line: &str| line.strip_prefix(name)?.trim_start_matches("{}").trim().parse().ok();
        let found = text.lines().find_map(value);
        found.unwrap_or(0.0)
    }
}

/// The key of a job's seed.
pub fn key(seed: u8) -> ContentKey {
    ContentKey::from_bytes([seed; 32])
}

/// Waits for a condition that another task brings about.
pub async fn until(what: &str, condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, wait).await.is_ok(), "never: {what}");
}

/// Runs a job to its last event.
pub async fn encode(
    mut client: EncoderWorkerClient<Channel>,
    job: v1::EncodeRequest,
) -> Result<v1::EncodeResponse, Status> {
    let mut events = client.encode(job).await?.into_inner();
    loop {
        let event = events.message().await?.expect("a job ends with its response or a status");
        if let Some(v1::encode_event::Kind::Ready(response)) = event.kind {
            return Ok(response);
        }
    }
}
