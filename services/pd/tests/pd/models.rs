//! Models that are loaded and unloaded while the worker serves: nothing that runs is lost, and what cannot be served changes
//! nothing.

use crate::support::{Pd, VL, about, source, start_changed, words};
use std::path::Path;
use tonic::{Code, Status};
use triptych_pd::{EngineSettings, PdConfig};
use triptych_proto::v1;
use triptych_proto::v1::worker_admin_client::WorkerAdminClient;
use triptych_runtime::grpc;

/// The directory of a golden model, from the root of all of them.
fn path(golden: &str) -> String {
    format!("{golden}/model")
}

async fn updatable(change: impl FnOnce(PdConfig) -> PdConfig) -> Pd {
    start_changed(|config| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        let models = vec![source("qwen2_vl_two_images", VL)];
        change(PdConfig { model_updates: Some(root), models, ..config })
    })
    .await
}

impl Pd {
    async fn load(&self, name: &str, path: &str, replaces: &str) -> Result<(), Status> {
        let request = v1::LoadModelRequest {
            name: name.into(),
            path: path.into(),
            replaces: replaces.into(),
            drain_ms: 30_000,
        };
        let mut admin = WorkerAdminClient::new(grpc::channel(&self.address.to_string()).unwrap());
        admin.load_model(request).await.map(|answer| assert!(answer.into_inner().serves))
    }

    async fn unload(&self, name: &str, drain_ms: u64) -> Result<(), Status> {
        let mut admin = WorkerAdminClient::new(grpc::channel(&self.address.to_string()).unwrap());
        admin.unload_model(v1::UnloadModelRequest { name: name.into(), drain_ms }).await.map(drop)
    }

    async fn served(&self) -> Vec<String> {
        let described = self.client().describe(v1::DescribeRequest {}).await.unwrap().into_inner();
        described.models.into_iter().map(|model| model.name).collect()
    }
}

fn of(model: &str, mut request: v1::PdGenerateRequest) -> v1::PdGenerateRequest {
    request.model = model.into();
    request
}

#[tokio::test]
async fn a_model_gives_way_to_another_and_what_it_has_begun_is_answered() {
    let pd = updatable(|config| config).await;
    let alone = pd.generate(words("on and on", 300)).await.unwrap();
    let running = pd.begin(words("on and on", 300)).await;
    let text = path("llama_tied");
    let replacing = pd.load("text", &text, VL);
    let (ended, loaded) = tokio::join!(crate::support::read(running), replacing);
    loaded.unwrap();
    // Its first token was read before.
    assert_eq!(ended.unwrap().tokens[0].len() + 1, alone.tokens[0].len());
    assert_eq!(pd.served().await, ["text"]);
    let gone = pd.generate(words("x", 4)).await.unwrap_err();
    assert!(gone.code() == Code::Unavailable && gone.message().contains("unloaded"), "{gone:?}");
    assert_eq!(pd.generate(of("nobody", words("x", 4))).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(pd.generate(of("text", words("x", 4))).await.unwrap().tokens[0].len(), 4);
    pd.load(VL, &path("qwen2_vl_two_images"), "").await.unwrap();
    assert_eq!(pd.served().await, ["text", VL]);
    let image = [pd.stored_image(1).await];
    assert_eq!(pd.generate(about(&image, 4)).await.unwrap().tokens[0].len(), 4, "its rows are delivered");
    let again = pd.generate(words("on and on", 300)).await.unwrap();
    assert_eq!(again.tokens, alone.tokens);
}

#[tokio::test]
async fn what_does_not_end_in_time_is_cut_as_retryable() {
    let pd = updatable(|config| config).await;
    let running = pd.begin(words("on and on", 3_000)).await;
    pd.unload(VL, 0).await.unwrap();
    let cut = crate::support::read(running).await.unwrap_err();
    assert_eq!(cut.code(), Code::Unavailable, "{cut:?}");
    assert!(pd.served().await.is_empty());
    assert_eq!(pd.unload(VL, 0).await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(pd.unload("nobody", 0).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn a_directory_that_cannot_be_served_changes_nothing() {
    let pd = updatable(|config| config).await;
    for (named, said) in
        [("llama_tied", "config.json"), ("../house", "--model-updates"), ("nothing", "--model-updates")]
    {
        let refused = pd.load("text", named, VL).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
        assert!(refused.message().contains(said), "{refused:?}");
    }
    let taken = pd.load(VL, &path("llama_tied"), "").await.unwrap_err();
    assert!(taken.message().contains("is served"), "{taken:?}");
    assert_eq!(pd.served().await, [VL]);
    assert!(pd.generate(words("x", 4)).await.is_ok());
}

#[tokio::test]
async fn a_model_that_fails_to_load_leaves_the_one_before() {
    // Its KV of one request is more than the worker's memory, which shows when it is loaded.
    let root = tempfile::tempdir().unwrap();
    let large = root.path().join("large");
    std::fs::create_dir(&large).unwrap();
    for file in std::fs::read_dir(source("llama_tied", "text").dir).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), large.join(file.file_name())).unwrap();
    }
    let config = std::fs::read_to_string(large.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["max_position_embeddings"] = 1_000_000.into();
    std::fs::write(large.join("config.json"), config.to_string()).unwrap();
    let engine = EngineSettings { max_sequences: 4, token_budget: 64, ..EngineSettings::default() };
    let below = Some(root.path().to_owned());
    let pd = updatable(|config| PdConfig {
        memory_bytes: Some(150 << 20),
        model_updates: below,
        engine,
        ..config
    })
    .await;
    let refused = pd.load("large", "large", VL).await;
    let Err(refused) = refused else { panic!("it fits") };
    assert!(refused.message().contains("--memory-mib"), "{refused:?}");
    assert_eq!(pd.served().await, [VL]);
    assert!(pd.generate(words("x", 4)).await.is_ok());
}

#[tokio::test]
async fn a_worker_that_does_not_allow_it_keeps_its_models() {
    let pd = updatable(|config| PdConfig { model_updates: None, ..config }).await;
    for refused in [pd.load("text", &path("llama_tied"), "").await, pd.unload(VL, 0).await] {
        assert!(refused.unwrap_err().message().contains("--model-updates"));
    }
    assert_eq!(pd.served().await, [VL]);
}
