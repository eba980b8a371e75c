//! Cost of the proxy: the same work through a proxy process and directly to workers that compute nothing, in turn.
//!
//! A request, an item and its bytes are waited for, so their cost is added latency. Tokens are passed on while others are
//! under way, so their cost is processor time of the proxy. Client, proxy and the network side of the workers also take
//! processor time from compute on the same cores: [`FrontTime`], of requests that come apart while other threads compute, as in
//! service, where little of it is left in caches. The caller of [`measure`] starts the processes: only the binary knows the
//! flags of its roles.

mod client;
mod displaced;
pub mod null_workers;

use crate::error::MeasureError;
use client::{Client, RequestKind, SMALL_ITEM};
use displaced::ComputeLoad;
use futures::future::BoxFuture;
use std::collections::HashMap;
use std::ffi::OsString;
use std::time::Duration;
use tokio::task::JoinSet;

/// Bytes of a large item.
const LARGE_ITEM: usize = 1 << 20;
/// Tokens of a long answer.
const TOKENS: u32 = 256;
/// Concurrent answers while the cost of tokens is measured: alone each token is a step, together a step has several.
const STREAMS: [usize; 2] = [1, 8];
/// Requests by which the processor time of one is measured, and the time between two.
const APART: (usize, Duration) = (16, Duration::from_millis(12));
/// Load by which is found what requests take from cores that compute.
const FLOOD: Flood = Flood { n_clients: 8, n_requests: 4 };
/// Threads of this process that are not its client or the network side of its workers: those that compute, and the one that gives
/// tokens as an engine does.
const NOT_FRONT: [&str; 2] = [displaced::THREAD, null_workers::STEPS_THREAD];

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

/// Processor time of client, proxy and network, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FrontTime {
    /// A request without items.
    pub request_us: f64,
    /// An item.
    pub item_us: f64,
    /// A byte of an item.
    pub item_byte_us: f64,
    /// A step that gives tokens, however many: the tasks of its requests are woken.
    pub wake_us: f64,
    /// Messages of tokens that leave together, however many: a connection is written to, and whoever reads it is woken.
    pub write_us: f64,
    /// Each of these messages.
    pub message_us: f64,
    /// Part of the time of a request that compute loses although one core is free, from 0 to 1.
    pub misplaced: f64,
}

/// Clients, and requests that each sends one after the other.
#[derive(Clone, Copy)]
struct Flood {
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
) -> BoxFuture<'a, Result<(AddedLatency, FrontTime), MeasureError>> {
    Box::pin(measure_costs(servers, rounds, quick, progress))
}

async fn measure_costs(
    servers: &Servers,
    rounds: u32,
    quick: bool,
    progress: Progress<'_>,
) -> Result<(AddedLatency, FrontTime), MeasureError> {
    let mut client = Client::new(&servers.proxy, &servers.worker)?;
    client.wait().await?;
    let n_samples = if quick { rounds.max(3) } else { rounds.saturating_mul(10) };
    let length = u64::from(n_samples) * 2 + 1;
    let kinds =
        [None, Some(SMALL_ITEM), Some(LARGE_ITEM)].map(|item| RequestKind { item, ..RequestKind::TEXT });
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
        done += u64::from(n_samples) / 7;
        progress(done, length);
    };
    let load = ComputeLoad::start(0)?;
    let used = |kind, streams| used(&client, servers.proxy_pid, (kind, streams), rounds);
    let mut requests = [0.0; 3];
    for (kind, us) in kinds.iter().zip(&mut requests) {
        *us = used(*kind, APART).await?.all_us;
        advance();
    }
    // The cost of the request itself is not the tokens'.
    let per_token = |all: Used| positive(all.all_us - requests[0]) / f64::from(TOKENS - 1);
    let answers = |per_message| RequestKind { item: None, tokens: TOKENS, per_message };
    let held = per_token(used(answers(TOKENS), (1, Duration::ZERO)).await?);
    advance();
    let mut sent = [0.0; 2];
    let mut proxy_us = 0.0;
    for (n, us) in STREAMS.into_iter().zip(&mut sent) {
        let all = used(answers(1), (n, Duration::ZERO)).await?;
        (*us, proxy_us) = (per_token(all) * n as f64, all.proxy_us);
        advance();
    }
    let flood = displaced_us(&client, &load, rounds).await?;
    drop(load);
    let misplaced = misplaced(&client, flood, rounds).await?;
    let added = AddedLatency {
        request_us: positive(text),
        item_us: positive(small - text),
        item_byte_us: per_byte(small, large),
        token_us: proxy_us / f64::from(TOKENS),
    };
    let front = FrontTime { misplaced, ..front_time(requests, held, sent) };
    Ok((added, front))
}

/// Costs from those of requests without an item, with a small and a large one, and of a step: with a token that is held, and with as
/// many messages as [`STREAMS`] has.
fn front_time([text, small, large]: [f64; 3], held: f64, [few, many]: [f64; 2]) -> FrontTime {
    let message_us = positive((many - few) / (STREAMS[1] - STREAMS[0]) as f64);
    FrontTime {
        request_us: text,
        item_us: positive(small - text),
        item_byte_us: per_byte(small, large),
        wake_us: held,
        write_us: positive(few - held - message_us * STREAMS[0] as f64),
        message_us,
        misplaced: 0.0,
    }
}

/// Part of what requests displace on busy cores that they displace as well while one core has nothing to do.
async fn misplaced(client: &Client, displaced_us_busy: f64, rounds: u32) -> Result<f64, MeasureError> {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 || displaced_us_busy <= 0.0 {
        return Ok(0.0);
    }
    let load = ComputeLoad::start(1)?;
    let lost = displaced_us(client, &load, rounds).await?;
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

/// Processor time of a request, in microseconds.
#[derive(Clone, Copy)]
struct Used {
    /// Of client, proxy and the network side of the workers.
    all_us: f64,
    /// Of the proxy.
    proxy_us: f64,
}

/// Processor time of one of `n` requests that begin `gap` apart: the median of `rounds`.
async fn used(
    client: &Client,
    proxy: u32,
    (kind, (n, gap)): (RequestKind, (usize, Duration)),
    rounds: u32,
) -> Result<Used, MeasureError> {
    let own = std::process::id();
    let (mut all, mut of_proxy) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let before = [own, proxy].map(ThreadTimes::of);
        let mut requests = JoinSet::new();
        for i in 0..n {
            let mut client = client.with_items_of(i);
            requests.spawn(async move { client.through_proxy(kind).await });
            if !gap.is_zero() {
                tokio::time::sleep(gap).await;
            }
        }
        joined(requests).await?;
        let [own_us, proxy_us] = [(own, &before[0]), (proxy, &before[1])]
            .map(|(process, before)| ThreadTimes::of(process).us_since(before));
        all.push((own_us + proxy_us) / n as f64);
        of_proxy.push(proxy_us / n as f64);
    }
    Ok(Used { all_us: median(all), proxy_us: median(of_proxy) })
}

/// Core time that a request of a flood displaces, in microseconds: the median of `rounds` under the load.
async fn displaced_us(client: &Client, load: &ComputeLoad, rounds: u32) -> Result<f64, MeasureError> {
    let Flood { n_clients, n_requests } = FLOOD;
    let mut samples = Vec::new();
    for _ in 0..rounds {
        let all = async {
            let mut clients = JoinSet::new();
            for i in 0..n_clients {
                let mut client = client.with_items_of(i);
                clients.spawn(async move {
                    for _ in 0..n_requests {
                        client.through_proxy(RequestKind::TEXT).await?;
                    }
                    Ok(Duration::ZERO)
                });
            }
            joined(clients).await
        };
        samples.push(load.displaced_us(all).await? / (n_clients * n_requests) as f64);
    }
    Ok(median(samples))
}

/// Waits for all of them, or the first that fails.
async fn joined(mut tasks: JoinSet<Result<Duration, MeasureError>>) -> Result<(), MeasureError> {
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(|e| MeasureError::failed("measuring ended early", &e))??;
    }
    Ok(())
}

fn is_front(thread: &str) -> bool {
    !NOT_FRONT.contains(&thread)
}

/// Processor time so far, in nanoseconds, of the live threads of a process by their ids, but for [`NOT_FRONT`].
#[derive(Debug, Default)]
struct ThreadTimes(HashMap<OsString, u64>);

impl ThreadTimes {
    fn of(process: u32) -> Self {
        let used = |task: std::fs::DirEntry| -> Option<(OsString, u64)> {
            let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
            if !is_front(name.trim_end()) {
                return None;
            }
            let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
            Some((task.file_name(), text.split_whitespace().next()?.parse().ok()?))
        };
        let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
        Self(tasks.filter_map(used).collect())
    }

    /// Microseconds since earlier times; what a thread used that has ended since is not known.
    fn us_since(&self, earlier: &Self) -> f64 {
        let used = |(id, ns): (&OsString, &u64)| ns.saturating_sub(earlier.0.get(id).copied().unwrap_or(0));
        self.0.iter().map(used).sum::<u64>() as f64 / 1e3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_of_tokens_are_those_of_steps_with_few_and_many() {
        // A step wakes for 10, a write is 40, each message 5.
        let front = front_time([300.0, 500.0, 1544.0], 10.0, [55.0, 90.0]);
        assert_eq!((front.wake_us, front.write_us, front.message_us), (10.0, 40.0, 5.0));
        assert_eq!((front.request_us, front.item_us), (300.0, 200.0));
        assert!((front.item_byte_us - 0.001).abs() < 1e-5, "{front:?}");
        let noise = front_time([300.0, 200.0, 100.0], 60.0, [50.0, 40.0]);
        let none = [noise.item_us, noise.item_byte_us, noise.write_us, noise.message_us];
        assert_eq!(none, [0.0; 4]);
    }

    #[test]
    fn processor_time_is_without_threads_that_stand_for_compute() {
        let spin = || {
            let before = ThreadTimes::of(std::process::id());
            let began = own_us();
            while own_us() < began + 20_000.0 {}
            ThreadTimes::of(std::process::id()).us_since(&before)
        };
        let client = std::thread::Builder::new().name("client".into()).spawn(spin).expect("a thread");
        // Other tests of this process take time as well.
        assert!(client.join().expect("an end") >= 19_000.0);
        assert!(is_front("client") && !is_front(displaced::THREAD) && !is_front(null_workers::STEPS_THREAD));
    }

    #[test]
    fn a_thread_that_ends_takes_nothing_from_the_others() {
        let times = |threads: &[(&str, u64)]| {
            ThreadTimes(threads.iter().map(|(id, ns)| (OsString::from(id), *ns)).collect())
        };
        let before = times(&[("1", 5_000), ("2", 900_000)]);
        assert_eq!(times(&[("1", 7_000), ("3", 1_000)]).us_since(&before), 3.0);
    }

    /// Processor time of this thread, in microseconds.
    fn own_us() -> f64 {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
        text.split_whitespace().next().and_then(|ns| ns.parse::<f64>().ok()).expect("a number") / 1e3
    }
}
