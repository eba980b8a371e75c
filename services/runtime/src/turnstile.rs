//! Turns on the compute of a process that holds engines and encoders: one step or one part of a forward at a time, so
//! that they never share the cores, and a bound on what is encoded between two steps.
//!
//! The rule is in [`turns`]; here it is put between threads. It knows neither engines nor encoders: a thread that waits
//! for a turn sleeps, and whoever ends one wakes those that wait.

mod turns;

pub use turns::{EncoderBudget, Spent, Ticket, Turns};

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The turnstile of a process. Clones share it.
#[derive(Clone, Debug)]
pub struct Turnstile(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    turns: Mutex<Turns>,
    changed: Condvar,
}

impl Turnstile {
    /// One through which nobody has gone.
    pub fn new(budget: EncoderBudget) -> Self {
        Self(Arc::new(Shared { turns: Mutex::new(Turns::new(budget)), changed: Condvar::new() }))
    }

    /// A place for an engine's thread.
    pub fn engine(&self) -> EngineGate {
        EngineGate { shared: Arc::clone(&self.0), id: self.0.turns().ticket() }
    }

    /// A place for an encoder's thread.
    pub fn encoder(&self) -> EncoderGate {
        EncoderGate(Arc::clone(&self.0))
    }

    /// What has been encoded between steps so far.
    pub fn spent(&self) -> Spent {
        self.0.turns().spent()
    }
}

impl Shared {
    fn turns(&self) -> MutexGuard<'_, Turns> {
        // Held for a few operations that do not panic.
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut Turns) -> T) -> T {
        let changed = change(&mut self.turns());
        self.changed.notify_all();
        changed
    }

    fn wait(&self, mut take: impl FnMut(&mut Turns) -> bool) {
        let mut turns = self.turns();
        while !take(&mut turns) {
            turns = self.changed.wait(turns).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// An engine's place. When it is dropped, nothing waits for that engine any more.
#[derive(Debug)]
pub struct EngineGate {
    shared: Arc<Shared>,
    id: Ticket,
}

impl EngineGate {
    /// Waits for this engine's turn and takes it.
    pub fn step(&self) -> StepTurn<'_> {
        let id = self.id;
        self.shared.turns().ask_step(id);
        self.shared.wait(|turns| turns.take_step(id));
        StepTurn { gate: self, since: Instant::now(), decodes: false }
    }

    /// Says that this engine asks for no step before something happens to it.
    pub fn rest(&self) {
        self.shared.change(|turns| turns.rest(self.id));
    }
}

impl Drop for EngineGate {
    fn drop(&mut self) {
        self.shared.change(|turns| turns.leave(self.id));
    }
}

/// An engine's turn, until it is dropped.
#[derive(Debug)]
pub struct StepTurn<'a> {
    gate: &'a EngineGate,
    since: Instant,
    decodes: bool,
}

impl StepTurn<'_> {
    /// Sequences of this engine write, and it will ask for its next step at once: the encoders' budget holds until it
    /// has had it.
    pub fn decodes(mut self) {
        self.decodes = true;
    }
}

impl Drop for StepTurn<'_> {
    fn drop(&mut self) {
        let (id, decodes, took) = (self.gate.id, self.decodes, self.since.elapsed());
        self.gate.shared.change(|turns| turns.end_step(id, decodes, took));
    }
}

/// An encoder's place.
#[derive(Clone, Debug)]
pub struct EncoderGate(Arc<Shared>);

impl EncoderGate {
    /// Begins a forward. It has no turn until its first part.
    pub fn forward(&self) -> ForwardTurn<'_> {
        let id = self.0.turns().ticket();
        ForwardTurn { shared: &self.0, id, part: None }
    }
}

/// A forward in parts. Its turn ends when it is dropped, or when it has to give way to a step.
#[derive(Debug)]
pub struct ForwardTurn<'a> {
    shared: &'a Shared,
    id: Ticket,
    /// Output tokens that the part under way is worth, and since when.
    part: Option<(u64, Instant)>,
}

impl ForwardTurn<'_> {
    /// Ends the part before this one and waits until this one, worth so many output tokens, may run.
    pub fn part(&mut self, tokens: usize) {
        let tokens = tokens as u64;
        self.end_part();
        self.shared.turns().ask_part(self.id, tokens);
        self.shared.wait(|turns| turns.take_part(self.id));
        self.part = Some((tokens, Instant::now()));
    }

    fn end_part(&mut self) {
        if let Some((tokens, since)) = self.part.take() {
            let took: Duration = since.elapsed();
            self.shared.change(|turns| turns.end_part(self.id, tokens, took));
        }
    }
}

impl Drop for ForwardTurn<'_> {
    fn drop(&mut self) {
        self.end_part();
        self.shared.change(|turns| turns.end_forward(self.id));
    }
}

#[cfg(test)]
mod tests;
