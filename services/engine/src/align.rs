//! Teacher-forced passes for cross-attention weights over known tokens, used for word timestamps.
//!
//! A pass is no sequence: it takes no blocks and no run slot. One layer of one pass runs in each step, after the
//! step's plan, so a pass delays a decoding sequence by a layer for each token, however many wait. Passes run one
//! after the other, in the order of their arrival.

use crate::output::Output;
use crate::request::SequenceId;
use crate::runner::Runner;
use std::collections::VecDeque;
use triptych_core::{AdapterId, Failure};

pub(crate) mod job;

pub use job::AlignJob;

/// Passes that wait, and the one whose layers run.
#[derive(Debug, Default)]
pub(crate) struct AlignQueue {
    waiting: VecDeque<AlignJob>,
    /// With its adapter.
    running: Option<(SequenceId, Option<AdapterId>)>,
}

impl AlignQueue {
    /// Appends a pass.
    pub fn push(&mut self, job: AlignJob) {
        self.waiting.push_back(job);
    }

    /// True if there is no pass.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.running.is_none()
    }

    /// True if a pass needs an adapter.
    pub fn uses(&self, adapter: AdapterId) -> bool {
        let waiting = self.waiting.iter().map(|job| job.adapter);
        waiting.chain(self.running.map(|(_, adapter)| adapter)).any(|used| used == Some(adapter))
    }

    /// Drops a pass. Unknown ids are ignored.
    pub fn abort(&mut self, id: SequenceId) {
        self.waiting.retain(|job| job.id != id);
        self.running = self.running.filter(|(running, _)| *running != id);
    }

    /// Runs a layer of the first pass. Its output if it ended.
    pub fn advance(&mut self, runner: &mut Runner) -> Option<Output> {
        if self.running.is_none() {
            let job = self.waiting.pop_front()?;
            if let Err(error) = runner.begin_align(&job) {
                return Some(Output::Failed(job.id, Failure::internal(error)));
            }
            self.running = Some((job.id, job.adapter));
        }
        let (id, _) = self.running?;
        let output = match runner.align_layer() {
            Ok(None) => return None,
            Ok(Some(weights)) => Output::Aligned(id, weights),
            Err(error) => Output::Failed(id, Failure::internal(error)),
        };
        self.running = None;
        Some(output)
    }
}
