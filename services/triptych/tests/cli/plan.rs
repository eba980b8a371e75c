//! `triptych profile` to its end, and `triptych plan` with what it wrote, beside a proxy that is not one, and with what
//! cannot be read.

use super::{refuses, tree, triptych};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use triptych_plan::curves::sample::{curves, two_towers};
use triptych_plan::curves::{CostCurves, ItemsAt};
use triptych_plan::planner::{CurveKind, Residuals};

fn stderr(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// File of synthetic curves.
fn file(dir: &Path) -> String {
    let path = dir.join("hand.json");
    std::fs::write(&path, serde_json::to_string(&curves()).expect("JSON")).expect("a file");
    path.to_str().expect("plain").to_owned()
}

#[test]
fn a_profile_of_the_sample_model_ends_with_a_file_that_can_be_planned_by() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("curves.json");
    let store = format!("disk:{}", dir.path().join("ec").display());
    let model = tree("tests/models/shapes-qwen2-vl");
    let args = ["profile", &model, "--quick", "--rounds", "1", "--threads", "1", "--cores", "0"];
    let output = triptych(&[&args[..], &["--ec", &store, "-o", out.to_str().expect("plain")]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let page = String::from_utf8_lossy(&output.stdout);
    for part in [
        "# Cost curves of shapes-qwen2-vl",
        "| encode: items |",
        "Sums of terms",
        "The proxy adds",
        "bound to cores [0]",
        "| decode | ",
    ] {
        assert!(page.contains(part), "{part} is not in\n{page}");
    }
    let read = CostCurves::read(&std::fs::read_to_string(&out).expect("written")).expect("curves");
    assert_eq!((read.threads, read.precision.as_str(), read.measured.cores.as_slice()), (1, "f32", &[0][..]));
    assert!(read.measured.store.starts_with("disk:") && read.row_bytes > 0);
    assert!(read.proxy.request_us > 0.0, "{:?}", read.proxy);
    // One round on a busy machine: which part is lost in the noise is chance, that all are is not.
    let front = read.front;
    assert!(
        front.request_us + front.item_us + front.wake_us + front.write_us + front.message_us > 0.0,
        "{front:?}"
    );
    assert_eq!(read.prompt.items, ItemsAt::Front);
    let beside = read.interference.as_ref().expect("measured beside neighbours");
    assert_eq!(beside.stages().count(), 4, "{beside:?}");
    assert!(beside.stages().all(|(_, times)| times.shared_us > 0.0 && times.alone_us > 0.0), "{beside:?}");
    assert!(read.publish.len() == 2 && read.publish.iter().all(|p| p.p50_us > 0.0));
    calibrates(&out, &read);
}

/// A cluster in service scales the curves; those are not scaled again, and workers of another size have none.
fn calibrates(curves: &Path, measured: &CostCurves) {
    let dir = tempfile::tempdir().expect("a folder");
    let (model, output) = (tree("tests/models/shapes-qwen2-vl"), dir.path().join("in-service"));
    let workload = "mixed:with=0.8,images=1-2,size=112x84,text=30,output=8";
    let plan = |curves: &Path, topology: &str| {
        let curves = curves.to_str().expect("plain");
        let flags = ["plan", "calibrate", "--curves", curves, "--model", &model, "--topology", topology];
        let more = ["--workload", workload, "--window-s", "2", "--cores", "0", "--output"];
        triptych(&[&flags[..], &more, &[output.to_str().expect("plain")]].concat())
    };
    let calibrated = plan(curves, "colocated");
    assert!(calibrated.status.success(), "{}", stderr(&calibrated));
    let page = String::from_utf8_lossy(&calibrated.stdout);
    assert!(page.contains("| colocated | "), "{page}");
    let file = output.join(curves.file_name().expect("a name"));
    let scaled = CostCurves::read(&std::fs::read_to_string(&file).expect("written")).expect("curves");
    let factors = scaled.in_service.expect("factors");
    // Forwards and both kinds of steps are told apart by their timeline, though one process does all of them.
    let prefill = factors.prefill.expect("measured");
    assert!(factors.encode != factors.step && prefill != factors.step, "{factors:?}");
    for (scaled, measured) in scaled.step.iter().zip(&measured.step) {
        let factor = if measured.prefill_tokens > 0 { prefill } else { factors.step };
        assert!((scaled.p50_us / measured.p50_us - factor).abs() < 1e-9, "{scaled:?} for {factors:?}");
    }
    let again = plan(&file, "colocated");
    assert!(stderr(&again).contains("scaled to service already"), "{}", stderr(&again));
    let other = plan(curves, "dp2");
    assert!(
        stderr(&other).contains("workers with 1 threads, which --topology has none of on 1 cores"),
        "{}",
        stderr(&other)
    );
}

#[test]
fn a_profile_of_two_towers_has_the_curves_of_each() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("curves.json");
    let out = out.to_str().expect("plain");
    let store = format!("disk:{}", dir.path().join("ec").display());
    let model = tree("tests/golden/cogagent_chat/model");
    let args = ["profile", &model, "--quick", "--rounds", "1", "--threads", "1", "--ec", &store, "-o", out];
    let output = triptych(&args);
    assert!(output.status.success(), "{}", stderr(&output));
    let page = String::from_utf8_lossy(&output.stdout);
    assert!(
        page.contains("| encode by low: items |") && page.contains("| encode by high: items |"),
        "{page}"
    );
    let read = CostCurves::read(&std::fs::read_to_string(out).expect("written")).expect("curves");
    assert_eq!(read.encoders().map(|encoder| encoder.name).collect::<Vec<_>>(), ["low", "high"]);
}

#[test]
fn what_cannot_be_measured_is_an_error_before_the_first_measurement() {
    let model = tree("tests/models/shapes-qwen2-vl");
    let profile = |more: &[&str], parts: &[&str]| refuses(&[&["profile", &model], more].concat(), 2, parts);
    profile(&["--cores", "9999"], &["--cores", "no core 9999"]);
    profile(&["--cores", "0,0"], &["core 0 is named twice"]);
    profile(&["--cores", "0", "--threads", "2"], &["--threads 2 on 1 cores"]);
    profile(&["-o", "/no/such/folder/c.json"], &["--output", "/no/such/folder"]);
    profile(&["--ec", "nfs://x"], &["`disk:DIR[?mib=N]`"]);
    profile(&["--rounds", "0"], &["--rounds"]);
    refuses(&["profile", "./no-such-model"], 2, &["./no-such-model", "no such directory"]);
}

#[test]
fn what_cannot_be_planned_is_told_with_what_is_allowed() {
    let dir = tempfile::tempdir().expect("a folder");
    let curves = file(dir.path());
    let base = ["plan", "--curves", &curves, "--slo", "ttft=1s"];
    let plan = |more: &[&str], parts: &[&str]| refuses(&[&base, more].concat(), 2, parts);
    plan(&[], &["--budget"]);
    plan(&["--budget", "8gpus"], &["8gpus", "8cores"]);
    plan(&["--budget", "8cores", "--workload", "nope"], &["nope", "epd-short"]);
    plan(&["--budget", "8cores", "--threads-per-worker", "3"], &["--threads-per-worker 3", "1 threads"]);
    plan(&["--watch", "http://x", "--min", "3", "--max", "2"], &["--min 3", "--max 2"]);
    plan(&["--watch", "http://x", "--apply-command", "scale"], &["{pool}", "{replicas}"]);
    plan(&["--watch", "http://x", "--apply", "docker"], &["kubernetes:NAMESPACE"]);
    plan(&["--watch", "http://x", "--apply", "kubernetes:prod"], &["--apply", "KUBERNETES_SERVICE_HOST"]);
    refuses(&["plan", "--curves", &curves, "--budget", "8cores"], 2, &["--slo"]);
    refuses(&["plan", "--slo", "ttft=soon", "--budget", "8cores"], 2, &["soon"]);
    refuses(&["plan", "--curves", "no.json", "--slo", "ttft=1s", "--budget", "2cores"], 2, &["no.json"]);
    std::fs::write(&curves, "{\"version\": 99}").expect("a file");
    plan(&["--budget", "8cores"], &["version 99", "triptych profile"]);
    let fleets = ["plan", "fleets", "--curves", &curves, "--slo", "ttft=1s", "--output", "/no/such"];
    std::fs::write(&curves, serde_json::to_string(&triptych_plan::curves::sample::curves()).expect("JSON"))
        .expect("a file");
    refuses(&fleets, 2, &["--output", "/no/such"]);
}

#[test]
fn a_plan_is_a_page_and_a_document() {
    let dir = tempfile::tempdir().expect("a folder");
    let curves = file(dir.path());
    let base = ["plan", "--curves", &curves, "--slo", "ttft=2s,tpot=100ms", "--quick", "--requests", "60"];
    let asked = ["--workload", "epd-short:images=1,text=100,output=12", "--budget", "2cores"];
    let output = triptych(&[&base[..], &asked].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let page = String::from_utf8_lossy(&output.stdout).into_owned();
    for part in
        ["# Plan for made by hand", "requests/s", "pools:\n", "$ triptych proxy", "If the rate doubles"]
    {
        assert!(page.contains(part), "{part} is not in\n{page}");
    }
    let headline = page.lines().find(|line| line.starts_with("**")).expect("a headline");
    let number = headline.trim_start_matches('*').split(' ').next().expect("a number");
    let row = page.lines().find(|line| line.contains(", recommended | ")).expect("a row");
    assert!(row.contains(&format!(", recommended | {number} (")), "{headline}\n{row}");
    // What is simulated is said meanwhile, on a pipe once for each phase.
    let said: Vec<_> = stderr(&output).lines().map(str::to_owned).collect();
    assert_eq!(said.len(), 3, "{said:?}");
    assert!(said[0].starts_with("simulating 1/3 first search"), "{said:?}");
    let output = triptych(&[&base[..], &asked, &["--json"]].concat());
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(document["best"]["goodput"]["mean"].as_f64().expect("a number") > 0.0);
    assert!(["disaggregate", "do_not_disaggregate"].contains(&document["advice"].as_str().expect("a word")));
}

#[test]
fn a_simulated_run_is_written_as_a_timeline() {
    let dir = tempfile::tempdir().expect("a folder");
    let (curves, out) = (file(dir.path()), dir.path().join("simulated.json"));
    let workload = "epd-short:images=1,text=100,output=12";
    let base = [
        "plan",
        "trace",
        "--curves",
        &curves,
        "--slo",
        "ttft=2s",
        "--requests",
        "50",
        "--workload",
        workload,
    ];
    let to = ["-o", out.to_str().expect("plain")];
    let trace = |more: &[&'static str]| [&base[..], &to, more].concat();
    let output = triptych(&trace(&["--rate", "2", "--one-machine"]));
    assert!(output.status.success(), "{}", stderr(&output));
    let text = std::fs::read_to_string(&out).expect("written");
    for (name, least) in [("\"step\"", 50 * 12 / 10), ("\"forward\"", 1), ("\"preprocess\"", 50)] {
        let n = text.lines().filter(|line| line.contains(name)).count();
        assert!(n >= least, "{n} spans of {name}");
    }
    refuses(&trace(&["--rate", "0"]), 2, &["--rate 0"]);
    refuses(&trace(&["--rate", "1", "--topology", "colocated"]), 2, &["2 cores each"]);
}

#[test]
fn a_stored_cell_is_simulated_with_the_slo_that_its_workers_were_told() {
    let dir = tempfile::tempdir().expect("a folder");
    let curves = file(dir.path());
    let cell = dir.path().join("dp2.json");
    // More than the cluster serves: prompts always wait.
    stored(dir.path(), "dp2", 60.0);
    let untold = std::fs::read_to_string(&cell).expect("a cell");
    let told = untold.replace("\"salt\":0", "\"salt\":0,\"pd_tpot_slo_ms\":100.0");
    let simulated = [&untold, &told].map(|text| {
        std::fs::write(&cell, text).expect("a file");
        let paths = [&cell, dir.path()].map(|path: &Path| path.to_str().expect("plain"));
        let flags =
            ["--curves", &curves, "--results", paths[0], "--output", paths[1], "--quick", "--requests", "60"];
        let output = triptych(&[&["plan", "validate"], &flags[..]].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        let json = std::fs::read_to_string(dir.path().join("validation.json")).expect("written");
        serde_json::from_str::<serde_json::Value>(&json).expect("JSON")["compared"].clone()
    });
    assert_ne!(simulated[0], simulated[1]);
}

/// A result of `triptych bench suite` for a topology with this goodput.
fn stored(dir: &Path, topology: &str, goodput: f64) {
    let percentiles = serde_json::json!({"p50": 100.0, "p90": 200.0, "p99": 300.0});
    let ends = serde_json::json!({"whole": 60, "short": 0, "refused": 0, "failed": 0, "unended": 0});
    let verdict = serde_json::json!({
        "passed": true, "percentiles_passed": true, "findings": [], "n_offered": 60, "n_good": 60, "n_served": 60,
        "ends": ends, "ttft_ms": percentiles, "tpot_ms": percentiles, "e2el_ms": percentiles,
        "concurrency_trend": null, "ttft_trend": null
    });
    let spread =
        serde_json::json!({"n": 0, "mean": null, "p50": null, "p90": null, "p99": null, "max": null});
    let run = serde_json::json!({
        "version": 1, "rate": goodput, "seed": 1, "warm_up_s": 1.0, "window_s": 10.0, "n_sent": 60,
        "verdict": verdict, "ttft_ms": spread, "tpot_ms": spread, "itl_ms": spread, "e2el_ms": spread,
        "throughput": {
            "offered_per_s": 0.0, "requests_per_s": 0.0, "good_per_s": 0.0, "output_tokens_per_s": 0.0,
            "images_per_s": 0.0, "audio_s_per_s": 0.0
        },
        "generator": {"late_ms": spread, "allowed_ms": 0.0, "void": false}, "prompt_tokens": null, "stages": null,
        "item_sources": null, "server": {"step_ms": 40.0}, "all_ends": ends, "errors": {}, "timeline": []
    });
    let document = serde_json::json!({
        "version": 1,
        "host": {"cpu": "made by hand", "cores": 2, "memory_mib": null, "at_unix_s": 0, "commit": "abc"},
        "setup": {
            "target": "here", "topology": topology, "model": "made by hand",
            "workload": "epd-short:images=1,text=100,output=12", "arrivals": "own", "slo": "ttft=2s,tpot=100ms",
            "slo_ttft_ms": 2000.0, "slo_tpot_ms": 100.0, "slo_e2el_ms": null,
            "rule": {"attainment": 0.99, "percentile": 99.0, "served": 0.97}, "seeds": [1], "n_requests": 60,
            "max_window_s": 10.0, "resolution": 0.05, "salt": 0
        },
        "shorter_than_the_rule": null,
        "rates": [{"rate": goodput, "verdict": verdict, "runs": [run]}],
        "goodput": {
            "rate": goodput, "interval": null, "fails_at": null, "rate_at_90": null, "vllm": null, "distserve": null
        }
    });
    std::fs::write(dir.join(format!("{topology}.json")), document.to_string()).expect("a file");
}

#[test]
fn stored_results_validate_the_plan_without_a_cluster() {
    let dir = tempfile::tempdir().expect("a folder");
    let (curves, results) = (file(dir.path()), dir.path().join("results"));
    std::fs::create_dir(&results).expect("a folder");
    stored(&results, "1e1pd", 4.0);
    stored(&results, "dp2", 2.0);
    let paths = [&results, dir.path()].map(|path| path.to_str().expect("plain").to_owned());
    let flags = ["--results", &paths[0], "--output", &paths[1], "--quick", "--requests", "60"];
    let base = ["plan", "validate", "--curves", &curves];
    // Results have an SLO of their own.
    let output = triptych(&[&base[..], &flags].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let page = String::from_utf8_lossy(&output.stdout);
    for part in [
        "ttft=2s,tpot=100ms",
        "on 1e1pd at 100 % of its capacity, 4.00",
        "TTFT p99",
        "1e1pd: 4.00",
        "as expected",
        "abc",
        "clusters inside their interval",
        "missed",
    ] {
        assert!(page.contains(part), "{part} is not in\n{page}");
    }
    // What was found is the model's error of the next plan.
    let residuals = dir.path().join("residuals.json");
    let read = Residuals::read(&std::fs::read_to_string(&residuals).expect("written")).expect("residuals");
    assert_eq!(read.cells.iter().map(|cell| cell.curves).collect::<Vec<_>>(), [CurveKind::Idle; 2]);
    let residuals = ["--residuals", residuals.to_str().expect("plain")];
    let again = triptych(&[&base[..], &["--slo", "ttft=2s,tpot=100ms"], &residuals, &flags].concat());
    assert!(again.status.success(), "{}", stderr(&again));
    let wrong = [&base[..], &["--slo", "ttft=2s", "--residuals", &curves], &flags].concat();
    refuses(&wrong, 2, &["--residuals", "not a file of residuals"]);
    let json = std::fs::read_to_string(dir.path().join("validation.json")).expect("written");
    let document: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(document["compared"].as_array().expect("a list").len(), 2);
    let clusters = &document["regrets"][0]["clusters"];
    assert_eq!(clusters[0]["measured"], 4.0);
    assert!(clusters[0]["expected"]["mean"].as_f64().is_some_and(|rate| rate > 0.0), "{clusters}");
    // The curves know no step as long as the workers reported.
    assert_eq!(document["compared"][0]["slowness"], 1.0);
    let output = triptych(&[&base[..], &["--slo", "ttft=2s,tpot=100ms", "--as-reported"], &flags].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("times as slow as the curves"),
        "{}",
        stderr(&output)
    );
}

/// A server of metrics that were asked for ever more.
fn metrics() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/metrics", listener.local_addr().expect("bound"));
    let n = Arc::new(AtomicU32::new(0));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let _ = stream.read(&mut [0; 4096]);
            // Twelve requests at each observation, each of four expensive images.
            let n = n.fetch_add(1, Ordering::Relaxed) * 12;
            let items = n * 4;
            let text = format!(
                "# HELP triptych_requests R.\n\
                 triptych_requests_total{{outcome=\"ok\"}} {n}\n\
                 triptych_requests_by_items_total{{items=\"4\"}} {n}\n\
                 triptych_item_source_total{{source=\"encoded\"}} {items}\n\
                 triptych_item_tokens_bucket{{le=\"512.0\"}} 0\n\
                 triptych_item_tokens_bucket{{le=\"1024.0\"}} {items}\n\
                 triptych_request_text_tokens_bucket{{le=\"32.0\"}} {n}\n\
                 triptych_request_output_tokens_bucket{{le=\"16.0\"}} {n}\n\
                 triptych_time_to_first_token_seconds_bucket{{le=\"0.1\"}} {n}\n# EOF\n"
            );
            let head =
                format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", text.len());
            let _ = stream.write_all((head + &text).as_bytes());
        }
    });
    url
}

#[test]
fn a_watch_prints_a_line_for_each_observation_and_sets_replicas() {
    let dir = tempfile::tempdir().expect("a folder");
    let (curves, url) = (file(dir.path()), metrics());
    let touch = format!("touch {}", dir.path().join("{pool}-{replicas}").display());
    let base =
        ["plan", "--curves", &curves, "--slo", "ttft=2s,tpot=100ms", "--quick", "--json", "--watch", &url];
    let how = [
        "--interval-s",
        "1",
        "--observations",
        "3",
        "--for-observations",
        "1",
        "--max-step",
        "1",
        "--apply-command",
        &touch,
    ];
    let output = triptych(&[&base[..], &how].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("a document a line")).collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert_eq!(lines[0]["watching"], true);
    assert!(lines[1]["changes"] == true && lines[1]["rate"].as_f64().expect("a number") > 1.0, "{text}");
    assert_eq!(lines[1]["current"]["encoders"], 1);
    assert_eq!(lines[1]["recommended"]["encoders"], 2, "one step at a time");
    assert!(
        lines[2]["changes"] == false && lines[2]["why"].as_str().expect("why").contains("cooldown"),
        "{text}"
    );
    assert!(dir.path().join("encoder-2").exists());
}

#[test]
fn a_watch_sets_the_pool_of_each_tower() {
    let dir = tempfile::tempdir().expect("a folder");
    let curves = dir.path().join("towers.json");
    std::fs::write(&curves, serde_json::to_string(&two_towers()).expect("JSON")).expect("a file");
    let curves = curves.to_str().expect("plain");
    let url = metrics();
    let touch = format!("touch {}", dir.path().join("{pool}-{replicas}").display());
    let base =
        ["plan", "--curves", curves, "--slo", "ttft=2s,tpot=100ms", "--quick", "--json", "--watch", &url];
    let how = [
        "--requests",
        "60",
        "--interval-s",
        "1",
        "--observations",
        "2",
        "--for-observations",
        "1",
        "--max-step",
        "1",
    ];
    let pools =
        ["--encoders", "high:4,low:1", "--apply-command", &touch, "--encoder-deployment", "low=a,high=b"];
    let output = triptych(&[&base[..], &how, &pools].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line: serde_json::Value = serde_json::from_str(text.lines().last().expect("a line")).expect("JSON");
    assert_eq!(line["current"]["encoders"], serde_json::json!({"low": 1, "high": 4}), "{text}");
    let needed = |tower: &str| line["needed"]["encoders"][tower].as_u64().expect("a number");
    assert!(needed("low") > needed("high"), "the second takes a third of the time: {text}");
    assert_eq!(line["recommended"]["encoders"]["low"], 2, "one step at a time: {text}");
    assert!(dir.path().join("a-2").exists(), "{text}");
    assert_eq!(dir.path().join("b-3").exists(), needed("high") < 4, "{text}");
    let wrong = ["--encoders", "low:1", "--observations", "1"];
    refuses(&[&base[..], &wrong].concat(), 2, &["no worker would hold tower high"]);
}

#[test]
fn a_proxy_that_does_not_answer_is_reported_and_the_watch_goes_on() {
    let dir = tempfile::tempdir().expect("a folder");
    let curves = file(dir.path());
    let base = ["plan", "--curves", &curves, "--slo", "ttft=2s", "--json"];
    let output =
        triptych(&[&base[..], &["--watch", "http://127.0.0.1:9/metrics", "--observations", "1"]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(String::from_utf8_lossy(&output.stdout).contains("\"trouble\""));
}
