//! The chart's probes against real processes: each names a health service or a path that its process serves.

use crate::chart::{of_kind, rendered, text};
use serde_json::Value;
use std::collections::BTreeSet;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use triptych_tests::cluster::{Cluster, reqwest_client};

/// A probe of the chart.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Probe {
    Grpc { service: String },
    Http { path: String },
}

/// Probes of our processes in all renderings, by component.
fn probes() -> BTreeSet<(String, Probe)> {
    let deployments = rendered().values().flat_map(|documents| of_kind(documents, "Deployment"));
    let containers = deployments.map(|d| &d["spec"]["template"]["spec"]["containers"][0]);
    let containers = containers.filter(|container| container["name"] != "vllm");
    let of = |container: &Value| -> Vec<(String, Probe)> {
        let component = text(container, "/name").to_owned();
        let all = ["startupProbe", "readinessProbe", "livenessProbe"].map(|kind| container[kind].clone());
        let read = |probe: Value| match (&probe["grpc"], &probe["httpGet"]) {
            (Value::Object(grpc), _) => {
                let service = grpc.get("service").and_then(Value::as_str).unwrap_or_default().to_owned();
                Some(Probe::Grpc { service })
            }
            (_, Value::Object(_)) => Some(Probe::Http { path: text(&probe, "/httpGet/path").to_owned() }),
            _ => None,
        };
        all.into_iter().filter_map(read).map(|probe| (component.clone(), probe)).collect()
    };
    containers.flat_map(of).collect()
}

/// gRPC URL of a child of `up`, from its log.
fn grpc_of(cluster: &Cluster, child: &str) -> String {
    let log = cluster.up.log();
    let line = log.lines().rev().find(|l| l.contains(&format!("{child} started"))).expect("it was started");
    let address = line.split("gRPC ").nth(1).and_then(|rest| rest.split(',').next()).expect("an address");
    format!("http://{address}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_probe_asks_for_something_that_its_process_says_is_well() {
    let cluster = Cluster::start(&["--ec", "memory"]).await;
    let probes = probes();
    assert!(probes.len() >= 14, "{probes:?}");
    for (component, probe) in probes {
        let child = match component.as_str() {
            "encoder" => "encoder-0",
            "pd" => "pd-0",
            other => other,
        };
        match &probe {
            Probe::Grpc { service } => {
                let address = if child == "proxy" { cluster.grpc.clone() } else { grpc_of(&cluster, child) };
                let channel = Endpoint::from_shared(address).expect("an address").connect().await;
                let mut client = HealthClient::new(channel.expect("it listens"));
                let answer = client.check(HealthCheckRequest { service: service.clone() }).await;
                let status =
                    answer.unwrap_or_else(|e| panic!("{component}: {probe:?}: {e}")).into_inner().status;
                assert_eq!(status, ServingStatus::Serving as i32, "{component}: {probe:?}");
            }
            Probe::Http { path } => {
                let base = if child == "proxy" { cluster.http.clone() } else { cluster.admin(child) };
                let answer = reqwest_client().get(format!("{base}{path}")).send().await.expect("it answers");
                assert!(answer.status().is_success(), "{component}: {probe:?}: {}", answer.status());
            }
        }
    }
}
