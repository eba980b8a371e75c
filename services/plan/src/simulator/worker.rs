//! A worker: its cores, and what it holds as an encoder, as a PD worker, or as both.

use super::event_queue::Nanos;
use super::output::{ROW_BYTES, narrowest};
use super::sharing::Sharing;
use super::spec::{EncoderSpec, PdSpec, PoolRole, PoolSpec, SpecError};
use crate::curves::{Costs, Stage};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;
use triptych_core::{ContentKey, TowerIdx};
use triptych_ec::local::LocalCache;
use triptych_encoder::load::LoadTracker;
use triptych_engine::plan::StepPlan;
use triptych_engine::scheduler::{Scheduler, SchedulerConfig};
use triptych_engine::{SequenceId, SequenceRequest, Stats};
use triptych_proto::v1;
use triptych_runtime::compute_arbiter::{ArbiterState, ComputeId};

/// A task on the cores of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// An item is read and resized for a tower.
    Preprocess(JobId, TowerIdx),
    /// A forward of a tower, or a part of one.
    Forward(TowerIdx),
    /// An engine step, of this stage.
    Step(Stage),
    /// Work of client, proxy and network on the same cores.
    Front,
}

impl Task {
    /// Its stage; `None`: it is no worker's compute.
    pub(super) fn stage(self) -> Option<Stage> {
        match self {
            Self::Preprocess(_, tower) => Some(Stage::Preprocess(tower)),
            Self::Forward(tower) => Some(Stage::Encode(tower)),
            Self::Step(stage) => Some(stage),
            Self::Front => None,
        }
    }
}

/// Names a job of an encoder.
pub(super) type JobId = u64;

/// A worker.
pub(super) struct Worker {
    pub(super) pool: usize,
    pub(super) costs: Rc<Costs>,
    /// True if steps are pipelined, as on a device that no encoder shares.
    pub(super) is_pipelined: bool,
    /// Costs with all cores of the host, if they are lent.
    pub(super) lent: Option<Rc<Costs>>,
    pub(super) cores: Sharing<Task>,
    pub(super) encoder: Option<EncoderSide>,
    pub(super) pd: Option<PdSide>,
    /// State of the turns that the two take.
    pub(super) turns: Option<TurnTaking>,
    pub(super) reports: Reports,
    pub(super) used: Used,
}

/// Use of a worker, in core-nanoseconds, and counts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Used {
    pub(super) preprocess: f64,
    pub(super) encode: f64,
    pub(super) step: f64,
    pub(super) front: f64,
    pub(super) n_batches: u64,
    pub(super) n_encoded: u64,
    pub(super) n_steps: u64,
    pub(super) n_rows: u64,
    pub(super) n_requests: u64,
}

impl Used {
    /// A task has ended that used so many core-nanoseconds.
    pub(super) fn add(&mut self, task: Task, used: f64) {
        *match task {
            Task::Preprocess(..) => &mut self.preprocess,
            Task::Forward(_) => &mut self.encode,
            Task::Step(_) => &mut self.step,
            Task::Front => &mut self.front,
        } += used;
    }
}

/// Reports to the proxy.
#[derive(Debug, Default)]
pub(super) struct Reports {
    /// The latest report, and its time.
    pub(super) reported: Option<(v1::WorkerState, Nanos)>,
    /// True if it will be looked soon whether there is news.
    pub(super) is_due: bool,
    /// True if the rows that it holds have changed since.
    pub(super) rows_changed: bool,
    /// Keys that were reported as held.
    pub(super) keys: std::collections::BTreeSet<ContentKey>,
}

/// Engine and encoder on the same cores.
pub(super) struct TurnTaking {
    pub(super) turns: ArbiterState,
    pub(super) engine: ComputeId,
    /// True if the engine has asked for a step.
    pub(super) step_asked: bool,
}

/// An encoder.
pub(super) struct EncoderSide {
    pub(super) spec: EncoderSpec,
    pub(super) load: LoadTracker,
    pub(super) n_jobs: usize,
    pub(super) preprocess_threads: usize,
    pub(super) n_preprocessing: usize,
    /// Jobs that wait for a thread to preprocess them.
    pub(super) raw: VecDeque<JobId>,
    towers: BTreeMap<TowerIdx, TowerQueue>,
    /// Rows that were published and are here still; a PD worker has them in its own.
    pub(super) rows: LocalCache,
}

/// The jobs of a tower that are preprocessed.
#[derive(Debug, Default)]
pub(super) struct TowerQueue {
    /// Those that wait for a batch.
    pub(super) ready: VecDeque<JobId>,
    pub(super) running: Option<Batch>,
}

impl EncoderSide {
    /// The jobs of a tower.
    pub(super) fn tower(&mut self, tower: TowerIdx) -> &mut TowerQueue {
        self.towers.entry(tower).or_default()
    }

    /// Those of all towers, in their order.
    pub(super) fn towers(&mut self) -> impl Iterator<Item = (TowerIdx, &mut TowerQueue)> {
        self.towers.iter_mut().map(|(tower, queue)| (*tower, queue))
    }
}

/// A forward under way.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) jobs: Vec<JobId>,
    pub(super) began: Nanos,
    /// Parts that are left, in turns with an engine: their output tokens and their time.
    pub(super) parts: VecDeque<(u64, Nanos)>,
    /// The part that has its turn, and since when.
    pub(super) part: Option<(u64, Nanos)>,
    pub(super) compute_id: ComputeId,
}

/// A PD worker.
pub(super) struct PdSide {
    pub(super) spec: PdSpec,
    pub(super) scheduler: Scheduler,
    /// Commands that arrived during a step.
    pub(super) inbox: Vec<Command>,
    pub(super) stepping: Option<Stepping>,
    /// True if the last step left nothing that could run, and nothing happened since.
    pub(super) stalled: bool,
    /// True if the engine is in a step, or about to look for one.
    pub(super) is_busy: bool,
    pub(super) requests: HashMap<SequenceId, usize>,
    pub(super) n_requests: usize,
    /// Time of the latest messages of its streams that did not wait.
    pub(super) sent_at: Option<Nanos>,
    /// Tick at which the messages leave that are held.
    pub(super) tick_at: Option<Nanos>,
    pub(super) n_live: usize,
    pub(super) rows: LocalCache,
    pub(super) loading: HashMap<ContentKey, LoadStage>,
    pub(super) load_queue: VecDeque<ContentKey>,
    pub(super) n_loading: usize,
    /// After the latest step.
    pub(super) stats: Stats,
    pub(super) wake: Option<Nanos>,
}

/// A command to an engine, between steps.
pub(super) enum Command {
    Arrive(Box<SequenceRequest>),
    Item(ContentKey),
    Abort(SequenceId),
}

/// A step under way.
pub(super) struct Stepping {
    pub(super) plan: StepPlan,
    /// Time at which it got its turn.
    pub(super) began: Nanos,
}

/// Progress of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoadStage {
    /// The output is not there yet.
    Waiting,
    /// There are as many loads under way as there may be.
    Queued,
    /// It comes.
    Coming,
}

impl Worker {
    /// A worker of a pool, at rest.
    pub(super) fn new(pool: usize, spec: &PoolSpec, costs: Rc<Costs>) -> Result<Self, SpecError> {
        let row_bytes = usize::try_from(narrowest(&costs)).unwrap_or(usize::MAX);
        let encoder = spec.encoder().map(|encoder| EncoderSide {
            spec: *encoder,
            load: LoadTracker::unmetered(encoder.max_jobs),
            n_jobs: 0,
            preprocess_threads: match encoder.preprocess_threads {
                0 => spec.curves.preprocess_threads(),
                n => n,
            },
            n_preprocessing: 0,
            raw: VecDeque::new(),
            towers: BTreeMap::new(),
            rows: LocalCache::new(scaled(encoder.rows_budget_bytes, row_bytes)),
        });
        let pd = spec.pd().map(|pd| PdSide::new(spec, pd, row_bytes)).transpose()?;
        let turns = match &spec.role {
            PoolRole::Both { encoder_budget, .. } => {
                let mut turns = ArbiterState::new(*encoder_budget);
                Some(TurnTaking { engine: turns.new_id(), turns, step_asked: false })
            }
            _ => None,
        };
        Ok(Self {
            pool,
            cores: Sharing::new(spec.curves.threads as f64),
            is_pipelined: matches!(spec.role, PoolRole::Pd(_)) && costs.curves().pipelining.is_some(),
            costs,
            lent: spec.lent.as_ref().map(|curves| Rc::new(Costs::new(curves))),
            encoder,
            pd,
            turns,
            reports: Reports::default(),
            used: Used::default(),
        })
    }

    /// True if a forward or a step is under way.
    pub(super) fn computes(&self) -> bool {
        self.cores.shares().any(|(task, _)| matches!(task, Task::Forward(_) | Task::Step(_)))
    }

    /// True if a forward is under way.
    pub(super) fn encodes(&self) -> bool {
        self.cores.shares().any(|(task, _)| matches!(task, Task::Forward(_)))
    }

    /// Threads that a forward or a step takes.
    pub(super) fn threads(&self) -> f64 {
        self.costs.curves().threads as f64
    }

    /// The rows that are kept here, of encoder outputs.
    pub(super) fn rows(&mut self) -> Option<&mut LocalCache> {
        match (&mut self.pd, &mut self.encoder) {
            (Some(pd), _) => Some(&mut pd.rows),
            (None, Some(encoder)) => Some(&mut encoder.rows),
            (None, None) => None,
        }
    }
}

/// A budget for rows, in the bytes that stand for them here.
fn scaled(budget: usize, row_bytes: usize) -> usize {
    budget / row_bytes * ROW_BYTES
}

impl PdSide {
    fn new(pool: &PoolSpec, spec: &PdSpec, row_bytes: usize) -> Result<Self, SpecError> {
        let info = pool.curves.kv.decoder();
        let config = spec.engine.for_decoder(&info, pool.curves.kv.max_cross_rows);
        let wrong = |e: triptych_engine::EngineError| SpecError::Engine {
            pool: pool.name.clone(),
            what: e.to_string(),
        };
        let pools = config.check(&info).map_err(wrong)?;
        let bounds = SchedulerConfig {
            token_budget: config.token_budget,
            decode_share: config.decode_share,
            tpot_slo: config.tpot_slo,
            max_tpot_slo: config.max_tpot_slo,
            max_sequences: config.max_sequences,
            max_loras: 1,
            max_waiting: config.max_waiting,
            prefix_cache: config.prefix_cache,
            preemption: config.preemption,
            rows: config.rows,
            order: spec.order,
        };
        let scheduler = Scheduler::new(bounds, info, pools);
        Ok(Self {
            spec: *spec,
            stats: Stats::of(&scheduler),
            scheduler,
            inbox: Vec::new(),
            stepping: None,
            stalled: true,
            is_busy: false,
            requests: HashMap::new(),
            n_requests: 0,
            sent_at: None,
            tick_at: None,
            n_live: 0,
            rows: LocalCache::new(scaled(spec.rows_budget_bytes, row_bytes)),
            loading: HashMap::new(),
            load_queue: VecDeque::new(),
            n_loading: 0,
            wake: None,
        })
    }
}
