//! The proxy as a run keeps it: its admission, its views of the workers, the machine of its encodes, and the simulated
//! side of each of them.

use super::output::Output;
use super::spec::ClusterSpec;
use super::worker::{JobId, Worker};
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::collections::{HashMap, HashSet};
use std::time::Instant;
use triptych_core::{ContentKey, ModelName, TowerIdx, WorkerId};
use triptych_proxy::decisions::Admission;
use triptych_proxy::decisions::elastic::{WorkSplit, WorkerCounts, divide};
use triptych_proxy::decisions::prefix::PrefixTable;
use triptych_proxy::decisions::score::is_within_bound;
use triptych_proxy::decisions::size::PrefillTime;
use triptych_proxy::decisions::view::{ItemSize, View};
use triptych_proxy::request_machine::action::AttemptId;
use triptych_proxy::request_machine::deaths::Deaths;
use triptych_proxy::request_machine::encodes::{EncodeId, Encodes};
use triptych_proxy::request_machine::retry_budget::RetryWindow;
use triptych_proxy::{ElasticRole, Roles};

/// The proxy.
pub(super) struct Proxy {
    /// True if there are requests to come.
    pub(super) is_offering: bool,
    pub(super) ids: Vec<WorkerId>,
    pub(super) views: Vec<View>,
    pub(super) encoders: Vec<usize>,
    pub(super) pds: Vec<usize>,
    /// PD workers that encode too.
    pub(super) colocated: Vec<usize>,
    /// The one tower that a worker holds; `None`: all.
    pub(super) towers: Vec<Option<TowerIdx>>,
    pub(super) roles: Roles,
    /// Encodes and answers, where roles are elastic.
    pub(super) work: WorkSplit,
    pub(super) admission: Admission,
    pub(super) budget: RetryWindow,
    pub(super) deaths: Deaths,
    pub(super) prefixes: PrefixTable,
    pub(super) encodes: Encodes,
    /// The simulated side of each encode of `encodes`.
    pub(super) in_flight: HashMap<EncodeId, InFlight>,
    /// Keys whose leases are held.
    pub(super) leases: HashSet<ContentKey>,
    pub(super) model: ModelName,
    /// Of choices.
    pub(super) rng: StdRng,
}

impl Proxy {
    pub(super) fn new(spec: &ClusterSpec, workers: &[Worker], seed: u64, base: Instant) -> Self {
        let with = |which: &dyn Fn(&Worker) -> bool| -> Vec<usize> {
            (0..workers.len()).filter(|i| which(&workers[*i])).collect()
        };
        let encoders = with(&|w| w.encoder.is_some() && w.pd.is_none());
        let name = |i: usize| {
            WorkerId::new(format!("{}@10.0.0.1:{i}", if workers[i].pd.is_some() { "pd" } else { "encoder" }))
        };
        let ids: Vec<_> = (0..workers.len()).map(name).collect();
        let policy = spec.proxy.encodes;
        Self {
            is_offering: false,
            ids,
            views: workers.iter().map(|_| View { is_up: true, ..View::default() }).collect(),
            encoders,
            pds: with(&|w| w.pd.is_some()),
            colocated: with(&|w| w.encoder.is_some() && w.pd.is_some()),
            towers: workers.iter().map(|w| w.encoder.as_ref().and_then(|e| e.spec.tower)).collect(),
            roles: spec.proxy.roles,
            work: WorkSplit::default(),
            admission: Admission::new(spec.proxy.max_in_flight),
            budget: RetryWindow::new(policy.retries, base),
            deaths: Deaths::new([0; 32]),
            prefixes: PrefixTable::default(),
            encodes: Encodes::new(policy),
            in_flight: HashMap::new(),
            leases: HashSet::new(),
            model: ModelName::new("m"),
            rng: StdRng::seed_from_u64(seed ^ 0x0005_eed0_fc40_1ce5),
        }
    }

    pub(super) fn of_item(&self, output: Output) -> ItemSize<'_> {
        ItemSize { model: &self.model, encoder: output.encoder(), bytes: output.sized.bytes }
    }

    /// Time of a prompt token, by the PD workers that have measured it.
    pub(super) fn prefill_time(&self) -> PrefillTime {
        PrefillTime::of_workers(self.pds.iter().map(|w| self.views[*w].prefill_us(&self.model)))
    }

    /// Gives every worker with both halves its role, as the product does.
    pub(super) fn divide(&mut self) {
        if self.roles == Roles::Fixed {
            return;
        }
        let workers = WorkerCounts { n: self.ids.len(), n_encoders: self.encoders.len() };
        let n_encoders = self.work.n_encoders(workers).saturating_sub(workers.n_encoders);
        let assigned: Vec<_> = self.colocated.iter().map(|w| self.views[*w].assigned).collect();
        for (w, role) in self.colocated.iter().zip(divide(&assigned, n_encoders)) {
            self.views[*w].role = role;
        }
    }

    /// PD workers that are given requests: not those that are left to encodes.
    pub(super) fn answering(&self, among: &[usize]) -> Vec<usize> {
        let answers = |w: &usize| self.views[*w].role != ElasticRole::Encoder;
        let answering: Vec<_> = among.iter().copied().filter(answers).collect();
        if answering.is_empty() { among.to_vec() } else { answering }
    }

    /// Encoder workers that hold a tower.
    pub(super) fn encoders_of(&self, tower: TowerIdx) -> Vec<usize> {
        self.encoders.iter().copied().filter(|w| self.towers[*w].is_none_or(|held| held == tower)).collect()
    }

    /// Workers that may encode with a tower: where roles are fixed and there are encoder workers of it, only those.
    pub(super) fn encoder_pool(&self, tower: TowerIdx) -> Vec<usize> {
        let encoders = self.encoders_of(tower);
        match self.roles {
            Roles::Fixed if !encoders.is_empty() => encoders,
            _ => [encoders.as_slice(), &self.colocated].concat(),
        }
    }

    /// PD workers that report to hold an output.
    pub(super) fn holders(&self, key: &ContentKey) -> Vec<WorkerId> {
        let all = self.pds.iter().map(|w| self.views[*w].n_requests()).sum();
        let holds = |w: &&usize| {
            let view = &self.views[**w];
            view.resident.contains(key) && is_within_bound(view.n_requests(), (all, self.pds.len() as u64))
        };
        self.pds.iter().filter(holds).map(|w| self.ids[*w].clone()).collect()
    }
}

/// The simulated side of an in-flight encode.
pub(super) struct InFlight {
    pub(super) output: Output,
    /// Items of requests that wait for it.
    pub(super) waiting: Vec<Waiting>,
    /// The PD worker that should encode it, if PD workers do.
    pub(super) placed: Option<usize>,
    pub(super) chosen: Option<usize>,
    pub(super) jobs: HashMap<AttemptId, JobId>,
    pub(super) holds_lease: bool,
    /// True if the encoder still had the rows.
    pub(super) kept: bool,
    /// Time at which it is woken next.
    pub(super) wake: Option<Instant>,
}

/// An item of a request that waits for an encode.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) request: usize,
    pub(super) item: usize,
    /// True if another began the encode.
    pub(super) joined: bool,
}

/// A question to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreQuestion {
    /// True if it has an output.
    Probe,
    /// The key's lease.
    Lease,
    /// The same as the first, after a wait.
    Wait,
}
