//! Chaos: a cluster of real processes under a mixed load, while proxies and workers are killed, stopped and restarted,
//! Redis is restarted, S3 is slow, and the network is partitioned.
//!
//! `cargo xtask chaos` runs it with 10 000 requests and writes `benches/results/chaos.md`; CI runs a short one.
#![forbid(unsafe_code)]

mod drills;
mod fleet;
mod link;
mod load;
mod proxies;
mod sums;

use drills::Drills;
use fleet::{ENCODERS, Fleet, PDS, PROXIES};
use load::{Asked, Clients, LoadStats, Question, RequestEnd, questions};
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_is_lost_and_no_answer_is_wrong_under_faults() {
    let n = setting("CHAOS_REQUESTS", REQUESTS);
    let mut fleet = Fleet::start().await;
    let clients = Arc::new(Clients::connect(&fleet).await);
    let questions = Arc::new(questions());
    let expected = Arc::new(undisturbed(&clients, &questions).await);
    let stats = Arc::new(Mutex::new(LoadStats::default()));
    let next = Arc::new(AtomicUsize::new(0));
    let drilled = Arc::new(AtomicBool::new(false));
    let started = Instant::now();
    let is_long = |question: &Question| question.is_long;
    let long: Vec<_> = (0..questions.len()).filter(|idx| is_long(&questions[*idx])).collect();
    let workers: Vec<_> = (0..CLIENTS + LONG_CLIENTS)
        .map(|client| {
            let long = (client >= CLIENTS).then(|| long.clone());
            let clients = clients.clone();
            let questions = questions.clone();
            let expected = expected.clone();
            let stats = stats.clone();
            let next = next.clone();
            let drilled = drilled.clone();
            tokio::spawn(async move {
                for round in 0.. {
                    let i = match long {
                        None => next.fetch_add(1, Ordering::Relaxed),
                        Some(_) => next.load(Ordering::Relaxed),
                    };
                    if i >= n && drilled.load(Ordering::Relaxed) {
                        return;
                    }
                    let (idx, i) = match &long {
                        // In an order that sends every question over each API and proxy.
                        None => ((i * 7 + i / questions.len()) % questions.len(), i),
                        Some(long) => (long[(client + round) % long.len()], client + round),
                    };
                    let asked = Instant::now();
                    let Asked { answer, n_again } = clients.ask(&questions[idx], i).await;
                    let end = match answer {
                        Ok(text) if text == expected[idx] => RequestEnd::Correct,
                        Ok(text) => RequestEnd::Wrong(format!("{text:?}, expected is {:?}", expected[idx])),
                        Err(end) => end,
                    };
                    {
                        let mut stats = stats.lock();
                        stats.n_again += n_again;
                        stats.count(&questions[idx].name, end, asked);
                    }
                    if long.is_none() {
                        tokio::time::sleep(PAUSE).await;
                    }
                }
            })
        })
        .collect();
    let mut drills = Drills::new(setting("CHAOS_SEED", 1) as u64);
    while !workers.iter().all(|w| w.is_finished()) {
        drills.one(&mut fleet).await;
        drilled.store(drills.all_done(), Ordering::Relaxed);
    }
    for worker in workers {
        worker.await.expect("a client does not panic");
    }
    settle(&fleet).await;
    let exited = fleet.exited_members();
    let mut stats = std::mem::take(&mut *stats.lock());
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
