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

/// The load of a run, which all clients share.
struct Load {
    /// Requests to send at least.
    n: usize,
    /// Indices of the questions with long answers.
    long: Vec<usize>,
    clients: Arc<Clients>,
    questions: Arc<Vec<Question>>,
    /// Answers without faults, one for each question.
    expected: Vec<String>,
    stats: Mutex<LoadStats>,
    next: AtomicUsize,
    /// True once every kind of drill was done.
    drilled: AtomicBool,
}

impl Load {
    /// Asks one question after the other until the run is over; the later clients ask for long answers only.
    async fn ask(self: Arc<Self>, client: usize) {
        let Self { questions, long, expected, .. } = &*self;
        let asks_long = client >= CLIENTS;
        for round in 0.. {
            let i = match asks_long {
                false => self.next.fetch_add(1, Ordering::Relaxed),
                true => self.next.load(Ordering::Relaxed),
            };
            if i >= self.n && self.drilled.load(Ordering::Relaxed) {
                return;
            }
            let (idx, i) = match asks_long {
                // In an order that sends every question over each API and proxy.
                false => ((i * 7 + i / questions.len()) % questions.len(), i),
                true => (long[(client + round) % long.len()], client + round),
            };
            let asked = Instant::now();
            let Asked { answer, n_again } = self.clients.ask(&questions[idx], i).await;
            let end = match answer {
                Ok(text) if text == expected[idx] => RequestEnd::Correct,
                Ok(text) => RequestEnd::Wrong(format!("{text:?}, expected is {:?}", expected[idx])),
                Err(end) => end,
            };
            {
                let mut stats = self.stats.lock();
                stats.n_again += n_again;
                stats.count(&questions[idx].name, end, asked);
            }
            if !asks_long {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_is_lost_and_no_answer_is_wrong_under_faults() {
    let n = setting("CHAOS_REQUESTS", REQUESTS);
    let mut fleet = Fleet::start().await;
    let clients = Arc::new(Clients::connect(&fleet).await);
    let questions = Arc::new(questions());
    let expected = undisturbed(&clients, &questions).await;
    let is_long = |question: &Question| question.is_long;
    let load = Arc::new(Load {
        n,
        long: (0..questions.len()).filter(|idx| is_long(&questions[*idx])).collect(),
        clients,
        questions,
        expected,
        stats: Mutex::new(LoadStats::default()),
        next: AtomicUsize::new(0),
        drilled: AtomicBool::new(false),
    });
    let started = Instant::now();
    let ask = |client| tokio::spawn(Arc::clone(&load).ask(client));
    let workers: Vec<_> = (0..CLIENTS + LONG_CLIENTS).map(ask).collect();
    let mut drills = Drills::new(setting("CHAOS_SEED", 1) as u64);
    while !workers.iter().all(|w| w.is_finished()) {
        drills.one(&mut fleet).await;
        load.drilled.store(drills.all_done(), Ordering::Relaxed);
    }
    for worker in workers {
        worker.await.expect("a client does not panic");
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
    assert!(drills.all_done(), "every kind of drill was done");
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
