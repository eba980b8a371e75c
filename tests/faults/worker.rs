//! A worker for tests that dies by request: an encoder or a PD worker of the product's own crates, with faults planted
//! through the seam that the product never sets.
//!
//! `faulty-worker ROLE GRPC_ADDRESS STORE_ADDRESS JOURNAL`. A PD worker acts on the seed of a request, an encoder on the
//! last bytes of an item; see [`triptych_tests::faults`].

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use triptych_core::limits::Limits;
use triptych_core::{DType, ModelName, WorkerId};
use triptych_ec::store::peer::PeerCacheSettings;
use triptych_ec::{EcSetting, EcStore};
use triptych_encoder::{BatchLimits, EncoderConfig};
use triptych_models::compute::{ComputeConfig, Precision};
use triptych_models::{LoadFormat, ModelSource};
use triptych_pd::grammar::TrialProgram;
use triptych_pd::{EngineSettings, PdConfig};
use triptych_runtime::start_journal::StartJournal;
use triptych_runtime::telemetry::TelemetryConfig;
use triptych_runtime::watchdog::{Watchdog, WatchdogLimits};
use triptych_runtime::{Drain, MetricsRegistry, grpc};
use triptych_tests::faults::{Fault, MEMORY_LIMIT, STEP_TIMEOUT};
use triptych_tests::samples::models_dir;

#[tokio::main]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [role, grpc, store, journal] = &args[..] else { panic!("ROLE GRPC_ADDRESS STORE_ADDRESS JOURNAL") };
    let telemetry = TelemetryConfig { role: role.clone(), ..TelemetryConfig::default() };
    let _telemetry = triptych_runtime::telemetry::init(&telemetry).expect("a log");
    let listener = TcpListener::bind(grpc).await.expect("the address is free");
    let setting: EcSetting = format!("grpc://{store}").parse().expect("an address");
    let store = triptych_ec::open(&setting, &Limits::default()).await.expect("a store");
    let limits = WatchdogLimits { work: Some(STEP_TIMEOUT), memory_bytes: Some(MEMORY_LIMIT) };
    let watchdog = Watchdog::start(limits, |overrun| {
        eprintln!("{overrun}");
        std::process::exit(overrun.exit_code().into());
    });
    let parts = Parts {
        listener,
        store,
        journal: StartJournal::open(Path::new(journal)).expect("a journal"),
        watchdog: watchdog.expect("a thread"),
    };
    match role.as_str() {
        "pd" => triptych_pd::run(pd(parts), Drain::new(), MetricsRegistry::default()).await.expect("it runs"),
        "encoder" => {
            let running = triptych_encoder::run(encoder(parts), Drain::new(), MetricsRegistry::default());
            running.await.expect("it runs");
        }
        other => panic!("{other} is no role"),
    }
}

struct Parts {
    listener: TcpListener,
    store: Arc<dyn EcStore>,
    journal: StartJournal,
    watchdog: Watchdog,
}

fn model() -> ModelSource {
    let dir = models_dir().join("shapes-qwen2-vl");
    ModelSource { dir, name: Some(ModelName::new("vl")), format: LoadFormat::Safetensors, packed: None }
}

fn pd(parts: Parts) -> PdConfig {
    PdConfig {
        model_updates: None,
        worker_id: WorkerId::new("faulty-pd"),
        grpc: parts.listener.into(),
        admin: None,
        models: vec![model()],
        drafts: Vec::new(),
        lora: triptych_pd::LoraSettings::default(),
        tool_syntax: None,
        store: parts.store,
        dialer: grpc::Dialer::default(),
        compute: ComputeConfig { threads: 1, ..ComputeConfig::default() },
        encoder_dtype: DType::F32.into(),
        encoder_precision: Precision::F32,
        mac_keys: Default::default(),
        limits: Limits::default(),
        ec_cache_bytes: 64 << 20,
        memory_bytes: None,
        engine: EngineSettings { self_kv_bytes: Some(64 << 20), ..EngineSettings::default() },
        encoder_memory: triptych_pd::ColocatedEncoders::Absent,
        colocated: None,
        arbiter: None,
        cores: None,
        // No request of these tests has a grammar.
        grammar_trial: TrialProgram::this_binary("grammar-trial"),
        journal: parts.journal,
        watchdog: parts.watchdog,
        fault: Some(Arc::new(|sequence| act(sequence.sampling.seed.and_then(Fault::of_seed)))),
    }
}

fn encoder(parts: Parts) -> EncoderConfig {
    EncoderConfig {
        model_updates: None,
        worker_id: WorkerId::new("faulty-encoder"),
        grpc: parts.listener.into(),
        admin: None,
        models: vec![model()],
        towers: triptych_encoder::TowerChoice::default(),
        lora: triptych_encoder::LoraSettings::default(),
        store: parts.store,
        compute: ComputeConfig { threads: 1, ..ComputeConfig::default() },
        dtype: DType::F32.into(),
        mac_keys: Default::default(),
        limits: Limits::default(),
        graphs: None,
        batch: BatchLimits::default(),
        cores: None,
        max_jobs: 64,
        preprocess_threads: 2,
        rows_budget_bytes: 16 << 20,
        memory_bytes: None,
        advertise: None,
        peer_cache: PeerCacheSettings::default(),
        journal: parts.journal,
        watchdog: parts.watchdog,
        fault: Some(Arc::new(|item| act(Fault::of_item(item)))),
    }
}

/// Does what a request asked for.
fn act(fault: Option<Fault>) {
    match fault {
        None => {}
        Some(Fault::Panic) => panic!("as the request asked"),
        Some(Fault::Abort) => std::process::abort(),
        Some(Fault::Loop) => loop {
            std::thread::sleep(Duration::from_secs(1));
        },
        Some(Fault::Memory) => {
            let mut taken = Vec::new();
            loop {
                taken.push(vec![1_u8; 1 << 20]);
                std::hint::black_box(&taken);
            }
        }
    }
}
