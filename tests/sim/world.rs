//! One simulation: from its seed to its record.

use crate::fault_plan::{Fault, FaultKind, FaultPlan, N_CLIENTS, N_ENCODERS, N_PDS, N_PROXIES};
use crate::net::{self, address};
use crate::recorder::{Recorder, SimRecord};
use crate::{client, encoder, pd};
use std::sync::Arc;
use std::time::Duration;
use triptych_core::limits::Limits;
use triptych_ec::EcStore;
use triptych_ec::server::EcObjectsService;
use triptych_ec::store::memory::MemoryStore;
use triptych_ec::store::remote::{RemoteStore, RemoteTuning};
use triptych_proxy::{Embedded, EmbeddedConfig};
use triptych_runtime::grpc::{self, Peers};
use triptych_runtime::{Drain, MetricsRegistry};
use turmoil::Sim;

/// Simulated time of a step, the resolution of all latencies.
const TICK: Duration = Duration::from_millis(5);
/// Longest simulated time of a run.
const LONGEST: Duration = Duration::from_secs(60);

/// Clients of a proxy: each sends its preface at once.
const CLIENTS: Peers = Peers::Clients { preface_timeout: LONGEST };

/// Runs a seed.
pub fn run(seed: u64) -> SimRecord {
    let plan = FaultPlan::of(seed);
    let recorder = Recorder::default();
    let mut sim = turmoil::Builder::new()
        .rng_seed(seed)
        .tick_duration(TICK)
        .simulation_duration(LONGEST)
        .min_message_latency(Duration::from_millis(1))
        .max_message_latency(Duration::from_millis(10))
        .enable_random_order()
        .build();
    sim.host("store", || async {
        let limits = Limits::default();
        let memory: Arc<dyn EcStore> = Arc::new(MemoryStore::new(64 << 20, &limits));
        let objects = EcObjectsService::into_server(memory, &limits);
        grpc::server(Peers::Cluster).add_service(objects).serve_with_incoming(net::incoming().await?).await?;
        Ok(())
    });
    for i in 0..N_ENCODERS {
        let name = format!("encoder-{i}");
        let recorder = recorder.clone();
        let without_reuse = plan.without_reuse;
        sim.host(name.clone(), move || encoder::run(name.clone(), recorder.clone(), store(), without_reuse));
    }
    for i in 0..N_PDS {
        let name = format!("pd-{i}");
        let recorder = recorder.clone();
        sim.host(name.clone(), move || pd::run(name.clone(), recorder.clone(), store()));
    }
    for i in 0..N_PROXIES {
        sim.host(format!("proxy-{i}"), move || proxy(seed.wrapping_add(i as u64)));
    }
    for i in 0..N_CLIENTS {
        let work = client::run(i, seed, plan.clone(), recorder.clone());
        sim.client(format!("client-{i}"), work);
    }
    drive(&mut sim, &plan, &recorder);
    check(&plan, &recorder);
    recorder.snapshot()
}

fn store() -> Arc<dyn EcStore> {
    let tuning = RemoteTuning { op_timeout: Duration::from_secs(2), ..RemoteTuning::default() };
    let store = RemoteStore::with_dial(&address("store"), tuning, &Limits::default(), Arc::new(net::channel));
    Arc::new(store.expect("the address is one"))
}

async fn proxy(seed: u64) -> turmoil::Result {
    let workers = |role: &str, n: usize| (0..n).map(|i| address(&format!("{role}-{i}"))).collect();
    let config = EmbeddedConfig {
        encoders: workers("encoder", N_ENCODERS),
        pds: workers("pd", N_PDS),
        dialer: net::dialer(),
        store: store(),
        limits: Limits::default(),
        max_in_flight: 64,
        seed: Some(seed),
    };
    let proxy = Embedded::start(config, Drain::new(), &MetricsRegistry::default())?;
    grpc::server(CLIENTS).add_service(proxy.grpc()).serve_with_incoming(net::incoming().await?).await?;
    Ok(())
}

/// Steps to the end, starting and ending faults in between.
fn drive(sim: &mut Sim<'_>, plan: &FaultPlan, recorder: &Recorder) {
    let mut begin = plan.faults.clone();
    let mut end: Vec<Fault> = Vec::new();
    loop {
        let now = sim.elapsed();
        while begin.first().is_some_and(|t| t.at <= now) {
            let fault = begin.remove(0);
            start(sim, &fault, recorder);
            end.push(fault);
        }
        for fault in end.extract_if(.., |t| t.at + t.lasts <= now).collect::<Vec<_>>() {
            stop(sim, &fault, recorder);
        }
        match sim.step() {
            Ok(true) => return,
            Ok(false) => {}
            Err(e) => return recorder.violation(format!("the simulation broke: {e}")),
        }
    }
}

fn start(sim: &mut Sim<'_>, fault: &Fault, recorder: &Recorder) {
    recorder.update(|record| record.history.push(format!("{fault:?}")));
    match &fault.kind {
        FaultKind::Crash(host) => sim.crash(host.as_str()),
        FaultKind::Partition(a, b) => sim.partition(a.as_str(), b.as_str()),
        FaultKind::Hold(a, b) => sim.hold(a.as_str(), b.as_str()),
        FaultKind::Slow(a, b, by) => sim.set_link_latency(a.as_str(), b.as_str(), *by),
    }
}

fn stop(sim: &mut Sim<'_>, fault: &Fault, recorder: &Recorder) {
    recorder.update(|record| record.history.push(format!("over: {:?}", fault.kind)));
    match &fault.kind {
        FaultKind::Crash(host) => sim.bounce(host.as_str()),
        FaultKind::Partition(a, b) => sim.repair(a.as_str(), b.as_str()),
        FaultKind::Hold(a, b) => sim.release(a.as_str(), b.as_str()),
        FaultKind::Slow(a, b, _) => sim.set_link_latency(a.as_str(), b.as_str(), Duration::from_millis(5)),
    }
}

/// Checks the invariants at the end of a simulation.
fn check(plan: &FaultPlan, recorder: &Recorder) {
    let record = recorder.snapshot();
    let ended = record.answered + record.refused.values().sum::<u32>();
    let asked = (plan.n_requests * N_CLIENTS) as u32;
    if record.violations.is_empty() && (ended != asked || record.open != 0) {
        recorder
            .violation(format!("{asked} requests were asked and {ended} ended, {} are open", record.open));
    }
    if plan.faults.is_empty() {
        for (key, n) in record.encodes.iter().filter(|(_, n)| **n > 1) {
            recorder.violation(format!("{key:?} was encoded {n} times without a fault"));
        }
    }
}
