//! Runs against a target whose every answer has a written-down time, with the clock paused: what is counted is exact.

use super::*;
use crate::client::Clock;
use crate::judge::Rule;
use crate::media::Media;
use crate::prompt::Wording;
use crate::slo::Slo;

/// First token after 100 ms, then one each 10 ms; and whatever `odd` says of a request.
struct Fake {
    odd: fn(u64) -> Option<Reply>,
    /// Time that making a request takes.
    slow_to_make: Duration,
}

impl Target for Fake {
    fn prepare(&self, offered: &Offered, _: &ContentSource) -> PreparedRequest {
        if self.slow_to_make > Duration::ZERO {
            std::thread::sleep(self.slow_to_make);
        }
        let n = offered.output_tokens;
        let odd = (self.odd)(offered.index);
        Box::new(move |clock: Clock| {
            Box::pin(async move {
                if let Some(odd) = odd {
                    tokio::time::sleep(odd.ended).await;
                    return Reply { ended: clock.now(), ..odd };
                }
                let mut reply = Reply::without_tokens(End::Whole, Duration::ZERO);
                tokio::time::sleep(Duration::from_millis(90)).await;
                for _ in 0..n {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    reply.tokens.push(clock.now());
                }
                Reply { ended: clock.now(), ..reply }
            })
        })
    }

    fn name(&self) -> String {
        "fake".to_owned()
    }

    fn model(&self) -> String {
        String::new()
    }
}

fn plan() -> RunPlan {
    RunPlan {
        rate: 20.0,
        arrivals: Arrivals::Constant,
        seed: 1,
        warm_up: Duration::from_secs(5),
        n_requests: 200,
        max_window: Duration::from_secs(600),
        drain: Duration::from_secs(30),
        max_late: None,
    }
}

fn slo() -> Slo {
    "ttft=150ms,tpot=20ms".parse().expect("an SLO")
}

async fn run_against(odd: fn(u64) -> Option<Reply>, plan: &RunPlan) -> Ran {
    run_until(odd, plan, &CancellationToken::new()).await
}

async fn run_until(odd: fn(u64) -> Option<Reply>, plan: &RunPlan, stop: &CancellationToken) -> Ran {
    triptych_runtime::tls::install_provider();
    let target: Arc<dyn Target> = Arc::new(Fake { odd, slow_to_make: Duration::ZERO });
    let workload = Workload::parse("text:text=5,output=11").expect("a workload");
    let content = ContentSource { media: Media::new(1), wording: Wording::DIGITS, seed: 1 };
    let (progress, _) = watch::channel(Progress::default());
    let scraper = Scraper::nobody().expect("a client");
    run(&target, &workload, &content, plan, RunObservers { scraper: &scraper, progress: &progress, stop })
        .await
}

#[tokio::test(start_paused = true)]
async fn every_request_is_sent_at_its_time_and_counted_once() {
    let plan = plan();
    let ran = run_against(|_| None, &plan).await;
    let result = run_result(&ran, &plan, &slo(), &Rule::default());
    assert_eq!(result.verdict.n_offered, 200);
    assert!(result.verdict.passed, "{:#?}", result.verdict.findings);
    assert!((result.window_s - 10.0).abs() < 0.11, "{}", result.window_s);
    let near = |found: Option<f64>, expect: f64| found.is_some_and(|f| (f - expect).abs() <= 1.5);
    assert!(near(result.ttft_ms.p99, 100.0), "{:?}", result.ttft_ms);
    assert!(near(result.tpot_ms.p50, 10.0) && near(result.itl_ms.max, 10.0), "{:?}", result.itl_ms);
    assert!(near(result.e2el_ms.p50, 200.0) && near(result.generator.late_ms.max, 0.0));
    assert!((result.throughput.requests_per_s - 20.0).abs() < 0.5, "{:?}", result.throughput);
    assert!((result.throughput.output_tokens_per_s - 220.0).abs() < 6.0, "{:?}", result.throughput);
    assert!(result.n_sent >= 300 && !result.generator.void && result.errors.is_empty());
    assert!(result.timeline.len() >= 14 && result.timeline[8].in_flight >= 3, "{:?}", result.timeline);
    assert_eq!((result.server, result.stages, result.item_sources), (None, None, None));
}

#[tokio::test(start_paused = true)]
async fn what_goes_wrong_is_an_outcome_too() {
    let reply = |end| Some(Reply::without_tokens(end, Duration::from_millis(50)));
    let odd = |i: u64| match i % 10 {
        3 => Some(Reply::without_tokens(End::Refused, Duration::from_millis(50))),
        5 => Some(Reply::without_tokens(End::Failed("reset".into()), Duration::from_millis(50))),
        7 => Some(Reply::without_tokens(End::Short, Duration::from_millis(50))),
        9 => Some(Reply::without_tokens(End::Whole, Duration::from_secs(100_000))),
        _ => None,
    };
    assert!(reply(End::Short).is_some());
    let plan = plan();
    let ran = run_against(odd, &plan).await;
    let result = run_result(&ran, &plan, &slo(), &Rule::default());
    let ends = result.verdict.ends;
    assert_eq!((ends.whole, ends.refused, ends.failed, ends.short, ends.unended), (120, 20, 20, 20, 20));
    assert_eq!((result.verdict.n_offered, result.verdict.n_good), (200, 120));
    assert_eq!(result.errors["reset"], 20);
    let last = ran.outcomes.iter().map(|o| o.ended).max().expect("outcomes");
    assert!(
        last <= ran.window.to + plan.drain + Duration::from_millis(2),
        "{last:?}: it waits so long and no longer"
    );
}

#[tokio::test(start_paused = true)]
async fn load_goes_on_until_the_last_judged_request_has_ended() {
    let plan = plan();
    let slow = |i: u64| (i == 250).then(|| Reply::without_tokens(End::Short, Duration::from_secs(8)));
    let ran = run_against(slow, &plan).await;
    let last_due = ran.outcomes.iter().map(|o| o.due).max().expect("outcomes");
    let slow_one = &ran.outcomes[250];
    assert!(ran.window.has(slow_one.due) && slow_one.ended > ran.window.to);
    assert!(last_due + Duration::from_millis(100) > slow_one.ended, "{last_due:?} {:?}", slow_one.ended);
    let judged_end = |o: &&Outcome| ran.window.has(o.due) && o.end == End::Unended;
    assert_eq!(ran.outcomes.iter().filter(judged_end).count(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_long_window_is_cut_whatever_the_number() {
    let plan = RunPlan { n_requests: 1_000_000, max_window: Duration::from_secs(3), ..plan() };
    let ran = run_against(|_| None, &plan).await;
    assert_eq!(ran.window.seconds(), 3.0);
    assert_eq!(ran.outcomes.iter().filter(|o| ran.window.has(o.due)).count(), 60);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_is_stopped_is_judged_up_to_that_moment() {
    let stopped = async |plan: &RunPlan, after: u64| {
        let stop = CancellationToken::new();
        let later = async {
            tokio::time::sleep(Duration::from_secs(after)).await;
            stop.cancel();
        };
        tokio::join!(run_until(|_| None, plan, &stop), later).0
    };
    // A window from 5 s to 15 s, and an answer takes 200 ms.
    let plan = plan();
    let ran = stopped(&plan, 8).await;
    assert!((ran.window.seconds() - 3.0).abs() < 0.1, "{:?}", ran.window);
    let result = run_result(&ran, &plan, &slo(), &Rule::default());
    let n = result.verdict.n_offered;
    assert!((58..=62).contains(&n) && result.verdict.ends.whole == n, "{:?}", result.verdict.ends);
    assert!((result.throughput.offered_per_s - 20.0).abs() < 0.7, "{:?}", result.throughput);
    let last = ran.outcomes.iter().map(|o| o.due).max().expect("outcomes");
    assert!(last <= ran.window.to, "no load after the stop: {last:?}");
    let in_warm_up = stopped(&plan, 2).await;
    assert_eq!(run_result(&in_warm_up, &plan, &slo(), &Rule::default()).verdict.n_offered, 0);
}

#[tokio::test]
async fn a_bench_that_is_late_says_so_and_its_run_is_void() {
    triptych_runtime::tls::install_provider();
    // 4 makers of 100 ms each make 40 a second, where 400 are due.
    let target: Arc<dyn Target> = Arc::new(Fake {
        odd: |_| Some(Reply::without_tokens(End::Whole, Duration::ZERO)),
        slow_to_make: Duration::from_millis(100),
    });
    let workload = Workload::parse("text:text=5,output=1").expect("a workload");
    let content = ContentSource { media: Media::new(1), wording: Wording::DIGITS, seed: 1 };
    let (progress, _) = watch::channel(Progress::default());
    let plan = RunPlan { rate: 400.0, warm_up: Duration::ZERO, n_requests: 120, ..plan() };
    let scraper = Scraper::nobody().expect("a client");
    let stop = CancellationToken::new();
    let observers = RunObservers { scraper: &scraper, progress: &progress, stop: &stop };
    let ran = run(&target, &workload, &content, &plan, observers).await;
    let result = run_result(&ran, &plan, &slo(), &Rule::default());
    assert!(result.generator.void, "{:?}", result.generator);
    assert_eq!(result.verdict.n_offered, 120);
}
