//! Cost of the proxy: the same work through a proxy process and directly to workers that compute nothing, in turn.
//!
//! A request, an item and its bytes are waited for, so their cost is added latency. Tokens are passed on while others are
//! under way, so their cost is processor time of the proxy. Client, proxy and the network side of the workers also take
//! core time from compute on the same cores; that is measured as [`DisplacedTime`]. The caller of [`measure`] starts the
//! processes: only the binary knows the flags of its roles.

mod client;
mod displaced;
pub mod null_workers;

use crate::error::MeasureError;
use client::{Client, RequestKind, SMALL_ITEM};
use displaced::ComputeLoad;
use futures::future::BoxFuture;
use tokio::task::JoinSet;

/// Bytes of a large item.
const LARGE_ITEM: usize = 1 << 20;
/// Tokens of a long answer.
const TOKENS: u32 = 256;
/// Concurrent answers while the cost of tokens is measured: alone each token is a step, together a step has several.
const STREAMS: [usize; 2] = [1, 8];
/// Load while the cost of requests is measured.
const REQUEST_LOAD: Load = Load { n_clients: 8, n_requests: 4 };

/// The processes of a measurement.
#[derive(Clone, Debug)]
pub struct Servers {
    /// gRPC address of the proxy.
    pub proxy: String,
    /// Process id of the proxy.
    pub proxy_pid: u32,
    /// gRPC address of the [`null_workers`] behind it.
    pub worker: String,
}

/// Latency that an idle proxy adds, and its processor time for tokens, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AddedLatency {
    /// A request without items.
    pub request_us: f64,
    /// An item.
    pub item_us: f64,
    /// A byte of an item.
    pub item_byte_us: f64,
    /// An output token.
    pub token_us: f64,
}

/// Core time that client, proxy and network take from compute on the same cores, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DisplacedTime {
    /// A request without items.
    pub request_us: f64,
    /// An item.
    pub item_us: f64,
    /// A byte of an item.
    pub item_byte_us: f64,
    /// A step that gives tokens, however many.
    pub step_us: f64,
    /// A token of a step.
    pub token_us: f64,
    /// Part of the time of a request that compute loses although one core is free, from 0 to 1.
    pub misplaced: f64,
}

/// Clients, and requests that each sends one after the other.
#[derive(Clone, Copy)]
struct Load {
    n_clients: usize,
    n_requests: usize,
}

/// Progress: places measured, of how many.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Measures both costs with ten times `rounds` requests of each kind; with `rounds` if `quick`.
///
/// # Errors
/// [`MeasureError::Failed`] if a server does not answer.
pub fn measure<'a>(
    servers: &'a Servers,
    rounds: u32,
    quick: bool,
    progress: Progress<'a>,
) -> BoxFuture<'a, Result<(AddedLatency, DisplacedTime), MeasureError>> {
    Box::pin(measure_costs(servers, rounds, quick, progress))
}

async fn measure_costs(
    servers: &Servers,
    rounds: u32,
    quick: bool,
    progress: Progress<'_>,
) -> Result<(AddedLatency, DisplacedTime), MeasureError> {
    let mut client = Client::new(&servers.proxy, &servers.worker)?;
    client.wait().await?;
    let n_samples = if quick { rounds.max(3) } else { rounds.saturating_mul(10) };
    let length = u64::from(n_samples) * 2 + 1;
    let kinds = [None, Some(SMALL_ITEM), Some(LARGE_ITEM)].map(|item| RequestKind { item, tokens: 1 });
    let mut added: [Vec<f64>; 3] = Default::default();
    for i in 0..=n_samples {
        progress(u64::from(i), length);
        for (kind, added) in kinds.iter().zip(&mut added) {
            let direct = client.direct(*kind).await?;
            let through = client.through_proxy(*kind).await?;
            // The first round touches memory and opens connections.
            if i > 0 {
                added.push((through.as_secs_f64() - direct.as_secs_f64()) * 1e6);
            }
        }
    }
    let [text, small, large] = added.map(median);
    let mut done = u64::from(n_samples);
    let mut advance = || {
        done += u64::from(n_samples) / 5;
        progress(done, length);
    };
    let load = ComputeLoad::start(0)?;
    let mut requests = [0.0; 3];
    for (kind, us) in kinds.iter().zip(&mut requests) {
        *us = displaced_us(&client, &load, *kind, REQUEST_LOAD, rounds).await?;
        advance();
    }
    let answers = RequestKind { item: None, tokens: TOKENS };
    let mut steps = [0.0; 2];
    let mut proxy_us = 0.0;
    for (n, us) in STREAMS.into_iter().zip(&mut steps) {
        let before = cpu_us(servers.proxy_pid);
        let streams = Load { n_clients: n, n_requests: 1 };
        let all = displaced_us(&client, &load, answers, streams, rounds).await?;
        proxy_us = (cpu_us(servers.proxy_pid) - before) / f64::from(rounds) / n as f64;
        // The cost of the request itself is not the tokens'.
        *us = positive(all - requests[0]) * n as f64 / f64::from(TOKENS - 1);
        advance();
    }
    drop(load);
    let misplaced = misplaced(&client, requests[0], rounds).await?;
    let (step_us, token_us) = step_and_token(steps);
    let added = AddedLatency {
        request_us: positive(text),
        item_us: positive(small - text),
        item_byte_us: per_byte(small, large),
        token_us: proxy_us / f64::from(TOKENS),
    };
    let [text, small, large] = requests;
    let displaced = DisplacedTime {
        request_us: positive(text - step_us - token_us),
        item_us: positive(small - text),
        item_byte_us: per_byte(small, large),
        step_us,
        token_us,
        misplaced,
    };
    Ok((added, displaced))
}

/// Part of what a request displaces on busy cores that it displaces as well while one core has nothing to do.
async fn misplaced(client: &Client, displaced_us_busy: f64, rounds: u32) -> Result<f64, MeasureError> {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 || displaced_us_busy <= 0.0 {
        return Ok(0.0);
    }
    let load = ComputeLoad::start(1)?;
    let kind = RequestKind { item: None, tokens: 1 };
    let lost = displaced_us(client, &load, kind, REQUEST_LOAD, rounds).await?;
    Ok((lost / displaced_us_busy).clamp(0.0, 1.0))
}

fn positive(us: f64) -> f64 {
    us.max(0.0)
}

fn per_byte(small_us: f64, large_us: f64) -> f64 {
    positive((large_us - small_us) / (LARGE_ITEM - SMALL_ITEM) as f64)
}

/// The middle value; 0 of none.
fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied().unwrap_or(0.0)
}

/// Cost of a step and of each token in it, from steps with as many tokens as [`STREAMS`] has.
fn step_and_token([few, many]: [f64; 2]) -> (f64, f64) {
    let token_us = ((many - few) / (STREAMS[1] - STREAMS[0]) as f64).max(0.0);
    ((few - token_us * STREAMS[0] as f64).max(0.0), token_us)
}

/// Core time that a request displaces, in microseconds: the median of `rounds` under the load.
async fn displaced_us(
    client: &Client,
    load: &ComputeLoad,
    kind: RequestKind,
    Load { n_clients, n_requests }: Load,
    rounds: u32,
) -> Result<f64, MeasureError> {
    let mut samples = Vec::new();
    for _ in 0..rounds {
        let all = async {
            let mut clients = JoinSet::new();
            for i in 0..n_clients {
                let mut client = client.with_items_of(i);
                clients.spawn(async move {
                    for _ in 0..n_requests {
                        client.through_proxy(kind).await?;
                    }
                    Ok::<_, MeasureError>(())
                });
            }
            while let Some(ended) = clients.join_next().await {
                ended.map_err(|e| MeasureError::failed("measuring ended early", &e))??;
            }
            Ok::<_, MeasureError>(())
        };
        samples.push(load.displaced_us(all).await? / (n_clients * n_requests) as f64);
    }
    Ok(median(samples))
}

/// Processor time of the live threads of a process so far, in microseconds.
fn cpu_us(process: u32) -> f64 {
    let ns = |task: std::fs::DirEntry| -> Option<u64> {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    tasks.filter_map(ns).sum::<u64>() as f64 / 1e3
}
