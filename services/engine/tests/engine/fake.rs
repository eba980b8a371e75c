//! A decoder without arithmetic. It keeps what was generated to each slot of a paged cache, reads the history of
//! a sequence back through its block table, and makes logits from a hash of it: one wrong slot, table,
//! position, row or length, and the completion is another one. What is plainly contradictory it asserts.

use std::collections::{HashSet, VecDeque};
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use triptych_core::clock::ManualClock;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_core::{AdapterId, EncodedRows};
use triptych_models::ModelError;
use triptych_models::decoder::{
    AlignInput, Decoder, DecoderInfo, GroupKv, KvCacheGroups, PagedBatch, Pending, StepInput,
};
use triptych_models::lora::LoraAdapter;
use triptych_models::sampling::{CarriedToken, Choices, choose_rows};

/// Tokens of the fake vocabulary.
pub const VOCAB: usize = 64;
/// After this token every logit is NaN. It is never generated.
pub const NAN_TOKEN: u32 = 62;
/// Width of an encoder output row.
pub const HIDDEN: usize = 2;

/// Record of the decoder's inputs, and its instructions.
#[derive(Debug, Default)]
pub struct StepLog {
    /// Every step: for each sequence its first token, and which of its tokens were computed.
    pub steps: Vec<Vec<(u32, Range<usize>)>>,
    /// Of the last step: the rows that cross-attend, where that is optional.
    pub cross_rows: Option<Vec<u32>>,
    /// Rows of each call that projects.
    pub projections: Vec<usize>,
    /// Work in the order of its run: `p` for rows projected, `s` for a step, `a` for a layer of an alignment, `w` for a wait.
    pub order: String,
    /// Layers that an alignment still has, and its first token.
    pub aligns: Option<(u32, u32)>,
    /// Adapters that are loaded.
    pub loaded: HashSet<AdapterId>,
    /// Distinct adapters of each step.
    pub adapters: Vec<usize>,
    /// Refuse the next forward.
    pub fail_forward: bool,
    /// Refuse the next projection.
    pub fail_projection: bool,
    /// Clock that a step moves, time of a row, and fixed time of a step.
    pub costs: Option<(Arc<ManualClock>, Duration, Duration)>,
    /// Logits repeat after so many positions, whatever was read.
    pub period: Option<u32>,
    /// Every so many positions the logits are another decoder's.
    pub wrong_every: Option<u32>,
    /// Results are handed out when they are waited for, as those of a device are.
    pub defers: bool,
    /// Results that were not waited for, by the number of the step.
    pending: VecDeque<(u64, Choices)>,
    /// Blocks that were copied, moved to the host, and moved back.
    pub moves: [usize; 3],
    /// Recurrent states: the tokens that each is after, and their hash.
    pub states: Vec<Option<(usize, u64)>>,
    /// Recurrent states that were copied.
    pub state_copies: usize,
    self_kv: Blocks,
    host_kv: Blocks,
    cross_kv: Vec<Option<u64>>,
}

/// Self-attention blocks.
#[derive(Debug, Default)]
struct Blocks {
    slots: Vec<Option<u64>>,
    /// First token of the sequence that a block was last generated for.
    first_tokens: Vec<Option<u32>>,
}

/// Contents of one block.
struct BlockContents {
    slots: Vec<Option<u64>>,
    first_token: Option<u32>,
}

impl Blocks {
    fn new(n: usize) -> Self {
        Self { slots: vec![None; n * KV_BLOCK_TOKENS], first_tokens: vec![None; n] }
    }

    fn block(&self, block: u32) -> BlockContents {
        let block = block as usize;
        let slots = self.slots[block * KV_BLOCK_TOKENS..][..KV_BLOCK_TOKENS].to_vec();
        BlockContents { slots, first_token: self.first_tokens[block] }
    }

    fn set(&mut self, block: u32, contents: BlockContents) {
        let block = block as usize;
        self.slots[block * KV_BLOCK_TOKENS..][..KV_BLOCK_TOKENS].copy_from_slice(&contents.slots);
        self.first_tokens[block] = contents.first_token;
    }
}

/// The decoder; its log is shared with the test.
pub struct FakeDecoder {
    /// With or without cross-attention, and how long the context is.
    pub info: DecoderInfo,
    /// The log.
    pub log: Arc<Mutex<StepLog>>,
}

pub fn info(cross_attention: bool, max_context: usize) -> DecoderInfo {
    DecoderInfo {
        vocab: VOCAB,
        n_readable: VOCAB,
        encoder_hidden: HIDDEN,
        embedded_hidden: HIDDEN,
        max_context,
        cross_attention,
        cross_optional: false,
        mutual_items: false,
        kv_groups: KvCacheGroups::FULL,
        self_block_bytes: 100,
        cross_block_bytes: if cross_attention { 10 } else { 0 },
        state_slot_bytes: None,
        cross_rows_per_token: 1,
    }
}

fn mix(hash: u64, value: u64) -> u64 {
    let mut x = (hash ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x ^= x >> 29;
    x.wrapping_mul(0xBF58_476D_1CE4_E5B9) ^ (x >> 32)
}

fn hash_row(row: &[f32]) -> u64 {
    row.iter().fold(17, |h, v| mix(h, u64::from(v.to_bits())))
}

fn at(offsets: &[u32], i: usize) -> Range<usize> {
    offsets[i] as usize..offsets[i + 1] as usize
}

/// Slots of the keys of sequence `i`.
fn slots(batch: &PagedBatch<'_>, i: usize) -> Vec<usize> {
    let table = &batch.block_tables[at(batch.table_start_loc, i)];
    let n_keys = batch.seq_lens[i] as usize;
    assert_eq!(table.len(), n_keys.div_ceil(KV_BLOCK_TOKENS), "a table ends with its keys");
    (0..n_keys).map(|k| table[k / KV_BLOCK_TOKENS] as usize * KV_BLOCK_TOKENS + k % KV_BLOCK_TOKENS).collect()
}

fn refusal() -> ModelError {
    ModelError::missing_key("fake", "fake", "an injected failure")
}

impl StepLog {
    /// Writes the rows of a step where they belong.
    fn write(&mut self, step: &StepInput<'_>) {
        let mut values: Vec<u64> = step.token_ids.iter().map(|t| u64::from(*t) + 1).collect();
        assert!(step.token_ids.iter().all(|t| (*t as usize) < VOCAB), "a token past the embedding table");
        for group in step.adapters {
            assert!(self.loaded.contains(&group.adapter), "an adapter is loaded while a step names it");
            for row in group.rows {
                let row = *row as usize;
                values[row] = mix(values[row], u64::from(group.adapter.as_bytes()[0]) + 1);
            }
        }
        self.adapters.push(step.adapters.len());
        let mut next_row = 0;
        for embed in step.embeds {
            assert!(embed.first_row >= next_row, "item rows ascend and are disjoint");
            for (i, row) in embed.rows.to_f32().chunks_exact(HIDDEN).enumerate() {
                values[embed.first_row + i] = hash_row(row);
                next_row = embed.first_row + i + 1;
            }
        }
        for group in step.self_kv {
            for (row, slot) in group.slot_mapping.iter().enumerate() {
                let position = step.positions[row].iter().fold(3, |h, p| mix(h, u64::from(*p)));
                self.self_kv.slots[*slot as usize] = Some(mix(values[row], position));
            }
        }
    }

    /// Advances the recurrent state of sequence `i` by its rows; returns its hash after each of them.
    fn recur(&mut self, step: &StepInput<'_>, i: usize) -> Option<Vec<u64>> {
        let slot = step.state_slots?[i] as usize;
        let GroupKv { slot_mapping, tables } = step.self_kv[0];
        let rows = at(tables.query_start_loc, i);
        let (mut n_tokens, mut hash) = self.states[slot].expect("a state is set before it is read");
        let n_keys = tables.seq_lens[i] as usize;
        assert_eq!(n_tokens, n_keys - rows.len(), "a state is after the tokens before the step");
        let hashes = rows.map(|row| {
            n_tokens += 1;
            hash = mix(hash, self.self_kv.slots[slot_mapping[row] as usize].expect("a row is written"));
            hash
        });
        let hashes = hashes.collect();
        self.states[slot] = Some((n_tokens, hash));
        Some(hashes)
    }

    /// Checks the rows of sequence `i` against its tables; returns the hash of its history up to each row, as far as the row sees
    /// it in each group of layers.
    fn read(&mut self, step: &StepInput<'_>, i: usize, groups: &KvCacheGroups) -> Vec<u64> {
        self.steps.last_mut().expect("a step is open").push((0, 0..0));
        let windows = groups.windows();
        assert_eq!(windows.len(), step.self_kv.len(), "KV of every group");
        let of_group =
            |(group, window): (&GroupKv<'_>, &Option<NonZeroU32>)| self.read_group(step, (group, i), *window);
        let read: Vec<Vec<u64>> = step.self_kv.iter().zip(windows).map(of_group).collect();
        let rows = 0..read[0].len();
        rows.map(|row| read[1..].iter().fold(read[0][row], |hash, group| mix(hash, group[row]))).collect()
    }

    /// The same of one group.
    fn read_group(
        &mut self,
        step: &StepInput<'_>,
        (group, i): (&GroupKv<'_>, usize),
        window: Option<NonZeroU32>,
    ) -> Vec<u64> {
        let (rows, slots) = (at(group.tables.query_start_loc, i), slots(&group.tables, i));
        let computed = slots.len() - rows.len()..slots.len();
        for (row, key) in rows.clone().zip(computed.clone()) {
            assert_eq!(
                group.slot_mapping[row] as usize, slots[key],
                "a row is written where its key is read"
            );
        }
        let block = slots[0] / KV_BLOCK_TOKENS;
        if computed.start == 0 {
            self.self_kv.first_tokens[block] = Some(step.token_ids[rows.start]);
        }
        // With a window the first block may be given back.
        let name = self.self_kv.first_tokens[block].or(window.map(|_| 0));
        let name = name.expect("a sequence starts with its first token");
        let open = self.steps.last_mut().and_then(|step| step.last_mut()).expect("a step is open");
        // A group without a window knows the first token.
        if window.is_none() || open.1.is_empty() {
            *open = (name, computed.clone());
        }
        let cross = self.cross_hashes(step);
        let value = |slot: &usize| self.self_kv.slots[*slot].expect("a slot is written before it is read");
        let Some(window) = window else {
            let before =
                |cross: u64| slots[..computed.start].iter().fold(cross, |hash, slot| mix(hash, value(slot)));
            let mut hash = (None, 0);
            let history = computed.clone().zip(rows).map(|(key, row)| {
                if hash.0 != Some(cross[row]) {
                    let since = slots[computed.start..key].iter();
                    hash = (
                        Some(cross[row]),
                        since.fold(before(cross[row]), |hash, slot| mix(hash, value(slot))),
                    );
                }
                hash.1 = mix(hash.1, value(&slots[key]));
                hash.1
            });
            return history.collect();
        };
        let seen = |key: usize| &slots[(key + 1).saturating_sub(window.get() as usize)..=key];
        let seen = computed.zip(rows).map(|(key, row)| (seen(key), cross[row]));
        seen.map(|(slots, cross)| slots.iter().fold(cross, |hash, slot| mix(hash, value(slot)))).collect()
    }

    /// Hash of the encoder rows that each row of a step attends to; 0 where there are none.
    fn cross_hashes(&self, step: &StepInput<'_>) -> Vec<u64> {
        let mut hashes = vec![0; step.token_ids.len()];
        let Some(batch) = step.cross_kv else { return hashes };
        let every: Vec<u32> = (0..).take(hashes.len()).collect();
        let rows = step.cross_rows.unwrap_or(&every);
        assert_eq!(rows.len(), *batch.query_start_loc.last().unwrap() as usize);
        for i in 0..batch.seq_lens.len() {
            let keys = slots(&batch, i).into_iter();
            let hash = keys.fold(5, |h, s| {
                mix(h, self.cross_kv[s].expect("a cross slot is projected before it is read"))
            });
            rows[at(batch.query_start_loc, i)].iter().for_each(|row| hashes[*row as usize] = hash);
        }
        hashes
    }
}

impl Decoder for FakeDecoder {
    fn info(&self) -> DecoderInfo {
        self.info
    }

    fn allocate_kv(&mut self, self_blocks: usize, cross_blocks: usize) -> Result<(), ModelError> {
        let mut log = self.log.lock().unwrap();
        log.self_kv = Blocks::new(self_blocks);
        log.cross_kv = vec![None; cross_blocks * KV_BLOCK_TOKENS];
        Ok(())
    }

    fn allocate_host(&mut self, n_blocks: usize) -> Result<(), ModelError> {
        self.log.lock().unwrap().host_kv = Blocks::new(n_blocks);
        Ok(())
    }

    fn allocate_states(&mut self, n_slots: usize) -> Result<(), ModelError> {
        self.log.lock().unwrap().states = vec![None; n_slots];
        Ok(())
    }

    fn copy_states(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        let mut log = self.log.lock().unwrap();
        log.state_copies += pairs.len();
        for (from, to) in pairs {
            let state = log.states[*from as usize].expect("a state is set before it is copied");
            log.states[*to as usize] = Some(state);
        }
        Ok(())
    }

    fn reset_states(&mut self, slots: &[u32]) -> Result<(), ModelError> {
        let mut log = self.log.lock().unwrap();
        slots.iter().for_each(|slot| log.states[*slot as usize] = Some((0, 11)));
        Ok(())
    }

    fn project_cross(&mut self, rows: &[EncodedRows<'_>], slots: &[u32]) -> Result<(), ModelError> {
        let mut log = self.log.lock().unwrap();
        if std::mem::take(&mut log.fail_projection) {
            return Err(refusal());
        }
        assert!(rows.iter().all(|rows| rows.hidden() == HIDDEN));
        let rows: Vec<f32> = rows.iter().flat_map(|rows| rows.to_f32()).collect();
        assert_eq!(rows.len(), slots.len() * HIDDEN);
        log.projections.push(slots.len());
        log.order.push('p');
        let mut seen = HashSet::new();
        assert!(slots.iter().all(|slot| seen.insert(*slot)), "no slot is written twice");
        for (row, slot) in rows.chunks_exact(HIDDEN).zip(slots) {
            log.cross_kv[*slot as usize] = Some(hash_row(row));
        }
        Ok(())
    }

    fn project_cross_adapted(
        &mut self,
        adapter: AdapterId,
        rows: &[EncodedRows<'_>],
        slots: &[u32],
    ) -> Result<(), ModelError> {
        self.project_cross(rows, slots)?;
        let mut log = self.log.lock().unwrap();
        assert!(log.loaded.contains(&adapter));
        for slot in slots {
            let value = &mut log.cross_kv[*slot as usize];
            *value = value.map(|value| mix(value, u64::from(adapter.as_bytes()[0])));
        }
        Ok(())
    }

    fn load_adapter(&mut self, adapter: &LoraAdapter) -> Result<(), ModelError> {
        self.log.lock().unwrap().loaded.insert(adapter.id());
        Ok(())
    }

    fn unload_adapter(&mut self, id: AdapterId) {
        assert!(self.log.lock().unwrap().loaded.remove(&id));
    }

    fn forward(&mut self, step: &StepInput<'_>) -> Result<Choices, ModelError> {
        let mut log = self.log.lock().unwrap();
        if std::mem::take(&mut log.fail_forward) {
            return Err(refusal());
        }
        let mut seen = HashSet::new();
        let mut written = step.self_kv.iter().flat_map(|group| group.slot_mapping);
        assert!(written.all(|slot| seen.insert(*slot)), "no slot is written twice");
        if let Some((clock, row, rest)) = &log.costs {
            clock.advance(*row * step.token_ids.len() as u32 + *rest);
        }
        assert_eq!(step.positions.len(), step.token_ids.len());
        assert!(step.self_kv.iter().all(|group| group.slot_mapping.len() == step.token_ids.len()));
        log.cross_rows = step.cross_rows.map(<[u32]>::to_vec);
        log.write(step);
        log.steps.push(Vec::new());
        log.order.push('s');
        let n_seqs = step.self_kv[0].tables.seq_lens.len();
        assert_eq!(step.state_slots.map(<[u32]>::len), self.info.state_slot_bytes.map(|_| n_seqs));
        let slots: HashSet<u32> = step.state_slots.into_iter().flatten().copied().collect();
        assert!(step.state_slots.is_none_or(|all| all.len() == slots.len()), "no state is written twice");
        let mut hashes: Vec<u64> = Vec::new();
        for i in 0..n_seqs {
            let read = log.read(step, i, &self.info.kv_groups);
            match log.recur(step, i) {
                Some(states) => hashes.extend(read.iter().zip(states).map(|(hash, state)| mix(*hash, state))),
                None => hashes.extend(read),
            }
        }
        let (period, wrong_every) = (log.period, log.wrong_every);
        let logits = step.logit_rows.iter().flat_map(|row| {
            let (position, token) = (step.positions[*row as usize][0], step.token_ids[*row as usize]);
            let hash = period.map_or(hashes[*row as usize], |period| u64::from(position % period));
            let hash = if wrong_every.is_some_and(|n| position % n == 0) { !hash } else { hash };
            (0..VOCAB as u64).map(move |t| match token == NAN_TOKEN {
                true => f32::NAN,
                false if t == u64::from(NAN_TOKEN) => f32::NEG_INFINITY,
                false => (mix(hash, t) % 1000) as f32 / 100.0,
            })
        });
        Ok(choose_rows(logits.collect(), VOCAB, step.choose))
    }

    fn submit(&mut self, step: &StepInput<'_>, carried: &[CarriedToken]) -> Result<Pending, ModelError> {
        let mut token_ids = step.token_ids.to_vec();
        if !carried.is_empty() {
            let log = self.log.lock().unwrap();
            let (_, before) = log.pending.back().expect("a step that is under way");
            for CarriedToken { row, choice } in carried {
                let choice = &before.choices[*choice as usize];
                token_ids[*row as usize] = choice.as_ref().map_or(0, |choice| choice.token);
            }
        }
        let choices = self.forward(&StepInput { token_ids: &token_ids, ..*step })?;
        let mut log = self.log.lock().unwrap();
        if !log.defers {
            return Ok(Pending::Done(choices));
        }
        let number = log.steps.len() as u64;
        log.pending.push_back((number, choices));
        assert!(log.pending.len() <= 2, "one step ahead");
        Ok(Pending::UnderWay(number))
    }

    fn wait(&mut self, pending: Pending) -> Result<Choices, ModelError> {
        let number = match pending {
            Pending::Done(choices) => return Ok(choices),
            Pending::UnderWay(number) => number,
        };
        let mut log = self.log.lock().unwrap();
        log.order.push('w');
        let (found, choices) = log.pending.pop_front().expect("a step that is under way");
        assert_eq!(found, number, "steps are waited for in their order");
        Ok(choices)
    }

    fn begin_align(&mut self, input: &AlignInput<'_>) -> Result<(), ModelError> {
        let n_layers = input.heads.iter().map(|(layer, _)| layer + 1).max().unwrap_or(0);
        self.log.lock().unwrap().aligns = Some((n_layers, input.tokens[0]));
        Ok(())
    }

    fn align_layer(&mut self) -> Result<Option<Vec<f32>>, ModelError> {
        let mut log = self.log.lock().unwrap();
        log.order.push('a');
        let (left, token) = log.aligns.take().expect("a pass has begun");
        if left == 1 {
            return Ok(Some(vec![token as f32]));
        }
        log.aligns = Some((left - 1, token));
        Ok(None)
    }

    fn copy_blocks(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        let mut log = self.log.lock().unwrap();
        log.moves[0] += pairs.len();
        for (from, to) in pairs {
            let block = log.self_kv.block(*from);
            log.self_kv.set(*to, block);
        }
        Ok(())
    }

    fn swap_out(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        let mut log = self.log.lock().unwrap();
        log.moves[1] += pairs.len();
        for (from, to) in pairs {
            let block = log.self_kv.block(*from);
            log.host_kv.set(*to, block);
        }
        Ok(())
    }

    fn swap_in(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        let mut log = self.log.lock().unwrap();
        log.moves[2] += pairs.len();
        for (from, to) in pairs {
            let block = log.host_kv.block(*from);
            log.self_kv.set(*to, block);
        }
        Ok(())
    }
}
