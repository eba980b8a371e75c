//! The thread that owns an engine: commands in, steps, news out.
//!
//! Compute happens here and nowhere else, so no async worker ever waits for a step. The command queue has no
//! bound of its own: admission in `service` bounds the requests, and each sends a fixed number of commands.
//! News queue up at most one answer long, because an answer ends at its context.

use crate::meters::{Meters, TurnMeters};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Instant;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use triptych_core::Failure;
use triptych_core::clock::{Clock, SystemClock};
use triptych_core::timeline::COMPUTE;
use triptych_engine::{AlignJob, Arrival, Engine, Event, Output, Readiness, SequenceId, Stats};
use triptych_runtime::turnstile::{EngineGate, Turnstile};

enum Command {
    Start { arrival: Box<Arrival>, news: UnboundedSender<Output> },
    Align { job: Box<AlignJob>, news: UnboundedSender<Output> },
    Tell(Event),
}

/// A handle on an engine's thread. The thread ends when the last handle is gone.
#[derive(Clone)]
pub struct Driver {
    commands: Sender<Command>,
    next_id: Arc<AtomicU64>,
    stats: watch::Receiver<Stats>,
}

/// Answers that are written until this is dropped.
pub struct RunningAnswers {
    ids: Vec<SequenceId>,
    driver: Driver,
}

impl Drop for RunningAnswers {
    fn drop(&mut self) {
        for id in &self.ids {
            // One that ended ignores it.
            self.driver.tell(Event::Abort(*id));
        }
    }
}

impl Driver {
    /// Starts the thread. `died` is cancelled if the engine panics: the process must then be replaced.
    ///
    /// # Errors
    /// If the machine gives no thread.
    pub fn spawn(
        name: &str,
        engine: Engine,
        (meters, turns): (Meters, Option<Turns>),
        died: CancellationToken,
    ) -> std::io::Result<Self> {
        let (commands, inbox) = channel();
        let meters = meters.since(engine.stats());
        let (told, stats) = watch::channel(engine.stats());
        let thread =
            Thread { engine, turns, inbox, routes: HashMap::new(), meters, told, clock: SystemClock };
        std::thread::Builder::new().name(format!("engine-{name}")).spawn(move || thread.run(&died))?;
        Ok(Self { commands, next_id: Arc::default(), stats })
    }

    /// A name that no other sequence of this engine has.
    pub fn next_id(&self) -> SequenceId {
        SequenceId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// What the engine held after its latest step.
    pub fn stats(&self) -> Stats {
        *self.stats.borrow()
    }

    /// Starts a sequence; the news of its answers go to `news`. They are aborted when the result is dropped.
    ///
    /// # Errors
    /// Unavailable when the engine is gone.
    pub fn start(&self, arrival: Arrival, news: UnboundedSender<Output>) -> Result<RunningAnswers, Failure> {
        let ids = arrival.ids.clone();
        let start = Command::Start { arrival: Box::new(arrival), news };
        self.commands.send(start).map_err(|_| Failure::unavailable("the engine is gone"))?;
        Ok(RunningAnswers { ids, driver: self.clone() })
    }

    /// Has known tokens read; the result goes to `news`.
    ///
    /// # Errors
    /// Unavailable when the engine is gone.
    pub fn align(&self, job: AlignJob, news: UnboundedSender<Output>) -> Result<(), Failure> {
        let align = Command::Align { job: Box::new(job), news };
        self.commands.send(align).map_err(|_| Failure::unavailable("the engine is gone"))
    }

    /// Tells the engine of an event. A gone engine has failed everything it had, so nobody waits for this.
    pub fn tell(&self, event: Event) {
        let _ = self.commands.send(Command::Tell(event));
    }
}

/// Where steps take their turns with the encoders of this process.
pub struct Turns {
    gate: EngineGate,
    turnstile: Turnstile,
    meters: TurnMeters,
}

impl Turns {
    /// An engine's place at the turnstile.
    pub fn new(turnstile: &Turnstile, meters: &TurnMeters) -> Self {
        Self { gate: turnstile.engine(), turnstile: turnstile.clone(), meters: meters.clone() }
    }
}

struct Thread {
    engine: Engine,
    turns: Option<Turns>,
    inbox: Receiver<Command>,
    routes: HashMap<SequenceId, UnboundedSender<Output>>,
    meters: Meters,
    told: watch::Sender<Stats>,
    clock: SystemClock,
}

/// Whether the loop goes on.
#[derive(PartialEq)]
enum Turn {
    Next,
    End,
}

impl Thread {
    fn run(mut self, died: &CancellationToken) {
        loop {
            match catch_unwind(AssertUnwindSafe(|| self.turn())) {
                Ok(Turn::Next) => {}
                Ok(Turn::End) => return,
                Err(_) => {
                    // Its books cannot be trusted any more: fail what runs, let the process be replaced.
                    tracing::error!(sequences = self.routes.len(), "the engine panicked");
                    for (id, news) in self.routes.drain() {
                        let _ = news.send(Output::Failed(id, Failure::internal("the engine panicked")));
                    }
                    died.cancel();
                    return;
                }
            }
        }
    }

    fn turn(&mut self) -> Turn {
        let readiness = self.engine.readiness();
        if let (Some(turns), Readiness::OnEvent | Readiness::At(_)) = (&self.turns, &readiness) {
            turns.gate.rest();
        }
        let first = match readiness {
            Readiness::Now => self.inbox.try_recv().ok(),
            Readiness::OnEvent => match self.inbox.recv() {
                Ok(command) => Some(command),
                Err(_) => return Turn::End,
            },
            Readiness::At(deadline) => {
                match self.inbox.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                    Ok(command) => Some(command),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => return Turn::End,
                }
            }
        };
        let mut next = first;
        while let Some(command) = next {
            self.obey(command);
            next = self.inbox.try_recv().ok();
        }
        let outputs = self.step();
        self.deliver(outputs);
        Turn::Next
    }

    /// One step, in turns with the encoders of this process.
    fn step(&mut self) -> Vec<Output> {
        let turn = self.turns.as_ref().map(|turns| turns.gate.step());
        let start = self.clock.now();
        let span = tracing::trace_span!(target: COMPUTE, "step");
        let outputs = span.in_scope(|| self.engine.step(&self.clock));
        // A step in which nothing could run has no time worth counting.
        if !outputs.is_empty() || self.engine.readiness() == Readiness::Now {
            self.meters.step(start.elapsed());
        }
        let stats = self.engine.stats();
        match turn {
            Some(turn) if stats.decoding > 0 => turn.decodes(),
            turn => drop(turn),
        }
        if let Some(turns) = &self.turns {
            turns.meters.saw(turns.turnstile.spent());
        }
        self.meters.books(stats);
        self.told.send_replace(stats);
        outputs
    }

    fn obey(&mut self, command: Command) {
        let now = self.clock.now();
        let outputs = match command {
            Command::Start { arrival, news } => {
                self.routes.extend(arrival.ids.iter().map(|id| (*id, news.clone())));
                self.engine.handle(Event::Arrive(arrival), now)
            }
            Command::Align { job, news } => {
                self.routes.insert(job.id, news);
                self.engine.handle(Event::Align(job), now)
            }
            Command::Tell(event) => {
                if let Event::Abort(id) = &event {
                    self.routes.remove(id);
                }
                self.engine.handle(event, now)
            }
        };
        self.deliver(outputs);
    }

    fn deliver(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            let (id, last) = (output.id(), output.is_last());
            let gone = self.routes.get(&id).is_none_or(|news| news.send(output).is_err());
            if last || gone {
                self.routes.remove(&id);
            }
            if gone && !last {
                self.engine.handle(Event::Abort(id), self.clock.now());
            }
        }
    }
}
