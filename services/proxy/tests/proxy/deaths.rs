//! Queries of death: workers that die of a request, and the requests beside it.

use crate::fakes::{Encoder, GenerateStep, Pd, Process, text};
use crate::support::{IMAGE, Proxy, ask, client, eventually, memory, models, question};
use serde_json::json;
use std::sync::Arc;
use tonic::Code;
use triptych_proto::v1::generate_response::Kind;

struct Fleet {
    pds: Vec<Pd>,
    processes: Vec<Process>,
    proxy: Proxy,
    _encoder: Process,
}

impl Fleet {
    async fn start(n_pds: usize) -> Self {
        let store = memory().await;
        let encoder = Encoder::new(models(), Arc::clone(&store)).serve();
        let pds: Vec<_> = (0..n_pds).map(|_| Pd::new(models())).collect();
        let processes: Vec<_> = pds.iter().map(Pd::serve).collect();
        let addresses: Vec<_> = processes.iter().map(|process| process.address).collect();
        let proxy = Proxy::start(&[encoder.address], &addresses, store, |_| {}).await;
        eventually("all workers are ready", async || {
            proxy.metric("triptych_fleet_workers{role=\"pd\",state=\"ready\"}").await == n_pds as f64
        })
        .await;
        Self { pds, processes, proxy, _encoder: encoder }
    }

    fn n_sent(&self) -> usize {
        self.pds.iter().map(|pd| pd.requests().len()).sum()
    }

    /// Kills `n` workers, each as soon as it has the next request.
    async fn kill_those_that_have_it(&self, processes: &mut [Process], n: usize) {
        let mut killed = vec![0; self.pds.len()];
        for _ in 0..n {
            let has_one = |i: &usize| self.pds[*i].requests().len() > killed[*i];
            eventually("it is sent to a worker", async || (0..self.pds.len()).any(|i| has_one(&i))).await;
            let worker = (0..self.pds.len()).find(has_one).expect("one has it");
            killed[worker] = usize::MAX;
            processes[worker].kill();
        }
    }
}

#[tokio::test]
async fn a_request_that_workers_die_of_is_tried_alone_once_and_then_refused() {
    let mut fleet = Fleet::start(4).await;
    for pd in &fleet.pds {
        pd.script([GenerateStep::SendThenHold(vec![])]);
    }
    let mut processes = std::mem::take(&mut fleet.processes);
    let (answer, ()) =
        futures::join!(ask(&fleet.proxy, question(&[])), fleet.kill_those_that_have_it(&mut processes, 3));
    let status = answer.unwrap_err();
    assert_eq!((status.code(), fleet.n_sent()), (Code::Internal, 3), "{status}");
    assert_eq!(status.metadata().get("triptych-class").unwrap(), "quarantined");
    assert!(!status.metadata().contains_key("retry-after-ms"));
    // The same again reaches nobody, whoever sends it.
    let again = ask(&fleet.proxy, question(&[])).await.unwrap_err();
    assert_eq!((again.code(), fleet.n_sent()), (Code::Internal, 3), "{again}");
    // Others do not suffer.
    let survivor = fleet.pds.iter().find(|pd| pd.requests().is_empty()).expect("one is left");
    survivor.skip(1);
    assert_eq!(ask(&fleet.proxy, question(&[IMAGE])).await.unwrap().text, "hello world");
}

#[tokio::test]
async fn http_says_that_it_is_not_to_be_sent_again() {
    let mut fleet = Fleet::start(4).await;
    for pd in &fleet.pds {
        pd.script([GenerateStep::SendThenHold(vec![])]);
    }
    let body = json!({"model": "vl", "messages": [{"role": "user", "content": "hi"}]});
    let asked = async {
        let url = fleet.proxy.url("/v1/chat/completions");
        let response = client().post(url).json(&body).send().await.unwrap();
        let retry = response.headers().get("x-should-retry").cloned();
        (response.status().as_u16(), retry, response.json::<serde_json::Value>().await.unwrap())
    };
    let mut processes = std::mem::take(&mut fleet.processes);
    let ((status, retry, error), ()) =
        futures::join!(asked, fleet.kill_those_that_have_it(&mut processes, 3));
    assert_eq!(status, 500, "{error}");
    assert_eq!(retry.unwrap(), "false");
    assert_eq!(error["error"]["code"], "request_quarantined");
    assert_eq!(error["error"]["type"], "server_error");
}

#[tokio::test]
async fn a_stream_that_is_being_written_is_no_suspect_however_many_of_its_workers_are_killed() {
    let mut fleet = Fleet::start(5).await;
    for pd in &fleet.pds {
        pd.script([GenerateStep::SendThenHold(vec![text("a")])]);
    }
    let mut stream = fleet.proxy.client().generate(question(&[IMAGE])).await.unwrap().into_inner();
    let (mut n_killed, mut n_pieces, mut is_whole) = (0, 0, false);
    while let Some(message) = stream.message().await.unwrap() {
        match message.kind.unwrap() {
            Kind::Delta(_) => n_pieces += 1,
            Kind::Summary(_) => is_whole = true,
            Kind::Accepted(_) => {}
        }
        if n_pieces > n_killed && n_killed < 4 {
            let has_it = fleet.pds.iter().position(|pd| !pd.requests().is_empty()).expect("one has it");
            fleet.pds.remove(has_it);
            fleet.processes.remove(has_it).kill();
            n_killed += 1;
            if n_killed == 4 {
                fleet.pds[0].release(1);
            }
        }
    }
    assert!(is_whole && n_killed == 4);
    assert_eq!(fleet.proxy.metric("triptych_worker_picks_total{role=\"pd\",reason=\"alone\"}").await, 0.0);
}
