//! Who goes next: a rule without threads and without a clock.
//!
//! While sequences decode, at most a budget of encoder output tokens is computed between two steps, and at least one
//! part; an encoder that has used it up waits for a step even if no engine asks for one at that moment, since one will.
//! A budget that is chosen automatically gives steps as much time as parts: after a burst that took longer than a step,
//! the encoder waits for several.
//! While none decodes, there is no bound of that kind: a step that waits goes between two forwards. Steps and forwards
//! that wait go in turns, the forward first, since it is the one that is bounded. Stall-free batching (Sarathi-Serve,
//! <https://arxiv.org/abs/2403.02310>) does the same to prompts.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Before anything is measured.
const FIRST_GUESS: u64 = 64;
/// A burst that is chosen automatically takes about as long as a step, within these bounds: half of what is usually
/// promised for a token at most.
const BURST: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(25));
/// Weight of the latest measurement.
const NEWS: f64 = 0.1;

/// Encoder output tokens that may be computed between two steps while sequences decode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EncoderBudget {
    /// As many as take about as long as a step, or as several that follow.
    #[default]
    Automatic,
    /// So many.
    Tokens(u64),
    /// A whole forward.
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

/// Counts since the start, of what was encoded between two steps while sequences decoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// Steps of engines.
    pub steps: u64,
    /// Of those, how many had encoder tokens computed between them and the step before.
    pub steps_after_encode: u64,
    /// Encoder tokens computed while sequences decoded.
    pub tokens: u64,
    /// The most of them between two steps.
    pub most: u64,
    /// The budget at this moment; `None`: there is none.
    pub budget: Option<u64>,
}

/// An engine, or a forward.
pub type Ticket = u64;

/// Whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    Step(Ticket),
    Forward(Ticket),
}

/// The state of the turnstile.
#[derive(Debug)]
pub struct Turns {
    budget: EncoderBudget,
    next: Ticket,
    holder: Option<Holder>,
    steps: VecDeque<Ticket>,
    /// Parts of forwards, and the tokens that they are worth.
    parts: VecDeque<(Ticket, u64)>,
    /// The forward that has begun and has not ended; it is the first of those that wait.
    begun: Option<Ticket>,
    /// Engines with sequences that write.
    decoding: BTreeSet<Ticket>,
    /// Whether a forward has ended since the last step.
    encoded: bool,
    /// Encoder tokens since the last step.
    burst: u64,
    /// Time of parts while sequences decoded that steps have not had yet.
    owed: Duration,
    spent: Spent,
    step_s: Option<f64>,
    token_s: Option<f64>,
}

impl Turns {
    /// Nobody has gone through.
    pub fn new(budget: EncoderBudget) -> Self {
        Self {
            budget,
            next: 0,
            holder: None,
            steps: VecDeque::new(),
            parts: VecDeque::new(),
            begun: None,
            decoding: BTreeSet::new(),
            encoded: false,
            burst: 0,
            owed: Duration::ZERO,
            spent: Spent::default(),
            step_s: None,
            token_s: None,
        }
    }

    /// A name that nobody else has.
    pub fn ticket(&mut self) -> Ticket {
        self.next += 1;
        self.next
    }

    /// What was encoded between steps so far.
    pub fn spent(&self) -> Spent {
        Spent { budget: self.limit(), ..self.spent }
    }

    /// An engine waits for its turn.
    pub fn ask_step(&mut self, id: Ticket) {
        self.steps.push_back(id);
    }

    /// Takes the turn if it is this engine's.
    pub fn take_step(&mut self, id: Ticket) -> bool {
        let next = self.holder.is_none() && self.steps.front() == Some(&id) && !self.forward_is_next();
        if next {
            self.steps.pop_front();
            self.holder = Some(Holder::Step(id));
        }
        next
    }

    /// Whether the first of the parts that wait goes before any step.
    fn forward_is_next(&self) -> bool {
        let Some((id, tokens)) = self.parts.front() else { return false };
        match self.limit().filter(|_| !self.decoding.is_empty()) {
            Some(_) if self.burst == 0 => self.owed.is_zero(),
            Some(limit) => self.burst.saturating_add(*tokens) <= limit,
            // A step that waits goes between two forwards.
            None => self.begun == Some(*id) || self.steps.is_empty() || !self.encoded,
        }
    }

    /// An engine's turn is over; whether sequences of it write.
    pub fn end_step(&mut self, id: Ticket, decodes: bool, took: Duration) {
        self.holder = None;
        self.spent.steps += 1;
        self.spent.steps_after_encode += u64::from(self.burst > 0);
        (self.burst, self.encoded) = (0, false);
        self.owed = self.owed.saturating_sub(took);
        match decodes {
            true => drop(self.decoding.insert(id)),
            false => self.rest(id),
        }
        if decodes {
            average(&mut self.step_s, took.as_secs_f64());
        }
    }

    /// The engine will not ask for a step by itself.
    pub fn rest(&mut self, id: Ticket) {
        self.decoding.remove(&id);
        if self.decoding.is_empty() {
            self.owed = Duration::ZERO;
        }
    }

    /// The engine is gone.
    pub fn leave(&mut self, id: Ticket) {
        self.rest(id);
        self.steps.retain(|step| *step != id);
    }

    /// A forward waits to go on with a part worth so many output tokens.
    pub fn ask_part(&mut self, id: Ticket, tokens: u64) {
        match self.begun == Some(id) {
            true => self.parts.push_front((id, tokens)),
            false => self.parts.push_back((id, tokens)),
        }
    }

    /// Takes the turn if it is this forward's and the part fits.
    pub fn take_part(&mut self, id: Ticket) -> bool {
        let first = self.parts.front().is_some_and(|(first, _)| *first == id);
        let next = self.holder.is_none() && first && self.forward_is_next();
        if next {
            self.parts.pop_front();
            self.begun = Some(id);
            self.holder = Some(Holder::Forward(id));
        }
        next
    }

    /// A forward's turn is over.
    pub fn end_part(&mut self, id: Ticket, tokens: u64, took: Duration) {
        debug_assert_eq!(self.holder, Some(Holder::Forward(id)), "only a part that has its turn ends");
        self.holder = None;
        if !self.decoding.is_empty() {
            self.burst = self.burst.saturating_add(tokens);
            self.spent.tokens = self.spent.tokens.saturating_add(tokens);
            self.spent.most = self.spent.most.max(self.burst);
            if self.budget == EncoderBudget::Automatic {
                self.owed += took;
            }
        }
        if tokens > 0 {
            average(&mut self.token_s, took.as_secs_f64() / tokens as f64);
        }
    }

    /// A forward is over, or given up.
    pub fn end_forward(&mut self, id: Ticket) {
        self.parts.retain(|(part, _)| *part != id);
        if self.begun == Some(id) {
            self.begun = None;
            self.encoded = true;
        }
    }

    /// Tokens that may be computed between two steps; `None`: any number.
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
                _ => FIRST_GUESS,
            }),
        }
    }
}

fn average(value: &mut Option<f64>, news: f64) {
    *value = Some(value.map_or(news, |old| old + NEWS * (news - old)));
}

#[cfg(test)]
mod tests;
