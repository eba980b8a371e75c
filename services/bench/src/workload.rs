//! Workloads: `NAME[:key=value,…]` becomes an endless, seeded sequence of requests at a rate.
//!
//! The same text, seed and arrivals give the same requests at any rate, with shorter or longer gaps. Read
//! [`spec`] for the workloads that draw each request alone, [`conversation`], [`clients`] and `trace` for the others; `azure`
//! and `hashed` read traces as others published them.

mod azure;
mod changing;
mod clients;
mod content;
mod conversation;
mod draw;
mod hashed;
mod lines;
mod spec;
mod trace;

use crate::arrivals::Arrivals;
use crate::offered::{ItemShape, Offered, OfferedItem};
use crate::text::{Settings, TextError};
use std::collections::BTreeSet;
use std::time::Duration;
use triptych_core::Modality;

pub use content::expected_reuse;

/// A workload, ready to offer requests.
#[derive(Clone, Debug)]
pub struct Workload {
    text: String,
    kind: Kind,
    /// False: items are left out of every request.
    has_items: bool,
}

#[derive(Clone, Debug)]
enum Kind {
    Each(spec::Spec),
    Conversation(conversation::Conversation),
    Clients(clients::Clients),
    Trace(trace::Trace),
    Changing(changing::Changing, Vec<Workload>),
}

/// Requests that are looked at for kinds of items: a kind that is rarer is not seen.
const SAMPLE: usize = 10_000;

/// The names, for help and messages.
pub const NAMES: &str = "text, random-mm, epd-short, epd-long, reuse, mixed, audio, multi-turn, servegen, azure, bailian, mooncake, trace:FILE, changing:EVERY|WEIGHT*WORKLOAD|…";

impl Workload {
    /// Reads `NAME[:key=value,…]` or `trace:FILE`; a trace file is read at once.
    ///
    /// # Errors
    /// [`TextError`] with the mistake and the allowed values.
    pub fn parse(text: &str) -> Result<Self, TextError> {
        if let Some(file) = text.strip_prefix("trace:") {
            let kind = Kind::Trace(trace::Trace::read(file)?);
            return Ok(Self { text: text.to_owned(), kind, has_items: true });
        }
        if let Some(rest) = text.strip_prefix(changing::PREFIX) {
            let (changing, texts) = changing::Changing::read(rest)?;
            let workloads = texts.into_iter().map(Self::parse).collect::<Result<_, _>>()?;
            let kind = Kind::Changing(changing, workloads);
            return Ok(Self { text: text.to_owned(), kind, has_items: true });
        }
        let (name, mut settings) = Settings::parse(text)?;
        let kind = match name.as_str() {
            "multi-turn" => Kind::Conversation(conversation::Conversation::read(&mut settings)?),
            "servegen" => Kind::Clients(clients::Clients::read(&mut settings)?),
            "azure" => Kind::Trace(azure::read(&mut settings)?),
            "bailian" => Kind::Trace(hashed::read(hashed::Source::Bailian, &mut settings)?),
            "mooncake" => Kind::Trace(hashed::read(hashed::Source::Mooncake, &mut settings)?),
            _ => match spec::Spec::read(&name, &mut settings)? {
                Some(spec) => Kind::Each(spec),
                None => {
                    let allowed = NAMES.to_owned();
                    return Err(TextError::Name { what: "workload", found: name, allowed });
                }
            },
        };
        settings.end()?;
        Ok(Self { text: text.to_owned(), kind, has_items: true })
    }

    /// The text that was parsed.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Time after which its mixes come again, if it changes: a run that is not so long says nothing of the last of them.
    pub fn cycle(&self) -> Option<Duration> {
        match &self.kind {
            Kind::Changing(changing, _) => Some(changing.cycle()),
            _ => None,
        }
    }

    /// Kinds of items that its requests have.
    pub fn modalities(&self) -> BTreeSet<Modality> {
        let offered = self.requests(1.0, Arrivals::Own, 0).take(SAMPLE);
        let of = |item: OfferedItem| match item.shape {
            ItemShape::Image { .. } => Modality::Image,
            ItemShape::Audio { .. } => Modality::Audio,
        };
        offered.flat_map(|request| request.items).map(of).collect()
    }

    /// The same requests with their items left out; `None` unless some have items and some have none, as not every model
    /// answers text alone.
    pub fn without_items(&self) -> Option<Self> {
        let offered = || self.requests(1.0, Arrivals::Own, 0).take(SAMPLE);
        let is_mixed = offered().any(|r| r.items.is_empty()) && offered().any(|r| !r.items.is_empty());
        is_mixed.then(|| Self { has_items: false, ..self.clone() })
    }

    /// Requests without an end, by the time they are due, at `rate` requests a second in the mean.
    ///
    /// # Panics
    /// If `rate` is not a positive number: rates are chosen by us, never read.
    pub fn requests(&self, rate: f64, arrivals: Arrivals, seed: u64) -> Requests {
        assert!(rate.is_finite() && rate > 0.0, "a rate of {rate} requests a second");
        let requests: Box<dyn Iterator<Item = Offered> + Send> = match &self.kind {
            Kind::Each(spec) => Box::new(spec.requests(arrivals.times(rate, seed, 0), seed)),
            Kind::Conversation(c) => Box::new(c.requests(rate, arrivals, seed)),
            Kind::Clients(c) => Box::new(c.requests(rate, arrivals, seed)),
            Kind::Trace(t) => Box::new(t.requests(rate, arrivals, seed)),
            Kind::Changing(changing, workloads) => {
                let workloads = workloads.clone();
                let of_place = move |place: usize, rate, seed| -> Box<dyn Iterator<Item = Offered> + Send> {
                    match workloads.get(place) {
                        Some(workload) => Box::new(workload.requests(rate, arrivals, seed)),
                        None => Box::new(std::iter::empty()),
                    }
                };
                Box::new(changing.requests(rate, seed, Box::new(of_place)))
            }
        };
        Requests { requests, has_items: self.has_items, next: 0 }
    }
}

/// An endless sequence of requests, in the order in which they are due.
pub struct Requests {
    requests: Box<dyn Iterator<Item = Offered> + Send>,
    has_items: bool,
    next: u64,
}

impl Iterator for Requests {
    type Item = Offered;

    fn next(&mut self) -> Option<Offered> {
        let mut offered = self.requests.next()?;
        offered.index = self.next;
        if !self.has_items {
            offered.items.clear();
        }
        self.next += 1;
        Some(offered)
    }
}

#[cfg(test)]
mod tests;
