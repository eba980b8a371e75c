//! Mixed requests whose right answers are known, and what became of each.

use crate::fleet::{Fleet, PROXIES};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tonic::transport::Channel;
use triptych_proto::v1;
use triptych_proto::v1::triptych_client::TriptychClient;
use triptych_tests::client::{about_images, about_sound, connect, generate};
use triptych_tests::cluster::reqwest_client;
use triptych_tests::samples::{ask_images, heldout, list};

/// What the cluster gives a request by default, and how much later its end may be here.
const TIME: Duration = Duration::from_secs(120);
const LATE: Duration = Duration::from_secs(30);

/// Tokens of an answer at length.
const AT_LENGTH: u32 = 2000;

const VISION: &str = "shapes-qwen2-vl";
const SPEECH: &str = "digits-whisper";

/// A request that is asked again and again.
#[derive(Clone)]
pub struct Question {
    pub name: String,
    message: v1::GenerateRequest,
    /// The same over HTTP, for those that can be asked so.
    body: Option<Value>,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// Right and whole.
    Right,
    /// Another text than that of an undisturbed run.
    Wrong(String),
    /// A failure with a class and, where another try makes sense, a pause.
    Typed(String),
    /// Neither: no end in time, or a stream that just stopped.
    Lost(String),
}

/// All the questions: pictures, pairs of pictures, sounds, text, with and without luck.
pub fn questions() -> Vec<Question> {
    let mut all = Vec::new();
    let text = |line: &Value, key: &str| line[key].as_str().expect("text").to_owned();
    for (i, line) in list("scenes.jsonl").iter().take(16).enumerate() {
        let (file, question) = (text(line, "file"), text(line, "question"));
        let picture = heldout(&file);
        let mut message = about_images(&question, vec![picture.clone()]);
        message.model = VISION.into();
        let mut body = ask_images(VISION, &question, &[&picture]);
        if i % 3 == 0 {
            // Drawn by lot, but from a seed: the same on every worker.
            message.sampling =
                Some(v1::Sampling { temperature: Some(0.8), seed: Some(i as u64), ..Default::default() });
            body["temperature"] = json!(0.8);
            body["seed"] = json!(i);
        }
        all.push(Question { name: file, message, body: Some(body) });
    }
    for line in list("scenes.jsonl").iter().skip(16).take(4) {
        // Streams that last, for something to happen in the middle of them.
        let file = text(line, "file");
        let mut message = about_images(&text(line, "question"), vec![heldout(&file)]);
        message.model = VISION.into();
        message.sampling = Some(v1::Sampling {
            ignore_eos: true,
            temperature: Some(0.0),
            max_tokens: Some(AT_LENGTH),
            ..Default::default()
        });
        all.push(Question { name: format!("{file}, at length"), message, body: None });
    }
    for line in list("pairs.jsonl").iter().take(6) {
        let files: Vec<_> =
            line["files"].as_array().expect("files").iter().map(|f| f.as_str().expect("a file")).collect();
        let mut message = about_images(&text(line, "question"), files.iter().map(|f| heldout(f)).collect());
        message.model = VISION.into();
        all.push(Question { name: files.join(" and "), message, body: None });
    }
    for line in list("digits.jsonl").iter().take(12) {
        let file = text(line, "file");
        let mut message = about_sound(heldout(&file), v1::SpeechTask::default());
        message.model = SPEECH.into();
        all.push(Question { name: file, message, body: None });
    }
    for line in list("chat.jsonl").iter().take(4) {
        let question = text(line, "question");
        let mut message = about_images(&question, Vec::new());
        message.model = VISION.into();
        let body = ask_images(VISION, &question, &[]);
        all.push(Question { name: question, message, body: Some(body) });
    }
    all
}

/// Connections to both proxies.
pub struct Clients {
    grpc: Vec<TriptychClient<Channel>>,
    http: Vec<String>,
    client: reqwest::Client,
}

impl Clients {
    pub async fn connect(fleet: &Fleet) -> Self {
        let mut grpc = Vec::new();
        for proxy in PROXIES {
            grpc.push(connect(&fleet.grpc(proxy)).await);
        }
        let http = PROXIES.iter().map(|proxy| fleet.http(proxy)).collect();
        Self { grpc, http, client: reqwest_client() }
    }

    /// Asks over gRPC; the text or the failure.
    async fn over_grpc(&self, question: &Question, proxy: usize, n: usize) -> Result<String, End> {
        let mut client = self.grpc[proxy].clone();
        let mut message = question.message.clone();
        if n.is_multiple_of(2) {
            // Bytes after a picture's end change its key and not what is seen: this one has to be encoded.
            for item in message.items.iter_mut().filter(|item| item.modality == v1::Modality::Image as i32) {
                if let Some(v1::item::Source::Data(data)) = &mut item.source {
                    *data = [&data[..], &n.to_le_bytes()].concat().into();
                }
            }
        }
        generate(&mut client, message).await.map(|answer| answer.text).map_err(|status| {
            let said = format!("{:?}: {}", status.code(), status.message());
            // The mark of an answer that the cluster gave, as against one of the transport.
            if status.metadata().contains_key("triptych-class") { End::Typed(said) } else { End::Lost(said) }
        })
    }

    /// Asks over HTTP and reads the stream of events to its end.
    async fn over_http(&self, body: &Value, proxy: usize) -> Result<String, End> {
        let mut body = body.clone();
        body["stream"] = json!(true);
        let asked = self.client.post(format!("{}/v1/chat/completions", self.http[proxy])).json(&body);
        let lost = |e: reqwest::Error| End::Lost(format!("the connection broke: {e}"));
        let response = asked.timeout(TIME + LATE).send().await.map_err(lost)?;
        let status = response.status();
        let text = response.text().await.map_err(lost)?;
        if !status.is_success() {
            let error: Value =
                serde_json::from_str(&text).map_err(|_| End::Lost(format!("{status}: {text}")))?;
            return Err(End::Typed(format!("{status}: {}", error["error"]["message"])));
        }
        let (mut answer, mut done) = (String::new(), false);
        for data in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
            if data == "[DONE]" {
                done = true;
                continue;
            }
            let event: Value =
                serde_json::from_str(data).map_err(|e| End::Lost(format!("an event is no JSON: {e}")))?;
            if let Some(error) = event["error"]["message"].as_str() {
                return Err(End::Typed(error.to_owned()));
            }
            answer.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
        }
        if done { Ok(answer) } else { Err(End::Lost("the events just stopped".into())) }
    }

    /// Asks question number `n`, over one face or the other.
    pub async fn ask(&self, question: &Question, n: usize) -> Result<String, End> {
        let proxy = n % PROXIES.len();
        let work = async {
            match &question.body {
                Some(body) if n % 4 >= 2 => self.over_http(body, proxy).await,
                _ => self.over_grpc(question, proxy, n).await,
            }
        };
        let ended = tokio::time::timeout(TIME + LATE, work).await;
        ended.unwrap_or_else(|_| Err(End::Lost("it never ended".into())))
    }
}

/// What became of the load.
#[derive(Default)]
pub struct Tally {
    pub ends: BTreeMap<&'static str, usize>,
    /// The first of each kind of failure, with how many there were.
    pub failures: BTreeMap<String, usize>,
    pub wrong: Vec<String>,
    pub lost: Vec<String>,
    pub latencies: Vec<Duration>,
}

impl Tally {
    /// Counts one end.
    pub fn count(&mut self, question: &str, end: End, started: Instant) {
        let word = match end {
            End::Right => {
                self.latencies.push(started.elapsed());
                "right"
            }
            End::Wrong(text) => {
                self.wrong.push(format!("{question}: {text}"));
                "wrong"
            }
            End::Typed(what) => {
                *self.failures.entry(what).or_default() += 1;
                "typed error"
            }
            End::Lost(what) => {
                self.lost.push(format!("{question}: {what}"));
                "lost"
            }
        };
        *self.ends.entry(word).or_default() += 1;
    }

    pub fn n(&self, word: &str) -> usize {
        self.ends.get(word).copied().unwrap_or(0)
    }

    /// The latency that this share of the right answers did not pass.
    pub fn percentile(&mut self, share: f64) -> Duration {
        self.latencies.sort();
        let last = self.latencies.len().saturating_sub(1);
        self.latencies.get((last as f64 * share) as usize).copied().unwrap_or_default()
    }
}
