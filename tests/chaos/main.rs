//! Chaos: a cluster of real processes under a mixed load, while workers are killed, stopped and restarted, Redis is
//! restarted, S3 is slow, and the network is parted.
//!
//! `cargo xtask chaos` runs it with 10 000 requests and writes `benches/results/chaos.md`; CI runs a short one.
#![forbid(unsafe_code)]

mod drills;
mod fleet;
mod forward;
mod load;

use drills::Drills;
use fleet::{ENCODERS, Fleet, PDS, PROXIES};
use load::{Clients, End, Question, Tally, questions};
use std::env;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use triptych_tests::cluster::sum_series;
use triptych_tests::process::eventually;

/// Requests of a short run, which must meet every kind of drill.
const REQUESTS: usize = 600;
/// Clients, each with one request at a time.
const CLIENTS: usize = 6;
/// A client's pause after a request: the load lasts long enough to meet every drill.
const PAUSE: Duration = Duration::from_millis(250);
/// Most of them that may fail, with a typed error.
const MAY_FAIL: f64 = 0.02;

fn setting(name: &str, default: usize) -> usize {
    match env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, allowed are whole numbers")),
        Err(_) => default,
    }
}

/// Answers of a quiet cluster.
async fn undisturbed(clients: &Clients, questions: &[Question]) -> Vec<String> {
    let mut answers = Vec::new();
    for (i, question) in questions.iter().enumerate() {
        let answer = clients.ask(question, i).await;
        answers.push(answer.unwrap_or_else(|e| panic!("{} of a quiet cluster: {e:?}", question.name)));
    }
    answers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_and_nothing_is_wrong_while_everything_breaks() {
    let n = setting("CHAOS_REQUESTS", REQUESTS);
    let mut fleet = Fleet::start().await;
    let clients = Arc::new(Clients::connect(&fleet).await);
    let questions = Arc::new(questions());
    let expected = Arc::new(undisturbed(&clients, &questions).await);
    let (tally, next) = (Arc::new(Mutex::new(Tally::default())), Arc::new(AtomicUsize::new(0)));
    let (started, drilled) = (Instant::now(), Arc::new(AtomicBool::new(false)));
    let workers: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (clients, questions, expected) = (clients.clone(), questions.clone(), expected.clone());
            let (tally, next, drilled) = (tally.clone(), next.clone(), drilled.clone());
            tokio::spawn(async move {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= n && drilled.load(Ordering::Relaxed) {
                        return;
                    }
                    // In an order that meets every question with every face and proxy.
                    let place = (i * 7 + i / questions.len()) % questions.len();
                    let asked = Instant::now();
                    let end = match clients.ask(&questions[place], i).await {
                        Ok(text) if text == expected[place] => End::Right,
                        Ok(text) => End::Wrong(format!("{text:?}, right is {:?}", expected[place])),
                        Err(end) => end,
                    };
                    locked(&tally).count(&questions[place].name, end, asked);
                    tokio::time::sleep(PAUSE).await;
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
    let fallen = fleet.fallen();
    let mut tally = std::mem::take(&mut *locked(&tally));
    let n = tally.ends.values().sum();
    let report = report(n, &mut tally, &drills, started.elapsed(), &books(&fleet).await);
    println!("{report}");
    if let Ok(path) = env::var("CHAOS_REPORT") {
        std::fs::write(&path, &report).unwrap_or_else(|e| panic!("{path}: {e}"));
    }
    assert!(fallen.is_empty(), "{}", fallen.join("\n"));
    assert!(tally.lost.is_empty(), "lost: {:#?}", tally.lost);
    assert!(tally.wrong.is_empty(), "wrong: {:#?}", tally.wrong);
    assert_eq!(tally.n("right") + tally.n("typed error"), n);
    assert!(drills.all_done(), "every kind of trouble was met");
    assert!((tally.n("typed error") as f64) <= MAY_FAIL * n as f64, "failed: {:#?}", tally.failures);
}

fn locked(tally: &Mutex<Tally>) -> MutexGuard<'_, Tally> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until nothing is under way anywhere: what was accepted has ended.
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

/// Sums of metrics over the members of a role that lived to the end.
async fn books(fleet: &Fleet) -> Vec<(String, f64)> {
    let mut books = Vec::new();
    for (members, names) in [
        (&PROXIES[..], &["triptych_item_source_total", "triptych_resumed_streams_total"][..]),
        (&ENCODERS[..], &["triptych_encodes_total"][..]),
        (&PDS[..], &["triptych_ec_corrupt_objects_total", "triptych_ec_misses_total"][..]),
    ] {
        for name in names {
            let mut sum = 0.0;
            for member in members {
                sum += sum_series(&fleet.metrics(member).await, name);
            }
            books.push(((*name).to_owned(), sum));
        }
    }
    books
}

fn report(n: usize, tally: &mut Tally, drills: &Drills, took: Duration, books: &[(String, f64)]) -> String {
    let mut text = String::new();
    let share = |k: usize| 100.0 * k as f64 / n as f64;
    let seconds = |time: Duration| time.as_secs_f64();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{n} requests in {:.0} s, {CLIENTS} clients.\n", seconds(took));
    let _ = writeln!(text, "| end | requests | share |\n|---|---|---|");
    for word in ["right", "typed error", "wrong", "lost"] {
        let _ = writeln!(text, "| {word} | {} | {:.2} % |", tally.n(word), share(tally.n(word)));
    }
    let (p50, p99) = (tally.percentile(0.5), tally.percentile(0.99));
    let _ =
        writeln!(text, "\nLatency of right answers: p50 {:.2} s, p99 {:.2} s.\n", seconds(p50), seconds(p99));
    let _ = writeln!(text, "| drill | times |\n|---|---|");
    for (kind, times) in &drills.done {
        let _ = writeln!(text, "| {kind} | {times} |");
    }
    let _ = writeln!(text, "\n| metric, of processes alive at the end | sum |\n|---|---|");
    for (name, sum) in books {
        let _ = writeln!(text, "| {name} | {sum} |");
    }
    for (what, times) in &tally.failures {
        let _ = writeln!(text, "\n{times} × {what}");
    }
    text
}
