//! Arbiter of the compute in a process with engines and encoders: one engine step or one chunk of an encoder forward at
//! a time, so that they never compete for cores, and a bound on the encoding between two steps.
//!
//! The rule is in [`state`]; this file applies it to threads. It knows neither engines nor encoders: a thread waits for
//! a permit on a condition variable, and every change wakes all waiters.

mod state;

pub use state::{ArbiterState, BudgetUsage, ComputeId, EncoderBudget};

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The compute arbiter of a process. Clones share it.
#[derive(Clone, Debug)]
pub struct ComputeArbiter(Arc<SharedState>);

#[derive(Debug)]
struct SharedState {
    state: Mutex<ArbiterState>,
    changed: Condvar,
}

impl ComputeArbiter {
    /// An arbiter with this budget and no registrations.
    pub fn new(budget: EncoderBudget) -> Self {
        Self(Arc::new(SharedState { state: Mutex::new(ArbiterState::new(budget)), changed: Condvar::new() }))
    }

    /// Registers an engine's thread.
    pub fn engine(&self) -> EngineRegistration {
        EngineRegistration { shared: Arc::clone(&self.0), id: self.0.state().new_id() }
    }

    /// Registers an encoder's thread.
    pub fn encoder(&self) -> EncoderRegistration {
        EncoderRegistration(Arc::clone(&self.0))
    }

    /// Steps and chunks that wait for a permit.
    pub fn n_waiting(&self) -> usize {
        self.0.state().n_waiting()
    }

    /// Use of the encoder budget since the start.
    pub fn usage(&self) -> BudgetUsage {
        self.0.state().usage()
    }
}

impl SharedState {
    fn state(&self) -> MutexGuard<'_, ArbiterState> {
        self.state.lock()
    }

    fn change<T>(&self, change: impl FnOnce(&mut ArbiterState) -> T) -> T {
        let changed = change(&mut self.state());
        self.changed.notify_all();
        changed
    }

    fn wait(&self, mut take: impl FnMut(&mut ArbiterState) -> bool) {
        let mut state = self.state();
        while !take(&mut state) {
            self.changed.wait(&mut state);
        }
    }
}

/// Registration of an engine. After its drop the encoders' budget no longer waits for that engine.
#[derive(Debug)]
pub struct EngineRegistration {
    shared: Arc<SharedState>,
    id: ComputeId,
}

impl EngineRegistration {
    /// Blocks until this engine may run a step.
    pub fn step(&self) -> StepPermit<'_> {
        let id = self.id;
        self.shared.state().ask_step(id);
        self.shared.wait(|state| state.take_step(id));
        StepPermit { engine: self, since: Instant::now(), slack: None }
    }

    /// Marks the engine idle: it requests no step until it has work.
    pub fn rest(&self) {
        self.shared.change(|state| state.rest(self.id));
    }
}

impl Drop for EngineRegistration {
    fn drop(&mut self) {
        self.shared.change(|state| state.leave(self.id));
    }
}

/// Permit for one engine step; dropping it ends the step.
#[derive(Debug)]
pub struct StepPermit<'a> {
    engine: &'a EngineRegistration,
    since: Instant,
    slack: Option<Duration>,
}

impl StepPermit<'_> {
    /// Marks the engine as decoding: it requests its next step at once, and the encoders' budget applies until then. `slack`: the
    /// time for which that step may wait without harm, beside the budget.
    pub fn decodes(mut self, slack: Duration) {
        self.slack = Some(slack);
    }
}

impl Drop for StepPermit<'_> {
    fn drop(&mut self) {
        let (id, slack, took) = (self.engine.id, self.slack, self.since.elapsed());
        self.engine.shared.change(|state| state.end_step(id, slack, took));
    }
}

/// Registration of an encoder.
#[derive(Clone, Debug)]
pub struct EncoderRegistration(Arc<SharedState>);

impl EncoderRegistration {
    /// Begins a forward. It holds no permit before its first chunk.
    pub fn forward(&self) -> ForwardPermit<'_> {
        let id = self.0.state().new_id();
        ForwardPermit { shared: &self.0, id, part: None }
    }
}

/// Permit for a forward, chunk by chunk. It ends with a drop, or between two chunks when a step goes first.
#[derive(Debug)]
pub struct ForwardPermit<'a> {
    shared: &'a SharedState,
    id: ComputeId,
    /// Output tokens of the running chunk, and its start.
    part: Option<(u64, Instant)>,
}

impl ForwardPermit<'_> {
    /// Ends the chunk before this one and blocks until this one, of `tokens` output tokens, may run. Returns the time blocked.
    ///
    /// Both are one change of the state: between two of them a step would see no chunk, and one that is told of the end runs before
    /// the next chunk is asked for, since to tell it takes longer than to wake up.
    pub fn part(&mut self, tokens: usize) -> Duration {
        let tokens = tokens as u64;
        let asked = Instant::now();
        let mut state = self.shared.state();
        if let Some((ended, since)) = self.part.take() {
            state.end_part(self.id, ended, asked - since);
        }
        state.ask_part(self.id, tokens);
        if !state.take_part(self.id) {
            self.shared.changed.notify_all();
            while !state.take_part(self.id) {
                self.shared.changed.wait(&mut state);
            }
        }
        drop(state);
        let since = Instant::now();
        self.part = Some((tokens, since));
        since - asked
    }

    fn end_part(&mut self) {
        if let Some((tokens, since)) = self.part.take() {
            let took: Duration = since.elapsed();
            self.shared.change(|state| state.end_part(self.id, tokens, took));
        }
    }
}

impl Drop for ForwardPermit<'_> {
    fn drop(&mut self) {
        self.end_part();
        self.shared.change(|state| state.end_forward(self.id));
    }
}

#[cfg(test)]
mod tests;
