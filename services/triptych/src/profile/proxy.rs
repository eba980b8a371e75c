//! What the proxy adds: the same work through a real proxy process and straight to workers that take no time, in turn.
//!
//! A request, an item and its bytes are waited for, so their cost is how much later the answer is. Tokens are passed on
//! while others are on their way, so theirs is processor time of the proxy. Beside it stands what all that is not a
//! worker's compute takes away from one that computes on the same cores ([`Computing`]): this process is client and
//! network side of the workers, so it counts with the proxy.

use super::broken;
use super::displaced::Computing;
use super::null::{MODEL, fingerprint, start};
use crate::error::CliError;
use crate::listen::Ports;
use indicatif::ProgressBar;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tonic::Status;
use tonic::transport::Channel;
use triptych_core::Modality;
use triptych_plan::curves::{FrontCost, ProxyCost};
use triptych_plan::profile::Spread;
use triptych_proto::v1;
use triptych_proto::v1::encoder_worker_client::EncoderWorkerClient;
use triptych_proto::v1::prefill_decode_worker_client::PrefillDecodeWorkerClient;
use triptych_proto::v1::triptych_client::TriptychClient;
use triptych_runtime::grpc;

/// Items, small and large, in bytes.
const ITEMS: [usize; 2] = [4 << 10, 1 << 20];
/// Tokens of a long answer.
const TOKENS: u32 = 256;
/// Answers on their way at once while what tokens take is measured: of one alone each is a step, with more of them a step
/// has as many.
const STREAMS: [usize; 2] = [1, 8];
/// Clients at once while what requests take is measured.
const N_CLIENTS: usize = 8;
/// Requests of each.
const N_REQUESTS: usize = 4;
/// How long processes may take to be there.
const START: Duration = Duration::from_secs(60);
/// Between two looks whether they are.
const PAUSE: Duration = Duration::from_millis(50);

/// A kind of request: bytes of its item, tokens of its answer.
#[derive(Clone, Copy)]
struct Kind {
    item: Option<usize>,
    tokens: u32,
}

/// Measures it; `rounds` times ten requests of each kind.
pub async fn measure(
    rounds: u32,
    quick: bool,
    bar: &ProgressBar,
) -> Result<(ProxyCost, FrontCost), CliError> {
    let worker = start().await?;
    let mut ports = Ports::default();
    let mut address = || ports.next().map(|port| format!("127.0.0.1:{port}"));
    let (store, front, http) = (address()?, address()?, address()?);
    drop(ports);
    let _store = Running::start(&format!("store --grpc {store}"))?;
    let flags =
        format!("proxy --grpc {front} --http {http} --ec grpc://{store} --encoder {worker} --pd {worker}");
    let proxy = Running::start(&flags)?;
    let mut client = Client::new(&front, &worker)?;
    client.wait().await?;
    let n_samples = if quick { rounds.max(3) } else { rounds.saturating_mul(10) };
    bar.set_message("proxy");
    bar.set_length(u64::from(n_samples) * 2 + 1);
    let kinds = [None, Some(ITEMS[0]), Some(ITEMS[1])].map(|item| Kind { item, tokens: 1 });
    let mut added: [Vec<f64>; 3] = Default::default();
    for i in 0..=n_samples {
        bar.set_position(u64::from(i));
        for (kind, added) in kinds.iter().zip(&mut added) {
            let straight = client.straight(*kind).await?;
            let through = client.through(*kind).await?;
            if i > 0 {
                added.push((through.as_secs_f64() - straight.as_secs_f64()) * 1e6);
            }
        }
    }
    let [text, small, large] = added.map(|samples| Spread::of(samples).p50_us);
    let positive = |us: f64| us.max(0.0);
    let per_byte = |small: f64, large: f64| positive((large - small) / (ITEMS[1] - ITEMS[0]) as f64);
    let computing = Computing::start()?;
    let mut requests = [0.0; 3];
    for (kind, us) in kinds.iter().zip(&mut requests) {
        *us = taken(&client, &computing, (*kind, N_CLIENTS, N_REQUESTS), rounds).await?;
        bar.inc(u64::from(n_samples) / 5);
    }
    let answers = Kind { item: None, tokens: TOKENS };
    let mut steps = [0.0; 2];
    let mut proxy_us = 0.0;
    for (n, us) in STREAMS.into_iter().zip(&mut steps) {
        let before = cpu_us(proxy.0.id());
        let all = taken(&client, &computing, (answers, n, 1), rounds).await?;
        proxy_us = (cpu_us(proxy.0.id()) - before) / f64::from(rounds) / n as f64;
        // What the request itself takes is not the tokens'.
        *us = positive(all - requests[0]) * n as f64 / f64::from(TOKENS - 1);
        bar.inc(u64::from(n_samples) / 5);
    }
    let (step_us, token_us) = step_and_token(steps);
    let cost = ProxyCost {
        request_us: positive(text),
        item_us: positive(small - text),
        item_byte_us: per_byte(small, large),
        token_us: proxy_us / f64::from(TOKENS),
    };
    let [text, small, large] = requests;
    let work = FrontCost {
        request_us: positive(text - step_us - token_us),
        item_us: positive(small - text),
        item_byte_us: per_byte(small, large),
        step_us,
        token_us,
    };
    Ok((cost, work))
}

/// What a step takes, and each token in it, of what steps with as many tokens as [`STREAMS`] take.
fn step_and_token([few, many]: [f64; 2]) -> (f64, f64) {
    let token_us = ((many - few) / (STREAMS[1] - STREAMS[0]) as f64).max(0.0);
    ((few - token_us * STREAMS[0] as f64).max(0.0), token_us)
}

/// Time of one core that requests take away, in microseconds for each: the median of `rounds`, in each of which so many
/// clients send so many requests, one after the other.
async fn taken(
    client: &Client,
    computing: &Computing,
    (kind, n_clients, n_requests): (Kind, usize, usize),
    rounds: u32,
) -> Result<f64, CliError> {
    let mut samples = Vec::new();
    for _ in 0..rounds {
        let all = async {
            let clients = (0..n_clients).map(|i| {
                let mut client = client.with_items_of(i);
                tokio::spawn(async move {
                    for _ in 0..n_requests {
                        client.through(kind).await?;
                    }
                    Ok::<_, CliError>(())
                })
            });
            for client in clients.collect::<Vec<_>>() {
                client.await.map_err(|e| CliError::failed("measuring ended early", &e))??;
            }
            Ok::<_, CliError>(())
        };
        samples.push(computing.displaced_us(all).await? / (n_clients * n_requests) as f64);
    }
    Ok(Spread::of(samples).p50_us)
}

/// Processor time of all threads of a process so far, in microseconds; of threads that have ended, nothing, and none of
/// its end while they are looked at.
fn cpu_us(process: u32) -> f64 {
    let ns = |task: std::fs::DirEntry| -> Option<u64> {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    tasks.filter_map(ns).sum::<u64>() as f64 / 1e3
}

/// A process of this binary that ends with this one.
struct Running(Child);

impl Running {
    fn start(flags: &str) -> Result<Self, CliError> {
        let binary = std::env::current_exe().map_err(|e| CliError::failed("cannot find this binary", &e))?;
        let child = Command::new(binary)
            .args(flags.split(' '))
            .args(["--supervised-by", &std::process::id().to_string()])
            // Settings of the operator's real cluster are not for these.
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        child.map(Self).map_err(|e| CliError::failed(format!("cannot start triptych {flags}"), &e))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // An error means that it is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[derive(Clone)]
struct Client {
    proxy: TriptychClient<Channel>,
    encoder: EncoderWorkerClient<Channel>,
    pd: PrefillDecodeWorkerClient<Channel>,
    /// Makes every item another.
    n_items: u64,
}

impl Client {
    fn new(front: &str, worker: &str) -> Result<Self, CliError> {
        let channel = |at: &str| grpc::channel(at).map_err(|e| broken(&format!("cannot reach {at}"), &e));
        Ok(Self {
            proxy: TriptychClient::new(channel(front)?),
            encoder: EncoderWorkerClient::new(channel(worker)?),
            pd: PrefillDecodeWorkerClient::new(channel(worker)?),
            n_items: 0,
        })
    }

    /// The same connections; items are others than this one's, and than those of any other number.
    fn with_items_of(&self, i: usize) -> Self {
        let n_items = rand::random::<u64>().wrapping_add(i as u64);
        Self { n_items, ..self.clone() }
    }

    /// Until the proxy has found its workers.
    async fn wait(&mut self) -> Result<(), CliError> {
        let began = Instant::now();
        loop {
            match self.through(Kind { item: Some(ITEMS[0]), tokens: 1 }).await {
                Ok(_) => return Ok(()),
                Err(e) if began.elapsed() > START => return Err(e),
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    fn item(&mut self, kind: Kind) -> Option<bytes::Bytes> {
        self.n_items += 1;
        let mut bytes = vec![0x5a; kind.item?];
        bytes[..8].copy_from_slice(&self.n_items.to_le_bytes());
        Some(bytes.into())
    }

    /// From sending to the end of the answer.
    async fn through(&mut self, kind: Kind) -> Result<Duration, CliError> {
        let item = |data| v1::Item {
            modality: v1::Modality::from(Modality::Image).into(),
            source: Some(v1::item::Source::Data(data)),
            options: None,
        };
        let request = v1::GenerateRequest {
            model: MODEL.into(),
            prompt: Some(prompt()),
            items: self.item(kind).map(item).into_iter().collect(),
            sampling: Some(sampling(kind)),
            ..Default::default()
        };
        let started = Instant::now();
        let told = |e: Status| broken("the proxy between null workers failed", &e);
        let mut pieces = self.proxy.generate(request).await.map_err(told)?.into_inner();
        while pieces.message().await.map_err(told)?.is_some() {}
        Ok(started.elapsed())
    }

    /// The encode, then the generation, as the proxy would.
    async fn straight(&mut self, kind: Kind) -> Result<Duration, CliError> {
        let item = self.item(kind);
        let told = |e: Status| broken("a null worker failed", &e);
        let started = Instant::now();
        if let Some(item) = item {
            let request = v1::EncodeRequest {
                model: MODEL.into(),
                key: vec![1; 32].into(),
                modality: v1::Modality::from(Modality::Image).into(),
                item,
                fingerprint: fingerprint().as_bytes().to_vec().into(),
                ..Default::default()
            };
            let mut events = self.encoder.encode(request).await.map_err(told)?.into_inner();
            while events.message().await.map_err(told)?.is_some() {}
        }
        let request = v1::PdGenerateRequest {
            model: MODEL.into(),
            prompt: Some(prompt()),
            sampling: Some(sampling(kind)),
            ..Default::default()
        };
        let mut pieces = self.pd.generate(request).await.map_err(told)?.into_inner();
        while pieces.message().await.map_err(told)?.is_some() {}
        Ok(started.elapsed())
    }
}

fn prompt() -> v1::Prompt {
    let text = v1::text_or_tokens::Kind::Text("What is in this picture?".into());
    v1::Prompt { kind: Some(v1::prompt::Kind::Singleton(v1::TextOrTokens { kind: Some(text) })) }
}

fn sampling(kind: Kind) -> v1::Sampling {
    v1::Sampling { max_tokens: Some(kind.tokens), ..Default::default() }
}
