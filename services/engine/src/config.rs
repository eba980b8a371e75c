//! Resource limits and policies of an engine.

use crate::blocks::MAX_BLOCKS;
use crate::error::EngineError;
use crate::speculation::prompt_lookup::PromptLookup;
use std::time::Duration;
use triptych_models::decoder::DecoderInfo;

/// Resource limits and policies of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Sizes of the KV caches.
    pub kv: KvBudget,
    /// Size of the cache of recurrent states; not read for a model without them.
    pub states: StateBudget,
    /// Most rows in a step, at least `max_sequences`. A large budget speeds up prefill; a small one delays the
    /// tokens of others less.
    pub token_budget: usize,
    /// Share of engine time for decode-only steps while prompts wait, in percent, at most 90. 0: every step
    /// prefills what the budget allows, and the more prompts wait the slower all others decode.
    pub decode_share: u8,
    /// Time per token after the first that each answer is to keep in the mean. With it a step prefills where that delays no answer
    /// beyond it, and else decoding has half of the time; `decode_share` holds where no step is that fast. `None`: `decode_share`
    /// alone.
    pub tpot_slo: Option<Duration>,
    /// Time to which `tpot_slo` gives way: while a first token has been waited for longer than 20 tokens of it, each further token
    /// may take a 20th of that wait, up to this. `None`, or less than `tpot_slo`: it does not.
    pub max_tpot_slo: Option<Duration>,
    /// Most sequences that run at once, at least 1; a beam counts as one.
    pub max_sequences: usize,
    /// Most sequences that wait, at least 1; one more is refused as overload.
    pub max_waiting: usize,
    /// Most distinct adapters among the sequences that run at once, at least 1; sequences of others wait.
    pub max_loras: usize,
    /// Reuse of full blocks for later sequences with the same prefix.
    pub prefix_cache: PrefixCache,
    /// Fate of the KV of a preempted sequence.
    pub preemption: Preemption,
    /// Method of drafting tokens.
    pub speculation: Speculation,
    /// Planning of a step while the one before it computes.
    pub pipelining: Pipelining,
    /// Time for which a sequence keeps the rows of its items.
    pub rows: RowRetention,
}

/// Sizes of the KV caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvBudget {
    /// In blocks of `KV_BLOCK_TOKENS` tokens.
    Blocks {
        /// Self-attention.
        self_attention: usize,
        /// Cross-attention; not read without it.
        cross_attention: usize,
        /// Self-attention of preempted sequences, in host memory. 0: none, so that they are recomputed.
        host: usize,
    },
    /// In bytes; a remainder smaller than a block is not used.
    Bytes {
        /// Self-attention.
        self_attention: usize,
        /// Cross-attention; not read without it.
        cross_attention: usize,
        /// Self-attention of preempted sequences, in host memory. 0: none, so that they are recomputed.
        host: usize,
    },
}

/// Size of the cache of recurrent states. A sequence takes a slot, a beam too; what is left keeps checkpoints of prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateBudget {
    /// In slots.
    Slots(usize),
    /// In bytes; a remainder smaller than a slot is not used.
    Bytes(usize),
}

/// Reuse of full blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefixCache {
    /// Full blocks are found by prefix key.
    #[default]
    On,
    /// Every prompt is computed from its first token.
    Off,
}

/// Way in which a preempted sequence gets its KV back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preemption {
    /// The one that is expected to take less time: swapping at this rate, or recomputing at the measured rate.
    /// Recomputes until a rate was measured.
    Cheapest {
        /// Bytes per second, one way.
        swap_bytes_per_s: u64,
    },
    /// Swaps to the host, as long as there is room.
    Swap,
    /// Recomputes.
    Recompute,
}

/// Time for which a sequence keeps the rows of its items.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowRetention {
    /// To its end.
    #[default]
    UntilEnd,
    /// Until its tokens are computed and it decodes. A sequence that is preempted later asks for them again
    /// ([`Output::Rows`](crate::Output::Rows)).
    UntilRead,
}

/// Planning of a step while the one before it computes. The output is the same; it pays where a device computes beside the
/// engine's thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pipelining {
    /// Each step ends before the next is planned.
    #[default]
    Off,
    /// One step ahead, with tokens that the device carries over. Off with speculation, whose drafts need all tokens.
    On,
}

/// Speculative decoding of greedy sequences. The output is the same; it takes fewer steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Speculation {
    /// No speculation.
    #[default]
    Off,
    /// Draft tokens by prompt lookup.
    PromptLookup(PromptLookup),
    /// Draft tokens by the attached draft model; none without one.
    DraftModel {
        /// Draft tokens per step.
        n_tokens: usize,
    },
}

/// 64 sequences on small caches; a caller knows its machine better.
impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            kv: KvBudget::Bytes { self_attention: 1 << 30, cross_attention: 1 << 30, host: 0 },
            states: StateBudget::Bytes(1 << 30),
            token_budget: 2048,
            decode_share: 0,
            tpot_slo: None,
            max_tpot_slo: None,
            max_sequences: 64,
            max_waiting: 1024,
            max_loras: 4,
            prefix_cache: PrefixCache::On,
            preemption: Preemption::default(),
            speculation: Speculation::Off,
            pipelining: Pipelining::Off,
            rows: RowRetention::UntilEnd,
        }
    }
}

/// The rate is that of one core's copies to memory, or of a PCIe link of four lanes.
impl Default for Preemption {
    fn default() -> Self {
        Self::Cheapest { swap_bytes_per_s: 5_000_000_000 }
    }
}

/// Blocks of each pool, and slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSizes {
    /// Self-attention.
    pub own: usize,
    /// Cross-attention.
    pub cross: usize,
    /// Self-attention on the host.
    pub host: usize,
    /// Slots of recurrent states; 0 of a model without them.
    pub states: usize,
}

/// In percent: prefill must advance too.
const MOST_DECODE_SHARE: usize = 90;

impl EngineConfig {
    /// Blocks and slots of the pools for this decoder.
    ///
    /// # Errors
    /// [`EngineError`] names what cannot work.
    pub fn check(&self, info: &DecoderInfo) -> Result<PoolSizes, EngineError> {
        at_least("max_sequences", self.max_sequences, 1)?;
        at_least("max_waiting", self.max_waiting, 1)?;
        at_least("max_loras", self.max_loras, 1)?;
        at_least("token_budget", self.token_budget, self.max_sequences)?;
        at_most("decode_share", self.decode_share.into(), MOST_DECODE_SHARE)?;
        self.check_speculation(info)?;
        Ok(PoolSizes { states: self.states.check(info)?, ..self.kv.check(info)? })
    }
}

impl EngineConfig {
    /// A rejected draft would leave a recurrent state that cannot be cut back.
    fn check_speculation(&self, info: &DecoderInfo) -> Result<(), EngineError> {
        if self.speculation == Speculation::Off || info.state_slot_bytes.is_none() {
            return Ok(());
        }
        Err(EngineError::Unsupported {
            setting: "speculation",
            model: "recurrent states, which cannot be rolled back",
            needed: "off",
        })
    }
}

impl StateBudget {
    /// Slots of the pool for this decoder; 0 if it has no recurrent states.
    ///
    /// # Errors
    /// [`EngineError::Setting`] if not one slot fits.
    pub fn check(self, info: &DecoderInfo) -> Result<usize, EngineError> {
        let Some(slot_bytes) = info.state_slot_bytes else { return Ok(0) };
        let n_slots = match self {
            Self::Slots(n) => n,
            Self::Bytes(n) => n / slot_bytes.get(),
        };
        at_least("states", n_slots, 1)?;
        Ok(n_slots.min(MAX_BLOCKS))
    }
}

impl KvBudget {
    /// Blocks of the pools for this decoder.
    ///
    /// # Errors
    /// [`EngineError::Setting`] names what cannot work.
    pub fn check(self, info: &DecoderInfo) -> Result<PoolSizes, EngineError> {
        let fit = |bytes: usize, block: usize| bytes.checked_div(block).unwrap_or(0);
        let (own, cross, host) = match self {
            Self::Blocks { self_attention, cross_attention, host } => (self_attention, cross_attention, host),
            Self::Bytes { self_attention, cross_attention, host } => (
                fit(self_attention, info.self_block_bytes),
                fit(cross_attention, info.cross_block_bytes),
                fit(host, info.self_block_bytes),
            ),
        };
        at_least("kv.self_attention", own, 1)?;
        let cross = if info.cross_attention { cross } else { 0 };
        // Where encoder input is optional, a pool without blocks serves text alone.
        if info.cross_attention && !info.cross_optional {
            at_least("kv.cross_attention", cross, 1)?;
        }
        let bounded = |n: usize| n.min(MAX_BLOCKS);
        Ok(PoolSizes { own: bounded(own), cross: bounded(cross), host: bounded(host), states: 0 })
    }
}

fn at_most(setting: &'static str, actual: usize, allowed: usize) -> Result<(), EngineError> {
    if actual <= allowed {
        return Ok(());
    }
    Err(EngineError::Setting { setting, actual, needed: format!("{allowed} or less") })
}

fn at_least(setting: &'static str, actual: usize, needed: usize) -> Result<(), EngineError> {
    if actual >= needed {
        return Ok(());
    }
    Err(EngineError::Setting { setting, actual, needed: format!("{needed} or more") })
}
