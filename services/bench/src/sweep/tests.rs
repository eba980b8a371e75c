//! A sweep against a modelled server with a paused clock: hours of load in a second, and a goodput that is known.

use super::*;
use crate::client::{PreparedRequest, Reply};
use crate::interleave::{ComparedServer, SweepObserver, run_interleaved};
use crate::offered::Offered;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

/// One request after the other, each for a time: with 50 ms 20 a second is all that it can do. The first token comes when its
/// turn is over, the second 10 ms later. Who goes away leaves the line.
struct OneByOne {
    line: Arc<tokio::sync::Mutex<()>>,
    takes: Arc<Mutex<Duration>>,
}

impl Target for OneByOne {
    fn prepare(&self, _: &Offered, _: &ContentSource) -> PreparedRequest {
        let (line, takes) = (Arc::clone(&self.line), Arc::clone(&self.takes));
        Box::new(move |clock| {
            Box::pin(async move {
                let turn = line.lock().await;
                let takes = *takes.lock();
                tokio::time::sleep(takes).await;
                drop(turn);
                let first = clock.now();
                tokio::time::sleep(Duration::from_millis(10)).await;
                let tokens = vec![first, clock.now()];
                Reply { tokens, prompt_tokens: Some(40), ..Reply::without_tokens(End::Whole, clock.now()) }
            })
        })
    }

    fn name(&self) -> String {
        "one-by-one".to_owned()
    }

    fn model(&self) -> String {
        "m".to_owned()
    }
}

fn server() -> Server {
    server_of(&time_of(50))
}

fn time_of(ms: u64) -> Arc<Mutex<Duration>> {
    Arc::new(Mutex::new(Duration::from_millis(ms)))
}

fn server_of(takes: &Arc<Mutex<Duration>>) -> Server {
    triptych_runtime::tls::install_provider();
    let target = OneByOne { line: Arc::default(), takes: Arc::clone(takes) };
    Server { target: Arc::new(target), scraper: Scraper::nobody().expect("a client") }
}

async fn sweep(slo: &str, settings: &SweepSettings) -> (SweepResult, Vec<String>) {
    let workload = Workload::parse("text:text=5,output=2").expect("a workload");
    let plans = Mutex::new(Vec::new());
    let listener = |event: SweepEvent<'_>| {
        if let SweepEvent::Plan(plan) = event {
            plans.lock().push(plan.to_owned());
        }
    };
    let slo = slo.parse().expect("an SLO");
    let found = run_sweep(&server(), &workload, &slo, settings, &listener).await.expect("it answers");
    (found, plans.into_inner())
}

#[tokio::test(start_paused = true)]
async fn it_finds_what_a_queue_can_hold() {
    // With constant gaps nobody waits below 20 a second, and above it everybody does, longer and longer.
    let settings = SweepSettings { arrivals: Arrivals::Constant, ..SweepSettings::default() };
    let (found, plans) = sweep("ttft=60ms,tpot=20ms", &settings).await;
    let goodput = found.goodput;
    let rate = goodput.rate.expect("a rate");
    let fails = goodput.fails_at.expect("a limit");
    assert!(rate <= 20.2 && fails > 19.8 && fails / rate < 1.051, "{goodput:?}");
    assert_eq!(goodput.vllm, Some(rate));
    assert!(found.shorter_than_the_rule.is_none(), "{:?}", found.shorter_than_the_rule);
    assert!(found.rates.is_sorted_by(|a, b| a.rate < b.rate) && found.rates.len() <= 12);
    assert!(plans[0].contains("rates with 3 runs of 1000 requests each: about"), "{plans:?}");
    let read = SweepResult::read(&found.to_json()).expect("its own document");
    assert_eq!((read.goodput, read.rates.len()), (found.goodput, found.rates.len()));
}

#[tokio::test(start_paused = true)]
async fn bursts_cost_goodput() {
    let settings = SweepSettings { n_requests: 2000, ..SweepSettings::default() };
    let with = async |arrivals| {
        let settings = SweepSettings { arrivals, ..settings.clone() };
        sweep("ttft=400ms,tpot=20ms", &settings).await.0.goodput.rate.expect("a rate")
    };
    let even = with(Arrivals::Constant).await;
    let poisson = with(Arrivals::Poisson).await;
    let bursts = with(Arrivals::Gamma { cv: 3.0 }).await;
    // An M/D/1 queue keeps 99 % below 350 ms of waiting up to about two thirds of its capacity.
    assert!(even > poisson && poisson > bursts, "{even} {poisson} {bursts}");
    assert!((11.0..16.5).contains(&poisson), "{poisson}");
}

#[tokio::test(start_paused = true)]
async fn a_short_sweep_says_so_and_a_list_is_followed() {
    let settings = SweepSettings {
        n_requests: 50,
        seeds: vec![7],
        rates: Rates::Listed(vec![2.0, 4.0]),
        ..SweepSettings::default()
    };
    let (found, plans) = sweep("ttft=400ms,tpot=20ms", &settings).await;
    assert_eq!(found.rates.iter().map(|r| r.rate).collect::<Vec<_>>(), [2.0, 4.0]);
    let text = found.shorter_than_the_rule.expect("50 requests are fewer than 1000");
    assert!(text.starts_with("shorter than the rule: 50 requests in the shortest run, 1 seeds"), "{text}");
    assert!(plans[0].contains("2 rates with 1 run of 50 requests each"), "{plans:?}");
}

#[tokio::test(start_paused = true)]
async fn a_rate_beyond_doubt_is_not_repeated_for_every_seed() {
    let settings = SweepSettings { rates: Rates::Listed(vec![10.0, 60.0]), ..SweepSettings::default() };
    let settings = SweepSettings { arrivals: Arrivals::Constant, n_requests: 300, ..settings };
    let (found, _) = sweep("ttft=60ms,tpot=20ms", &settings).await;
    assert_eq!(found.rates.iter().map(|r| r.runs.len()).collect::<Vec<_>>(), [3, 1]);
}

/// Rates at which a server of 50 ms a request has all of the first 60 requests in 160 ms, all but a few, and a part.
fn short_runs() -> SweepSettings {
    SweepSettings {
        rates: Rates::Listed(vec![5.0, 14.0, 60.0]),
        arrivals: Arrivals::Poisson,
        n_requests: 60,
        until_clear: true,
        ..SweepSettings::default()
    }
}

#[tokio::test(start_paused = true)]
async fn further_seeds_are_for_rates_that_short_runs_leave_open() {
    let (found, _) = sweep("ttft=160ms,tpot=20ms", &short_runs()).await;
    let runs: Vec<_> = found.rates.iter().map(|r| (r.runs[0].verdict.attainment(), r.runs.len())).collect();
    let [(all, 1), (most, more), (few, 1)] = runs[..] else { panic!("{runs:?}") };
    assert!(all > 0.99 && (OPEN..0.99).contains(&most) && more > 1 && few < OPEN, "{runs:?}");
    let text = found.shorter_than_the_rule.expect("one rate has one seed");
    assert!(text.contains("1 seeds"), "{text}");
}

/// Number of runs at each rate in the order in which they were judged, by lane.
#[derive(Default)]
struct RunCounts {
    counts: Mutex<HashMap<usize, Vec<usize>>>,
    /// Time of a request that is changed when the first rate has been judged.
    changed: Option<(Arc<Mutex<Duration>>, Duration)>,
}

impl SweepObserver for RunCounts {
    fn event(&self, lane: usize, event: SweepEvent<'_>) {
        let SweepEvent::Rate(result) = event else { return };
        self.counts.lock().entry(lane).or_default().push(result.runs.len());
        if let Some((takes, then)) = &self.changed {
            *takes.lock() = *then;
        }
    }

    fn result(&self, _: usize, _: &SweepResult) {}
}

/// Number of runs at each rate of servers that are compared, each with the time that a request takes.
async fn runs_of<const N: usize>(
    times: [&Arc<Mutex<Duration>>; N],
    settings: &SweepSettings,
    observer: RunCounts,
) -> [Vec<usize>; N] {
    let server = |takes| ComparedServer { topology: "one".to_owned(), server: server_of(takes) };
    let workload = Workload::parse("text:text=5,output=2").expect("a workload");
    let slo = "ttft=160ms,tpot=20ms".parse().expect("an SLO");
    let load = OfferedLoad { workload: &workload, slo: &slo };
    run_interleaved(&times.map(server), &load, settings, &observer).await.expect("they answer");
    let mut counts = observer.counts.into_inner();
    std::array::from_fn(|lane| counts.remove(&lane).expect("a result of each"))
}

#[tokio::test(start_paused = true)]
async fn who_passes_has_the_seeds_of_another_for_which_the_rate_is_open() {
    let times = [10, 50, 150].map(time_of);
    let [fast, usual, slow] = runs_of(times.each_ref(), &short_runs(), RunCounts::default()).await;
    // The second is open at 14 requests/s, where the first passes and the third fails clearly.
    assert!(matches!(usual[..], [1, 2 | 3, 1]), "{usual:?}");
    assert_eq!(fast, usual);
    assert_eq!(slow[1..], [1, 1]);
}

#[tokio::test(start_paused = true)]
async fn seeds_of_an_earlier_round_are_shared_too() {
    let settings = SweepSettings { rates: Rates::Listed(vec![14.0, 14.0]), ..short_runs() };
    let times = [10, 50].map(time_of);
    let slower = Some((Arc::clone(&times[1]), Duration::from_millis(500)));
    let [fast, usual] =
        runs_of(times.each_ref(), &settings, RunCounts { changed: slower, ..RunCounts::default() }).await;
    // The second leaves the rate open in the first round, and fails it clearly in the next.
    assert!(matches!(usual[..], [2 | 3, 1]), "{usual:?}");
    assert_eq!(fast, [usual[0], usual[0]]);
}

#[tokio::test(start_paused = true)]
async fn goodput_of_a_short_run_is_what_was_offered_in_it() {
    // Twenty arrivals of a Poisson process take a time of their own at any rate.
    let settings = SweepSettings {
        n_requests: 20,
        seeds: vec![1],
        rates: Rates::Listed(vec![8.0]),
        ..SweepSettings::default()
    };
    let (found, _) = sweep("ttft=1s,tpot=20ms", &settings).await;
    let rate = &found.rates[0];
    let run = &rate.runs[0];
    assert!(
        (run.throughput.offered_per_s / 8.0 - 1.0).abs() > 0.02,
        "{:?}: a seed that is off",
        run.throughput
    );
    assert!((rate.offered() / run.throughput.offered_per_s - 1.0).abs() < 1e-3, "{:?}", run.throughput);
    assert!(rate.verdict.passed, "{:#?}", rate.verdict.findings);
    assert_eq!(found.goodput.rate, Some(rate.offered()));
    assert!(rate.rate_text().ends_with("(8 asked for)"), "{}", rate.rate_text());
}

#[tokio::test(start_paused = true)]
async fn a_sweep_that_is_stopped_has_the_rates_so_far_and_says_that_it_is_partial() {
    let settings = SweepSettings {
        arrivals: Arrivals::Constant,
        n_requests: 200,
        seeds: vec![1],
        rates: Rates::Listed(vec![2.0, 4.0, 8.0]),
        ..SweepSettings::default()
    };
    let workload = Workload::parse("text:text=5,output=2").expect("a workload");
    let slo = "ttft=400ms,tpot=20ms".parse().expect("an SLO");
    let in_second = AtomicBool::new(false);
    let listener = |event: SweepEvent<'_>| match event {
        SweepEvent::Run { rate, .. } => in_second.store(rate == 4.0, Ordering::Relaxed),
        SweepEvent::Progress(at)
            if in_second.load(Ordering::Relaxed) && at.elapsed > at.window_end.mul_f64(0.6) =>
        {
            settings.stop.cancel();
        }
        _ => {}
    };
    let found = run_sweep(&server(), &workload, &slo, &settings, &listener).await.expect("a partial result");
    assert!(found.partial);
    let judged: Vec<_> = found.rates.iter().map(|r| (r.rate, r.verdict.n_offered)).collect();
    assert!(matches!(judged[..], [(2.0, 200), (4.0, 60..=180)]), "{judged:?}");
    assert!(found.goodput.rate.is_some_and(|rate| (3.8..=4.1).contains(&rate)), "{:?}", found.goodput);
    let page = crate::report::Report::of_sweeps("Goodput", std::slice::from_ref(&found)).to_markdown();
    assert!(page.contains("stopped before"), "{page}");
    assert!(SweepResult::read(&found.to_json()).expect("its own document").partial);

    let stopped = SweepSettings::default();
    stopped.stop.cancel();
    let nothing = run_sweep(&server(), &workload, &slo, &stopped, &|_| ()).await;
    assert!(matches!(nothing, Err(SweepError::Stopped)));
}

#[tokio::test(start_paused = true)]
async fn a_bench_that_is_late_at_every_rate_gives_up() {
    // No send is earlier than its time, and the clock of a timer goes by milliseconds.
    let settings =
        SweepSettings { max_late: Some(Duration::ZERO), n_requests: 50, ..SweepSettings::default() };
    let (found, _) = sweep("ttft=400ms,tpot=20ms", &settings).await;
    assert_eq!((found.rates.len(), found.goodput.rate, found.goodput.vllm), (3, None, None));
    let broken: Vec<_> =
        found.rates[0].verdict.findings.iter().filter(|f| !f.passed).map(|f| &f.rule).collect();
    assert_eq!(broken, ["the bench is in time"]);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_answers_nothing_fails_before_the_first_run() {
    triptych_runtime::tls::install_provider();
    struct Nobody;
    impl Target for Nobody {
        fn prepare(&self, _: &Offered, _: &ContentSource) -> PreparedRequest {
            let end = End::Failed("cannot connect".to_owned());
            Box::new(move |clock| Box::pin(async move { Reply::without_tokens(end, clock.now()) }))
        }
        fn name(&self) -> String {
            "nobody".to_owned()
        }
        fn model(&self) -> String {
            String::new()
        }
    }
    let server = Server { target: Arc::new(Nobody), scraper: Scraper::nobody().expect("a client") };
    let workload = Workload::parse("text").expect("a workload");
    let slo = "ttft=1s".parse().expect("an SLO");
    let found = run_sweep(&server, &workload, &slo, &SweepSettings::default(), &|_| ()).await;
    assert!(found.expect_err("no answer").to_string().contains("nobody does not answer"));
}

/// Answers in 100 ms; under these seeds at 10 requests/s with 3 ms more for each second of the run.
struct SlowsDown(Vec<u64>);

impl Target for SlowsDown {
    fn prepare(&self, offered: &Offered, content: &ContentSource) -> PreparedRequest {
        let is_slow = self.0.iter().any(|seed| content.seed == mix(mix(*seed) ^ 10f64.to_bits()));
        let more = if is_slow { offered.at.mul_f64(0.003) } else { Duration::ZERO };
        Box::new(move |clock| {
            Box::pin(async move {
                tokio::time::sleep(Duration::from_millis(100) + more).await;
                let tokens = vec![clock.now()];
                Reply { tokens, prompt_tokens: Some(40), ..Reply::without_tokens(End::Whole, clock.now()) }
            })
        })
    }

    fn name(&self) -> String {
        "slows-down".to_owned()
    }

    fn model(&self) -> String {
        "m".to_owned()
    }
}

#[tokio::test(start_paused = true)]
async fn a_rate_that_only_rises_is_repeated_with_other_seeds_and_they_decide() {
    triptych_runtime::tls::install_provider();
    let workload = Workload::parse("text:text=5,output=1").expect("a workload");
    let slo = "ttft=1s".parse().expect("an SLO");
    let cases = [(vec![], 3, true), (vec![1, 2, 3], 6, true), (vec![1, 2, 3, 4, 5, 6], 6, false)];
    for (slow, n_runs, passed) in cases {
        let target = Arc::new(SlowsDown(slow.clone()));
        let server = Server { target, scraper: Scraper::nobody().expect("a client") };
        let settings = SweepSettings { rates: Rates::Listed(vec![10.0]), ..SweepSettings::default() };
        let found = run_sweep(&server, &workload, &slo, &settings, &|_| ()).await.expect("it answers");
        let rate = &found.rates[0];
        let seeds: Vec<_> = rate.runs.iter().map(|run| run.seed).collect();
        assert_eq!(seeds, (1..=n_runs).collect::<Vec<_>>(), "slow with {slow:?}");
        assert_eq!(rate.verdict.passed, passed, "slow with {slow:?}: {:?}", rate.verdict.findings);
        assert_eq!(found.goodput.rate.is_some(), passed, "goodput is of the same verdict");
        assert_eq!(rate.verdict.n_offered, 1000 * n_runs);
    }
}
