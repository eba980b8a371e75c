//! A rolling restart under load: every process gets SIGTERM in turn, drains, and is replaced; no request fails.
//!
//! Two proxies find two encoder and two PD workers in a registry: a worker is used once it is ready, and gets nothing new
//! once its shutdown begins. Clients act as a load balancer: they watch each proxy's health.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};
use triptych_ec::testing::RedisServer;
use triptych_proto::v1;
use triptych_proto::v1::triptych_client::TriptychClient;
use triptych_tests::client::{about_images, generate};
use triptych_tests::cluster::reqwest_client;
use triptych_tests::process::{Process, eventually, free_port, signal};
use triptych_tests::samples::{heldout, models_dir};

const N_CLIENTS: u64 = 4;

/// A process of the cluster, its command line and its addresses.
struct RoleProcess {
    process: Process,
    line: Vec<String>,
    grpc: String,
    http: String,
}

impl RoleProcess {
    fn start(role: &str, probes: &str, args: &[String]) -> Self {
        let address = || format!("127.0.0.1:{}", free_port());
        let grpc = address();
        let http = address();
        let own = [role, "--grpc", &grpc, probes, &http, "--lame-duck", "500"].map(str::to_owned);
        let line = [&own[..], args].concat();
        Self { process: launch(&line), line, grpc, http }
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

    /// Sends SIGTERM, waits for the exit, and starts a successor at the same addresses.
    async fn replace(&mut self) {
        signal(self.process.pid(), "TERM");
        let status = self.process.wait().await;
        assert!(status.success(), "{:?} ended with {status}:\n{}", self.line, self.process.log());
        assert!(!self.process.log().contains("grace period over"), "{}", self.process.log());
        self.process = launch(&self.line);
        self.ready().await;
    }

    /// `Some` if this proxy knows two ready workers of each role.
    async fn knows_all(&self) -> Option<()> {
        let metrics = self.get("/metrics").await?;
        let line = |role| format!("triptych_fleet_workers{{role=\"{role}\",state=\"ready\"}} 2");
        ["encoder", "pd"].iter().all(|role| metrics.contains(&line(role))).then_some(())
    }
}

fn launch(line: &[String]) -> Process {
    Process::start(&line.iter().map(String::as_str).collect::<Vec<_>>())
}

/// A proxy, as seen by a load balancer.
struct Target {
    client: TriptychClient<Channel>,
    serving: AtomicBool,
}

impl Target {
    fn new(address: &str) -> Self {
        let channel = Endpoint::from_shared(format!("http://{address}")).expect("an address").connect_lazy();
        let client = TriptychClient::new(channel).max_decoding_message_size(64 << 20);
        Self { client, serving: AtomicBool::new(false) }
    }

    /// Follows the proxy's readiness for as long as the test runs.
    async fn watch(&self, http: &str) {
        let client = reqwest_client();
        loop {
            let ready = client.get(format!("http://{http}/readyz")).send().await;
            self.serving.store(ready.is_ok_and(|r| r.status().is_success()), Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Sends questions about new images without end, to alternating proxies that serve.
async fn ask_on(number: u64, targets: &[Arc<Target>], answered: &AtomicU64, failed: &AtomicU64) {
    let image = heldout("scene.png");
    let mut expect = None;
    for n in 0u64.. {
        let mut own = image.clone();
        // Bytes after the end of a PNG change its key and not its pixels.
        own.extend_from_slice(&number.to_le_bytes());
        own.extend_from_slice(&n.to_le_bytes());
        let preferred = usize::try_from(number + n).expect("few") % targets.len();
        let order = (0..targets.len()).map(|i| &targets[(preferred + i) % targets.len()]);
        let Some(target) = order.into_iter().find(|t| t.serving.load(Ordering::SeqCst)) else {
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        let mut request = about_images("What is in this picture?", vec![own]);
        request.model = "shapes-qwen2-vl".into();
        request.sampling = Some(v1::Sampling { temperature: Some(0.0), ..Default::default() });
        match generate(&mut target.client.clone(), request).await {
            Ok(answer) => {
                let expect = expect.get_or_insert_with(|| answer.text.clone());
                assert_eq!(*expect, answer.text);
                answered.fetch_add(1, Ordering::SeqCst);
            }
            Err(status) => {
                eprintln!("client {number}, request {n}: {status:?}");
                failed.fetch_add(1, Ordering::SeqCst);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigterm_to_every_process_in_turn_loses_no_request() {
    let registry = RedisServer::start();
    let model = models_dir().join("shapes-qwen2-vl");
    let text = |words: &[&str]| words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>();
    let store = RoleProcess::start("store", "--admin", &[]);
    let ec = format!("grpc://{}", store.grpc);
    let model = model.to_str().expect("UTF-8");
    let worker = text(&["--ec", &ec, "--model", model, "--threads", "1", "--register", &registry.url()]);
    let proxy = text(&["--ec", &ec, "--discover", &registry.url()]);
    let mut parts = [
        RoleProcess::start("proxy", "--http", &proxy),
        RoleProcess::start("proxy", "--http", &proxy),
        RoleProcess::start("encoder", "--admin", &worker),
        RoleProcess::start("encoder", "--admin", &worker),
        RoleProcess::start("pd", "--admin", &worker),
        RoleProcess::start("pd", "--admin", &worker),
        store,
    ];
    let mut tasks = JoinSet::new();
    let answered = Arc::new(AtomicU64::new(0));
    let failed = Arc::new(AtomicU64::new(0));
    let targets: Vec<_> = parts[..2].iter().map(|p| Arc::new(Target::new(&p.grpc))).collect();
    for (part, target) in parts.iter().zip(&targets) {
        let target = Arc::clone(target);
        let http = part.http.clone();
        tasks.spawn(async move { target.watch(&http).await });
    }
    for number in 0..N_CLIENTS {
        let targets = targets.clone();
        let answered = Arc::clone(&answered);
        let failed = Arc::clone(&failed);
        tasks.spawn(async move { ask_on(number, &targets, &answered, &failed).await });
    }
    for i in 0..parts.len() {
        for proxy in &parts[..2] {
            eventually("the proxies know all workers", async || proxy.knows_all().await).await;
        }
        let before = answered.load(Ordering::SeqCst);
        eventually("answers come", async || {
            (answered.load(Ordering::SeqCst) >= before + 2 * N_CLIENTS).then_some(())
        })
        .await;
        parts[i].replace().await;
        assert_eq!(failed.load(Ordering::SeqCst), 0, "after {:?}", parts[i].line);
    }
    let before = answered.load(Ordering::SeqCst);
    eventually("answers come", async || {
        (answered.load(Ordering::SeqCst) >= before + 2 * N_CLIENTS).then_some(())
    })
    .await;
    assert_eq!(failed.load(Ordering::SeqCst), 0);
}
