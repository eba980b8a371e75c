//! A request on its way, its items, and the jobs that encode them.

use super::event_queue::Nanos;
use super::output::Output;
use super::result::Stages;
use super::source::Source;
use std::time::Duration;
use triptych_bench::offered::Offered;
use triptych_bench::outcome::{End, ItemCounts, Outcome};
use triptych_core::TowerIdx;
use triptych_encoder::load::JobLoad;
use triptych_engine::SequenceId;
use triptych_proxy::decisions::Permit;
use triptych_proxy::decisions::reservation::Reservation;
use triptych_proxy::decisions::size::Forecast;
use triptych_proxy::decisions::view::Sent;
use triptych_proxy::request_machine::action::AttemptId;
use triptych_proxy::request_machine::encodes::EncodeId;
use triptych_proxy::request_machine::output::Encoded;
use triptych_proxy::request_machine::request::RequestMachine;

/// A request.
pub(super) struct Request {
    pub(super) offered: Offered,
    pub(super) outcome: Outcome,
    pub(super) stages: Stages,
    pub(super) items: Vec<Item>,
    /// The machine that decides for it; `None` before the proxy has read it.
    pub(super) machine: Option<RequestMachine>,
    /// Time at which it is woken next.
    pub(super) wake: Option<Nanos>,
    /// Held until it ends.
    pub(super) permit: Option<Permit>,
    /// The PD worker that encodes its items, if PD workers do.
    pub(super) placed: Option<usize>,
    /// Items that are reserved there.
    pub(super) reservation: Reservation,
    /// The PD worker that was chosen, and the tokens of its prompt.
    pub(super) chosen: Option<(usize, u64)>,
    /// The PD worker that has it.
    pub(super) at: Option<At>,
    /// The end of its answer, once a PD worker has ended it.
    pub(super) answer_end: End,
    /// Time of the last message of its answer, which may be yet to come.
    pub(super) message_at: Option<Nanos>,
    /// Position in its text at which the answer begins.
    pub(super) answer_place: u32,
    /// Time at which its last item was READY.
    pub(super) ready_at: Nanos,
}

/// A request at a PD worker: its name there, and its part in the worker's load.
#[derive(Clone, Copy, Debug)]
pub(super) struct At {
    pub(super) worker: usize,
    pub(super) sequence: SequenceId,
    pub(super) epoch: u64,
    pub(super) work: Sent,
}

/// An output of an item of a request.
#[derive(Clone, Debug)]
pub(super) struct Item {
    /// The item's place in the request: outputs of its towers follow one another.
    pub(super) item_idx: usize,
    pub(super) output: Output,
    /// True if the request names it as an output that the store has: there is no item to encode.
    pub(super) is_stored: bool,
    pub(super) state: ItemState,
    /// Set when it is READY.
    pub(super) encoded: Option<Encoded>,
    /// Its source, once it was READY for the first time.
    pub(super) source: Option<Source>,
}

impl Item {
    pub(super) fn new(item_idx: usize, output: Output, is_stored: bool) -> Self {
        Self { item_idx, output, is_stored, state: ItemState::Left, encoded: None, source: None }
    }
}

/// Progress of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ItemState {
    /// It waits for this encode.
    InFlight(EncodeId),
    /// It is READY.
    Ready,
    /// It waits for nothing.
    Left,
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
            slo: offered.slo,
        };
        Self {
            offered,
            outcome,
            stages: Stages::default(),
            items: Vec::new(),
            machine: None,
            wake: None,
            permit: None,
            placed: None,
            reservation: Reservation::default(),
            chosen: None,
            at: None,
            answer_end: End::Short,
            message_at: None,
            answer_place: 0,
            ready_at: 0,
        }
    }

    /// True if a PD worker still has it under this name.
    pub(super) fn is_at(&self, worker: usize, sequence: SequenceId) -> bool {
        self.at.is_some_and(|at| at.worker == worker && at.sequence == sequence)
    }

    /// Takes note of the source of an output. Of the last one of an item the item's source: that which took longest.
    pub(super) fn found(&mut self, i: usize, source: Source) -> Option<Source> {
        let output = self.items.get_mut(i).filter(|output| output.source.is_none())?;
        output.source = Some(source);
        let item_idx = output.item_idx;
        let source = self.source_of(item_idx)?;
        self.outcome.items.n_found += u32::from(source != Source::Encoded);
        Some(source)
    }

    /// The source of an item; `None` before all its outputs were READY.
    fn source_of(&self, item_idx: usize) -> Option<Source> {
        let outputs = self.items.iter().filter(|item| item.item_idx == item_idx);
        let sources: Option<Vec<_>> = outputs.map(|item| item.source).collect();
        sources?.into_iter().max()
    }

    /// Items of which an output was never READY.
    pub(super) fn n_failed(&self) -> u64 {
        let is_first = |item: &&Item| item.output.tower == TowerIdx::default();
        let failed = |item: &&Item| self.source_of(item.item_idx).is_none();
        self.items.iter().filter(is_first).filter(failed).count() as u64
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
    pub(super) encode: EncodeId,
    pub(super) attempt: AttemptId,
    pub(super) worker: usize,
    pub(super) output: Output,
    /// The request that asked first.
    pub(super) asker: Option<usize>,
    /// Its part in the proxy's account of that load.
    pub(super) epoch: u64,
    pub(super) work: Sent,
    pub(super) forecast: Option<Forecast>,
    /// Its part in the worker's load.
    pub(super) ticket: Option<JobLoad>,
    /// Time at which its current stage began.
    pub(super) since: Nanos,
    pub(super) times: JobTimes,
    /// This item's part of its batch's forward.
    pub(super) share: Nanos,
    /// True if nobody wants it any more.
    pub(super) cancelled: bool,
    /// True if its encoder still had the rows.
    pub(super) kept: bool,
    /// True if the proxy has heard its end.
    pub(super) is_answered: bool,
}

/// The time that each stage of a job took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct JobTimes {
    pub(super) queue: Nanos,
    pub(super) preprocess: Nanos,
    pub(super) encode: Nanos,
    pub(super) publish: Nanos,
}

/// The end of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JobEnd {
    /// Its output is READY.
    Ready,
    /// The encoder had no room.
    Full,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curves::sample::two_towers;
    use crate::curves::{Costs, Sized};
    use triptych_bench::offered::{ItemShape, OfferedItem};

    #[test]
    fn an_item_counts_once_by_the_output_that_took_longest() {
        let costs = Costs::new(&two_towers());
        let item = OfferedItem { content: 1, shape: ItemShape::Image { width: 448, height: 448 } };
        let check = |sources: [Source; 2], expect: (Source, u32)| {
            let mut request = Request::new(Offered {
                index: 0,
                at: Duration::ZERO,
                text_tokens: 1,
                output_tokens: 1,
                items: vec![item],
                session: None,
                blocks: None,
                slo: None,
            });
            let sizes = [Sized::default(); 2];
            let outputs = Output::all_of(&item, &sizes, &costs);
            request.items = outputs.map(|output| Item::new(0, output, false)).collect();
            assert_eq!(request.found(0, sources[0]), None, "the other output is to come");
            assert_eq!(request.n_failed(), 1);
            assert_eq!(request.found(1, sources[1]), Some(expect.0));
            assert_eq!(request.found(1, Source::Stored), None, "a renewed output is not counted again");
            assert_eq!((request.n_failed(), request.outcome.items.n_found), (0, expect.1));
        };
        check([Source::Stored, Source::Encoded], (Source::Encoded, 0));
        check([Source::Encoded, Source::Kept], (Source::Encoded, 0));
        check([Source::Remembered, Source::Stored], (Source::Stored, 1));
    }
}
