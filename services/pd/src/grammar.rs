//! Grammars of structured output, compiled for requests without harm to others.
//!
//! A constraint is tried out in a child process with limits on memory and time ([`trial`]); only what passed there is
//! compiled here, on a thread with a large stack. A few compile at once, some more wait, and the next is refused.
//! Outcomes are cached by hash, refusals included; equal constraints at the same time are compiled once. Requests
//! without a constraint and engine steps never wait for any of it. It knows no request and no engine.

mod cache;
mod child;
mod trial;

pub use child::run as run_trial;
pub use trial::TrialProgram;

use cache::{CacheKey, Compiled, Outcome, OutcomeCache};
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio_util::task::TaskTracker;
use triptych_core::sampling::Constraint;
use triptych_core::{Failure, FailureClass, TenantId};
use triptych_engine::constraint::trial::STACK_BYTES;
use triptych_engine::constraint::{CompiledConstraint, Constraints};
use triptych_runtime::single_flight::SingleFlight;
use triptych_runtime::status::from_join_error;

/// Grammars that compile at once.
const MAX_RUNNING: usize = 2;
/// Grammars that compile or wait to.
const MAX_PENDING: usize = 32;

/// Turns to compile, shared by the models of a worker.
#[derive(Clone)]
pub struct CompilePool {
    program: Arc<TrialProgram>,
    running: Arc<Semaphore>,
    pending: Arc<Semaphore>,
    tasks: TaskTracker,
}

/// Compiles constraints for one model.
#[derive(Clone)]
pub struct GrammarCompiler {
    constraints: Arc<Constraints>,
    pool: CompilePool,
    cache: Arc<Mutex<OutcomeCache>>,
    calls: SingleFlight<CacheKey, Option<Outcome>>,
}

impl CompilePool {
    /// Trials run as `program`; compilations are among `tasks`, which drain waits for.
    pub fn new(program: TrialProgram, tasks: &TaskTracker) -> Self {
        Self {
            program: Arc::new(program),
            running: Arc::new(Semaphore::new(MAX_RUNNING)),
            pending: Arc::new(Semaphore::new(MAX_PENDING)),
            tasks: tasks.clone(),
        }
    }

    fn admit(&self) -> Result<OwnedSemaphorePermit, Failure> {
        self.pending.clone().try_acquire_owned().map_err(|_| {
            let text =
                format!("{MAX_PENDING} grammars are being compiled or wait to be, the limit of this worker");
            Failure::new(FailureClass::Overloaded, text)
        })
    }

    /// Runs CPU work of milliseconds beside the async workers.
    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        self.tasks.spawn_blocking(work).await.map_err(|e| from_join_error("a grammar", &e))?
    }
}

impl GrammarCompiler {
    /// For one model.
    pub fn new(constraints: Constraints, pool: CompilePool) -> Self {
        let calls = SingleFlight::new(pool.tasks.clone());
        Self { constraints: Arc::new(constraints), pool, cache: Arc::default(), calls }
    }

    /// The constraint compiled, from the cache if it is there. When all its callers go away, it is no longer compiled.
    ///
    /// # Errors
    /// Invalid: the constraint cannot be compiled, or exceeds a limit. Overloaded: too many are being compiled.
    pub async fn compile(&self, constraint: Constraint, tenant: TenantId) -> Outcome {
        let key = CacheKey::new(&constraint, tenant);
        if let Some(outcome) = self.cache.lock().get(&key) {
            return outcome;
        }
        let compiler = self.clone();
        let (mut call, _) = self.calls.subscribe(key, None, |outcome| async move {
            outcome.send_replace(Some(compiler.compile_once(key, constraint).await));
        });
        match call.until(Option::is_some).await.flatten() {
            Some(outcome) => outcome,
            None => Err(call.lost("the compilation of a grammar").await),
        }
    }

    async fn compile_once(&self, key: CacheKey, constraint: Constraint) -> Outcome {
        // Another call may have ended since the caller looked.
        if let Some(outcome) = self.cache.lock().get(&key) {
            return outcome;
        }
        let outcome = self.try_and_compile(Arc::new(constraint)).await;
        self.cache.lock().insert(key, &outcome);
        outcome
    }

    async fn try_and_compile(&self, constraint: Arc<Constraint>) -> Outcome {
        let _place = self.pool.admit()?;
        let (constraints, checked) = (Arc::clone(&self.constraints), Arc::clone(&constraint));
        self.pool.run(move || constraints.check(&checked)).await?;
        let turn = self.pool.running.clone().acquire_owned().await.map_err(Failure::internal)?;
        let (constraints, tried) = (Arc::clone(&self.constraints), Arc::clone(&constraint));
        let job = self.pool.run(move || constraints.trial(&tried)).await?;
        let n_bytes = trial::run(&self.pool.program, job, constraint.field()).await?;
        let constraints = Arc::clone(&self.constraints);
        let compiled = on_thread(move || {
            let _turn = turn;
            constraints.compile(&constraint)
        });
        Ok(Compiled::new(compiled.await?, n_bytes))
    }
}

/// Runs a compilation that has passed its trial, on a thread with as large a stack as the trial's.
async fn on_thread(
    work: impl FnOnce() -> Result<CompiledConstraint, Failure> + Send + 'static,
) -> Result<CompiledConstraint, Failure> {
    let (done, outcome) = oneshot::channel();
    let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(STACK_BYTES);
    // Nobody may wait for it any more.
    let started = thread.spawn(move || drop(done.send(work())));
    started
        .map_err(|e| Failure::unavailable("this worker has no thread to compile a grammar").with_detail(e))?;
    outcome.await.map_err(|_| Failure::internal("a thread that compiled a grammar ended early"))?
}
