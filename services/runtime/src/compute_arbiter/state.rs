//! Order of steps and forwards: a state machine without threads and without a clock.
//!
//! While sequences decode, at most a budget of encoder output tokens is computed between two steps, and at least one
//! chunk. An encoder that has used the budget up waits for a step even if no engine requests one at that moment, since
//! one will. An automatic budget gives steps as much time as chunks: after a burst that took longer than a step, the
//! encoder waits for several. While no sequence decodes, a step that waits reads prompts: steps and chunks alternate, the
//! chunk first, since it is the bounded one. A prompt does not wait for a whole forward, nor an image for all prompts.
//! Without a budget whole forwards take the place of chunks. Stall-free batching (Sarathi-Serve,
//! <https://arxiv.org/abs/2403.02310>) does the same for prompts.
//!
//! Half of the time is more than decodes need whose answers are well within their SLO. An engine that knows its SLO tells how long
//! its next step may wait, and with an automatic budget chunks of so much time go first: images are encoded sooner, and fewer
//! steps decode more sequences each.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Automatic budget in tokens before the first measurement.
const INITIAL_BUDGET: u64 = 64;
/// Bounds of an automatic burst, which takes about as long as a step: at most half of a usual TPOT objective.
const BURST: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(25));
/// Weight of the latest measurement in the moving averages.
const EMA_WEIGHT: f64 = 0.1;

/// Encoder output tokens that may be computed between two steps while sequences decode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EncoderBudget {
    /// As many as take about as long as a step, or as the steps that follow.
    #[default]
    Automatic,
    /// A fixed number.
    Tokens(u64),
    /// No bound: a whole forward.
    Unlimited,
}

impl FromStr for EncoderBudget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Automatic),
            "none" | "0" => Ok(Self::Unlimited),
            _ => text
                .parse()
                .map(Self::Tokens)
                .map_err(|_| format!("{text:?} is not `auto`, `none` or a number of tokens")),
        }
    }
}

impl fmt::Display for EncoderBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Automatic => f.write_str("auto"),
            Self::Tokens(n) => n.fmt(f),
            Self::Unlimited => f.write_str("none"),
        }
    }
}

/// Counters since the start, of the encoding between two steps while sequences decode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BudgetUsage {
    /// Engine steps.
    pub steps: u64,
    /// Engine steps with encoder tokens between them and the step before.
    pub steps_after_encode: u64,
    /// Encoder tokens computed while sequences decode.
    pub tokens: u64,
    /// Those of them for which decodes waited that could.
    pub tokens_in_slack: u64,
    /// Most encoder tokens between two steps.
    pub most: u64,
    /// Current budget; `None`: unlimited.
    pub budget: Option<u64>,
}

/// Id of an engine or a forward.
pub type ComputeId = u64;

/// Holder of the permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    Step(ComputeId),
    Forward(ComputeId),
}

/// State of the arbiter: queues, holder and measurements.
#[derive(Debug)]
pub struct ArbiterState {
    budget: EncoderBudget,
    next: ComputeId,
    holder: Option<Holder>,
    steps: VecDeque<ComputeId>,
    /// Waiting chunks, and their output tokens.
    parts: VecDeque<(ComputeId, u64)>,
    /// The forward in progress; its chunks go first among those that wait.
    begun: Option<ComputeId>,
    /// Engines with decoding sequences, and how long the next step of each may wait.
    decoding: BTreeMap<ComputeId, Duration>,
    /// The running chunk goes before decodes that may wait for it.
    is_covered: bool,
    /// A chunk (without a budget: a forward) has ended since the last step.
    encoded: bool,
    /// Encoder tokens since the last step, while sequences decode.
    burst: u64,
    /// Compute time of chunks that steps have not yet had in return.
    owed: Duration,
    usage: BudgetUsage,
    step_s: Option<f64>,
    token_s: Option<f64>,
}

impl ArbiterState {
    /// A state with nothing waiting.
    pub fn new(budget: EncoderBudget) -> Self {
        Self {
            budget,
            next: 0,
            holder: None,
            steps: VecDeque::new(),
            parts: VecDeque::new(),
            begun: None,
            decoding: BTreeMap::new(),
            is_covered: false,
            encoded: false,
            burst: 0,
            owed: Duration::ZERO,
            usage: BudgetUsage::default(),
            step_s: None,
            token_s: None,
        }
    }

    /// A fresh id.
    pub fn new_id(&mut self) -> ComputeId {
        self.next += 1;
        self.next
    }

    /// Use of the encoder budget since the start.
    pub fn usage(&self) -> BudgetUsage {
        BudgetUsage { budget: self.limit(), ..self.usage }
    }

    /// Steps and chunks in the queues.
    pub fn n_waiting(&self) -> usize {
        self.steps.len() + self.parts.len()
    }

    /// Queues a step of an engine.
    pub fn ask_step(&mut self, id: ComputeId) {
        self.steps.push_back(id);
    }

    /// Starts the engine's step if it is next.
    pub fn take_step(&mut self, id: ComputeId) -> bool {
        let next = self.holder.is_none() && self.steps.front() == Some(&id) && !self.forward_is_next();
        if next {
            self.steps.pop_front();
            self.holder = Some(Holder::Step(id));
        }
        next
    }

    /// True if the first waiting chunk goes before any step.
    fn forward_is_next(&self) -> bool {
        let Some((id, tokens)) = self.parts.front() else { return false };
        if self.covers(*tokens) {
            return true;
        }
        match self.limit().filter(|_| !self.decoding.is_empty()) {
            Some(_) if self.burst == 0 => self.owed.is_zero(),
            Some(limit) => self.burst.saturating_add(*tokens) <= limit,
            None if self.steps.is_empty() || !self.encoded => true,
            // Without a budget a waiting step runs between two forwards.
            None => self.budget == EncoderBudget::Unlimited && self.begun == Some(*id),
        }
    }

    /// True if decodes may wait for a chunk of `tokens` output tokens.
    fn covers(&self, tokens: u64) -> bool {
        let slack = self.decoding.values().min().filter(|_| self.budget == EncoderBudget::Automatic);
        let takes = self.token_s.map(|token_s| Duration::try_from_secs_f64(tokens as f64 * token_s));
        slack.zip(takes).is_some_and(|(slack, takes)| takes.is_ok_and(|takes| takes <= *slack))
    }

    /// Takes time that has passed from what decodes may wait.
    fn pass(&mut self, took: Duration) {
        for slack in self.decoding.values_mut() {
            *slack = slack.saturating_sub(took);
        }
    }

    /// Ends an engine's step of length `took`. `slack`: the time for which its next step may wait; `None`: it has no decoding
    /// sequences.
    pub fn end_step(&mut self, id: ComputeId, slack: Option<Duration>, took: Duration) {
        self.holder = None;
        self.usage.steps += 1;
        self.usage.steps_after_encode += u64::from(self.burst > 0);
        (self.burst, self.encoded) = (0, false);
        self.owed = self.owed.saturating_sub(took);
        self.pass(took);
        match slack {
            Some(slack) => {
                self.decoding.insert(id, slack);
                average(&mut self.step_s, took.as_secs_f64());
            }
            None => self.rest(id),
        }
    }

    /// Marks the engine idle.
    pub fn rest(&mut self, id: ComputeId) {
        self.decoding.remove(&id);
        if self.decoding.is_empty() {
            self.owed = Duration::ZERO;
        }
    }

    /// Removes the engine.
    pub fn leave(&mut self, id: ComputeId) {
        self.rest(id);
        self.steps.retain(|step| *step != id);
    }

    /// Queues a forward's next chunk of `tokens` output tokens.
    pub fn ask_part(&mut self, id: ComputeId, tokens: u64) {
        match self.begun == Some(id) {
            true => self.parts.push_front((id, tokens)),
            false => self.parts.push_back((id, tokens)),
        }
    }

    /// Starts the forward's chunk if it is next and within the budget.
    pub fn take_part(&mut self, id: ComputeId) -> bool {
        let Some(&(_, tokens)) = self.parts.front().filter(|(first, _)| *first == id) else { return false };
        let next = self.holder.is_none() && self.forward_is_next();
        if next {
            self.is_covered = self.covers(tokens);
            self.parts.pop_front();
            self.begun = Some(id);
            self.holder = Some(Holder::Forward(id));
        }
        next
    }

    /// Ends a forward's chunk of length `took`.
    pub fn end_part(&mut self, id: ComputeId, tokens: u64, took: Duration) {
        debug_assert_eq!(self.holder, Some(Holder::Forward(id)), "only the running chunk ends");
        self.holder = None;
        self.encoded |= self.budget != EncoderBudget::Unlimited;
        if !self.decoding.is_empty() {
            self.burst = self.burst.saturating_add(tokens);
            self.usage.tokens = self.usage.tokens.saturating_add(tokens);
            if self.is_covered {
                self.usage.tokens_in_slack = self.usage.tokens_in_slack.saturating_add(tokens);
            }
            self.usage.most = self.usage.most.max(self.burst);
            if self.budget == EncoderBudget::Automatic && !self.is_covered {
                self.owed += took;
            }
            self.pass(took);
        }
        if tokens > 0 {
            average(&mut self.token_s, took.as_secs_f64() / tokens as f64);
        }
    }

    /// Ends or cancels a forward.
    pub fn end_forward(&mut self, id: ComputeId) {
        self.parts.retain(|(part, _)| *part != id);
        if self.begun == Some(id) {
            self.begun = None;
            self.encoded = true;
        }
    }

    /// Encoder tokens allowed between two steps; `None`: unlimited.
    fn limit(&self) -> Option<u64> {
        match self.budget {
            EncoderBudget::Unlimited => None,
            EncoderBudget::Tokens(n) => Some(n),
            EncoderBudget::Automatic => Some(match (self.step_s, self.token_s) {
                (Some(step_s), Some(token_s)) if token_s > 0.0 => {
                    let burst_s = step_s.clamp(BURST.0.as_secs_f64(), BURST.1.as_secs_f64());
                    // A cast from a float saturates.
                    ((burst_s / token_s) as u64).max(1)
                }
                _ => INITIAL_BUDGET,
            }),
        }
    }
}

fn average(value: &mut Option<f64>, sample: f64) {
    *value = Some(value.map_or(sample, |old| old + EMA_WEIGHT * (sample - old)));
}

#[cfg(test)]
mod tests;
