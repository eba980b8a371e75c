//! A mixed load with known answers, and the outcome of each request.

use crate::fleet::Fleet;
use crate::names::PROXIES;
use crate::proxies::ProxyEnds;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tonic::Status;
use tonic::transport::Channel;
use triptych_proto::v1;
use triptych_proto::v1::generate_response::Kind;
use triptych_proto::v1::triptych_client::TriptychClient;
use triptych_tests::client::{about_audio, about_images, connect};
use triptych_tests::cluster::reqwest_client;
use triptych_tests::samples::{ask_images, heldout, list};

/// Default deadline of a request.
const DEADLINE: Duration = Duration::from_secs(120);
/// Margin after which its end must have reached the client.
const MARGIN: Duration = Duration::from_secs(30);

/// Pause of a client before it sends a request again.
const AGAIN_PAUSE: Duration = Duration::from_millis(200);

/// Tokens of a long answer.
const LONG_ANSWER_TOKENS: u32 = 2000;

const VISION: &str = "shapes-qwen2-vl";
const SPEECH: &str = "digits-whisper";

/// A request that is repeated throughout the run.
#[derive(Clone)]
pub struct Question {
    pub name: String,
    message: v1::GenerateRequest,
    /// The same request over HTTP, if it has an HTTP form.
    body: Option<Value>,
    /// True if its answer is long.
    pub is_long: bool,
}

/// Outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RequestEnd {
    /// Correct and complete.
    Correct,
    /// Another text than in an undisturbed run.
    Wrong(String),
    /// A failure with a class, and a pause if it is retryable.
    Typed(String),
    /// No end in time, or a stream that broke off.
    Lost(String),
}

/// All questions: images, pairs of images, audio clips, text; greedy and sampled.
pub fn questions() -> Vec<Question> {
    let mut all = Vec::new();
    let text = |line: &Value, key: &str| line[key].as_str().expect("text").to_owned();
    for (i, line) in list("scenes.jsonl").iter().take(16).enumerate() {
        let file = text(line, "file");
        let question = text(line, "question");
        let image = heldout(&file);
        let mut message = about_images(&question, vec![image.clone()]);
        message.model = VISION.into();
        let mut body = ask_images(VISION, &question, &[&image]);
        if i % 3 == 0 {
            // Sampled with a seed: the same on every worker.
            message.sampling =
                Some(v1::Sampling { temperature: Some(0.8), seed: Some(i as u64), ..Default::default() });
            body["temperature"] = json!(0.8);
            body["seed"] = json!(i);
        }
        all.push(Question { name: file, message, body: Some(body), is_long: false });
    }
    for line in list("scenes.jsonl").iter().skip(16).take(4) {
        // Long streams, for faults in the middle of them.
        let file = text(line, "file");
        let mut message = about_images(&text(line, "question"), vec![heldout(&file)]);
        message.model = VISION.into();
        message.sampling = Some(v1::Sampling {
            ignore_eos: true,
            temperature: Some(0.0),
            max_tokens: Some(LONG_ANSWER_TOKENS),
            ..Default::default()
        });
        all.push(Question { name: format!("{file}, at length"), message, body: None, is_long: true });
    }
    for line in list("pairs.jsonl").iter().take(6) {
        let files: Vec<_> =
            line["files"].as_array().expect("files").iter().map(|f| f.as_str().expect("a file")).collect();
        let mut message = about_images(&text(line, "question"), files.iter().map(|f| heldout(f)).collect());
        message.model = VISION.into();
        all.push(Question { name: files.join(" and "), message, body: None, is_long: false });
    }
    for line in list("digits.jsonl").iter().take(12) {
        let file = text(line, "file");
        let mut message = about_audio(heldout(&file), v1::SpeechTask::default());
        message.model = SPEECH.into();
        all.push(Question { name: file, message, body: None, is_long: false });
    }
    for line in list("chat.jsonl").iter().take(4) {
        let question = text(line, "question");
        let mut message = about_images(&question, Vec::new());
        message.model = VISION.into();
        let body = ask_images(VISION, &question, &[]);
        all.push(Question { name: question, message, body: Some(body), is_long: false });
    }
    all
}

/// A request that did not get its answer.
enum Failed {
    /// A failure with a class.
    Typed(String),
    /// The connection broke, or was never made.
    Broken {
        what: String,
        /// True if the proxy had accepted the request.
        is_begun: bool,
    },
}

impl Failed {
    fn status(status: &Status, is_begun: bool) -> Self {
        let what = format!("{:?}: {}", status.code(), status.message());
        // Failures of the cluster carry a class; those of the transport do not.
        match status.metadata().contains_key("triptych-class") {
            true => Self::Typed(what),
            false => Self::Broken { what, is_begun },
        }
    }
}

/// A request that ended, for its client.
pub struct Asked {
    pub answer: Result<String, RequestEnd>,
    /// Times that the client sent it again, since its proxy was killed or being replaced.
    pub n_again: usize,
}

/// Connections to both proxies.
pub struct Clients {
    ends: Arc<ProxyEnds>,
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
        Self { ends: Arc::clone(&fleet.ends), grpc, http, client: reqwest_client() }
    }

    /// Asks over gRPC; the text or the failure.
    async fn over_grpc(&self, question: &Question, proxy: usize, n: usize) -> Result<String, Failed> {
        let mut client = self.grpc[proxy].clone();
        let mut message = question.message.clone();
        if n.is_multiple_of(2) {
            // Bytes after the end of an image change its key and not its pixels: it has to be encoded.
            for item in message.items.iter_mut().filter(|item| item.modality == v1::Modality::Image as i32) {
                if let Some(v1::item::Source::Data(data)) = &mut item.source {
                    *data = [&data[..], &n.to_le_bytes()].concat().into();
                }
            }
        }
        let opened = client.generate(message).await.map_err(|status| Failed::status(&status, false))?;
        let (mut stream, mut answer) = (opened.into_inner(), String::new());
        while let Some(message) = stream.message().await.map_err(|status| Failed::status(&status, true))? {
            match message.kind {
                Some(Kind::Delta(delta)) => answer.push_str(&delta.text),
                Some(Kind::Summary(_)) => return Ok(answer),
                _ => {}
            }
        }
        Err(Failed::Broken { what: "it ended without a summary".into(), is_begun: true })
    }

    /// Asks over HTTP and reads the stream of events to its end.
    async fn over_http(&self, body: &Value, proxy: usize) -> Result<String, Failed> {
        let mut body = body.clone();
        body["stream"] = json!(true);
        let asked = self.client.post(format!("{}/v1/chat/completions", self.http[proxy])).json(&body);
        let broken = |what: String| Failed::Broken { what, is_begun: true };
        let response = asked.timeout(DEADLINE + MARGIN).send().await;
        let response = response.map_err(|e| Failed::Broken { what: e.to_string(), is_begun: false })?;
        let status = response.status();
        let text = response.text().await.map_err(|e| broken(format!("the connection broke: {e}")))?;
        if !status.is_success() {
            let error: Value =
                serde_json::from_str(&text).map_err(|_| broken(format!("{status}: {text}")))?;
            return Err(Failed::Typed(format!("{status}: {}", error["error"]["message"])));
        }
        let mut answer = String::new();
        let mut done = false;
        for data in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
            if data == "[DONE]" {
                done = true;
                continue;
            }
            let event: Value =
                serde_json::from_str(data).map_err(|e| broken(format!("an event is no JSON: {e}")))?;
            if let Some(error) = event["error"]["message"].as_str() {
                return Err(Failed::Typed(error.to_owned()));
            }
            answer.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
        }
        if done { Ok(answer) } else { Err(broken("the stream broke off".into())) }
    }

    /// Sends question number `n` over gRPC or HTTP, and, as a client that has two addresses does, to the other proxy if
    /// the first was killed meanwhile, or is being replaced and did not take it.
    pub async fn ask(&self, question: &Question, n: usize) -> Asked {
        let mut n_again = 0;
        let work = async {
            loop {
                let proxy = (n + n_again) % PROXIES.len();
                let before = self.ends.seen(proxy);
                let answer = match &question.body {
                    Some(body) if n % 4 >= 2 => self.over_http(body, proxy).await,
                    _ => self.over_grpc(question, proxy, n).await,
                };
                match answer {
                    Ok(text) => return Ok(text),
                    Err(Failed::Typed(what)) => return Err(RequestEnd::Typed(what)),
                    Err(Failed::Broken { is_begun, .. }) if self.ends.excuses(proxy, before, is_begun) => {
                        n_again += 1;
                        tokio::time::sleep(AGAIN_PAUSE).await;
                    }
                    Err(Failed::Broken { what, .. }) => {
                        let what =
                            format!("{what}; {}: {before:?} → {:?}", PROXIES[proxy], self.ends.seen(proxy));
                        return Err(RequestEnd::Lost(what));
                    }
                }
            }
        };
        let ended = tokio::time::timeout(DEADLINE + MARGIN, work).await;
        let answer = ended.unwrap_or_else(|_| Err(RequestEnd::Lost("it never ended".into())));
        Asked { answer, n_again }
    }
}

/// Outcomes of the load.
#[derive(Default)]
pub struct LoadStats {
    /// Requests by outcome.
    pub ends: BTreeMap<&'static str, usize>,
    /// Typed failures by text.
    pub failures: BTreeMap<String, usize>,
    pub wrong: Vec<String>,
    pub lost: Vec<String>,
    pub latencies: Vec<Duration>,
    /// Requests that their client sent again, since its proxy was killed or being replaced.
    pub n_again: usize,
}

impl LoadStats {
    /// Counts one outcome.
    pub fn count(&mut self, question: &str, end: RequestEnd, n_again: usize, started: Instant) {
        self.n_again += n_again;
        let word = match end {
            RequestEnd::Correct => {
                self.latencies.push(started.elapsed());
                "correct"
            }
            RequestEnd::Wrong(text) => {
                self.wrong.push(format!("{question}: {text}"));
                "wrong"
            }
            RequestEnd::Typed(what) => {
                *self.failures.entry(what).or_default() += 1;
                "typed error"
            }
            RequestEnd::Lost(what) => {
                self.lost.push(format!("{question}: {what}"));
                "lost"
            }
        };
        *self.ends.entry(word).or_default() += 1;
    }

    pub fn n(&self, word: &str) -> usize {
        self.ends.get(word).copied().unwrap_or(0)
    }

    /// Latency percentile of the correct answers; `share` from 0 to 1.
    pub fn percentile(&mut self, share: f64) -> Duration {
        self.latencies.sort();
        let last = self.latencies.len().saturating_sub(1);
        self.latencies.get((last as f64 * share) as usize).copied().unwrap_or_default()
    }
}
