//! One encode for the whole fleet: three proxies and three encoder workers, each a process of its own, around one Redis.

use triptych_ec::testing::RedisServer;
use triptych_tests::client::{about_images, connect, generate};
use triptych_tests::cluster::{reqwest_client, sum_series};
use triptych_tests::process::{Process, eventually, free_port};
use triptych_tests::samples::{heldout, models_dir};

/// A process, and the addresses of its gRPC and HTTP servers.
struct RoleProcess {
    process: Process,
    grpc: String,
    http: String,
}

impl RoleProcess {
    /// A role on free ports; its second port is under `flag`.
    fn start(role: &str, flag: &str, args: &[&str]) -> Self {
        let address = || format!("127.0.0.1:{}", free_port());
        let grpc = address();
        let http = address();
        let mut all = vec![role, "--grpc", &grpc, flag, &http];
        all.extend_from_slice(args);
        Self { process: Process::start(&all), grpc, http }
    }

    async fn get(&self, path: &str) -> Option<String> {
        let response = reqwest_client().get(format!("http://{}{path}", self.http)).send().await.ok()?;
        response.error_for_status().ok()?.text().await.ok()
    }

    async fn ready(&mut self) {
        eventually("it is ready", async || {
            assert!(self.process.exited().is_none(), "it ended early:\n{}", self.process.log());
            self.get("/readyz").await
        })
        .await;
    }

    async fn metric(&self, name: &str) -> f64 {
        sum_series(&self.get("/metrics").await.expect("metrics"), name)
    }
}

async fn total(parts: &[RoleProcess], name: &str) -> f64 {
    let mut sum = 0.0;
    for part in parts {
        sum += part.metric(name).await;
    }
    sum
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_image_over_three_proxies_and_three_encoders_costs_one_encode() {
    let redis = RedisServer::start();
    let store = redis.url();
    let model = models_dir().join("shapes-qwen2-vl");
    let model = model.to_str().expect("UTF-8");
    let worker = ["--ec", &store, "--model", model, "--threads", "1"];
    let mut encoders: Vec<_> = (0..3).map(|_| RoleProcess::start("encoder", "--admin", &worker)).collect();
    let mut pd = RoleProcess::start("pd", "--admin", &worker);
    for part in encoders.iter_mut().chain([&mut pd]) {
        part.ready().await;
    }
    let mut fleet = vec!["--ec", &store, "--pd", &pd.grpc];
    for encoder in &encoders {
        fleet.extend(["--encoder", &encoder.grpc]);
    }
    let mut proxies: Vec<_> = (0..3).map(|_| RoleProcess::start("proxy", "--http", &fleet)).collect();
    let mut clients = Vec::new();
    for proxy in &mut proxies {
        proxy.ready().await;
        clients.push(connect(&format!("http://{}", proxy.grpc)).await);
    }
    let asks = (0..24).map(|i| {
        let mut client = clients[i % 3].clone();
        let request = about_images("What is in this picture?", vec![heldout("scene.png")]);
        async move { generate(&mut client, request).await.expect("an answer").text }
    });
    let answers = futures::future::join_all(asks).await;
    assert!(!answers[0].is_empty() && answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    assert_eq!(total(&encoders, "triptych_encodes_total").await, 1.0);
    assert_eq!(total(&proxies, "triptych_encode_jobs_total").await, 1.0, "and one job was sent");
}
