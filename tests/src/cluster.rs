//! A whole cluster, started as a user starts it: `triptych up`.

use crate::process::{Process, binary, children_of, eventually, free_port};
use serde_json::Value;
use std::ffi::OsString;
use std::process::Command;

/// A running cluster. Drop kills all its processes.
pub struct Cluster {
    pub up: Process,
    pub http: String,
    pub grpc: String,
}

impl Cluster {
    /// Runs `triptych up` on free ports with further arguments, and waits for `/readyz`.
    pub async fn start(args: &[&str]) -> Self {
        Self::start_with(args, &[]).await
    }

    /// The same with further variables.
    pub async fn start_with(args: &[&str], variables: &[(&str, OsString)]) -> Self {
        let http = format!("127.0.0.1:{}", free_port());
        let grpc = format!("127.0.0.1:{}", free_port());
        let mut all = vec!["up", "--http", &http, "--grpc", &grpc];
        all.extend_from_slice(args);
        let variables = variables.iter().map(|(name, value)| (name, value));
        let up = Process::spawn(Command::new(binary()).args(&all).envs(variables));
        let mut cluster = Self { up, http: format!("http://{http}"), grpc: format!("http://{grpc}") };
        cluster.wait_ready().await;
        cluster
    }

    /// Waits for `/readyz`.
    pub async fn wait_ready(&mut self) {
        let url = format!("{}/readyz", self.http);
        let client = reqwest_client();
        let up = &mut self.up;
        eventually("the cluster is ready", async || {
            assert!(up.exited().is_none(), "`up` ended early:\n{}", up.log());
            client.get(&url).send().await.ok().filter(|r| r.status().is_success())
        })
        .await;
    }

    /// Process ids of a role: `proxy`, `encoder`, `pd`, `store`.
    pub fn pids(&self, role: &str) -> Vec<u32> {
        children_of(self.up.pid(), role)
    }

    /// The only process of a role.
    pub fn pid(&self, role: &str) -> u32 {
        let pids = self.pids(role);
        assert_eq!(pids.len(), 1, "one {role}");
        pids[0]
    }

    /// Waits until a role has a process other than `old` and the cluster is ready.
    pub async fn wait_replaced(&mut self, role: &str, old: u32) {
        let up = self.up.pid();
        eventually("the worker is replaced", async || {
            children_of(up, role).into_iter().find(|pid| *pid != old)
        })
        .await;
        self.wait_ready().await;
    }

    /// Address of a worker's `/metrics`, as the log gives it for its newest process: `encoder-0`, `pd-0`.
    pub fn admin(&self, worker: &str) -> String {
        let log = self.up.log();
        let started = log.lines().rev().find(|l| l.contains(&format!("{worker} started")));
        let url = started.and_then(|l| l.split_whitespace().find(|word| word.starts_with("http://")));
        url.unwrap_or_else(|| panic!("no address of {worker} in\n{log}"))
            .trim_end_matches("/metrics")
            .to_owned()
    }

    /// Metrics of a worker, or of the proxy (`proxy`), as text.
    pub async fn metrics(&self, worker: &str) -> String {
        let base = if worker == "proxy" { self.http.clone() } else { self.admin(worker) };
        let response = reqwest_client().get(format!("{base}/metrics")).send().await.expect("metrics");
        response.text().await.expect("text")
    }

    /// Sum over all series of a metric of a worker.
    pub async fn metric(&self, worker: &str, name: &str) -> f64 {
        sum_series(&self.metrics(worker).await, name)
    }

    /// A chat request over HTTP; status and body.
    pub async fn chat(&self, body: Value) -> (u16, Value) {
        let response = reqwest_client()
            .post(format!("{}/v1/chat/completions", self.http))
            .json(&body)
            .send()
            .await
            .expect("the proxy answers");
        let status = response.status().as_u16();
        let text = response.text().await.expect("a body");
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }
}

/// Sum over all series of a metric in Prometheus text.
pub fn sum_series(text: &str, name: &str) -> f64 {
    let series = text.lines().filter(|l| !l.starts_with('#'));
    let named = series.filter(|l| l.split(['{', ' ']).next() == Some(name));
    named.filter_map(|l| l.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

/// An HTTP client without proxies, with its TLS provider installed.
pub fn reqwest_client() -> reqwest::Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().no_proxy().build().expect("a client")
}
