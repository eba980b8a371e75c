//! The cluster under test: two proxies, three encoders, three PD workers, Redis, S3; each a process of its own.

use crate::link::FaultyLink;
use crate::names::{ENCODERS, PDS, PROXIES};
use crate::proxies::ProxyEnds;
use crate::sums::{MetricSums, RESUMED};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use triptych_ec::testing::{RedisServer, S3Server};
use triptych_tests::cluster::{reqwest_client, sum_series};
use triptych_tests::net::Net;
use triptych_tests::process::{Process, eventually, signal};
use triptych_tests::samples::models_dir;

/// Ports of every role, each in its own namespace.
const GRPC: u16 = 7000;
const HTTP: u16 = 8000;

/// Context length given to the vision model: eight times that of its training, so that long answers last long enough
/// for faults in the middle of them.
const LONG_CONTEXT: u32 = 8192;
/// Seconds for a process that is told to end to bring its answers to their end, faults of others included.
const DRAIN_GRACE: &str = "60";
/// The longest wait for the metrics of a process: it may be cut off.
const METRICS_TIME: Duration = Duration::from_secs(2);

/// A running role.
struct Member {
    name: &'static str,
    process: Process,
}

/// All processes and servers. Drop kills them, and removes the namespaces.
pub struct Fleet {
    /// Ends of the proxies, for their clients.
    pub ends: Arc<ProxyEnds>,
    /// Sums of the processes that have ended.
    ended: MetricSums,
    members: Vec<Member>,
    pub redis: RedisServer,
    pub s3: S3Server,
    redis_link: FaultyLink,
    s3_link: FaultyLink,
    models: [PathBuf; 2],
    _models: TempDir,
    // Last: processes are killed before their namespaces are removed.
    pub net: Net,
}

impl Fleet {
    /// Starts everything and waits until both proxies are ready.
    pub async fn start() -> Self {
        let mut net = Net::start();
        for name in PROXIES.into_iter().chain(ENCODERS).chain(PDS) {
            net.add(name);
        }
        let redis = RedisServer::start();
        let s3 = S3Server::start();
        let redis_link = FaultyLink::start(&net.host(2), redis.port()).await;
        let s3_link = FaultyLink::start(&net.host(3), s3.port()).await;
        let folder = TempDir::new().expect("a folder for temporary files");
        let models = [with_long_context(folder.path()), models_dir().join("digits-whisper")];
        let (ends, ended, members) = (Arc::default(), MetricSums::default(), Vec::new());
        let mut fleet =
            Self { ends, ended, members, redis, s3, redis_link, s3_link, models, _models: folder, net };
        for name in ENCODERS.into_iter().chain(PDS).chain(PROXIES) {
            fleet.spawn(name);
        }
        for name in PROXIES {
            fleet.wait_ready(name).await;
        }
        fleet
    }

    /// gRPC URL of a proxy.
    pub fn grpc(&self, proxy: &str) -> String {
        format!("http://{}:{GRPC}", self.net.address(proxy))
    }

    pub fn http(&self, name: &str) -> String {
        format!("http://{}:{HTTP}", self.net.address(name))
    }

    /// Address of Redis on the bridge, for partitions.
    pub fn redis_address(&self) -> String {
        self.net.host(2)
    }

    pub fn slow_s3(&self, by: Duration) {
        self.s3_link.slow(by);
    }

    /// Cuts the link to S3, or restores it.
    pub fn cut_s3(&self, is_cut: bool) {
        self.s3_link.cut(is_cut);
    }

    pub fn slow_redis(&self, by: Duration) {
        self.redis_link.slow(by);
    }

    pub fn signal(&self, name: &str, signal_name: &str) {
        let member = self.members.iter().find(|m| m.name == name);
        signal(member.unwrap_or_else(|| panic!("{name} runs")).process.pid(), signal_name);
    }

    /// Kills a member with SIGKILL and starts it again.
    pub async fn replace(&mut self, name: &'static str) {
        let metrics = self.metrics(name).await;
        self.ended.add(name, &metrics);
        self.ends.killed(name);
        self.restart(name).await;
    }

    /// Starts a member again that has ended, or is ended by that. A proxy is back when it is ready, so that there is
    /// always one.
    async fn restart(&mut self, name: &'static str) {
        self.members.retain(|m| m.name != name);
        self.spawn(name);
        if PROXIES.contains(&name) {
            self.wait_ready(name).await;
            self.ends.is_back(name);
        }
    }

    /// The PD worker that has the most requests, as soon as one has any.
    pub async fn busiest_pd(&self) -> &'static str {
        eventually("a PD worker has requests", async || {
            let mut busiest = (0, None);
            for name in PDS {
                let running = sum_series(&self.metrics(name).await, "triptych_requests_running") as usize;
                busiest = busiest.max((running, (running > 0).then_some(name)));
            }
            busiest.1
        })
        .await
    }

    /// Streams that were resumed so far.
    pub async fn resumed_streams(&self) -> f64 {
        let mut sums = self.ended.clone();
        for name in PROXIES {
            sums.add(name, &self.metrics(name).await);
        }
        sums.get(RESUMED)
    }

    /// Sums of metrics, of all processes.
    pub async fn metric_sums(&self) -> MetricSums {
        let mut sums = self.ended.clone();
        for name in PROXIES.into_iter().chain(ENCODERS).chain(PDS) {
            sums.add(name, &self.metrics(name).await);
        }
        sums
    }

    /// Ends a member with SIGTERM, waits for its end, and starts it again.
    pub async fn roll(&mut self, name: &'static str) {
        let metrics = self.metrics(name).await;
        self.ended.add(name, &metrics);
        self.ends.rolled(name);
        self.signal(name, "TERM");
        if let Some(member) = self.members.iter_mut().find(|m| m.name == name) {
            let status = member.process.wait().await;
            assert!(status.success(), "{name} did not drain: {status}\n{}", member.process.log());
        }
        self.restart(name).await;
    }

    /// Members that exited unexpectedly, with status and log.
    pub fn exited_members(&mut self) -> Vec<String> {
        let exited = self.members.iter_mut().filter_map(|m| {
            let status = m.process.exited()?;
            Some(format!("{} ended with {status}:\n{}", m.name, m.process.log()))
        });
        exited.collect()
    }

    /// A member's metrics.
    pub async fn metrics(&self, name: &str) -> String {
        let asked = reqwest_client().get(format!("{}/metrics", self.http(name)));
        let asked = asked.timeout(METRICS_TIME).send().await;
        match asked {
            Ok(response) => response.text().await.unwrap_or_default(),
            Err(_) => String::new(),
        }
    }

    pub async fn wait_ready(&self, name: &str) {
        let client = reqwest_client();
        let url = format!("{}/readyz", self.http(name));
        eventually("a member is ready", async || {
            client.get(&url).send().await.ok().filter(|r| r.status().is_success())
        })
        .await;
    }

    fn spawn(&mut self, name: &'static str) {
        let address = self.net.address(name);
        let grpc = format!("{address}:{GRPC}");
        let http = format!("{address}:{HTTP}");
        let redis = format!("redis://{}:{}?ttl_s=600", self.net.host(2), self.redis.port());
        let s3 = format!(
            "s3://{}/ec?endpoint=http://{}:{}&allow_http=true",
            self.s3.bucket(),
            self.net.host(3),
            self.s3.port()
        );
        let mut args: Vec<String> = ["--grpc", &grpc, "--ec", &redis, "--ec", &s3].map(str::to_owned).into();
        args.extend(["--drain-grace".to_owned(), DRAIN_GRACE.to_owned()]);
        let mut flag = |flag: &str, value: &str| args.extend([flag.to_owned(), value.to_owned()]);
        let role = if PROXIES.contains(&name) {
            flag("--http", &http);
            ENCODERS.iter().for_each(|n| flag("--encoder", &format!("{}:{GRPC}", self.net.address(n))));
            PDS.iter().for_each(|n| flag("--pd", &format!("{}:{GRPC}", self.net.address(n))));
            "proxy"
        } else {
            flag("--admin", &http);
            flag("--threads", "1");
            self.models.iter().for_each(|model| flag("--model", model.to_str().expect("a plain path")));
            args.push("--insecure-plaintext".to_owned());
            if ENCODERS.contains(&name) { "encoder" } else { "pd" }
        };
        args.insert(0, role.to_owned());
        let namespace = self.net.namespace(name);
        let process = Process::start_in(&namespace, &args, &self.s3.environment());
        self.members.push(Member { name, process });
    }
}

/// A copy of the vision sample model with a longer context.
fn with_long_context(folder: &Path) -> PathBuf {
    const MODEL: &str = "shapes-qwen2-vl";
    let sample = models_dir().join(MODEL);
    let ours = folder.join(MODEL);
    fs::create_dir(&ours).expect("a folder");
    for entry in fs::read_dir(&sample).expect("the sample model") {
        let entry = entry.expect("the sample model");
        symlink(entry.path(), ours.join(entry.file_name())).expect("a link");
    }
    let config = fs::read(sample.join("config.json")).expect("its config");
    let mut config: Value = serde_json::from_slice(&config).expect("its config");
    config["text_config"]["max_position_embeddings"] = json!(LONG_CONTEXT);
    fs::remove_file(ours.join("config.json")).expect("a link");
    fs::write(ours.join("config.json"), config.to_string()).expect("a file");
    ours
}
