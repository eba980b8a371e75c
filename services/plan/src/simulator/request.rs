//! A request on its way, its items, and the jobs that encode them.

use super::agenda::Nanos;
use super::result::Stages;
use crate::curves::Sized;
use std::time::Duration;
use triptych_bench::offered::Offered;
use triptych_bench::outcome::{End, ItemCounts, Outcome};
use triptych_core::ContentKey;
use triptych_encoder::load::JobLoad;
use triptych_engine::SequenceId;
use triptych_proxy::decisions::Permit;
use triptych_proxy::decisions::size::Forecast;
use triptych_proxy::decisions::view::Sent;

/// A request.
pub(super) struct Request {
    pub(super) offered: Offered,
    pub(super) outcome: Outcome,
    pub(super) stages: Stages,
    pub(super) places: Vec<Place>,
    pub(super) phase: Phase,
    /// The door's.
    pub(super) permit: Option<Permit>,
    /// The PD worker that encodes its items, where PD workers encode.
    pub(super) home: Option<usize>,
    /// What is reserved there: items that were not given yet, and their predicted cost in microseconds.
    pub(super) reserved: Vec<(ContentKey, u64)>,
    /// The PD worker that has it, its name there, and what it is reckoned as.
    pub(super) at: Option<At>,
    /// PD workers that had no room for it.
    pub(super) tried: Vec<usize>,
    /// Where in its text the answer begins.
    pub(super) answer_place: u32,
    /// When its last item was READY.
    pub(super) ready_at: Nanos,
}

/// A request at a PD worker.
#[derive(Clone, Copy, Debug)]
pub(super) struct At {
    pub(super) worker: usize,
    pub(super) sequence: SequenceId,
    pub(super) epoch: u64,
    pub(super) work: Sent,
    /// Whether the worker has taken it in.
    pub(super) is_in: bool,
}

/// How far a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its items are looked for.
    Supplying,
    /// A PD worker has it.
    Answering,
    /// It has ended.
    Ended,
}

/// An item of a request.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) key: ContentKey,
    pub(super) sized: Sized,
    pub(super) state: PlaceState,
    /// PD workers that hold it, where nobody else is known to.
    pub(super) holder: Option<usize>,
}

/// How far an item is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlaceState {
    /// In this flight, which it shares with another request or not.
    Flying { flight: u64, shared: bool },
    /// READY.
    Ready,
}

/// Where an item's output comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Remembered,
    Resident,
    Stored,
    Shared,
    Encoded,
    Kept,
}

impl Request {
    pub(super) fn new(offered: Offered) -> Self {
        let outcome = Outcome {
            index: offered.index,
            due: offered.at,
            sent: offered.at,
            tokens: Vec::with_capacity(offered.output_tokens as usize),
            ended: offered.at,
            end: End::Unended,
            items: ItemCounts { n: offered.items.len() as u32, n_found: 0 },
        };
        Self {
            offered,
            outcome,
            stages: Stages::default(),
            places: Vec::new(),
            phase: Phase::Supplying,
            permit: None,
            home: None,
            reserved: Vec::new(),
            at: None,
            tried: Vec::new(),
            answer_place: 0,
            ready_at: 0,
        }
    }

    /// An item came from there.
    pub(super) fn found(&mut self, source: Source) {
        self.outcome.items.n_found += u32::from(source != Source::Encoded);
    }

    /// Takes note of what a job of an item took, if it is the slowest so far.
    pub(super) fn waited_for(&mut self, times: JobTimes) {
        let all = |s: &Stages| s.encode_queue + s.preprocess + s.encode + s.publish;
        let stages = Stages {
            encode_queue: ns(times.queue),
            preprocess: ns(times.preprocess),
            encode: ns(times.encode),
            publish: ns(times.publish),
            ..self.stages
        };
        if all(&stages) > all(&self.stages) {
            self.stages = stages;
        }
    }
}

pub(super) fn ns(nanos: Nanos) -> Duration {
    Duration::from_nanos(nanos)
}

/// A job: an item at an encoder.
pub(super) struct Job {
    pub(super) flight: u64,
    pub(super) worker: usize,
    pub(super) key: ContentKey,
    pub(super) sized: Sized,
    /// What it is reckoned as.
    pub(super) epoch: u64,
    pub(super) work: Sent,
    pub(super) forecast: Option<Forecast>,
    pub(super) sent: Nanos,
    /// In the worker's load.
    pub(super) ticket: Option<JobLoad>,
    /// When the stage that it is in began.
    pub(super) since: Nanos,
    pub(super) times: JobTimes,
    /// This item's part of its batch's forward.
    pub(super) share: Nanos,
    /// Whether nobody wants it any more.
    pub(super) cancelled: bool,
    /// Whether its encoder still had the rows.
    pub(super) kept: bool,
    /// Whether the proxy has heard its end.
    pub(super) is_answered: bool,
}

/// Where a job's time went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct JobTimes {
    pub(super) queue: Nanos,
    pub(super) preprocess: Nanos,
    pub(super) encode: Nanos,
    pub(super) publish: Nanos,
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JobEnd {
    /// Its output is READY.
    Ready,
    /// The encoder had no room.
    Full,
}
