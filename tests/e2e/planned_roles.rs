//! Roles that the real `triptych plan --watch` gives to workers of a running cluster under load, by curves that change under it:
//! a worker is left to encodes, a process is killed in the middle of it, and it answers again. No request is lost.

use crate::role_flips::{Load, workers};
use serde_json::Value;
use std::path::Path;
use std::sync::atomic::Ordering;
use triptych_ec::testing::RedisServer;
use triptych_plan::curves::sample::{Costs, curves_of};
use triptych_tests::cluster::Cluster;
use triptych_tests::process::{Process, eventually, signal};

/// Curves by which encodes stand in the way of answers: an image takes this part of a worker at the rate that was seen, and a
/// token must not wait for it.
fn encodes_disturb(rate: f64) -> Costs {
    let image_us = 0.3e6 / rate;
    Costs {
        encode_fixed: image_us,
        encode_token: 0.0,
        step_fixed: 2000.0,
        decode: 1.0,
        prefill_token: 1.0,
        key: 0.0,
    }
}

/// Curves by which prompts are all the work: a request of so many tokens takes three seconds of a worker, at any rate that is
/// offered more than there are.
fn answers_are_all(tokens: f64) -> Costs {
    let prefill_token = 3.0e6 / tokens;
    Costs { encode_fixed: 1.0, encode_token: 0.0, step_fixed: 1.0, decode: 1.0, prefill_token, key: 0.0 }
}

/// Replaces the curves as a whole: the planner may read at any moment.
fn write(file: &Path, costs: &Costs) {
    let new = file.with_extension("new");
    std::fs::write(&new, serde_json::to_string(&curves_of(costs)).expect("JSON")).expect("a file");
    std::fs::rename(new, file).expect("the same folder");
}

/// Lines of the watch about roles.
fn lines(watch: &Process) -> Vec<Value> {
    let log = watch.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["roles"].is_object()).collect()
}

/// Mean rate of the intervals with a load; 0: none has one yet. One interval of a second alone may be off by a third.
fn mean_rate(watch: &Process) -> f64 {
    let rates: Vec<f64> =
        lines(watch).iter().filter_map(|line| line["rate"].as_f64()).filter(|rate| *rate > 0.0).collect();
    rates.iter().sum::<f64>() / rates.len().max(1) as f64
}

/// The planner beside a cluster, by an SLO.
fn watch(cluster: &Cluster, curves: &Path, slo: &str) -> Process {
    let url = format!("{}/metrics", cluster.admin("proxy"));
    let file = curves.to_str().expect("plain");
    let question = ["plan", "--watch", &url, "--curves", file, "--slo", slo, "--quick", "--requests", "60"];
    let how =
        ["--apply", "roles", "--json", "--interval-s", "1", "--for-observations", "2", "--cooldown-s", "1"];
    Process::start(&[&question[..], &how].concat())
}

/// Ends a planner that sees the whole cluster; its lines that tell of changes.
async fn ended(mut watch: Process) -> Vec<Value> {
    // The last look may be of a time when a process was away.
    let n_before = lines(&watch).len();
    eventually("a look without trouble", async || {
        let said = lines(&watch);
        said.iter().skip(n_before).any(|line| line["trouble"] == "").then_some(())
    })
    .await;
    signal(watch.pid(), "INT");
    assert!(watch.wait().await.success());
    lines(&watch).into_iter().filter(|line| line["changes"] == true).collect()
}

/// Mean prompt tokens of the requests so far, of text and items.
async fn prompt_tokens(cluster: &Cluster) -> f64 {
    let mut sum = 0.0;
    for name in ["triptych_request_text_tokens_sum", "triptych_item_tokens_sum"] {
        sum += cluster.metric("proxy", name).await;
    }
    sum / cluster.metric("proxy", "triptych_request_text_tokens_count").await
}

/// Ids of the workers that are left to encodes.
async fn encoders(cluster: &Cluster) -> Vec<String> {
    let all = workers(cluster).await;
    let encoders = all.iter().filter(|worker| worker["elastic_role"] == "encoder");
    encoders.map(|worker| worker["id"].as_str().expect("a name").to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_planner_flips_roles_under_load_and_a_process_dies_in_it_and_no_request_is_lost() {
    let (redis, dir) = (RedisServer::start(), tempfile::tempdir().expect("a folder"));
    let (store, curves) = (redis.url(), dir.path().join("curves.json"));
    let lazy = ["--encoder-weights", "lazy", "--encoder-weights-idle", "2", "--drain-grace", "5"];
    let args = ["--encoders", "0", "--pds", "2", "--with-encoder", "--ec", &store];
    let cluster = Cluster::start(&[&args[..], &lazy].concat()).await;
    let (load, lost) = Load::start(&cluster).await;
    load.goes_on(2).await;
    write(&curves, &Costs::default());
    let first = watch(&cluster, &curves, "ttft=600s,tpot=3ms");
    eventually("a rate is seen", async || (mean_rate(&first) > 0.0).then_some(())).await;
    assert!(encoders(&cluster).await.is_empty());

    // Encodes get a worker; at that moment a process dies: the one that is to encode, then, later, the one that answers.
    let flipped = eventually("a worker is left to encodes", async || {
        write(&curves, &encodes_disturb(mean_rate(&first)));
        let found = encoders(&cluster).await;
        (found.len() == 1).then_some(found)
    })
    .await;
    for _ in 0..2 {
        let victims = cluster.pids("pd");
        let victim = victims[0];
        signal(victim, "KILL");
        eventually("it is replaced", async || {
            let pids = cluster.pids("pd");
            (pids.len() == 2 && !pids.contains(&victim)).then_some(())
        })
        .await;
        load.goes_on(2).await;
        assert_eq!(lost.load(Ordering::SeqCst), 0);
    }
    eventually("the cluster is as planned", async || {
        let all = workers(&cluster).await;
        let ready = all.iter().all(|worker| worker["health"] == "ready");
        (ready && encoders(&cluster).await.len() == 1).then_some(())
    })
    .await;
    eventually("the encoder has loaded its weights ahead or for a job", async || {
        let mut loads = 0.0;
        for worker in ["pd-0", "pd-1"] {
            loads += cluster.metric(worker, "triptych_encoder_weight_loads_total").await;
        }
        (loads >= 1.0).then_some(())
    })
    .await;

    let flips = ended(first).await;
    assert_eq!(flips[0]["roles"]["encoders"], serde_json::json!(flipped), "{flips:?}");

    // Nobody needs it for encodes: another planner, which finds the roles as they are, has it answer again.
    write(&curves, &answers_are_all(prompt_tokens(&cluster).await));
    let second = watch(&cluster, &curves, "ttft=60s");
    eventually("all workers answer", async || encoders(&cluster).await.is_empty().then_some(())).await;
    load.goes_on(2).await;
    assert_eq!(lost.load(Ordering::SeqCst), 0);
    assert_eq!(ended(second).await[0]["roles"]["recommended"], 0);
}
