//! The thread that owns an engine: commands in, steps, outputs out.
//!
//! Compute happens here and nowhere else, so no async worker ever waits for a step. The command queue is
//! unbounded in itself: admission in `service` bounds the requests, and each sends a fixed number of commands.
//! An output queue holds at most one completion, because a completion ends at its context.

use crate::lending;
use crate::meters::{ArbiterMeters, PdMeters};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Instant;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;
use triptych_core::clock::{Clock, SystemClock};
use triptych_core::timeline::COMPUTE;
use triptych_core::{AdapterId, Failure};
use triptych_engine::{AlignJob, Engine, Event, NextStep, Output, SequenceId, SequenceRequest, Stats};
use triptych_models::ModelError;
use triptych_models::compute::{Cores, share_cores, stop_sharing_cores};
use triptych_models::lora::LoraAdapter;
use triptych_runtime::compute_arbiter::{ComputeArbiter, EngineRegistration};
use triptych_runtime::core_share::{ComputationKind, CoreShare};
use triptych_runtime::watchdog::Watchdog;

enum EngineCommand {
    Start { request: Box<SequenceRequest>, outputs: UnboundedSender<Output> },
    Align { job: Box<AlignJob>, outputs: UnboundedSender<Output> },
    Event(Event),
    LoadAdapter { name: String, adapter: Box<LoraAdapter>, done: oneshot::Sender<Result<(), ModelError>> },
    UnloadAdapter(AdapterId),
}

/// Handle of an engine's thread, which ends when the last handle is dropped.
#[derive(Clone)]
pub struct Driver {
    commands: Sender<EngineCommand>,
    next_id: Arc<AtomicU64>,
    stats: watch::Receiver<Stats>,
}

/// Running sequences, or an alignment; dropping this aborts them.
pub struct RunningSequences {
    ids: Vec<SequenceId>,
    driver: Driver,
}

impl Drop for RunningSequences {
    fn drop(&mut self) {
        for id in &self.ids {
            // No effect on one that ended.
            self.driver.send(Event::Abort(*id));
        }
    }
}

/// Parts of an engine's thread.
pub struct DriverSetup {
    /// The engine.
    pub engine: Engine,
    /// Names of its loaded adapters, for metrics.
    pub adapter_names: HashMap<AdapterId, String>,
    /// Metrics of its model.
    pub meters: PdMeters,
    /// Arbitration of compute between engines and encoders; `None`: no encoders in this process.
    pub arbitration: Option<Arbitration>,
    /// Share of the host's cores; `None`: all of them.
    pub cores: Option<CoreShare>,
    /// Watches the engine's steps.
    pub watchdog: Watchdog,
    /// Called on the engine's thread with each sequence that starts. `None` outside tests.
    pub fault: Option<SequenceHook>,
    /// Cancelled when the thread has ended and the engine's memory is free.
    pub ended: CancellationToken,
}

/// Seam by which tests plant faults into an engine's thread.
pub type SequenceHook = Arc<dyn Fn(&SequenceRequest) + Send + Sync>;

impl Driver {
    /// Starts the thread. `died` is cancelled if the engine panics: the process must then be replaced.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn spawn(name: &str, setup: DriverSetup, died: CancellationToken) -> std::io::Result<Self> {
        let DriverSetup { engine, adapter_names, meters, arbitration, cores, watchdog, fault, ended } = setup;
        let (commands, inbox) = channel();
        let meters = meters.since(engine.stats());
        let (stats_sender, stats) = watch::channel(engine.stats());
        let mut thread = EngineThread {
            engine,
            adapter_names,
            arbitration,
            cores,
            is_computing: false,
            inbox,
            routes: HashMap::new(),
            meters,
            stats: stats_sender,
            clock: SystemClock,
            watchdog,
            fault,
        };
        thread.observe_adapters();
        let run = move || {
            let _ended = ended.drop_guard();
            thread.run(&died);
        };
        std::thread::Builder::new().name(format!("engine-{name}")).spawn(run)?;
        Ok(Self { commands, next_id: Arc::default(), stats })
    }

    /// An id that no other sequence of this engine has.
    pub fn next_id(&self) -> SequenceId {
        SequenceId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Statistics after the latest step.
    pub fn stats(&self) -> Stats {
        *self.stats.borrow()
    }

    /// Starts a sequence; its outputs go to `outputs`. Dropping the result aborts it.
    ///
    /// # Errors
    /// Unavailable when the engine is gone.
    pub fn start(
        &self,
        request: SequenceRequest,
        outputs: UnboundedSender<Output>,
    ) -> Result<RunningSequences, Failure> {
        let ids = request.ids.clone();
        let start = EngineCommand::Start { request: Box::new(request), outputs };
        self.commands.send(start).map_err(|_| Failure::unavailable("the engine is gone"))?;
        Ok(RunningSequences { ids, driver: self.clone() })
    }

    /// Runs an alignment in parts, one in each step; its result goes to `outputs`. Dropping the result aborts it.
    ///
    /// # Errors
    /// Unavailable when the engine is gone.
    pub fn align(
        &self,
        job: AlignJob,
        outputs: UnboundedSender<Output>,
    ) -> Result<RunningSequences, Failure> {
        let ids = vec![job.id];
        let align = EngineCommand::Align { job: Box::new(job), outputs };
        self.commands.send(align).map_err(|_| Failure::unavailable("the engine is gone"))?;
        Ok(RunningSequences { ids, driver: self.clone() })
    }

    /// Loads an adapter between two steps; sequences may name it once this has ended.
    ///
    /// # Errors
    /// Unavailable when the engine is gone; the result is that of [`Engine::load_adapter`].
    pub async fn load_adapter(
        &self,
        name: &str,
        adapter: LoraAdapter,
    ) -> Result<Result<(), ModelError>, Failure> {
        let (done, loaded) = oneshot::channel();
        let gone = || Failure::unavailable("the engine is gone");
        let load = EngineCommand::LoadAdapter { name: name.to_owned(), adapter: Box::new(adapter), done };
        self.commands.send(load).map_err(|_| gone())?;
        loaded.await.map_err(|_| gone())
    }

    /// Refuses new sequences of an adapter, which goes when the last one has ended.
    pub fn unload_adapter(&self, id: AdapterId) {
        let _ = self.commands.send(EngineCommand::UnloadAdapter(id));
    }

    /// True if both are handles of one engine.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.next_id, &other.next_id)
    }

    /// Sends an event. An engine that is gone has failed all its sequences, so a failed send needs no report.
    pub fn send(&self, event: Event) {
        let _ = self.commands.send(EngineCommand::Event(event));
    }
}

/// An engine's use of the compute arbiter.
pub struct Arbitration {
    engine: EngineRegistration,
    arbiter: ComputeArbiter,
    meters: ArbiterMeters,
}

impl Arbitration {
    /// Registers an engine.
    pub fn new(arbiter: &ComputeArbiter, meters: &ArbiterMeters) -> Self {
        Self { engine: arbiter.engine(), arbiter: arbiter.clone(), meters: meters.clone() }
    }
}

struct EngineThread {
    engine: Engine,
    arbitration: Option<Arbitration>,
    cores: Option<CoreShare>,
    /// Set while steps follow one another.
    is_computing: bool,
    inbox: Receiver<EngineCommand>,
    routes: HashMap<SequenceId, UnboundedSender<Output>>,
    adapter_names: HashMap<AdapterId, String>,
    meters: PdMeters,
    stats: watch::Sender<Stats>,
    clock: SystemClock,
    watchdog: Watchdog,
    fault: Option<SequenceHook>,
}

impl EngineThread {
    fn run(mut self, died: &CancellationToken) {
        loop {
            match catch_unwind(AssertUnwindSafe(|| self.run_once())) {
                Ok(ControlFlow::Continue(())) => {}
                Ok(ControlFlow::Break(())) => return,
                Err(_) => {
                    // Its accounting may be wrong: the process is replaced. Its sequences stay open until then: they
                    // end with their connections, and are taken up elsewhere, as after any death.
                    tracing::error!(sequences = self.routes.len(), "the engine panicked");
                    std::mem::forget(std::mem::take(&mut self.routes));
                    died.cancel();
                    return;
                }
            }
        }
    }

    fn run_once(&mut self) -> ControlFlow<()> {
        let next_step = self.engine.next_step();
        if let NextStep::OnEvent | NextStep::At(_) = &next_step {
            self.rest();
        }
        let first = match next_step {
            NextStep::Now => {
                self.take_while_computing();
                self.take_while_lending();
                self.inbox.try_recv().ok()
            }
            NextStep::OnEvent => match self.inbox.recv() {
                Ok(command) => Some(command),
                Err(_) => return ControlFlow::Break(()),
            },
            NextStep::At(deadline) => {
                match self.inbox.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                    Ok(command) => Some(command),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => return ControlFlow::Break(()),
                }
            }
        };
        let mut next = first;
        while let Some(command) = next {
            self.apply(command);
            next = self.inbox.try_recv().ok();
        }
        let outputs = self.step();
        self.observe_adapters();
        self.deliver(outputs);
        if self.engine.is_device_lost() {
            // As after a panic: sequences stay open until the process ends.
            std::mem::forget(std::mem::take(&mut self.routes));
            self.watchdog.device_lost();
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }

    /// Lets others have the cores, until the next step.
    fn rest(&mut self) {
        if std::mem::take(&mut self.is_computing) {
            stop_sharing_cores();
        }
        if let Some(arbitration) = &self.arbitration {
            arbitration.engine.rest();
        }
    }

    /// Takes commands while the step under way computes, until the next has to be planned.
    fn take_while_computing(&mut self) {
        let left = |thread: &Self| {
            let until = thread.engine.next_plan()?;
            until.checked_duration_since(thread.clock.now()).filter(|left| !left.is_zero())
        };
        while let Some(left) = left(self) {
            match self.inbox.recv_timeout(left) {
                Ok(command) => self.apply(command),
                Err(_) => return,
            }
        }
    }

    /// Takes commands while the next decode step waits for other workers of the host.
    fn take_while_lending(&mut self) {
        let left = |thread: &Self| {
            let cores = thread.cores.as_ref()?;
            lending::wait(thread.engine.spare_decode_slack(thread.clock.now()), || cores.others_encode())
        };
        while let Some(left) = left(self) {
            self.rest();
            match self.inbox.recv_timeout(left) {
                Ok(command) => self.apply(command),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Runs one step, by permit of the compute arbiter if there is one: all compute of the engine is in its steps.
    fn step(&mut self) -> Vec<Output> {
        let permit = self.arbitration.as_ref().map(|arbitration| arbitration.engine.step());
        let _watched = self.watchdog.begin("an engine step");
        if let (false, Some(cores)) = (self.is_computing, &self.cores) {
            let mut computing = cores.begin(ComputationKind::Steps);
            share_cores(move |core| {
                let share = computing.share(core, Instant::now())?;
                Some(Cores { n_threads: share.n_cores, avoided: share.avoided })
            });
            self.is_computing = true;
        }
        let start = self.clock.now();
        let span = tracing::trace_span!(target: COMPUTE, "step");
        let outputs = span.in_scope(|| self.engine.step(&self.clock));
        // A step without work is not measured.
        if !outputs.is_empty() || self.engine.next_step() == NextStep::Now {
            self.meters.step(start.elapsed());
        }
        let stats = self.engine.stats();
        match permit {
            Some(permit) if stats.decoding > 0 => permit.decodes(self.engine.decode_slack(self.clock.now())),
            permit => drop(permit),
        }
        if let Some(arbitration) = &self.arbitration {
            arbitration.meters.observe(arbitration.arbiter.usage());
        }
        self.meters.observe(stats);
        self.meters.observe_graphs(self.engine.graph_stats());
        self.stats.send_replace(stats);
        outputs
    }

    fn observe_adapters(&mut self) {
        let loads = self.engine.adapter_loads();
        self.adapter_names.retain(|id, _| loads.iter().any(|(loaded, _)| loaded == id));
        let named = |(id, load)| Some((self.adapter_names.get(&id)?.clone(), load));
        self.meters.observe_adapters(&loads.into_iter().filter_map(named).collect::<Vec<_>>());
    }

    fn apply(&mut self, command: EngineCommand) {
        let now = self.clock.now();
        let watched = self.watchdog.begin("the start of a sequence");
        let outputs = match command {
            EngineCommand::Start { request, outputs } => {
                if let Some(fault) = &self.fault {
                    fault(&request);
                }
                self.routes.extend(request.ids.iter().map(|id| (*id, outputs.clone())));
                self.engine.handle(Event::Add(request), now)
            }
            EngineCommand::Align { job, outputs } => {
                self.routes.insert(job.id, outputs);
                self.engine.handle(Event::Align(job), now)
            }
            EngineCommand::Event(event) => {
                if let Event::Abort(id) = &event {
                    self.routes.remove(id);
                }
                self.engine.handle(event, now)
            }
            EngineCommand::LoadAdapter { name, adapter, done } => {
                self.adapter_names.entry(adapter.id()).or_insert(name);
                // A caller that went away unloads what it does not know.
                let _ = done.send(self.engine.load_adapter(&adapter));
                Vec::new()
            }
            EngineCommand::UnloadAdapter(id) => {
                self.engine.unload_adapter(id);
                Vec::new()
            }
        };
        drop(watched);
        self.deliver(outputs);
    }

    fn deliver(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            let id = output.id();
            let last = output.is_last();
            let gone = self.routes.get(&id).is_none_or(|outputs| outputs.send(output).is_err());
            if last || gone {
                self.routes.remove(&id);
            }
            if gone && !last {
                self.engine.handle(Event::Abort(id), self.clock.now());
            }
        }
    }
}

#[cfg(test)]
mod tests;
