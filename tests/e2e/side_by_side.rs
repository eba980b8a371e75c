//! Clusters that the bench starts itself: each is pinned to its cores, measured, and ended. Speed is not tested.

use std::fs;
use std::path::Path;
use triptych_bench::result::SweepResult;
use triptych_tests::process::{Process, children_of, eventually, is_alive, signal};
use triptych_tests::samples::models_dir;

/// A config without weights.
const MODEL: &str = "qwen2-vl-tiny";
/// Small enough for a debug build.
const WORKLOAD: &str = "epd-short:images=1,size=112x84,text=30,output=8";

/// `triptych bench suite` of two topologies, with these flags.
fn suite(out: &Path, flags: &[&str]) -> Process {
    let model = models_dir().join("../../benches/models").join(MODEL).display().to_string();
    let out = out.display().to_string();
    let usual = [
        "bench",
        "suite",
        "--topology",
        "1e1pd,colocated",
        "--model",
        &model,
        "--load-format",
        "dummy",
        "--out",
        &out,
    ];
    let load = ["--workload", WORKLOAD, "--slo", "ttft=120s,tpot=60s", "--seeds", "1", "--rates", "4"];
    Process::start(&[&usual[..], &load[..], flags].concat())
}

/// Children of the bench that run a role.
fn workers(bench: &Process) -> Vec<u32> {
    ["encoder", "pd", "proxy"].iter().flat_map(|role| children_of(bench.pid(), role)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clusters_are_pinned_to_their_cores_measured_and_ended() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("results");
    let mut bench = suite(&out, &["--requests", "6", "--max-window", "10", "--warm-up", "1"]);
    // 1e1pd has an encoder and a PD worker, colocated one worker; each has a proxy.
    let started = eventually("all are up", async || {
        assert!(bench.exited().is_none(), "it ended early:\n{}", bench.log());
        Some(workers(&bench)).filter(|all| all.len() == 5)
    });
    let started = started.await;
    let allowed = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:").map(str::to_owned))
    };
    let of_encoder = children_of(bench.pid(), "encoder").iter().find_map(allowed).expect("it runs");
    let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
    if n_cores == 2 {
        assert_eq!(of_encoder.trim(), "0", "one of two cores");
    }
    assert!(bench.wait().await.success(), "{}", bench.log());
    assert!(started.iter().all(|pid| !is_alive(*pid)), "nothing is left behind");
    for topology in ["1e1pd", "colocated"] {
        let files = fs::read_dir(&out).expect("results").map(|e| e.expect("an entry").path());
        let file = files.into_iter().find(|f| f.to_string_lossy().ends_with(&format!("__{topology}.json")));
        let text = fs::read_to_string(file.expect("a result")).expect("text");
        let found = SweepResult::read(&text).expect("its own document");
        assert_eq!(found.setup.topology.as_deref(), Some(topology));
        let run = &found.rates[0].runs[0];
        assert_eq!((run.verdict.n_offered, run.verdict.ends.whole), (6, 6), "{:?}", run.errors);
    }
    let page = fs::read_to_string(out.join("report.html")).expect("a page");
    assert!(page.contains("1e1pd") && page.contains("colocated") && page.contains("cores, 1e1pd"));

    // Existing results are not measured again.
    let mut again = suite(&out, &["--requests", "6", "--max-window", "10", "--warm-up", "1"]);
    assert!(again.wait().await.success(), "{}", again.log());
    assert!(again.log().contains("0 of 2 results"), "{}", again.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_timed_by_curves_are_as_slow_as_they_say_and_more_than_there_are_cores() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("results");
    let curves = models_dir().join("../../benches/papers/a100-qwen3-vl-4b.json").display().to_string();
    let model = models_dir().join("../../benches/models").join("qwen2-vl-timed").display().to_string();
    let to = out.display().to_string();
    let cluster = ["bench", "suite", "--topology", "1e3pd", "--model", &model, "--load-format", "dummy"];
    let load = ["--workload", WORKLOAD, "--slo", "ttft=120s,tpot=60s", "--seeds", "1", "--rates", "4"];
    let run =
        ["--requests", "8", "--max-window", "10", "--warm-up", "1", "--out", &to, "--timed-by", &curves];
    let mut bench = Process::start(&[&cluster[..], &load[..], &run[..]].concat());
    assert!(bench.wait().await.success(), "{}", bench.log());
    let files = fs::read_dir(&out).expect("results").map(|e| e.expect("an entry").path());
    let file = files.into_iter().find(|f| f.to_string_lossy().ends_with("__1e3pd.json"));
    let found = SweepResult::read(&fs::read_to_string(file.expect("a result")).expect("text"));
    let verdict = &found.expect("its own document").rates[0].runs[0].verdict;
    assert_eq!((verdict.n_offered, verdict.ends.whole), (8, 8));
    // A step of one sequence takes 18 ms in the curves, give or take chance.
    let tpot = verdict.tpot_ms.p50.expect("a TPOT");
    assert!(tpot > 15.0, "{tpot} ms");
    assert!(verdict.ttft_ms.p50.expect("a TTFT") > 20.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_death_of_a_worker_voids_the_measurement() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("results");
    // A minute of warm-up: the worker dies before the measurement.
    let mut bench = suite(&out, &["--requests", "6", "--max-window", "60", "--warm-up", "60"]);
    let workers = eventually("all are up", async || {
        assert!(bench.exited().is_none(), "it ended early:\n{}", bench.log());
        Some(workers(&bench)).filter(|all| all.len() == 5 && bench.log().contains("colocated: worker-0 on"))
    });
    let workers = workers.await;
    let victim = children_of(bench.pid(), "encoder")[0];
    signal(victim, "KILL");
    assert_eq!(bench.wait().await.code(), Some(1));
    assert!(bench.log().contains("encoder-0 ended") && bench.log().contains("void"), "{}", bench.log());
    assert!(workers.iter().all(|pid| !is_alive(*pid)), "nothing is left behind");
    let entries = |dir: &Path| fs::read_dir(dir).expect("a folder").map(|e| e.expect("an entry").path());
    let left =
        entries(&out).flat_map(|path| if path.is_dir() { entries(&path).collect() } else { vec![path] });
    assert!(left.collect::<Vec<_>>().is_empty(), "and no result is");
}
