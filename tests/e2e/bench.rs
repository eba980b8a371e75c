//! The bench against a real cluster: few requests, and every count checked. Speed is not tested.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use triptych_bench::arrivals::Arrivals;
use triptych_bench::blocks::{Block, RunKey};
use triptych_bench::client::grpc::GrpcTarget;
use triptych_bench::outcome::End;
use triptych_bench::result::SweepResult;
use triptych_bench::scrape::Scraper;
use triptych_bench::sweep::{Server, Sweep, SweepEvent, SweepSettings};
use triptych_bench::workload::Workload;
use triptych_tests::cluster::{Cluster, reqwest_client};
use triptych_tests::process::{binary, signal};

/// Small enough for the sample model's context.
const WORKLOAD: &str = "mixed:with=0.5,images=1-2,size=112x84,text=30,output=8,share=0.3";
/// An SLO that every request meets.
const SLO: &str = "ttft=120s,tpot=60s";

/// `triptych bench run` with these flags; its result and what it printed.
async fn bench(flags: Vec<String>) -> (SweepResult, String) {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("result.json");
    let usual = [
        "--requests",
        "20",
        "--seeds",
        "1,2",
        "--warm-up",
        "1s",
        "--rates",
        "8",
        "--slo",
        SLO,
        "--max-late",
        "1h",
    ];
    let mut command = Command::new(binary());
    command.args(["bench", "run", "--model", "shapes-qwen2-vl"]).args(usual).args(flags);
    command.arg("--json").arg(&file);
    let output = tokio::task::spawn_blocking(move || command.output()).await.expect("no panic");
    let output = output.expect("the binary runs");
    let printed =
        format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{printed}");
    let text = std::fs::read_to_string(&file).expect("a result");
    (SweepResult::read(&text).expect("its own document"), printed)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_request_is_counted_over_grpc_and_http() {
    let cluster = Cluster::start(&[]).await;
    let metrics = ["encoder-0", "pd-0"].map(|worker| format!("{}/metrics", cluster.admin(worker)));
    let mut flags = vec!["--grpc".to_owned(), cluster.grpc.clone(), "--workload".into(), WORKLOAD.into()];
    flags.extend(metrics.iter().flat_map(|url| ["--metrics".to_owned(), url.clone()]));
    let (found, printed) = bench(flags).await;
    assert!(printed.contains("shorter than the rule: 20 requests in the shortest run, 2 seeds"), "{printed}");
    let rate = &found.rates[0];
    assert_eq!(
        (rate.rate, rate.verdict.n_offered, rate.verdict.n_good),
        (8.0, 40, 40),
        "{:#?}",
        rate.verdict
    );
    for run in &rate.runs {
        assert_eq!((run.verdict.n_offered, run.verdict.ends.whole), (20, 20), "{:?}", run.errors);
        let sources = run.item_sources.expect("Triptych says where items came from");
        let n_items = sources.encoded + sources.shared + sources.cached;
        assert!(n_items > 0 && sources.cached + sources.shared > 0, "{sources:?}");
        let server = run.server.expect("Triptych has metrics");
        assert!(server.encodes.expect("an encoder") >= sources.encoded as f64, "{server:?}");
        assert!(server.step_ms.is_some() && run.stages.is_some_and(|s| s.prefill.n == 20));
        // An encoder reports nothing before its first item.
        let mut reported = run.timeline.iter().skip_while(|s| s.encoding.is_none()).peekable();
        assert!(reported.peek().is_some() && reported.all(|s| s.encoding.is_some()), "{:?}", run.timeline);
        assert!(run.timeline.iter().all(|s| s.running.is_some()), "{:?}", run.timeline);
    }

    // Over HTTP, text only: the requested number of tokens, after those of the template.
    let url = ["--url", &cluster.http, "--workload", "text:text=200,output=12"].map(str::to_owned);
    let (longer, _) = bench(url.to_vec()).await;
    let url = ["--url", &cluster.http, "--workload", "text:text=100,output=12"].map(str::to_owned);
    let (shorter, _) = bench(url.to_vec()).await;
    let prompt = |found: &SweepResult| {
        let run = &found.rates[0].runs[0];
        assert_eq!((run.verdict.ends.whole, run.e2el_ms.n), (20, 20), "{:?}", run.errors);
        let prompt = run.prompt_tokens.expect("the server counts");
        assert_eq!(prompt.p50, prompt.max, "all prompts are of one length");
        prompt.mean.expect("prompts")
    };
    assert_eq!(prompt(&longer) - prompt(&shorter), 100.0);
    assert_eq!(longer.setup.model, "shapes-qwen2-vl");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_request_has_a_verdict_after_a_worker_is_killed() {
    let cluster = Cluster::start(&[]).await;
    let _ = reqwest_client();
    let channel = triptych_runtime::grpc::channel(&cluster.grpc).expect("an address");
    let target =
        GrpcTarget::new(&cluster.grpc, vec![channel], "shapes-qwen2-vl".into(), None).expect("no key");
    let server = Server { target: Arc::new(target), scraper: Scraper::nobody().expect("a client") };
    let workload = Workload::parse(WORKLOAD).expect("a workload");
    let settings = SweepSettings {
        arrivals: Arrivals::Constant,
        n_requests: 40,
        warm_up: Some(Duration::from_secs(1)),
        ..SweepSettings::default()
    };
    let slo = SLO.parse().expect("an SLO");
    let sweep = Sweep::begin(&server, &workload, &slo, &settings).await.expect("it answers");
    let pd = cluster.pid("pd");
    let killed = AtomicBool::new(false);
    let listener = |news: SweepEvent<'_>| {
        if let SweepEvent::Progress(progress) = news
            && progress.n_sent >= 20
            && !killed.swap(true, Ordering::Relaxed)
        {
            signal(pd, "KILL");
        }
    };
    let run = sweep.run(RunKey { rate: 10.0, seed: 1, block: Block::WHOLE }, &listener).await;
    assert!(killed.load(Ordering::Relaxed), "the run was long enough for the kill");
    let verdict = &run.result.verdict;
    assert_eq!(verdict.n_offered, 40);
    let ends = verdict.ends;
    assert_eq!(ends.whole + ends.short + ends.refused + ends.failed + ends.unended, 40, "{ends:?}");
    assert_eq!(verdict.n_good, ends.whole, "{:?}", run.result.errors);
    let indices: Vec<u64> = run.outcomes.iter().map(|o| o.index).collect();
    assert_eq!(indices, (0..run.result.n_sent).collect::<Vec<_>>(), "each request once");
    for outcome in run.outcomes.iter().filter(|o| o.end == End::Whole) {
        assert_eq!(outcome.tokens.len(), 8);
        assert!(outcome.tokens.is_sorted() && outcome.tokens[0] > outcome.sent);
    }
}
