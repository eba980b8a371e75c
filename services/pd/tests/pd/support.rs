//! The worker under test, requests to it, and its responses.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::transport::Channel;
use tonic::{IntoRequest, Status, Streaming};
use triptych_core::item::from_f32;
use triptych_core::limits::Limits;
use triptych_core::{
    ContentKey, DType, EncodedItem, EncoderOutput, Extent, Fingerprint, Modality, ModelName, WorkerId,
};
use triptych_ec::fault::{Faults, Faulty};
use triptych_ec::object;
use triptych_ec::store::EcStore;
use triptych_ec::store::memory::MemoryStore;
use triptych_models::compute::{ComputeConfig, Precision};
use triptych_models::tokenization::Tokenizer;
use triptych_models::{LoadFormat, ModelSource};
use triptych_pd::grammar::TrialProgram;
use triptych_pd::{EngineSettings, PdConfig, PdError};
use triptych_proto::v1;
use triptych_proto::v1::pd_generate_response::Kind;
use triptych_proto::v1::prefill_decode_worker_client::PrefillDecodeWorkerClient;
use triptych_runtime::start_journal::StartJournal;
use triptych_runtime::watchdog::Watchdog;
use triptych_runtime::{Drain, MetricsRegistry, grpc};

/// A vision-language model: rows 64 wide, 4096 tokens of context.
pub const VL: &str = "vl";
/// A speech model: rows 64 wide, 50 rows and one second a window, 80 tokens of context.
pub const SPEECH: &str = "speech";
/// Rows of a speech window.
pub const WINDOW: u32 = 50;
const HIDDEN: u32 = 64;
/// No wait takes longer; generous, since test machines are busy.
const PATIENCE: Duration = Duration::from_secs(60);

/// A worker that runs in this process.
pub struct Pd {
    pub address: SocketAddr,
    pub drain: Drain,
    pub metrics: MetricsRegistry,
    pub faults: Faults,
    pub store: Arc<MemoryStore>,
    pub running: JoinHandle<Result<(), PdError>>,
    encoders: Vec<(String, Fingerprint)>,
}

/// A worker of small default sizes.
pub async fn start() -> Pd {
    start_with(EngineSettings {
        self_kv_bytes: Some(8 << 20),
        cross_kv_bytes: Some(8 << 20),
        ..EngineSettings::default()
    })
    .await
}

/// A worker with an engine of these sizes.
pub async fn start_with(engine: EngineSettings) -> Pd {
    start_helped(engine, Vec::new()).await
}

/// A worker whose models have draft models.
pub async fn start_helped(engine: EngineSettings, drafts: Vec<ModelSource>) -> Pd {
    start_changed(|config| PdConfig { engine, drafts, ..config }).await
}

/// A worker with other settings.
pub async fn start_changed(change: impl FnOnce(PdConfig) -> PdConfig) -> Pd {
    let (drain, metrics, faults) = (Drain::new(), MetricsRegistry::default(), Faults::default());
    let store = Arc::new(MemoryStore::new(64 << 20, &Limits::default()));
    let grpc = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = grpc.local_addr().expect("an address");
    let store_that_fails = Arc::new(Faulty::new(store.clone(), faults.clone()));
    let config = change(config(grpc, store_that_fails));
    let running = tokio::spawn(triptych_pd::run(config, drain.clone(), metrics.clone()));
    let mut pd = Pd { address, drain, metrics, faults, store, running, encoders: Vec::new() };
    let described = pd.client().describe(v1::DescribeRequest {}).await.expect("it starts").into_inner();
    for model in described.models {
        let fingerprint = Fingerprint::from_slice(&model.encoders[0].fingerprint).expect("32 bytes");
        pd.encoders.push((model.name, fingerprint));
    }
    pd
}

/// Settings of a worker that serves both models.
pub fn config(grpc: TcpListener, store: Arc<dyn EcStore>) -> PdConfig {
    PdConfig {
        model_updates: None,
        worker_id: WorkerId::new("pd-test"),
        grpc: grpc.into(),
        admin: None,
        models: vec![source("qwen2_vl_two_images", VL), source("whisper_multilingual", SPEECH)],
        drafts: Vec::new(),
        lora: triptych_pd::LoraSettings::default(),
        tool_syntax: None,
        store,
        dialer: grpc::Dialer::default(),
        compute: ComputeConfig { threads: 1, ..ComputeConfig::default() },
        encoder_dtype: DType::F32.into(),
        encoder_precision: Precision::F32,
        mac_keys: Default::default(),
        limits: Limits::default(),
        ec_cache_bytes: 64 << 20,
        memory_bytes: None,
        engine: EngineSettings::default(),
        grammar_trial: trial("compile"),
        encoder_memory: triptych_pd::ColocatedEncoders::Absent,
        colocated: None,
        arbiter: None,
        cores: None,
        journal: StartJournal::without_file(),
        watchdog: Watchdog::default(),
        fault: None,
    }
}

/// Environment variable for the other process: its role, and a file in which it notes that it was started.
pub const TRIAL_ROLE: &str = "TRIPTYCH_TEST_TRIAL";

/// This binary as a process that tries out grammars, in a role of `grammar::as_the_process_of_a_trial`.
pub fn trial(role: &str) -> TrialProgram {
    let args = ["grammar::as_the_process_of_a_trial", "--exact", "--nocapture", "--test-threads=1"];
    TrialProgram {
        program: std::env::current_exe().expect("a test knows its own path"),
        args: args.map(Into::into).to_vec(),
        env: vec![(TRIAL_ROLE.into(), role.into())],
    }
}

/// A golden model under a name.
pub fn source(golden: &str, name: &str) -> ModelSource {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(golden).join("model");
    ModelSource { dir, name: Some(ModelName::new(name)), format: LoadFormat::Safetensors, packed: None }
}

/// The tokenizer of the vision-language model.
pub fn tokenizer() -> Tokenizer {
    Tokenizer::from_dir(&source("qwen2_vl_two_images", VL).dir).expect("a tokenizer")
}

/// A response, read to its end.
#[derive(Debug, Default)]
pub struct Response {
    /// Tokens of each choice.
    pub tokens: Vec<Vec<u32>>,
    pub segments: Vec<v1::Segment>,
    pub n_ends: usize,
    pub summary: v1::Summary,
}

impl Pd {
    /// A client with a connection of its own.
    pub fn client(&self) -> PrefillDecodeWorkerClient<Channel> {
        PrefillDecodeWorkerClient::new(grpc::channel(&self.address.to_string()).expect("an address"))
    }

    /// Sends a request and reads the stream to its end.
    pub async fn generate(
        &self,
        request: impl IntoRequest<v1::PdGenerateRequest>,
    ) -> Result<Response, Status> {
        read(self.client().generate(request).await?.into_inner()).await
    }

    /// Sends a request and reads up to its first token.
    pub async fn begin(&self, request: v1::PdGenerateRequest) -> Streaming<v1::PdGenerateResponse> {
        let mut stream = self.client().generate(request).await.expect("admitted").into_inner();
        stream.message().await.expect("no failure").expect("a first token");
        stream
    }

    /// An encoder output of the model.
    pub fn output(&self, model: &str, extent: Extent, seed: u8) -> EncoderOutput {
        let (modality, n_tokens) = match extent {
            Extent::Grid { t, h, w } => (Modality::Image, t * h * w / 4),
            Extent::Windows { n_windows, .. } => (Modality::Audio, n_windows * WINDOW),
            Extent::Video { t, h, w, .. } => (Modality::Video, t * h * w / 4),
            Extent::Tokens => unreachable!("neither model reads text"),
        };
        let fingerprint = self.encoders.iter().find(|(name, _)| name == model).expect("a served model").1;
        let item = EncodedItem {
            key: ContentKey::from_bytes([seed; 32]),
            fingerprint,
            modality,
            n_tokens,
            hidden: HIDDEN,
            dtype: DType::F32,
            extent,
            checksum: [0; 32],
        };
        let n = n_tokens * HIDDEN;
        let value =
            |i: u32| ((i.wrapping_add(u32::from(seed) << 20)).wrapping_mul(2_654_435_761) >> 8) as f32;
        let rows: Vec<f32> = (0..n).map(|i| value(i) / (1 << 23) as f32 - 1.0).collect();
        EncoderOutput::seal(item, from_f32(&rows, DType::F32)).expect("whole rows")
    }

    /// An image of four rows that is in the store.
    pub async fn stored_image(&self, seed: u8) -> EncodedItem {
        let output = self.output(VL, Extent::Grid { t: 1, h: 4, w: 4 }, seed);
        self.put(&output).await;
        output.item().clone()
    }

    pub async fn put(&self, output: &EncoderOutput) {
        self.store.put_if_absent(&output.item().key, object::encode(output)).await.expect("room");
    }

    /// Value of a metric; 0 without one.
    pub fn metric(&self, line: &str) -> f64 {
        let text = self.metrics.encode();
        let found = text.lines().find_map(|l| l.strip_prefix(line)?.strip_prefix(' ')?.parse().ok());
        found.unwrap_or(0.0)
    }

    /// Waits until a metric has a value.
    pub async fn until_metric(&self, line: &str, wanted: f64) {
        let reached = || self.metric(line) == wanted;
        until(&format!("{line} {wanted}"), reached).await;
    }

    /// Waits until nothing runs, waits, or holds blocks.
    pub async fn until_idle(&self, model: &str) {
        for what in ["requests_running{", "requests_waiting{"] {
            self.until_metric(&format!("triptych_{what}model=\"{model}\"}}"), 0.0).await;
        }
        for pool in ["self", "cross"] {
            let line = format!("triptych_kv_cache_usage_ratio{{model=\"{model}\",pool=\"{pool}\"}}");
            self.until_metric(&line, 0.0).await;
        }
    }
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

/// Reads a stream to its end.
pub async fn read(mut stream: Streaming<v1::PdGenerateResponse>) -> Result<Response, Status> {
    let mut response = Response::default();
    let mut ended = false;
    while let Some(message) = stream.message().await? {
        assert!(!ended, "nothing follows the summary");
        match message.kind.expect("a kind") {
            Kind::Delta(delta) => {
                let choice = delta.choice as usize;
                response.tokens.resize(response.tokens.len().max(choice + 1), Vec::new());
                response.tokens[choice].extend(delta.token_ids);
                response.segments.extend(delta.segments);
                response.n_ends += usize::from(delta.finish_reason != 0);
            }
            Kind::Summary(summary) => (response.summary, ended) = (summary, true),
        }
    }
    assert!(ended, "a stream that ends well has a summary");
    Ok(response)
}

/// A greedy question about images, with an id of its own.
pub fn about(items: &[EncodedItem], max_tokens: u32) -> v1::PdGenerateRequest {
    use v1::{part, prompt};
    let part = |kind| v1::Part { kind: Some(kind) };
    let mut parts: Vec<_> = (0..items.len() as u32).map(|i| part(part::Kind::Item(i))).collect();
    parts.push(part(part::Kind::Text("what is it".into())));
    let message = v1::Message { role: v1::Role::User.into(), parts };
    let chat = prompt::Kind::Chat(prompt::Chat { messages: vec![message], ..Default::default() });
    request(VL, chat, items, max_tokens)
}

/// A greedy transcription.
pub fn transcribe(item: &EncodedItem, max_tokens: u32) -> v1::PdGenerateRequest {
    let task = v1::SpeechTask { timestamps: true, language: Some("en".into()), ..Default::default() };
    request(SPEECH, v1::prompt::Kind::Speech(task), std::slice::from_ref(item), max_tokens)
}

/// A text prompt without an item.
pub fn words(text: &str, max_tokens: u32) -> v1::PdGenerateRequest {
    let kind = v1::text_or_tokens::Kind::Text(text.into());
    let prompt = v1::prompt::Kind::Singleton(v1::TextOrTokens { kind: Some(kind) });
    request(VL, prompt, &[], max_tokens)
}

fn request(
    model: &str,
    prompt: v1::prompt::Kind,
    items: &[EncodedItem],
    max_tokens: u32,
) -> v1::PdGenerateRequest {
    v1::PdGenerateRequest {
        request_id: format!("req-{:032x}", 7),
        model: model.into(),
        prompt: Some(v1::Prompt { kind: Some(prompt) }),
        items: items.iter().map(Into::into).collect(),
        sampling: Some(v1::Sampling {
            max_tokens: Some(max_tokens),
            temperature: Some(0.0),
            ignore_eos: true,
            ..Default::default()
        }),
        ..v1::PdGenerateRequest::default()
    }
}

/// Changes a request's sampling.
pub fn sampled(
    mut request: v1::PdGenerateRequest,
    change: impl FnOnce(&mut v1::Sampling),
) -> v1::PdGenerateRequest {
    change(request.sampling.get_or_insert_default());
    request
}
