//! Conversations of several turns: each turn has all earlier text, answers and items again, and one may bring new
//! items. Turns are sent when their time comes, answered or not, as everything in an open loop.

use super::content::{Content, Contents};
use super::draw::sizes;
use super::draw::{Length, Shapes};
use super::spec::{Draws, Spec, span};
use crate::arrivals::{Arrivals, Times, at};
use crate::offered::{ConversationTurn, Offered, OfferedItem, Session};
use crate::seed::{BenchRng, Purpose, mix, rng, unit};
use crate::text::{Settings, TextError};
use rand::RngExt;
use rand_distr::{Distribution, Exp1};
use std::collections::BTreeMap;

/// Distribution of conversations.
#[derive(Clone, Debug)]
pub(super) struct Conversation {
    /// Distribution of a turn.
    turn: Spec,
    /// Fewest and most turns.
    turns: (u32, u32),
    /// The chance that a turn after the first brings items.
    more: f64,
    /// Mean time from one turn to the next, in seconds.
    think_s: f64,
}

impl Conversation {
    pub(super) fn read(settings: &mut Settings) -> Result<Self, TextError> {
        let range = settings.number("range", 0.0, (0.0, 1.0))?;
        let (low, high) = span(settings, "turns", (2, 6))?;
        let size = settings.take("size").unwrap_or_else(|| "640x640".to_owned());
        Ok(Self {
            turn: Spec {
                text: Length::read(settings, "text", 100, range)?,
                output: Length::read(settings, "output", 100, range)?,
                with_items: 1.0,
                n_items: span(settings, "images", (1, 1))?,
                limits: (256, 256),
                shapes: Shapes::Buckets(sizes("size", &size)?),
                content: Content::read(settings, Content::Fresh)?,
            },
            turns: (low.max(1), high.max(1)),
            more: settings.number("more", 0.3, (0.0, 1.0))?,
            think_s: settings.time("think")?.map_or(10.0, |t| t.as_secs_f64()),
        })
    }

    /// Turns at `rate` a second in the mean; `arrivals` is how conversations begin.
    pub(super) fn requests(
        &self,
        rate: f64,
        arrivals: Arrivals,
        seed: u64,
    ) -> impl Iterator<Item = Offered> + Send + use<> {
        let mean_turns = f64::from(self.turns.0 + self.turns.1) / 2.0;
        let talks = Talks {
            starts: arrivals.times(rate / mean_turns, seed, 0),
            // Conversations that began before the run are in their midst when it starts: from its first second on,
            // first and later turns are offered in the mix that they have in the long run.
            lead_s: if self.turns.1 > 1 { 4.0 * self.think_s * f64::from(self.turns.1) } else { 0.0 },
            next_start: None,
            n_started: 0,
            waiting: BTreeMap::new(),
            contents: self.turn.content.start(seed),
            spec: self.clone(),
            seed,
        };
        talks.skip_while(|(t, _)| *t < 0.0).map(|(t, offered)| Offered { at: at(t), ..offered })
    }
}

/// A conversation under way.
#[derive(Clone, Debug)]
struct Talk {
    id: u64,
    rng: BenchRng,
    left: u32,
    turns: Vec<ConversationTurn>,
    items: Vec<OfferedItem>,
}

/// All conversations, in the order of their turns.
struct Talks {
    starts: Times,
    lead_s: f64,
    next_start: Option<f64>,
    n_started: u64,
    /// By the time of their next turn, in nanoseconds, and their number.
    waiting: BTreeMap<(i64, u64), Talk>,
    contents: Contents,
    spec: Conversation,
    seed: u64,
}

impl Iterator for Talks {
    type Item = (f64, Offered);

    fn next(&mut self) -> Option<(f64, Offered)> {
        loop {
            let start = match self.next_start {
                Some(start) => start,
                None => *self.next_start.insert(self.starts.next()? - self.lead_s),
            };
            match self.waiting.first_entry() {
                Some(first) if nanos_to_s(first.key().0) <= start => {
                    let ((nanos, _), talk) = first.remove_entry();
                    let t = nanos_to_s(nanos);
                    return Some((t, self.turn(t, talk)));
                }
                _ => self.start(start),
            }
        }
    }
}

impl Talks {
    fn start(&mut self, t: f64) {
        let id = self.n_started;
        self.n_started += 1;
        self.next_start = None;
        let mut rng = rng(self.seed, Purpose::Requests, mix(id));
        let left = rng.random_range(self.spec.turns.0..=self.spec.turns.1);
        let talk = Talk { id, rng, left, turns: Vec::new(), items: Vec::new() };
        self.waiting.insert(((t * 1e9) as i64, id), talk);
    }

    /// The turn that is due at `t`; the next one is put down.
    fn turn(&mut self, t: f64, mut talk: Talk) -> Offered {
        let brings = talk.turns.is_empty() || unit(&mut talk.rng) < self.spec.more;
        let spec = Spec { with_items: if brings { 1.0 } else { 0.0 }, ..self.spec.turn.clone() };
        let mut draws = Draws::new(spec, talk.rng.clone(), self.contents.clone());
        let own = draws.request(0.0);
        (talk.rng, self.contents) = draws.end();
        talk.turns.push(ConversationTurn {
            text_tokens: own.text_tokens,
            n_items: own.items.len() as u32,
            answer_tokens: own.output_tokens,
        });
        talk.items.extend(own.items);
        let answers: u32 = talk.turns.iter().rev().skip(1).map(|turn| turn.answer_tokens).sum();
        let offered = Offered {
            index: 0,
            at: at(t),
            text_tokens: talk.turns.iter().map(|turn| turn.text_tokens).sum::<u32>() + answers,
            output_tokens: own.output_tokens,
            items: talk.items.clone(),
            session: Some(Session { id: talk.id, turns: talk.turns.clone() }),
            blocks: None,
            slo: None,
        };
        talk.left -= 1;
        if talk.left > 0 {
            let pause: f64 = Exp1.sample(&mut talk.rng);
            self.waiting.insert((((t + pause * self.spec.think_s) * 1e9) as i64, talk.id), talk);
        }
        offered
    }
}

fn nanos_to_s(nanos: i64) -> f64 {
    nanos as f64 / 1e9
}
