//! Roles that change under load, without a restart: what a worker has ends there, what is new goes by its role, and nothing
//! is lost, not even if a process is killed in the middle of it.

use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::task::JoinSet;
use triptych_proto::v1;
use triptych_tests::client::{about_images, connect, generate};
use triptych_tests::cluster::{Cluster, reqwest_client};
use triptych_tests::process::{eventually, signal};
use triptych_tests::samples::heldout;

pub const MODEL: &str = "shapes-qwen2-vl";
const N_CLIENTS: u64 = 3;

/// A question about an image that nobody has asked about: bytes behind the end of a PNG change its key, and not its pixels.
pub fn question(client: u64, n: u64) -> v1::GenerateRequest {
    let image = [heldout("scene.png"), client.to_le_bytes().to_vec(), n.to_le_bytes().to_vec()].concat();
    let mut request = about_images("What is in this picture?", vec![image]);
    request.model = MODEL.into();
    request.sampling = Some(v1::Sampling { temperature: Some(0.0), ..Default::default() });
    request
}

/// Clients that ask without end. All have the same answer.
pub struct Load {
    /// Answers of each client.
    answered: Vec<Arc<AtomicU64>>,
    _clients: JoinSet<()>,
}

impl Load {
    /// Starts them; with the number of requests that were lost.
    pub async fn start(cluster: &Cluster) -> (Self, Arc<AtomicU64>) {
        let expect =
            generate(&mut connect(&cluster.grpc).await, question(0, 0)).await.expect("an answer").text;
        let (mut of_all, lost) = (Vec::new(), Arc::new(AtomicU64::new(0)));
        let mut clients = JoinSet::new();
        for client in 1..=N_CLIENTS {
            let mut connection = connect(&cluster.grpc).await;
            let answered = Arc::new(AtomicU64::new(0));
            of_all.push(Arc::clone(&answered));
            let (lost, expect) = (Arc::clone(&lost), expect.clone());
            clients.spawn(async move {
                for n in 0.. {
                    match generate(&mut connection, question(client, n)).await {
                        Ok(answer) if answer.text == expect => answered.fetch_add(1, Ordering::SeqCst),
                        other => {
                            eprintln!("client {client}, request {n}: {other:?}");
                            lost.fetch_add(1, Ordering::SeqCst)
                        }
                    };
                }
            });
        }
        (Self { answered: of_all, _clients: clients }, lost)
    }

    /// Waits for so many more answers of each client, so that no request of before is under way: one that is with two processes
    /// which die is suspected of it.
    pub async fn goes_on(&self, n: u64) {
        let answered = || self.answered.iter().map(|of_client| of_client.load(Ordering::SeqCst));
        let goals: Vec<u64> = answered().map(|before| before + n).collect();
        let there = async || answered().zip(&goals).all(|(now, goal)| now >= *goal).then_some(());
        eventually("answers come", there).await;
    }
}

/// The workers as the admin API has them.
pub async fn workers(cluster: &Cluster) -> Vec<Value> {
    let url = format!("{}/admin/workers", cluster.admin("proxy"));
    let answer = reqwest_client().get(url).send().await.expect("the proxy answers");
    let body: Value = answer.json().await.expect("JSON");
    body["workers"].as_array().expect("a list").clone()
}

/// Gives a worker a role; the status of the answer.
async fn assign(cluster: &Cluster, id: &str, role: &str) -> u16 {
    let url = format!("{}/admin/workers/{id}/role", cluster.admin("proxy"));
    let call = reqwest_client().put(url).body(json!({"role": role}).to_string());
    call.send().await.expect("the proxy answers").status().as_u16()
}

/// Waits until a worker's order is known, it works by it, and all workers are ready. `both` is no role but leave to have any:
/// by the load, a machine whose encodes are slow leaves a worker to them.
async fn is_settled(cluster: &Cluster, id: &str, role: &str) {
    eventually("the role is there", async || {
        let all = workers(cluster).await;
        let ready = all.iter().all(|worker| worker["health"] == "ready");
        let found = all.iter().find(|worker| worker["id"] == id).expect("it is known");
        let works_by_it = role == "both" || found["elastic_role"] == role;
        (ready && found["assigned_role"] == role && works_by_it).then_some(())
    })
    .await;
}

/// Waits until a worker has ended all requests that it had.
async fn is_drained(cluster: &Cluster, id: &str) {
    eventually("its requests have ended", async || {
        let all = workers(cluster).await;
        let found = all.iter().find(|worker| worker["id"] == id).expect("it is known");
        (found["running"] == 0 && found["waiting"] == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn roles_flip_under_load_and_processes_die_in_it_and_no_request_is_lost() {
    let args = ["--encoders", "0", "--pds", "2", "--with-encoder", "--roles", "auto", "--drain-grace", "5"];
    let cluster = Cluster::start(&args).await;
    let ids: Vec<String> = workers(&cluster)
        .await
        .iter()
        .map(|worker| worker["id"].as_str().expect("a name").to_owned())
        .collect();
    let [one, two] = [&ids[0], &ids[1]];
    let (load, lost) = Load::start(&cluster).await;
    // Each worker in each role, and back.
    for (id, role) in [(two, "encoder"), (two, "both"), (one, "encoder"), (one, "pd"), (one, "both")] {
        load.goes_on(2).await;
        assert_eq!(assign(&cluster, id, role).await, 204, "{id} {role}");
        if role == "encoder" {
            is_drained(&cluster, id).await;
            load.goes_on(2).await;
            let other = if id == one { two } else { one };
            assert_eq!(assign(&cluster, other, "encoder").await, 400, "somebody has to answer");
        }
        is_settled(&cluster, id, role).await;
        assert_eq!(lost.load(Ordering::SeqCst), 0, "{id} {role}");
    }
    // A process dies at the moment at which its role, or the other's, changes. The role is its address's.
    for (i, role) in ["encoder", "both", "encoder"].into_iter().enumerate() {
        let victims = cluster.pids("pd");
        let victim = victims[i % victims.len()];
        assert_eq!(assign(&cluster, two, role).await, 204);
        signal(victim, "KILL");
        eventually("it is replaced", async || {
            let pids = cluster.pids("pd");
            (pids.len() == 2 && !pids.contains(&victim)).then_some(())
        })
        .await;
        is_settled(&cluster, two, role).await;
        load.goes_on(2).await;
        assert_eq!(lost.load(Ordering::SeqCst), 0, "{role}");
    }
    // The first worker's: the load leaves only the last one to encodes.
    assert!(cluster.metric("proxy", "triptych_role_changes_total").await >= 2.0);
    let log = cluster.up.log();
    assert_eq!(log.matches("an operator gives a worker a role").count(), 8, "{log}");
}
