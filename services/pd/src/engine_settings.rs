//! Settings of a worker's engines, and the caches that they come to for a decoder.

use std::fmt;
use std::num::NonZeroUsize;
use std::time::Duration;
use tokio::sync::Semaphore;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_engine::speculation::prompt_lookup::PromptLookup;
use triptych_engine::{EngineConfig, KvBudget, Speculation, StateBudget};
use triptych_models::decoder::{DecodeGraphConfig, DecoderInfo};

/// Sizes of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineSettings {
    /// Budget of the self-attention KV cache in bytes; less is taken if all sequences at full length need less.
    /// Default `None`: 1 GiB, or on a device with memory of its own a share of that ([`Self::on_device`]).
    pub self_kv_bytes: Option<usize>,
    /// Budget of the cross-attention KV cache in bytes; less is taken if all sequences with the largest encoder input
    /// need less. Default `None`, as above.
    pub cross_kv_bytes: Option<usize>,
    /// Budget of the cache of recurrent states in bytes, for models that have some. Default `None`: 1 GiB, or on a device with memory
    /// of its own a quarter of what its KV and it may take.
    pub state_bytes: Option<usize>,
    /// Host memory for the self-attention KV of preempted sequences, in bytes. Default 256 MiB. 0: none, they
    /// are recomputed.
    pub host_kv_bytes: usize,
    /// Draft tokens by prompt lookup for greedy completions. Default 0: no speculation.
    pub lookup_tokens: usize,
    /// Most rows of a step. Default 512.
    pub token_budget: usize,
    /// Share of engine time for decode-only steps while prompts wait, in percent. Default 33: sequences decode
    /// at a third of their speed at least, and prompts prefill at two thirds of theirs.
    pub decode_share: u8,
    /// Time per token after the first that answers are to keep in the mean. Default `None`: `decode_share` alone.
    pub tpot_slo: Option<Duration>,
    /// Time to which that gives way while first tokens are waited for. Default `None`: it does not.
    pub max_tpot_slo: Option<Duration>,
    /// Most sequences that run at once. Default 64.
    pub max_sequences: usize,
    /// Most sequences that wait; a request whose sequences would not all fit is refused. Default 1024.
    pub max_waiting: usize,
    /// Most distinct LoRA adapters among the sequences that run at once. Default 4.
    pub max_loras: usize,
    /// Most requests admitted at once. Default 512.
    pub max_requests: usize,
    /// Minimum time between messages of a choice in a response stream. Default 10 ms. Zero: a message for each step.
    pub stream_interval: Duration,
    /// Draft tokens per step of a draft model. Default 4.
    pub draft_tokens: usize,
    /// Device memory of a decoder's graphs in bytes. Default 512 MiB. 0: no graphs.
    pub graph_bytes: usize,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            self_kv_bytes: None,
            cross_kv_bytes: None,
            state_bytes: None,
            host_kv_bytes: 256 << 20,
            lookup_tokens: 0,
            token_budget: 512,
            decode_share: 33,
            tpot_slo: None,
            max_tpot_slo: None,
            max_sequences: 64,
            max_waiting: 1024,
            max_loras: 4,
            max_requests: 512,
            stream_interval: Duration::from_millis(10),
            draft_tokens: 4,
            graph_bytes: 512 << 20,
        }
    }
}

/// Budget of a cache in host memory where nothing is set.
const HOST_KV_BYTES: usize = 1 << 30;

/// Checkpoints of recurrent states that are kept for each sequence that may run, at most.
const CHECKPOINTS_PER_SEQUENCE: usize = 7;

/// Share of a device's free memory, once weights are loaded, that caches take where nothing is set, in tenths. The rest is
/// for activations.
const DEVICE_SHARE: usize = 9;

impl EngineSettings {
    /// Settings for one of `n_models` on a device that has `free` bytes left beside the weights of all of them: budgets that
    /// are not set become its part of nine tenths of those, in halves if it has cross-attention; recurrent states have a quarter
    /// of the part.
    pub fn on_device(mut self, free: usize, n_models: usize, info: &DecoderInfo) -> Self {
        let mut part = free / 10 * DEVICE_SHARE / n_models.max(1);
        if info.state_slot_bytes.is_some() {
            let states = *self.state_bytes.get_or_insert(part / 4);
            part = part.saturating_sub(states);
        }
        match (self.self_kv_bytes, self.cross_kv_bytes) {
            (None, None) if info.cross_attention => {
                self.self_kv_bytes = Some(part / 2);
                self.cross_kv_bytes = Some(part / 2);
            }
            (None, cross) => {
                let taken = cross.filter(|_| info.cross_attention).unwrap_or(0);
                self.self_kv_bytes = Some(part.saturating_sub(taken));
            }
            (Some(own), None) => self.cross_kv_bytes = Some(part.saturating_sub(own)),
            (Some(_), Some(_)) => {}
        }
        self
    }

    /// Settings of decode graphs; `None`: no graphs.
    pub fn graphs(self) -> Option<DecodeGraphConfig> {
        let max_sequences = self.max_sequences.next_power_of_two();
        (self.graph_bytes > 0).then_some(DecodeGraphConfig { max_sequences, max_bytes: self.graph_bytes })
    }

    /// Sequences that run or wait.
    pub fn max_live(self) -> usize {
        self.max_waiting.saturating_add(self.max_sequences).min(Semaphore::MAX_PERMITS)
    }

    /// Engine settings for a decoder, with no more KV than all sequences at full length can fill, each with
    /// `max_cross_rows` encoder rows; `None`: any number.
    pub fn for_decoder(self, info: &DecoderInfo, max_cross_rows: Option<usize>) -> EngineConfig {
        let most = |tokens: usize| self.max_sequences.saturating_mul(tokens.div_ceil(KV_BLOCK_TOKENS));
        let fit = |bytes: usize, block: usize| bytes.checked_div(block).unwrap_or(0);
        let most_cross = max_cross_rows.map_or(usize::MAX, most);
        // Blocks behind a window serve later sequences with the same prefix.
        let most_own = most(info.max_context).saturating_mul(info.kv_groups.n_groups());
        let kv = KvBudget::Blocks {
            self_attention: fit(self.self_kv_bytes.unwrap_or(HOST_KV_BYTES), info.self_block_bytes)
                .min(most_own),
            cross_attention: fit(self.cross_kv_bytes.unwrap_or(HOST_KV_BYTES), info.cross_block_bytes)
                .min(most_cross),
            host: fit(self.host_kv_bytes, info.self_block_bytes).min(most_own),
        };
        // Beside a slot for each sequence that runs, so many checkpoints of prefixes.
        let most_slots = self.max_sequences.saturating_mul(1 + CHECKPOINTS_PER_SEQUENCE);
        let slot_bytes = info.state_slot_bytes.map_or(0, NonZeroUsize::get);
        let states = fit(self.state_bytes.unwrap_or(HOST_KV_BYTES), slot_bytes).min(most_slots);
        EngineConfig {
            kv,
            states: StateBudget::Slots(states),
            token_budget: self.token_budget.max(self.max_sequences),
            decode_share: self.decode_share,
            tpot_slo: self.tpot_slo,
            max_tpot_slo: self.max_tpot_slo,
            max_sequences: self.max_sequences,
            // Before the first step all live sequences wait.
            max_waiting: self.max_live(),
            max_loras: self.max_loras.max(1),
            speculation: match self.lookup_tokens {
                0 => Speculation::Off,
                n_tokens => Speculation::PromptLookup(PromptLookup { n_tokens, max_ngram: 3 }),
            },
            ..EngineConfig::default()
        }
    }
}

/// A cross-attention cache that is smaller than the largest encoder input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrossShortage {
    /// Rows that it holds.
    pub held_rows: usize,
    /// Rows of the largest encoder input.
    pub max_rows: usize,
    /// Bytes of a cache that holds them.
    pub needed_bytes: usize,
}

impl CrossShortage {
    /// The shortage of an engine's caches for inputs of up to `max_rows` rows; `None`: they fit.
    pub fn of(config: &EngineConfig, info: &DecoderInfo, max_rows: Option<usize>) -> Option<Self> {
        let KvBudget::Blocks { cross_attention, .. } = config.kv else { return None };
        let max_rows = max_rows.filter(|_| info.cross_attention)?;
        let needed = max_rows.div_ceil(KV_BLOCK_TOKENS);
        (cross_attention < needed).then(|| Self {
            held_rows: cross_attention * KV_BLOCK_TOKENS,
            max_rows,
            needed_bytes: needed.saturating_mul(info.cross_block_bytes),
        })
    }
}

impl fmt::Display for CrossShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { held_rows, max_rows, needed_bytes } = self;
        let mib = needed_bytes.div_ceil(1 << 20);
        write!(
            f,
            "the cross-attention cache holds {held_rows} encoder rows, an item may have {max_rows}: larger ones are \
             refused unless --cross-kv-mib is {mib} or more"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_models::decoder::KvCacheGroups;

    /// A decoder of 4 KiB for each token and encoder row.
    fn decoder() -> DecoderInfo {
        let block = 4096 * KV_BLOCK_TOKENS;
        DecoderInfo {
            vocab: 100,
            n_readable: 100,
            encoder_hidden: 8,
            embedded_hidden: 8,
            max_context: 512,
            cross_attention: true,
            cross_optional: false,
            mutual_items: false,
            kv_groups: KvCacheGroups::FULL,
            self_block_bytes: block,
            cross_block_bytes: block,
            state_slot_bytes: None,
            cross_rows_per_token: 7,
        }
    }

    fn cross_rows(settings: EngineSettings, max_rows: Option<usize>) -> usize {
        let config = settings.for_decoder(&decoder(), max_rows);
        config.check(&decoder()).unwrap().cross * KV_BLOCK_TOKENS
    }

    #[test]
    fn the_largest_input_fits_however_few_sequences_run() {
        for max_rows in [1500, 6404, 8192] {
            for max_sequences in [1, 2, 4, 64] {
                let settings = EngineSettings { max_sequences, ..EngineSettings::default() };
                let rows = cross_rows(settings, Some(max_rows));
                assert!(rows >= max_rows, "{rows} rows for {max_rows} with {max_sequences} sequences");
                assert!(rows <= max_sequences * max_rows.next_multiple_of(KV_BLOCK_TOKENS));
            }
        }
    }

    #[test]
    fn the_budget_bounds_the_cache_where_nothing_else_does() {
        let settings =
            EngineSettings { max_sequences: 1, cross_kv_bytes: Some(64 << 20), ..EngineSettings::default() };
        assert_eq!(cross_rows(settings, None), 16384);
        assert_eq!(cross_rows(settings, Some(20_000)), 16384);
    }

    #[test]
    fn a_device_gives_its_models_equal_parts_of_nine_tenths() {
        let unset = EngineSettings::default();
        let budgets = |settings: EngineSettings, info: &DecoderInfo| {
            let settings = settings.on_device(1000, 3, info);
            [settings.self_kv_bytes, settings.cross_kv_bytes].map(Option::unwrap_or_default)
        };
        let only_own = DecoderInfo { cross_attention: false, ..decoder() };
        assert_eq!(budgets(unset, &decoder()), [150, 150]);
        assert_eq!(budgets(unset, &only_own)[0], 300);
        assert_eq!(budgets(EngineSettings { self_kv_bytes: Some(70), ..unset }, &decoder()), [70, 230]);
        assert_eq!(budgets(EngineSettings { cross_kv_bytes: Some(400), ..unset }, &decoder()), [0, 400]);
        let set = EngineSettings { self_kv_bytes: Some(5), cross_kv_bytes: Some(6), ..unset };
        assert_eq!(budgets(set, &decoder()), [5, 6]);
    }

    #[test]
    fn recurrent_states_have_a_quarter_of_a_device_or_what_is_set_and_no_more_slots_than_serve() {
        let recurrent =
            DecoderInfo { cross_attention: false, state_slot_bytes: NonZeroUsize::new(10), ..decoder() };
        let unset = EngineSettings { max_sequences: 2, ..EngineSettings::default() };
        let budgets = |settings: EngineSettings| {
            let settings = settings.on_device(1000, 1, &recurrent);
            [settings.self_kv_bytes, settings.state_bytes].map(Option::unwrap_or_default)
        };
        assert_eq!(budgets(unset), [675, 225]);
        assert_eq!(budgets(EngineSettings { state_bytes: Some(100), ..unset }), [800, 100]);
        let slots = |settings: EngineSettings, info| settings.for_decoder(info, None).states;
        assert_eq!(slots(unset, &recurrent), StateBudget::Slots(16));
        assert_eq!(
            slots(EngineSettings { state_bytes: Some(59), ..unset }, &recurrent),
            StateBudget::Slots(5)
        );
        assert_eq!(slots(unset, &decoder()), StateBudget::Slots(0));
    }

    #[test]
    fn a_budget_below_the_largest_input_is_told_with_the_setting_and_what_it_takes() {
        let settings = EngineSettings { cross_kv_bytes: Some(16 << 20), ..EngineSettings::default() };
        let shortage =
            |max_rows| CrossShortage::of(&settings.for_decoder(&decoder(), max_rows), &decoder(), max_rows);
        assert_eq!((shortage(None), shortage(Some(4096))), (None, None));
        let text = shortage(Some(6404)).unwrap().to_string();
        assert_eq!(
            text,
            "the cross-attention cache holds 4096 encoder rows, an item may have 6404: larger ones are refused unless \
             --cross-kv-mib is 26 or more"
        );
    }
}
