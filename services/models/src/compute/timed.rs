//! Forwards that take the time of another machine and compute nothing: everything around them runs as it does with that
//! machine, so what it costs can be measured where the machine is not.
//!
//! Rows of encoder output are zeros, and tokens are one after another of the vocabulary's printable middle; neither means
//! anything. What forwards take is asked of [`ForwardTimes`].
//!
//! The machine has a device of its own: what is submitted begins as what was submitted before ends, however late the host wakes up.

use crate::decoder::{Decoder, DecoderInfo, Pending, StepInput, no_step};
use crate::encoder::Encoder;
use crate::error::ModelError;
use crate::preprocess::EncoderInput;
use crate::sampling::{CarriedToken, Choice, Choices, ChooseBatch, WholeRows};
use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};
use triptych_core::{EncodedRows, TowerIdx};

/// Parts of a forward of the encoder, between which an engine on the same device may run.
const PARTS: usize = 12;

/// Sizes of an engine step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepSizes {
    /// Prompt tokens.
    pub prefill_tokens: u32,
    /// Keys that those attend to, summed over the tokens.
    pub prefill_context: u64,
    /// Sequences that write a token.
    pub decodes: u32,
    /// Keys that those attend to.
    pub decode_context: u64,
}

/// Times of forwards on some machine. Asked from the threads that compute.
pub trait ForwardTimes: Send + Sync {
    /// An engine step.
    fn step(&self, sizes: StepSizes) -> Duration;

    /// A forward of a tower, as a rule the only one, over items of so many output tokens.
    fn encode(&self, tower: TowerIdx, tokens: &[u32]) -> Duration;

    /// Projection of so many rows of encoder output.
    fn project(&self, rows: usize) -> Duration;
}

/// Times of a process, set once at its start.
#[derive(Clone, Copy)]
pub struct TimedForwards(pub &'static dyn ForwardTimes);

impl fmt::Debug for TimedForwards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TimedForwards")
    }
}

/// The same times are the same object.
impl PartialEq for TimedForwards {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::addr_eq(self.0, other.0)
    }
}

impl Eq for TimedForwards {}

/// The longest wait for a permit in which the device was not given to others.
const AT_ONCE: Duration = Duration::from_micros(200);

/// A moment so much later; the same one where a file of curves says more than a clock can hold.
fn after(moment: Instant, takes: Duration) -> Instant {
    moment.checked_add(takes).unwrap_or(moment)
}

/// Waits for a moment.
fn wait_until(due: Instant) {
    std::thread::sleep(due.saturating_duration_since(Instant::now()));
}

/// A decoder of another's sizes.
pub(super) struct TimedDecoder {
    info: DecoderInfo,
    times: TimedForwards,
    n_chosen: u64,
    /// End of what was submitted last.
    busy_until: Instant,
    /// Steps under way in their order: number, end, and what they choose.
    under_way: VecDeque<(u64, Instant, Choices)>,
    n_submitted: u64,
}

impl TimedDecoder {
    /// Takes the place of a decoder.
    pub(super) fn new(decoder: &dyn Decoder, times: TimedForwards) -> Self {
        Self::of(decoder.info(), times)
    }

    fn of(info: DecoderInfo, times: TimedForwards) -> Self {
        Self {
            info,
            times,
            n_chosen: 0,
            busy_until: Instant::now(),
            under_way: VecDeque::new(),
            n_submitted: 0,
        }
    }

    /// Gives the device work of a length; returns its end.
    fn occupy(&mut self, takes: Duration) -> Instant {
        self.busy_until = after(self.busy_until.max(Instant::now()), takes);
        self.busy_until
    }

    fn choose(&mut self, batch: &ChooseBatch) -> Choices {
        let vocab = self.info.vocab;
        let choice = |_| {
            self.n_chosen += 1;
            // Special tokens lie at the ends of a vocabulary.
            let token = vocab as u64 / 4 + self.n_chosen % (vocab as u64 / 4).max(1);
            Ok(Choice { token: token as u32, logprobs: None })
        };
        let choices = batch.choices.iter().map(choice).collect();
        let values = vec![0.0; batch.whole.len() * vocab];
        Choices { choices, rows: WholeRows::alone(values, vocab, &batch.whole) }
    }
}

/// Sizes of a step: a sequence with one row is decoding.
fn sizes(step: &StepInput<'_>) -> StepSizes {
    let mut sizes = StepSizes::default();
    let seqs = step.sequences();
    for (rows, keys) in seqs.query_start_loc.windows(2).zip(seqs.seq_lens) {
        let n = rows[1].saturating_sub(rows[0]);
        let before = u64::from(keys.saturating_sub(n));
        if n == 1 {
            sizes.decodes += 1;
            sizes.decode_context += u64::from(*keys);
        } else {
            sizes.prefill_tokens += n;
            sizes.prefill_context += u64::from(n) * before + u64::from(n) * (u64::from(n) + 1) / 2;
        }
    }
    sizes
}

impl Decoder for TimedDecoder {
    fn info(&self) -> DecoderInfo {
        self.info
    }

    fn allocate_kv(&mut self, _: usize, _: usize) -> Result<(), ModelError> {
        Ok(())
    }

    fn allocate_host(&mut self, _: usize) -> Result<(), ModelError> {
        Ok(())
    }

    fn copy_states(&mut self, _: &[(u32, u32)]) -> Result<(), ModelError> {
        Ok(())
    }

    fn reset_states(&mut self, _: &[u32]) -> Result<(), ModelError> {
        Ok(())
    }

    fn project_cross(&mut self, _: &[EncodedRows<'_>], slots: &[u32]) -> Result<(), ModelError> {
        let takes = self.times.0.project(slots.len());
        wait_until(self.occupy(takes));
        Ok(())
    }

    fn forward(&mut self, step: &StepInput<'_>) -> Result<Choices, ModelError> {
        let ended = self.occupy(self.times.0.step(sizes(step)));
        let choices = self.choose(step.choose);
        wait_until(ended);
        Ok(choices)
    }

    fn submit(&mut self, step: &StepInput<'_>, _: &[CarriedToken]) -> Result<Pending, ModelError> {
        let ended = self.occupy(self.times.0.step(sizes(step)));
        let choices = self.choose(step.choose);
        self.n_submitted += 1;
        self.under_way.push_back((self.n_submitted, ended, choices));
        Ok(Pending::UnderWay(self.n_submitted))
    }

    fn wait(&mut self, pending: Pending) -> Result<Choices, ModelError> {
        let number = match pending {
            Pending::Done(choices) => return Ok(choices),
            Pending::UnderWay(number) => number,
        };
        while let Some((found, ended, choices)) = self.under_way.pop_front() {
            if found == number {
                wait_until(ended);
                return Ok(choices);
            }
        }
        Err(no_step("wait").into())
    }

    fn copy_blocks(&mut self, _: &[(u32, u32)]) -> Result<(), ModelError> {
        Ok(())
    }

    fn swap_out(&mut self, _: &[(u32, u32)]) -> Result<(), ModelError> {
        Ok(())
    }

    fn swap_in(&mut self, _: &[(u32, u32)]) -> Result<(), ModelError> {
        Ok(())
    }
}

/// An encoder of another's width.
pub(super) struct TimedEncoder {
    hidden: usize,
    tower: TowerIdx,
    times: TimedForwards,
}

impl TimedEncoder {
    /// Takes the place of a tower's encoder.
    pub(super) fn new(encoder: &dyn Encoder, tower: TowerIdx, times: TimedForwards) -> Self {
        Self { hidden: encoder.hidden(), tower, times }
    }
}

impl Encoder for TimedEncoder {
    fn hidden(&self) -> usize {
        self.hidden
    }

    fn encode_in_parts(
        &mut self,
        batch: &[&EncoderInput],
        before: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        let tokens: Vec<u32> = batch.iter().map(|input| input.n_tokens).collect();
        let takes = self.times.0.encode(self.tower, &tokens) / PARTS as u32;
        let n_tokens = tokens.iter().map(|n| *n as usize).sum();
        let mut due = Instant::now();
        for share in crate::encoder::shares(n_tokens, PARTS) {
            let asked = Instant::now();
            before(share);
            if asked.elapsed() > AT_ONCE {
                due = Instant::now();
            }
            due = after(due, takes);
            wait_until(due);
        }
        Ok(tokens.iter().map(|n| vec![0.0; *n as usize * self.hidden]).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::{GroupKv, KvCacheGroups};
    use triptych_kernels::ops::PagedBatch;

    /// A step of these sequences; what stands in its rows is not looked at.
    fn step<'a>(self_kv: &'a [GroupKv<'a>], choose: &'a ChooseBatch) -> StepInput<'a> {
        StepInput {
            token_ids: &[],
            positions: &[],
            embeds: &[],
            self_kv,
            cross_kv: None,
            cross_rows: None,
            state_slots: None,
            adapters: &[],
            logit_rows: &[],
            choose,
        }
    }

    fn sequences<'a>(query_start_loc: &'a [u32], seq_lens: &'a [u32]) -> GroupKv<'a> {
        let tables = PagedBatch { query_start_loc, table_start_loc: &[], block_tables: &[], seq_lens };
        GroupKv { slot_mapping: &[], tables }
    }

    #[test]
    fn a_step_is_known_by_its_sequences() {
        // A chunk of three tokens after five, a sequence that decodes with nine keys, and a prompt of two.
        let (choose, self_kv) = (ChooseBatch::default(), [sequences(&[0, 3, 4, 6], &[8, 9, 2])]);
        let step = step(&self_kv, &choose);
        let expect = StepSizes { prefill_tokens: 5, prefill_context: 21 + 3, decodes: 1, decode_context: 9 };
        assert_eq!(sizes(&step), expect);
    }

    const HOUR: Duration = Duration::from_secs(3600);

    /// Forwards that take no time.
    struct AtOnce;

    impl ForwardTimes for AtOnce {
        fn step(&self, _: StepSizes) -> Duration {
            Duration::ZERO
        }
        fn encode(&self, _: TowerIdx, _: &[u32]) -> Duration {
            Duration::ZERO
        }
        fn project(&self, _: usize) -> Duration {
            Duration::ZERO
        }
    }

    fn decoder(takes: &'static AtOnce) -> TimedDecoder {
        let info = DecoderInfo {
            vocab: 64,
            n_readable: 64,
            encoder_hidden: 1,
            embedded_hidden: 1,
            max_context: 16,
            cross_attention: false,
            cross_optional: false,
            mutual_items: false,
            kv_groups: KvCacheGroups::FULL,
            self_block_bytes: 1,
            cross_block_bytes: 0,
            state_slot_bytes: None,
            cross_rows_per_token: 1,
        };
        TimedDecoder::of(info, TimedForwards(takes))
    }

    #[test]
    fn a_submitted_step_begins_as_the_one_before_it_ends() {
        let mut decoder = decoder(&AtOnce);
        let first = decoder.occupy(HOUR);
        assert_eq!((decoder.occupy(HOUR) - first, decoder.busy_until - first), (HOUR, HOUR));
    }

    #[test]
    fn steps_under_way_are_waited_for_in_their_order() {
        let mut decoder = decoder(&AtOnce);
        let (choose, self_kv) = (ChooseBatch::default(), [sequences(&[0], &[])]);
        let step = step(&self_kv, &choose);
        let pending: Vec<_> = (0..3).map(|_| decoder.submit(&step, &[]).unwrap()).collect();
        let numbers: Vec<u64> = pending
            .iter()
            .map(|pending| match pending {
                Pending::UnderWay(number) => *number,
                Pending::Done(_) => panic!("it was not given to the device"),
            })
            .collect();
        assert_eq!(numbers, [1, 2, 3]);
        assert!(decoder.wait(Pending::UnderWay(1)).is_ok());
        assert!(decoder.wait(Pending::UnderWay(3)).is_ok(), "one that is not waited for is dropped");
        assert!(decoder.wait(Pending::UnderWay(2)).is_err());
    }
}
