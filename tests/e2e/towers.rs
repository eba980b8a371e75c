//! A model of two towers whose encoder workers hold one each: an image has a job at both, and either can die alone.

use serde_json::{Value, json};
use std::path::PathBuf;
use triptych_tests::cluster::{reqwest_client, sum_series};
use triptych_tests::process::{Process, eventually, free_port, signal};
use triptych_tests::samples::data_url;

const CASE: &str = "cogagent_chat";

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden").join(CASE)
}

fn expected() -> Value {
    serde_json::from_slice(&std::fs::read(golden().join("expected.json")).expect("a file")).expect("JSON")
}

/// An encoder worker that holds one tower.
struct Tower {
    name: &'static str,
    grpc: String,
    admin: String,
    process: Process,
}

impl Tower {
    fn start(name: &'static str, ec: &str) -> Self {
        let [grpc, admin] = [(); 2].map(|()| format!("127.0.0.1:{}", free_port()));
        let process = Self::spawn(name, ec, [&grpc, &admin]);
        Self { name, grpc, admin, process }
    }

    fn spawn(name: &str, ec: &str, [grpc, admin]: [&str; 2]) -> Process {
        let model = format!("{CASE}={}", golden().join("model").display());
        let at = ["encoder", "--grpc", grpc, "--admin", admin, "--ec", ec];
        Process::start(&[&at[..], &["--model", &model, "--towers", name]].concat())
    }

    /// Kills it and starts another in its place.
    fn replace(&mut self, ec: &str) {
        signal(self.process.pid(), "KILL");
        self.process = Self::spawn(self.name, ec, [&self.grpc, &self.admin]);
    }

    /// Sum of a metric.
    async fn metric(&self, name: &str) -> Option<f64> {
        let text = reqwest_client().get(format!("http://{}/metrics", self.admin)).send().await.ok()?;
        Some(sum_series(&text.text().await.ok()?, name))
    }

    async fn n_encodes(&self) -> f64 {
        self.metric("triptych_encodes_total").await.unwrap_or_default()
    }
}

async fn is_ready(http: &str) -> bool {
    let answer = reqwest_client().get(format!("{http}/readyz")).send().await;
    answer.is_ok_and(|answer| answer.status().is_success())
}

/// The answer to a prompt of the reference, as text.
async fn answer(http: &str, prompt: &Value, image: Value) -> String {
    let text = |text: &Value| json!({"type": "text", "text": text});
    let body = json!({
        "model": CASE, "messages": [{"role": "user", "content": [image, text(&prompt["text"])]}], "temperature": 0,
        "max_tokens": prompt["greedy_tokens"].as_array().expect("ids").len(),
    });
    let sent = reqwest_client().post(format!("{http}/v1/chat/completions")).json(&body).send().await;
    let answer: Value = sent.expect("the proxy answers").json().await.expect("JSON");
    answer["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
}

/// The image of a prompt as a part of a message; bytes behind the file make another item of it.
fn image(expected: &Value, prompt: &Value, behind: &[u8]) -> Value {
    let name = prompt["images"][0].as_str().expect("a name");
    let file = expected["images"][name]["file"].as_str().expect("a file");
    let bytes = [&std::fs::read(golden().join(file)).expect("an image"), behind].concat();
    json!({"type": "image_url", "image_url": {"url": data_url(&bytes)}})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_tower_is_a_job_of_its_own_and_one_that_dies_is_done_again_alone() {
    let [store, http, grpc, pd] = [(); 4].map(|()| format!("127.0.0.1:{}", free_port()));
    let _store = Process::start(&["store", "--grpc", &store]);
    eventually("the store listens", async || tokio::net::TcpStream::connect(&store).await.ok()).await;
    let ec = format!("grpc://{store}");
    let model = format!("{CASE}={}", golden().join("model").display());
    let _pd = Process::start(&["pd", "--grpc", &pd, "--ec", &ec, "--model", &model]);
    let low = Tower::start("low", &ec);
    let mut high = Tower::start("high", &ec);
    // The encoder of the second tower holds nothing of the first one's work.
    let at = ["proxy", "--http", &http, "--grpc", &grpc, "--ec", &ec];
    let workers = ["--pd", &pd, "--encoder", &low.grpc, "--encoder", &high.grpc];
    let _proxy = Process::start(&[&at[..], &workers].concat());
    let http = format!("http://{http}");
    eventually("both towers are there", async || is_ready(&http).await.then_some(())).await;

    let expected = expected();
    let prompts = expected["prompts"].as_array().expect("prompts");
    let plain = |prompt: &&Value| prompt["history"].as_array().is_none_or(Vec::is_empty);
    let prompt = prompts.iter().find(plain).expect("a prompt without history");
    let text = prompt["greedy_text"].as_str().expect("a text");
    assert_eq!(answer(&http, prompt, image(&expected, prompt, b"")).await, text);
    assert_eq!([low.n_encodes().await, high.n_encodes().await], [1.0, 1.0]);

    // Stopped, it has a job that it can never end; the other tower's job ends meanwhile.
    signal(high.process.pid(), "STOP");
    let (asked, again) = (prompt.clone(), image(&expected, prompt, b"again"));
    let address = http.clone();
    let waiting = tokio::spawn(async move { answer(&address, &asked, again).await });
    eventually("the first tower is done", async || (low.n_encodes().await >= 2.0).then_some(())).await;
    assert!(!waiting.is_finished(), "no answer without the second tower");
    high.replace(&ec);
    assert_eq!(waiting.await.expect("no panic"), text);
    assert_eq!([low.n_encodes().await, high.n_encodes().await], [2.0, 1.0], "nothing was encoded twice");

    // Without one of them the model is not ready.
    signal(high.process.pid(), "KILL");
    eventually("a tower is missing", async || (!is_ready(&http).await).then_some(())).await;
}
