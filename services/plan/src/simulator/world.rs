//! The cluster while it runs: everything that there is, and what happens at each event.

use super::event_queue::{EventQueue, Nanos};
use super::proxy::{Proxy, StoreQuestion};
use super::request::{JobEnd, Request};
use super::result::{ItemSources, Moment, Span};
use super::sharing::Ended;
use super::spec::{ClusterSpec, FrontCores, SpecError};
use super::store::{Store, Transfer};
use super::worker::{JobId, Task, Worker};
use crate::curves::{Costs, Sized, Spread, Stage};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};
use triptych_bench::offered::{ItemShape, Offered};
use triptych_core::{ContentKey, ItemIdx};
use triptych_engine::SequenceId;
use triptych_proto::v1;
use triptych_proxy::request_machine::encodes::EncodeId;
use triptych_proxy::request_machine::event::{EncodeEvent, RequestEvent};

/// Part of a token's way that is a worker's side of the network: client, proxy and worker do about the same for it.
const WORKERS_SIDE: f64 = 1.0 / 3.0;

/// Something that happens.
#[derive(Debug)]
pub(super) enum Event {
    /// A request is at the proxy.
    Arrive(usize),
    /// The proxy has read a request.
    Supply(usize),
    /// A request has waited for as long as it wanted to.
    WakeRequest(usize),
    /// An encode has waited for as long as it wanted to.
    WakeEncode(EncodeId),
    /// The store has answered an encode.
    StoreAnswers(EncodeId, StoreQuestion),
    /// A job is at its encoder.
    JobArrives(JobId),
    /// The proxy hears what a job's output will be.
    Announced(JobId),
    /// The proxy hears of a job's end.
    JobEnded(JobId, JobEnd),
    /// An encoder hears that a job is not wanted any more.
    Cancel(JobId),
    /// An item is preprocessed on cores that no worker computes with.
    Preprocessed { worker: usize, job: JobId },
    /// Something ends on a worker's cores, unless they have changed since.
    Cores { worker: usize, version: u64 },
    /// A transfer ends that shares nothing.
    Moved(Transfer),
    /// A transfer ends, unless others have begun or ended since.
    Lines(u64),
    /// A PD worker hears that an output can be loaded.
    Loadable { worker: usize, key: ContentKey },
    /// A PD worker hears that an output is nowhere.
    Missing { worker: usize, key: ContentKey },
    /// A request is at its PD worker, under this name.
    Given(usize, SequenceId),
    /// The proxy passes on the first token of an answer.
    Wrote(usize),
    /// The proxy hears the end of the answer of this name.
    Answered { request: usize, sequence: SequenceId, end: AnswerEnd },
    /// An engine looks what there is to do.
    Turn(usize),
    /// A deadline passes in an engine.
    Wake { worker: usize, at: Nanos },
    /// A worker looks whether there is news to tell.
    Report(usize),
    /// The proxy hears a report.
    Reported { worker: usize, state: Box<v1::WorkerState> },
    /// The timeline gets a place.
    Sample,
}

/// The end of a PD worker's part of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerEnd {
    /// With all that was to be written.
    Whole,
    /// With less.
    Short,
    /// There was no room.
    Full,
    /// Its time was over.
    Late,
    /// It did not find an item.
    Missing(ItemIdx),
    /// Otherwise.
    Failed,
}

/// The cluster while it runs.
pub(super) struct World<'a> {
    pub(super) spec: &'a ClusterSpec,
    /// The instant that stands for the start of the run.
    pub(super) base: Instant,
    pub(super) queue: EventQueue<Event>,
    /// Of times.
    pub(super) rng: StdRng,
    pub(super) workers: Vec<Worker>,
    pub(super) proxy: Proxy,
    pub(super) store: Store,
    pub(super) requests: Vec<Request>,
    /// By the name of its sequence, at whatever worker.
    pub(super) jobs: HashMap<JobId, super::request::Job>,
    pub(super) n_jobs: JobId,
    pub(super) n_sequences: u64,
    pub(super) items: ItemSources,
    pub(super) timeline: Vec<Moment>,
    pub(super) spans: Vec<Span>,
    pub(super) in_flight: usize,
    pub(super) encode_items: usize,
    /// Whose cores had work of the parts before the workers last.
    last_front: usize,
    /// Sizes of items for each tower by their shape, as asked so far.
    sizes: HashMap<ItemShape, Vec<Sized>>,
}

impl<'a> World<'a> {
    pub(super) fn new(spec: &'a ClusterSpec, seed: u64) -> Result<Self, SpecError> {
        let mut workers = Vec::new();
        for (i, pool) in spec.pools.iter().enumerate() {
            let costs = Rc::new(Costs::new(&pool.curves));
            for _ in 0..pool.workers {
                workers.push(Worker::new(i, pool, Rc::clone(&costs))?);
            }
        }
        let base = Instant::now();
        let proxy = Proxy::new(spec, &workers, seed, base);
        Ok(Self {
            spec,
            base,
            queue: EventQueue::new(),
            rng: StdRng::seed_from_u64(seed),
            workers,
            proxy,
            store: Store::new(&spec.store),
            requests: Vec::new(),
            jobs: HashMap::new(),
            n_jobs: 0,
            n_sequences: 0,
            items: ItemSources::default(),
            timeline: Vec::new(),
            spans: Vec::new(),
            in_flight: 0,
            encode_items: 0,
            last_front: 0,
            sizes: HashMap::new(),
        })
    }

    /// Runs to the end.
    pub(super) fn run(&mut self, offered: impl Iterator<Item = Offered>) {
        let (mut offered, mut last) = (offered, Duration::ZERO);
        if let Some(first) = offered.next() {
            self.offer(first);
            self.queue.at(0, Event::Sample);
        }
        loop {
            let end = match self.proxy.is_offering {
                true => Nanos::MAX,
                false => nanos(last.saturating_add(self.spec.patience)),
            };
            let Some(event) = self.queue.next_before(end) else { break };
            if let Event::Arrive(request) = event {
                last = self.requests[request].offered.at;
                match offered.next() {
                    Some(next) => self.offer(next),
                    None => self.proxy.is_offering = false,
                }
            }
            self.happens(event);
            if !self.proxy.is_offering && self.in_flight == 0 && self.jobs.is_empty() {
                break;
            }
        }
    }

    fn offer(&mut self, offered: Offered) {
        self.proxy.is_offering = true;
        let at = nanos(offered.at).saturating_add(self.hop());
        self.requests.push(Request::new(offered));
        self.queue.at(at, Event::Arrive(self.requests.len() - 1));
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Arrive(request) => self.arrive(request),
            Event::Supply(request) => self.supply(request),
            Event::WakeRequest(request) => self.request_on(request, RequestEvent::Woken),
            Event::WakeEncode(encode) => self.encode_on(encode, EncodeEvent::Woken),
            Event::StoreAnswers(encode, question) => self.store_answers(encode, question),
            Event::JobArrives(job) => self.job_arrives(job),
            Event::Announced(job) => self.announced(job),
            Event::JobEnded(job, end) => self.job_ended(job, end),
            Event::Cancel(job) => self.cancel(job),
            Event::Preprocessed { worker, job } => self.preprocessed(worker, job),
            Event::Cores { worker, version } => self.cores(worker, version),
            Event::Moved(transfer) => self.moved(transfer),
            Event::Lines(version) => self.lines(version),
            Event::Loadable { worker, key } => self.loadable(worker, key),
            Event::Missing { worker, key } => self.missing(worker, key),
            Event::Given(request, sequence) => self.given(request, sequence),
            Event::Wrote(request) => self.request_on(request, RequestEvent::Wrote { went_out: true }),
            Event::Answered { request, sequence, end } => self.answered(request, sequence, end),
            Event::Turn(worker) => self.turn(worker),
            Event::Wake { worker, at } => self.wake(worker, at),
            Event::Report(worker) => self.report(worker),
            Event::Reported { worker, state } => self.reported(worker, *state),
            Event::Sample => self.sample(),
        }
    }

    /// Now, for the product's code.
    pub(super) fn now(&self) -> Instant {
        self.instant(self.queue.now())
    }

    pub(super) fn instant(&self, at: Nanos) -> Instant {
        self.base + Duration::from_nanos(at)
    }

    /// From one process to another.
    pub(super) fn hop(&self) -> Nanos {
        nanos(self.spec.hop)
    }

    pub(super) fn draw(&mut self, spread: Spread) -> Nanos {
        nanos(spread.draw(&mut self.rng))
    }

    /// Costs of a worker that has measured items; where none has, of any.
    pub(super) fn encoder_costs(&self) -> Option<Rc<Costs>> {
        let all = || self.workers.iter().map(|w| &w.costs);
        all().find(|costs| !costs.curves().items.is_empty()).or_else(|| all().next()).map(Rc::clone)
    }

    /// Sizes of an item for each tower: every worker of a model makes the same of it.
    pub(super) fn sizes(&mut self, shape: ItemShape, costs: &Costs) -> Vec<Sized> {
        let sizes = || costs.encoders().map(|(_, encoder)| encoder.item(shape)).collect();
        self.sizes.entry(shape).or_insert_with(sizes).clone()
    }

    /// The parts before the workers are busy for so long, on one core. Client and proxy run wherever there is least to
    /// do, as the kernel places them; a worker's side of the network where the worker is.
    pub(super) fn front_works(&mut self, us: f64, beside: Option<usize>) {
        if self.spec.proxy.cores != FrontCores::Workers {
            return;
        }
        let at_worker = beside.map(|worker| (worker, us * WORKERS_SIDE));
        let elsewhere = us - at_worker.map_or(0.0, |(_, us)| us);
        if let Some((worker, us)) = at_worker {
            self.front_task(worker, us);
        }
        // Behind the worker's: its core is not free any more.
        let placed = if self.is_misplaced() { self.any_worker() } else { self.least_busy() };
        self.front_task(placed, elsewhere);
    }

    /// Work of a worker's own network side.
    pub(super) fn worker_front_works(&mut self, worker: usize, us: f64) {
        if self.spec.proxy.cores == FrontCores::Workers {
            self.front_task(worker, us);
        }
    }

    /// True if the kernel wakes a thread of client or proxy on a core that is not the freest.
    fn is_misplaced(&mut self) -> bool {
        let part = self.workers.first().map_or(0.0, |w| w.costs.curves().front.misplaced);
        // No draw where nothing was measured: the other times stay those of the same seed.
        part > 0.0 && self.rng.random::<f64>() < part
    }

    fn any_worker(&mut self) -> usize {
        self.rng.random_range(0..self.workers.len().max(1))
    }

    fn front_task(&mut self, worker: usize, us: f64) {
        let work = from_us(us);
        if work > 0 {
            self.compute(worker, Task::Front, (work, 1.0));
        }
    }

    /// Whose cores have least to do; of several, one after the other.
    fn least_busy(&mut self) -> usize {
        let n = self.workers.len().max(1);
        self.last_front = (self.last_front + 1) % n;
        let load = |i: &usize| self.workers[*i].cores.width() / self.workers[*i].threads();
        let in_turn = (0..n).map(|i| (i + self.last_front) % n);
        in_turn.min_by(|a, b| load(a).total_cmp(&load(b))).unwrap_or(0)
    }

    /// Puts a task on a worker's cores.
    pub(super) fn compute(&mut self, worker: usize, task: Task, (work, width): (Nanos, f64)) {
        let now = self.queue.now();
        self.workers[worker].cores.start(now, task, (work, width));
        self.look_at_cores(worker);
    }

    /// After a change on a worker's cores: its next end, and those of its neighbours on the same host.
    fn look_at_cores(&mut self, worker: usize) {
        self.interfere(worker);
        self.schedule_end(worker);
        if self.spec.proxy.cores != FrontCores::Workers {
            return;
        }
        for other in (0..self.workers.len()).filter(|other| *other != worker) {
            if self.interfere(other) {
                self.schedule_end(other);
            }
        }
    }

    fn schedule_end(&mut self, worker: usize) {
        if let Some((at, version)) = self.workers[worker].cores.next() {
            self.queue.at(at, Event::Cores { worker, version });
        }
    }

    fn cores(&mut self, worker: usize, version: u64) {
        let now = self.queue.now();
        let w = &mut self.workers[worker];
        if !w.cores.is_current(version) {
            return;
        }
        for Ended { name, used } in w.cores.ended(now) {
            self.workers[worker].used.add(name, used);
            match name {
                Task::Preprocess(job, _) => self.preprocessed(worker, job),
                Task::Forward(tower) => self.forwarded(worker, tower),
                Task::Step(_) => self.stepped(worker),
                Task::Front => {}
            }
        }
        self.look_at_cores(worker);
    }

    /// A span of compute that ends now.
    pub(super) fn span(&mut self, worker: usize, stage: Stage, (began, n, tokens): (Nanos, usize, u64)) {
        if self.spec.records_spans {
            let (began, ended) = (Duration::from_nanos(began), Duration::from_nanos(self.queue.now()));
            self.spans.push(Span { worker, stage, began, ended, n, tokens });
        }
    }

    /// Begins a transfer.
    pub(super) fn transfer(&mut self, transfer: Transfer, spread: Spread) {
        let work = self.draw(spread);
        if !self.store.is_shared {
            return self.queue.after(work, Event::Moved(transfer));
        }
        self.store.transfer(self.queue.now(), transfer, work);
        self.look_at_lines();
    }

    fn look_at_lines(&mut self) {
        if let Some((at, version)) = self.store.lines.next() {
            self.queue.at(at, Event::Lines(version));
        }
    }

    fn lines(&mut self, version: u64) {
        if !self.store.lines.is_current(version) {
            return;
        }
        for Ended { name: transfer, .. } in self.store.lines.ended(self.queue.now()) {
            self.moved(transfer);
        }
        self.look_at_lines();
    }

    fn moved(&mut self, transfer: Transfer) {
        match transfer {
            Transfer::Publish(job) => self.published(job),
            Transfer::Behind { key, bytes } => {
                self.store.put(key, bytes);
                self.store.drop_from_peer_cache(&key);
            }
            Transfer::Load { worker, key } => self.loaded(worker, key),
        }
    }

    /// A name that no other sequence has.
    pub(super) fn next_sequence(&mut self) -> SequenceId {
        self.n_sequences += 1;
        SequenceId(self.n_sequences)
    }
}

/// A time in nanoseconds.
pub(super) fn nanos(time: Duration) -> Nanos {
    Nanos::try_from(time.as_nanos()).unwrap_or(Nanos::MAX)
}

/// Microseconds in nanoseconds.
pub(super) fn from_us(us: f64) -> Nanos {
    // A cast from a float saturates.
    (us * 1e3) as Nanos
}
