//! One simulation from its seed to its books.

use crate::ledger::{Books, Ledger};
use crate::net::{self, address};
use crate::plan::{Kind, N_CLIENTS, N_ENCODERS, N_PDS, N_PROXIES, Plan, Trouble};
use crate::{client, encoder, pd};
use std::sync::Arc;
use std::time::Duration;
use triptych_core::limits::Limits;
use triptych_ec::EcStore;
use triptych_ec::server::EcObjectsService;
use triptych_ec::store::memory::MemoryStore;
use triptych_ec::store::remote::{RemoteStore, RemoteTuning};
use triptych_proxy::{Embedded, EmbeddedConfig};
use triptych_runtime::{Drain, MetricsRegistry, grpc};
use turmoil::Sim;

/// How much time passes in a step; latencies are as exact as this.
const TICK: Duration = Duration::from_millis(5);
/// No simulation lasts longer.
const LONGEST: Duration = Duration::from_secs(60);

/// Runs a seed.
pub fn run(seed: u64) -> Books {
    let (plan, ledger) = (Plan::of(seed), Ledger::default());
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
        grpc::server().add_service(objects).serve_with_incoming(net::incoming().await?).await?;
        Ok(())
    });
    for i in 0..N_ENCODERS {
        let (name, ledger) = (format!("encoder-{i}"), ledger.clone());
        let forgetful = plan.forgetful;
        sim.host(name.clone(), move || encoder::run(name.clone(), ledger.clone(), store(), forgetful));
    }
    for i in 0..N_PDS {
        let (name, ledger) = (format!("pd-{i}"), ledger.clone());
        sim.host(name.clone(), move || pd::run(name.clone(), ledger.clone(), store()));
    }
    for i in 0..N_PROXIES {
        sim.host(format!("proxy-{i}"), move || proxy(seed.wrapping_add(i as u64)));
    }
    for i in 0..N_CLIENTS {
        let work = client::run(i, seed, plan.clone(), ledger.clone());
        sim.client(format!("client-{i}"), work);
    }
    drive(&mut sim, &plan, &ledger);
    check(&plan, &ledger);
    ledger.read()
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
    grpc::server().add_service(proxy.grpc()).serve_with_incoming(net::incoming().await?).await?;
    Ok(())
}

/// Steps to the end, making trouble in between.
fn drive(sim: &mut Sim<'_>, plan: &Plan, ledger: &Ledger) {
    let mut begin = plan.troubles.clone();
    let mut end: Vec<Trouble> = Vec::new();
    loop {
        let now = sim.elapsed();
        while begin.first().is_some_and(|t| t.at <= now) {
            let trouble = begin.remove(0);
            start(sim, &trouble, ledger);
            end.push(trouble);
        }
        for trouble in end.extract_if(.., |t| t.at + t.lasts <= now).collect::<Vec<_>>() {
            stop(sim, &trouble, ledger);
        }
        match sim.step() {
            Ok(true) => return,
            Ok(false) => {}
            Err(e) => return ledger.violation(format!("the simulation broke: {e}")),
        }
    }
}

fn start(sim: &mut Sim<'_>, trouble: &Trouble, ledger: &Ledger) {
    ledger.note(|books| books.history.push(format!("{trouble:?}")));
    match &trouble.kind {
        Kind::Crash(host) => sim.crash(host.as_str()),
        Kind::Partition(a, b) => sim.partition(a.as_str(), b.as_str()),
        Kind::Hold(a, b) => sim.hold(a.as_str(), b.as_str()),
        Kind::Slow(a, b, by) => sim.set_link_latency(a.as_str(), b.as_str(), *by),
    }
}

fn stop(sim: &mut Sim<'_>, trouble: &Trouble, ledger: &Ledger) {
    ledger.note(|books| books.history.push(format!("over: {:?}", trouble.kind)));
    match &trouble.kind {
        Kind::Crash(host) => sim.bounce(host.as_str()),
        Kind::Partition(a, b) => sim.repair(a.as_str(), b.as_str()),
        Kind::Hold(a, b) => sim.release(a.as_str(), b.as_str()),
        Kind::Slow(a, b, _) => sim.set_link_latency(a.as_str(), b.as_str(), Duration::from_millis(5)),
    }
}

/// What must hold at the end of any simulation.
fn check(plan: &Plan, ledger: &Ledger) {
    let books = ledger.read();
    let ended = books.answered + books.refused.values().sum::<u32>();
    let asked = (plan.n_requests * N_CLIENTS) as u32;
    if books.violations.is_empty() && (ended != asked || books.open != 0) {
        ledger.violation(format!("{asked} requests were asked and {ended} ended, {} are open", books.open));
    }
    if plan.troubles.is_empty() {
        for (key, n) in books.encodes.iter().filter(|(_, n)| **n > 1) {
            ledger.violation(format!("{key:?} was encoded {n} times, and nothing had gone wrong"));
        }
    }
}
