//! Every metric, label and value that rules, dashboards and scalers read is exported by a real cluster.
//!
//! The cluster serves images and audio, refuses an unknown model, and finds corrupt objects in its store; its `/metrics`
//! are scraped as Prometheus does. Metrics that appear in outages only are listed here with their labels.

use crate::chart::{of_kind, rendered, text};
use crate::page::deploy;
use crate::promql::{Series, asked};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use triptych_proto::v1::SpeechTask;
use triptych_tests::client::{about_audio, about_images, connect, generate};
use triptych_tests::cluster::Cluster;
use triptych_tests::process::signal;
use triptych_tests::samples::heldout;

/// Labels of a target: those of Prometheus, of the operator, and of its relabelling.
fn target_labels() -> BTreeSet<String> {
    let monitor = of_kind(&rendered()["full"], "PodMonitor").next().expect("a monitor");
    let relabelings =
        monitor["spec"]["podMetricsEndpoints"][0]["relabelings"].as_array().expect("relabelling");
    let own = ["job", "instance", "namespace", "pod", "container"].map(str::to_owned);
    own.into_iter().chain(relabelings.iter().map(|r| text(r, "/targetLabel").to_owned())).collect()
}

/// Metrics that a healthy cluster does not export, with their labels and the file that sets them.
const FAILURE_ONLY: [(&str, &[&str], &str); 4] = [
    ("triptych_worker_ejections_total", &["role", "cause"], "services/proxy/src/fleet/meters.rs"),
    ("triptych_retry_budget_exhausted_total", &["for"], "services/proxy/src/encode/meters.rs"),
    ("triptych_admission_rejections_total", &["stage"], "services/proxy/src/fleet/meters.rs"),
    ("triptych_resumed_streams_total", &["model"], "services/proxy/src/observe.rs"),
];
/// Further ones, without labels in queries.
const RETRIES: [&str; 2] = ["triptych_pd_retries_total", "triptych_pending_item_wait_seconds_bucket"];

/// Those of graphs, which only workers on CUDA have: `tests/e2e/cuda.rs` finds them there.
const CUDA_ONLY: [&str; 10] = [
    "triptych_encode_graph_replays_total",
    "triptych_encode_eager_forwards_total",
    "triptych_encode_graph_tokens_total",
    "triptych_encode_graph_padding_tokens_total",
    "triptych_encode_graph_memory_bytes",
    "triptych_decode_graph_replays_total",
    "triptych_decode_eager_steps_total",
    "triptych_decode_graph_tokens_total",
    "triptych_decode_graph_padding_tokens_total",
    "triptych_decode_graph_memory_bytes",
];

/// Series by name: each label with its values.
type ExportedSeries = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// Adds the metrics of a process.
fn read(shown: &mut ExportedSeries, metrics: &str) {
    for line in metrics.lines().filter(|l| !l.starts_with('#')) {
        let name = line.split(['{', ' ']).next().expect("a name");
        let labels = shown.entry(name.to_owned()).or_default();
        let inside =
            line.split_once('{').and_then(|(_, rest)| rest.rsplit_once('}')).map_or("", |(inside, _)| inside);
        for pair in inside.split("\",") {
            if let Some((label, value)) = pair.split_once("=\"") {
                labels.entry(label.to_owned()).or_default().insert(value.trim_end_matches('"').to_owned());
            }
        }
    }
}

/// Series of a cluster that has served every kind of request, and found a corrupt object.
async fn exported() -> ExportedSeries {
    let dir = tempfile::tempdir().expect("a folder");
    let ec = format!("disk:{}", dir.path().display());
    let mut cluster = Cluster::start(&["--ec", &ec]).await;
    let mut client = connect(&cluster.grpc).await;
    let about_scene = about_images("What is in this picture?", vec![heldout("scene.png")]);
    generate(&mut client, about_scene.clone()).await.expect("an answer");
    generate(&mut client, about_audio(heldout("digits.wav"), SpeechTask::default()))
        .await
        .expect("an answer");
    generate(&mut client, about_scene.clone()).await.expect("an answer from the cache");
    let (status, _) =
        cluster.chat(json!({"model": "unknown", "messages": [{"role": "user", "content": "x"}]})).await;
    assert_eq!(status, 404);
    let mut shown = ExportedSeries::new();
    for worker in ["proxy", "encoder-0", "pd-0"] {
        read(&mut shown, &cluster.metrics(worker).await);
    }
    // Restarted workers have empty caches, and read the corrupt objects.
    corrupt(dir.path());
    for worker in ["encoder", "pd"] {
        let old = cluster.pid(worker);
        signal(old, "KILL");
        cluster.wait_replaced(worker, old).await;
    }
    generate(&mut client, about_scene).await.expect("an answer after another encode");
    read(&mut shown, &cluster.metrics("pd-0").await);
    shown
}

/// Changes a byte in the middle of every object.
fn corrupt(dir: &Path) {
    for entry in fs::read_dir(dir).expect("the store's folder").flatten() {
        let path = entry.path();
        if path.is_dir() {
            corrupt(&path);
        } else if entry.metadata().is_ok_and(|m| m.len() > 1024) {
            let mut bytes = fs::read(&path).expect("an object");
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(&path, bytes).expect("an object");
        }
    }
}

/// Every expression of rules, dashboards and scalers, with its location.
fn expressions() -> Vec<(String, String)> {
    let mut found = Vec::new();
    let rule = of_kind(&rendered()["tls"], "PrometheusRule").next().expect("a rule");
    for group in rule["spec"]["groups"].as_array().expect("groups") {
        for rule in group["rules"].as_array().expect("rules") {
            let name = rule["alert"].as_str().or(rule["record"].as_str()).expect("a name");
            found.push((format!("rule {name}"), text(rule, "/expr").to_owned()));
        }
    }
    let boards = fs::read_dir(deploy().join("grafana")).expect("dashboards").flatten().map(|e| e.path());
    for board in boards.filter(|p| p.extension().is_some_and(|x| x == "json")) {
        let json: Value = serde_json::from_str(&fs::read_to_string(&board).expect("a file")).expect("JSON");
        for panel in json["panels"].as_array().expect("panels") {
            for target in panel["targets"].as_array().into_iter().flatten() {
                found.push((
                    format!("{} {}", board.display(), panel["title"]),
                    text(target, "/expr").to_owned(),
                ));
            }
        }
    }
    found.extend(scalers());
    found
}

/// Queries of the scalers of KEDA and Kubernetes, as expressions.
fn scalers() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (name, documents) in rendered() {
        for scaler in of_kind(documents, "ScaledObject") {
            let triggers = scaler["spec"]["triggers"].as_array().expect("triggers").iter();
            for trigger in triggers.filter(|t| t["type"] == "prometheus") {
                found.push((format!("{name}: KEDA"), text(trigger, "/metadata/query").to_owned()));
            }
        }
        for scaler in of_kind(documents, "HorizontalPodAutoscaler") {
            let metrics = scaler["spec"]["metrics"].as_array().expect("metrics").iter();
            for metric in metrics.map(|m| &m["pods"]["metric"]).filter(|m| m.is_object()) {
                let labels = metric["selector"]["matchLabels"].as_object().into_iter().flatten();
                let labels: Vec<_> = labels.map(|(k, v)| format!("{k}={v}")).collect();
                found.push((
                    format!("{name}: HPA"),
                    format!("{}{{{}}}", text(metric, "/name"), labels.join(",")),
                ));
            }
        }
    }
    found
}

/// The mistake of a selector, if it has one.
fn mistake(series: &Series, shown: &ExportedSeries, targets: &BTreeSet<String>) -> Option<String> {
    // Prometheus derives it from each scrape.
    if series.name == "up" {
        return None;
    }
    let in_trouble = FAILURE_ONLY.iter().find(|(name, ..)| *name == series.name);
    let own: BTreeMap<String, BTreeSet<String>> = match (shown.get(&series.name), in_trouble) {
        (Some(labels), _) => labels.clone(),
        (None, Some((_, labels, _))) => labels.iter().map(|l| ((*l).to_owned(), BTreeSet::new())).collect(),
        (None, None) if RETRIES.iter().chain(&CUDA_ONLY).any(|name| *name == series.name) => BTreeMap::new(),
        (None, None) => return Some(format!("no process exports {}", series.name)),
    };
    if let Some(hidden) = own.keys().find(|l| targets.contains(*l)) {
        return Some(format!("{}'s own label {hidden} would be hidden by the target's", series.name));
    }
    for (label, values) in &series.labels {
        if targets.contains(label) {
            continue;
        }
        let Some(seen) = own.get(label) else { return Some(format!("{} has no label {label}", series.name)) };
        // Every bound is exported; of other values only those that occurred.
        if label == "le" && !values.iter().all(|v| seen.contains(v)) {
            return Some(format!("{} has no bound {values:?}, it has {seen:?}", series.name));
        }
    }
    None
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_metric_and_label_in_queries_is_exported_by_a_real_cluster() {
    let shown = exported().await;
    let targets = target_labels();
    let expressions = expressions();
    assert!(expressions.len() > 90, "{}", expressions.len());
    let recorded: BTreeSet<_> = expressions
        .iter()
        .filter_map(|(at, _)| at.strip_prefix("rule triptych:"))
        .map(|n| format!("triptych:{n}"))
        .collect();
    let labels: BTreeSet<_> = shown.values().flat_map(BTreeMap::keys).cloned().collect();
    let in_trouble = FAILURE_ONLY.iter().flat_map(|(_, labels, _)| labels.iter().map(|l| (*l).to_owned()));
    let known: BTreeSet<_> = labels.into_iter().chain(in_trouble).chain(targets.iter().cloned()).collect();
    let mut wrong = Vec::new();
    for (at, expression) in expressions {
        let asked = asked(&expression);
        assert!(!asked.series.is_empty() || expression == "vector(0.99)", "{at}: {expression}");
        let series = asked.series.iter().filter(|s| !recorded.contains(&s.name));
        wrong.extend(series.filter_map(|s| Some(format!("{at}: {}", mistake(s, &shown, &targets)?))));
        let unknown = asked.grouped.iter().filter(|label| !known.contains(*label));
        wrong.extend(unknown.map(|label| format!("{at}: nothing has a label {label}")));
    }
    assert!(wrong.is_empty(), "{wrong:#?}\nexported: {:?}", shown.keys());
}

#[test]
fn labels_of_targets_in_the_compose_file_are_those_of_the_chart() {
    let config = fs::read_to_string(deploy().join("compose/prometheus.yml")).expect("a configuration");
    let labels: Vec<_> = config.lines().filter_map(|l| l.trim().strip_prefix("target_label: ")).collect();
    assert!(labels.contains(&"component"), "{labels:?}");
    let unknown: Vec<_> = labels.into_iter().filter(|label| !target_labels().contains(*label)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

#[test]
fn metrics_of_failures_have_the_labels_of_the_code() {
    let root = deploy().join("..");
    for (name, labels, file) in FAILURE_ONLY {
        let code = fs::read_to_string(root.join(file)).expect(file);
        for label in labels {
            assert!(code.contains(&format!("(\"{label}\",")), "{file} gives {name} no label {label}");
        }
    }
}

#[test]
fn the_ttft_bounds_of_the_chart_are_those_of_the_histogram() {
    let schema = fs::read_to_string(deploy().join("helm/triptych/values.schema.json")).expect("a schema");
    let schema: Value = serde_json::from_str(&schema).expect("JSON");
    let offered =
        &schema["properties"]["monitoring"]["properties"]["rules"]["properties"]["ttftSeconds"]["enum"];
    let bounds: Vec<String> = (0..20).map(|i| format!("{}", 1e-4 * 2f64.powi(i))).collect();
    for bound in offered.as_array().expect("bounds") {
        assert!(bounds.iter().any(|b| bound == b), "{bound} is none of {bounds:?}");
    }
}
