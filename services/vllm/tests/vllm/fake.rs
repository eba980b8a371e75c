//! A fake vLLM server: HTTP/1.1 by hand, so that it can misbehave in every way. It records what it is asked for.

use crate::connector::Connector;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// Name of the only model.
pub const MODEL: &str = "vl";

/// Reaction to the next request of the model.
#[derive(Clone)]
pub enum Step {
    /// A whole answer with a status.
    Status(u16, String),
    /// Pieces of a stream of events, and its end.
    Stream(Vec<String>),
    /// Pieces of a stream; then the connection is closed in the middle.
    Cut(Vec<String>),
    /// Pieces of a stream; then nothing, until the caller is gone.
    Hold(Vec<String>),
}

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Asked {
    pub path: String,
    pub headers: BTreeMap<String, String>,
    pub body: Value,
}

#[derive(Default)]
struct Record {
    asked: Mutex<Vec<Asked>>,
    script: Mutex<VecDeque<Step>>,
    models: Mutex<Option<Value>>,
    /// More lines of its metrics.
    metrics: Mutex<String>,
    /// Its EC connector; a scripted answer publishes nothing.
    connector: OnceLock<Connector>,
    /// Requests whose caller went away while they were held.
    n_dropped: AtomicUsize,
    is_dead: std::sync::atomic::AtomicBool,
}

/// A fake vLLM server. Dropping it closes all its connections.
pub struct Vllm {
    pub address: SocketAddr,
    record: Arc<Record>,
    server: JoinHandle<()>,
}

impl Drop for Vllm {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Vllm {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let record = Arc::<Record>::default();
        let server = tokio::spawn(serve(listener, Arc::clone(&record)));
        Self { address, record, server }
    }

    /// The address as `--pd` has it.
    pub fn setting(&self, options: &str) -> String {
        format!("vllm+http://{}{options}", self.address)
    }

    pub fn script(&self, steps: impl IntoIterator<Item = Step>) {
        self.record.script.lock().unwrap().extend(steps);
    }

    /// Forgets what was not answered yet.
    pub fn clear_script(&self) {
        self.record.script.lock().unwrap().clear();
    }

    /// Answers `/v1/models` with this.
    pub fn serve_models(&self, models: Value) {
        *self.record.models.lock().unwrap() = Some(models);
    }

    /// Has an EC connector that publishes under the proxy's keys, and says so.
    pub fn publish(&self, connector: Connector) {
        *self.record.metrics.lock().unwrap() = connector.metrics();
        assert!(self.record.connector.set(connector).is_ok());
    }

    /// Requests of the model so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.record.asked.lock().unwrap().clone()
    }

    pub fn n_dropped(&self) -> usize {
        self.record.n_dropped.load(Ordering::SeqCst)
    }

    /// Its engine died: probes fail, the process lives.
    pub fn lose_engine(&self) {
        self.record.is_dead.store(true, Ordering::SeqCst);
    }

    /// Closes the listener and every connection.
    pub fn kill(&self) {
        self.server.abort();
    }
}

async fn serve(listener: TcpListener, record: Arc<Record>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        connections.spawn(connection(stream, Arc::clone(&record)));
    }
}

async fn connection(mut stream: TcpStream, record: Arc<Record>) {
    while let Some(asked) = read_request(&mut stream).await {
        let alive = if record.is_dead.load(Ordering::SeqCst) { 503 } else { 200 };
        let answered = match asked.path.as_str() {
            "/health" => whole(&mut stream, alive, "").await,
            "/v1/models" => {
                let models = record.models.lock().unwrap().clone().unwrap_or_else(models);
                whole(&mut stream, 200, &models.to_string()).await
            }
            "/metrics" => {
                let text =
                    "vllm:num_requests_running{engine=\"0\"} 1.0\nprocess_start_time_seconds 1.7e+09\n";
                let text = text.to_owned() + &record.metrics.lock().unwrap().clone();
                whole(&mut stream, 200, &text).await
            }
            "/tokenize" => {
                let tokens = json!({"count": 2, "max_model_len": 512, "tokens": [5, 6], "token_strs": null});
                whole(&mut stream, 200, &tokens.to_string()).await
            }
            _ => {
                record.asked.lock().unwrap().push(asked.clone());
                let step = record.script.lock().unwrap().pop_front();
                let step = match (step, record.connector.get()) {
                    (None, Some(connector)) => Some(Step::Status(200, connector.encode(&asked.body).await)),
                    (step, _) => step,
                };
                answer(&mut stream, step.unwrap_or_else(|| Step::Stream(hello())), &record).await
            }
        };
        if answered.is_none() {
            return;
        }
    }
}

fn models() -> Value {
    json!({"object": "list", "data": [{
        "id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "vllm", "root": "/models/vl",
        "parent": null, "max_model_len": 512, "permission": [],
    }]})
}

async fn read_request(stream: &mut TcpStream) -> Option<Asked> {
    let mut bytes = Vec::new();
    let head_len = loop {
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break end;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(bytes[..head_len].to_vec()).unwrap();
    let mut lines = head.lines();
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    let headers: BTreeMap<_, _> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let len: usize = headers.get("content-length").map_or(0, |len| len.parse().unwrap());
    let mut body = bytes.split_off(head_len + 4);
    while body.len() < len {
        if stream.read_buf(&mut body).await.ok()? == 0 {
            return None;
        }
    }
    Some(Asked { path, headers, body: serde_json::from_slice(&body).unwrap_or_default() })
}

/// `None` when the connection is to be closed.
async fn answer(stream: &mut TcpStream, step: Step, record: &Record) -> Option<()> {
    let (pieces, end) = match &step {
        Step::Status(code, body) => return whole(stream, *code, body).await,
        Step::Stream(pieces) => (pieces, "0\r\n\r\n"),
        Step::Cut(pieces) | Step::Hold(pieces) => (pieces, ""),
    };
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await.ok()?;
    for piece in pieces {
        let chunk = format!("{:x}\r\n{piece}\r\n", piece.len());
        stream.write_all(chunk.as_bytes()).await.ok()?;
    }
    stream.write_all(end.as_bytes()).await.ok()?;
    match step {
        Step::Stream(_) => Some(()),
        Step::Hold(_) => {
            let mut byte = [0];
            if stream.read(&mut byte).await.unwrap_or(0) == 0 {
                record.n_dropped.fetch_add(1, Ordering::SeqCst);
            }
            None
        }
        Step::Cut(_) | Step::Status(..) => None,
    }
}

async fn whole(stream: &mut TcpStream, code: u16, body: &str) -> Option<()> {
    let head = format!("HTTP/1.1 {code} X\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(head.as_bytes()).await.ok()
}

/// An event.
pub fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// A piece of a chat's first choice.
pub fn piece(text: &str, token: u32, finish: Option<&str>) -> String {
    event(&json!({
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL,
        "choices": [{
            "index": 0, "delta": {"content": text}, "logprobs": null, "finish_reason": finish,
            "stop_reason": null, "token_ids": [token],
        }],
    }))
}

/// The first chunk of a chat.
pub fn role() -> String {
    event(&json!({
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL,
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null}],
        "prompt_token_ids": [1, 2, 3],
    }))
}

/// The last chunk, and the end.
pub fn usage(prompt: u32, completion: u32) -> String {
    let usage = json!({
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 1},
    });
    let last = json!({"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": MODEL, "choices": [], "usage": usage});
    event(&last) + "data: [DONE]\n\n"
}

/// A whole answer: "Hello" in two tokens.
pub fn hello() -> Vec<String> {
    vec![role(), piece("Hel", 7, None), piece("lo", 8, Some("stop")), usage(3, 2)]
}
