//! Chaos: a cluster of real processes under a mixed load, while proxies and workers are killed, stopped and restarted,
//! Redis is restarted, S3 is slow, and the network is partitioned.
//!
//! `cargo xtask chaos` runs it with 10 000 requests and writes `benches/results/chaos.md`; CI runs a short one.
#![forbid(unsafe_code)]

mod drills;
mod fleet;
mod link;
mod load;
mod names;
mod proxies;
mod sums;

use drills::Drills;
use fleet::Fleet;
use load::{Asked, Clients, LoadStats, Question, RequestEnd, questions};
use names::{ENCODERS, PDS, PROXIES};
use parking_lot::Mutex;
use std::env;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use sums::{MetricSums, RESUMED};
use tokio::task::JoinSet;
use triptych_tests::cluster::sum_series;
use triptych_tests::process::eventually;

/// Requests of a short run, which must cover every kind of drill.
const REQUESTS: usize = 600;
/// Clients, each with one request at a time.
const CLIENTS: usize = 6;
/// Further clients, which ask for long answers only, one after the other: there is always a stream to break off.
const LONG_CLIENTS: usize = 6;
/// Streams that are resumed at least: one for each drill in which a PD worker is killed, of which the shortest run has so
/// many.
const RESUMED_AT_LEAST: usize = 3;
/// A client's pause after a request, so that the load outlasts the drills.
const PAUSE: Duration = Duration::from_millis(250);
/// Largest share of requests that may end with a typed error.
const MAX_FAILED_SHARE: f64 = 0.02;

fn setting(name: &str, default: usize) -> usize {
    match env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, allowed are integers")),
        Err(_) => default,
    }
}

/// Answers of the cluster without faults.
async fn undisturbed(clients: &Clients, questions: &[Question]) -> Vec<String> {
    let mut answers = Vec::new();
    for (i, question) in questions.iter().enumerate() {
        let answer = clients.ask(question, i).await.answer;
        answers.push(answer.unwrap_or_else(|e| panic!("{} of a quiet cluster: {e:?}", question.name)));
    }
    answers
}

/// The load of all clients.
struct Load {
    clients: Clients,
    questions: Vec<Question>,
    /// Answers of the cluster without faults.
    expected: Vec<String>,
    stats: Mutex<LoadStats>,
    /// Requests of the clients that ask for anything.
    n_asked: AtomicUsize,
    /// Nobody asks any more.
    is_over: AtomicBool,
}

impl Load {
    async fn new(fleet: &Fleet) -> Self {
        let (clients, questions) = (Clients::connect(fleet).await, questions());
        let expected = undisturbed(&clients, &questions).await;
        let (stats, n_asked, is_over) = Default::default();
        Self { clients, questions, expected, stats, n_asked, is_over }
    }

    /// Asks for anything, with pauses.
    async fn ask_for_anything(&self) {
        while !self.is_over.load(Ordering::Relaxed) {
            let (i, n) = (self.n_asked.fetch_add(1, Ordering::Relaxed), self.questions.len());
            // In an order that sends every question over each API and proxy.
            self.ask((i * 7 + i / n) % n, i).await;
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Asks for long answers, one after the other.
    async fn ask_at_length(&self, client: usize) {
        let is_long = |idx: &usize| self.questions[*idx].is_long;
        let long: Vec<_> = (0..self.questions.len()).filter(is_long).collect();
        let mut i = client;
        while !self.is_over.load(Ordering::Relaxed) {
            self.ask(long[i % long.len()], i).await;
            i += 1;
        }
    }

    async fn ask(&self, idx: usize, i: usize) {
        let (question, expected, asked) = (&self.questions[idx], &self.expected[idx], Instant::now());
        let Asked { answer, n_again } = self.clients.ask(question, i).await;
        let end = match answer {
            Ok(text) if text == *expected => RequestEnd::Correct,
            Ok(text) => RequestEnd::Wrong(format!("{text:?}, expected is {expected:?}")),
            Err(end) => end,
        };
        self.stats.lock().count(&question.name, end, n_again, asked);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_is_lost_and_no_answer_is_wrong_under_faults() {
    let at_least = setting("CHAOS_REQUESTS", REQUESTS);
    let mut fleet = Fleet::start().await;
    let load = Arc::new(Load::new(&fleet).await);
    let started = Instant::now();
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS + LONG_CLIENTS {
        let load = Arc::clone(&load);
        clients.spawn(async move {
            match client < CLIENTS {
                true => load.ask_for_anything().await,
                false => load.ask_at_length(client).await,
            }
        });
    }
    let mut drills = Drills::new(setting("CHAOS_SEED", 1) as u64);
    while !drills.all_done() || load.n_asked.load(Ordering::Relaxed) < at_least {
        drills.one(&mut fleet).await;
    }
    load.is_over.store(true, Ordering::Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended.expect("a client does not panic");
    }
    settle(&fleet).await;
    let exited = fleet.exited_members();
    let mut stats = std::mem::take(&mut *load.stats.lock());
    let n = stats.ends.values().sum();
    let sums = fleet.metric_sums().await;
    let report = report(n, &mut stats, &drills, started.elapsed(), &sums);
    println!("{report}");
    if let Ok(path) = env::var("CHAOS_REPORT") {
        std::fs::write(&path, &report).unwrap_or_else(|e| panic!("{path}: {e}"));
    }
    assert!(exited.is_empty(), "{}", exited.join("\n"));
    assert!(stats.lost.is_empty(), "lost: {:#?}", stats.lost);
    assert!(stats.wrong.is_empty(), "wrong: {:#?}", stats.wrong);
    assert_eq!(stats.n("correct") + stats.n("typed error"), n);
    let (resumed, at_least) = (sums.get(RESUMED), setting("CHAOS_RESUMED", RESUMED_AT_LEAST));
    assert!(resumed >= at_least as f64, "{resumed} streams were resumed, {at_least} at least are to be");
    assert!((stats.n("typed error") as f64) <= MAX_FAILED_SHARE * n as f64, "failed: {:#?}", stats.failures);
}

/// Waits until no request runs on any member.
async fn settle(fleet: &Fleet) {
    for name in PROXIES.into_iter().chain(ENCODERS).chain(PDS) {
        fleet.wait_ready(name).await;
        eventually("nothing runs any more", async || {
            let running = sum_series(&fleet.metrics(name).await, "triptych_requests_running");
            (running == 0.0).then_some(())
        })
        .await;
    }
}

fn report(n: usize, stats: &mut LoadStats, drills: &Drills, took: Duration, sums: &MetricSums) -> String {
    let mut text = String::new();
    let share = |k: usize| 100.0 * k as f64 / n as f64;
    let seconds = |time: Duration| time.as_secs_f64();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{n} requests in {:.0} s, {} clients.\n", seconds(took), CLIENTS + LONG_CLIENTS);
    let _ = writeln!(text, "| end | requests | share |\n|---|---|---|");
    for word in ["correct", "typed error", "wrong", "lost"] {
        let _ = writeln!(text, "| {word} | {} | {:.2} % |", stats.n(word), share(stats.n(word)));
    }
    let again = stats.n_again;
    let _ =
        writeln!(text, "\nSent again by their clients, since their proxy was killed or replaced: {again}.");
    let p50 = stats.percentile(0.5);
    let p99 = stats.percentile(0.99);
    let _ = writeln!(
        text,
        "\nLatency of correct answers: p50 {:.2} s, p99 {:.2} s.\n",
        seconds(p50),
        seconds(p99)
    );
    let _ = writeln!(text, "| drill | times |\n|---|---|");
    for (kind, times) in &drills.done {
        let _ = writeln!(text, "| {kind} | {times} |");
    }
    let _ =
        writeln!(text, "\n| metric, of all processes, each until shortly before its end | sum |\n|---|---|");
    for (name, sum) in &sums.0 {
        let _ = writeln!(text, "| {name} | {sum} |");
    }
    for (what, times) in &stats.failures {
        let _ = writeln!(text, "\n{times} × {what}");
    }
    text
}
