//! A few sequences decoded greedily over block tables that are kept as simple as can be.

use crate::case::{encoded, stored};
use std::sync::Arc;
use triptych_core::AdapterId;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_kernels::Backend;
use triptych_kernels::ops::PagedBatch;
use triptych_models::decoder::{AdapterRows, Decoder, DecoderInfo, EmbedRows, GroupKv, StepInput};
use triptych_models::sampling::ChooseBatch;

/// A sequence to decode.
#[derive(Clone, Default)]
pub struct Sequence {
    pub prompt: Vec<u32>,
    /// `[prompt.len()]`.
    pub positions: Vec<[u32; 3]>,
    pub next_position: u32,
    /// Width of encoder rows.
    pub hidden: usize,
    /// First token of each item with its rows, which are in the prompt (several rows of the encoder are a token where the decoder
    /// says so); where cross-attention is optional, with the rows that tokens from there up to the next attend to.
    pub embeds: Vec<(usize, Vec<f32>)>,
    /// Encoder rows that every token cross-attends to.
    pub cross: Vec<f32>,
    /// A loaded adapter.
    pub adapter: Option<AdapterId>,
}

/// Schedule of sequences over steps.
#[derive(Clone, Copy)]
pub struct Mix {
    /// Sequence `i` starts at step `i · stagger`: steps then mix prefill and decode.
    pub stagger: usize,
    /// Most prompt tokens of a sequence in a step.
    pub chunk: usize,
}

impl Mix {
    /// Everything at once.
    pub const PLAIN: Self = Self { stagger: 0, chunk: usize::MAX };
}

struct Running<'a> {
    own: &'a Sequence,
    tokens: Vec<u32>,
    n_computed: usize,
    /// Blocks of each KV cache group.
    blocks: Vec<Vec<u32>>,
    views: Vec<View<'a>>,
    /// True if items are not among the tokens.
    sees_items: bool,
    starts_at: usize,
    /// Slot of its recurrent state, where there is one.
    state_slot: u32,
    /// True if the rows of an item are computed in one step.
    whole_items: bool,
    /// Values of an item that stand for a token.
    embed_width: usize,
}

/// Encoder rows that tokens from one on attend to.
struct View<'a> {
    first_token: usize,
    rows: &'a [f32],
    blocks: Vec<u32>,
}

impl Sequence {
    /// First tokens and encoder rows of what it cross-attends to.
    fn views(&self, info: &DecoderInfo) -> impl Iterator<Item = (usize, &[f32])> {
        let whole = (info.cross_attention && !self.cross.is_empty()).then_some((0, self.cross.as_slice()));
        let late = if info.cross_optional { self.embeds.as_slice() } else { &[] };
        whole.into_iter().chain(late.iter().map(|(first, rows)| (*first, rows.as_slice())))
    }
}

/// Sequences with the tokens expected of them.
#[derive(Clone, Copy)]
pub struct GreedyCheck<'a> {
    pub sequences: &'a [Sequence],
    /// Generated tokens of each sequence, all of one length.
    pub expected: &'a [Vec<u32>],
    /// Sequences that are also decoded one at a time.
    pub n_alone: usize,
    /// Second schedule of the batch, beside all at once.
    pub mix: Mix,
}

/// Holds sequences to the tokens expected of them: the first ones one at a time, then all in a batch, at once and as the
/// mix schedules them. The stand-in takes a hundred times as long as a device: there one alone and the mix are run.
pub fn assert_greedy<B: Backend>(backend: &B, decoder: &mut dyn Decoder, name: &str, check: GreedyCheck<'_>) {
    let GreedyCheck { sequences, expected, n_alone, mix } = check;
    let is_brief = backend.name() == "cuda" && triptych_cuda_standin::device().is_none();
    let n_alone = if is_brief { n_alone.min(1) } else { n_alone };
    let n_steps = expected[0].len();
    for (one, expected) in sequences.iter().zip(expected).take(n_alone) {
        let alone = greedy(decoder, std::slice::from_ref(one), n_steps, Mix::PLAIN);
        assert_eq!(&alone[0], expected, "{name} alone");
    }
    for mix in if is_brief { vec![mix] } else { vec![Mix::PLAIN, mix] } {
        assert_eq!(greedy(decoder, sequences, n_steps, mix), expected, "{name} in a batch");
    }
}

/// `n_steps` argmax tokens of each sequence.
pub fn greedy(decoder: &mut dyn Decoder, sequences: &[Sequence], n_steps: usize, mix: Mix) -> Vec<Vec<u32>> {
    let mut running = admit(decoder, sequences, n_steps, mix);
    let vocab = decoder.info().vocab;
    for step in 0.. {
        let mut active: Vec<&mut Running<'_>> = running
            .iter_mut()
            .filter(|r| r.starts_at <= step && r.tokens.len() < r.own.prompt.len() + n_steps)
            .collect();
        if active.is_empty() && step > sequences.len() * mix.stagger {
            break;
        }
        let batch = Batch::of(&active, mix.chunk);
        let logits = batch.forward(decoder);
        let mut rows = logits.chunks_exact(vocab);
        for (sequence, n) in active.iter_mut().zip(&batch.n_tokens) {
            sequence.n_computed += n;
            if sequence.n_computed == sequence.tokens.len() {
                sequence.tokens.push(argmax(rows.next().expect("a row of logits for each finished prompt")));
            }
        }
    }
    running.into_iter().map(|r| r.tokens[r.own.prompt.len()..].to_vec()).collect()
}

/// Logits of all prompt tokens of one sequence, `[prompt.len(), vocab]`.
pub fn teacher_forced(decoder: &mut dyn Decoder, sequence: &Sequence) -> Vec<f32> {
    let mut running = admit(decoder, std::slice::from_ref(sequence), 0, Mix::PLAIN);
    let mut batch = Batch::of(&[&mut running[0]], usize::MAX);
    batch.logit_rows = (0..sequence.prompt.len() as u32).collect();
    batch.forward(decoder)
}

/// Logits of all prompt tokens of sequences that are computed in one step, one sequence after another.
pub fn teacher_forced_together(decoder: &mut dyn Decoder, sequences: &[Sequence]) -> Vec<f32> {
    let mut running = admit(decoder, sequences, 0, Mix::PLAIN);
    let all: Vec<&mut Running<'_>> = running.iter_mut().collect();
    let mut batch = Batch::of(&all, usize::MAX);
    batch.logit_rows = (0..batch.token_ids.len() as u32).collect();
    batch.forward(decoder)
}

fn admit<'a>(
    decoder: &mut dyn Decoder,
    sequences: &'a [Sequence],
    n_steps: usize,
    mix: Mix,
) -> Vec<Running<'a>> {
    let info = decoder.info();
    let blocks_of = |n: usize| n.div_ceil(KV_BLOCK_TOKENS);
    let n_groups = info.kv_groups.n_groups();
    let of_group = |s: &Sequence| blocks_of(s.prompt.len() + n_steps);
    let own = |s: &Sequence| n_groups * of_group(s);
    let cross =
        |s: &Sequence| s.views(&info).map(|(_, rows)| blocks_of(rows.len() / s.hidden)).sum::<usize>();
    let [n_own, n_cross]: [usize; 2] = [sequences.iter().map(own).sum(), sequences.iter().map(cross).sum()];
    decoder.allocate_kv(n_own, n_cross).expect("room for caches");
    if info.state_slot_bytes.is_some() {
        decoder.allocate_states(sequences.len()).expect("room for states");
        let slots: Vec<u32> = (0..sequences.len() as u32).collect();
        decoder.reset_states(&slots).expect("slots that are there");
    }
    // Given out from the end, so that no sequence's blocks are in order.
    let (mut free, mut free_cross): (Vec<u32>, Vec<u32>) =
        ((0..n_own as u32).collect(), (0..n_cross as u32).collect());
    let mut take = |from_cross: bool, n: usize| -> Vec<u32> {
        let free = if from_cross { &mut free_cross } else { &mut free };
        (0..n).map(|_| free.pop().expect("as many blocks as counted")).collect()
    };
    let mut running = Vec::new();
    for (i, s) in sequences.iter().enumerate() {
        let blocks: Vec<Vec<u32>> = (0..n_groups).map(|_| take(false, of_group(s))).collect();
        let mut views = Vec::new();
        for (first_token, rows) in s.views(&info) {
            let n_rows = rows.len() / s.hidden;
            let blocks = take(true, blocks_of(n_rows));
            let slots: Vec<u32> = (0..n_rows).map(|row| slot(&blocks, row)).collect();
            let stored = stored(rows, s.hidden);
            let encoded = [encoded(&stored, s.hidden)];
            let projected = match s.adapter {
                Some(adapter) => decoder.project_cross_adapted(adapter, &encoded, &slots),
                None => decoder.project_cross(&encoded, &slots),
            };
            projected.expect("encoder rows fit");
            views.push(View { first_token, rows, blocks });
        }
        let tokens = s.prompt.clone();
        let starts_at = i * mix.stagger;
        running.push(Running {
            own: s,
            tokens,
            n_computed: 0,
            blocks,
            views,
            sees_items: info.cross_optional,
            starts_at,
            state_slot: (sequences.len() - 1 - i) as u32,
            whole_items: info.mutual_items,
            embed_width: info.embedded_hidden,
        });
    }
    running
}

/// The vectors of a step.
#[derive(Default)]
struct Batch {
    n_tokens: Vec<usize>,
    token_ids: Vec<u32>,
    positions: Vec<[u32; 3]>,
    /// First row, width of rows, the rows, and true if they end their span.
    embeds: Vec<(usize, usize, Arc<[u8]>, bool)>,
    query_start_loc: Vec<u32>,
    /// Slots and tables of each KV cache group.
    own: Vec<(Vec<u32>, Tables)>,
    cross: Tables,
    cross_start_loc: Vec<u32>,
    cross_rows: Vec<u32>,
    state_slots: Vec<u32>,
    adapters: Vec<(AdapterId, Vec<u32>)>,
    logit_rows: Vec<u32>,
}

#[derive(Default)]
struct Tables {
    start_loc: Vec<u32>,
    blocks: Vec<u32>,
    lens: Vec<u32>,
}

impl Tables {
    fn push(&mut self, blocks: &[u32], len: usize) {
        self.start_loc.push(self.blocks.len() as u32);
        // Only the blocks in use: a kernel that reads further is caught.
        self.blocks.extend(&blocks[..len.div_ceil(KV_BLOCK_TOKENS)]);
        self.lens.push(len as u32);
    }

    fn view<'a>(&'a self, query_start_loc: &'a [u32]) -> PagedBatch<'a> {
        PagedBatch {
            query_start_loc,
            table_start_loc: &self.start_loc,
            block_tables: &self.blocks,
            seq_lens: &self.lens,
        }
    }
}

impl Batch {
    fn of(active: &[&mut Running<'_>], chunk: usize) -> Self {
        let mut batch = Self::default();
        let n_groups = active.first().map_or(0, |sequence| sequence.blocks.len());
        batch.own.resize_with(n_groups, Default::default);
        for sequence in active {
            batch.push(sequence, chunk);
        }
        batch.query_start_loc.push(batch.token_ids.len() as u32);
        for (_, tables) in &mut batch.own {
            tables.start_loc.push(tables.blocks.len() as u32);
        }
        batch.cross.start_loc.push(batch.cross.blocks.len() as u32);
        batch.cross_start_loc.push(batch.cross_rows.len() as u32);
        batch
    }

    fn push(&mut self, s: &Running<'_>, chunk: usize) {
        let first = s.n_computed;
        let mut end = s.tokens.len().min(s.n_computed.saturating_add(chunk));
        if s.whole_items {
            let ends = s.own.embeds.iter().map(|(at, rows)| (*at, at + rows.len() / s.embed_width));
            end =
                ends.filter(|(at, to)| (*at + 1..*to).contains(&end)).map(|(_, to)| to).max().unwrap_or(end);
        }
        let first_row = self.token_ids.len();
        self.query_start_loc.push(first_row as u32);
        self.n_tokens.push(end - first);
        let n_prompt = s.own.prompt.len();
        for i in first..end {
            self.token_ids.push(s.tokens[i]);
            let next = || [s.own.next_position + (i - n_prompt) as u32; 3];
            self.positions.push(s.own.positions.get(i).copied().unwrap_or_else(next));
        }
        if let Some(adapter) = s.own.adapter {
            let rows = first_row as u32..self.token_ids.len() as u32;
            match self.adapters.iter_mut().find(|(of, _)| *of == adapter) {
                Some((_, known)) => known.extend(rows),
                None => self.adapters.push((adapter, rows.collect())),
            }
        }
        let among = if s.sees_items { &[][..] } else { &s.own.embeds };
        for (at, rows) in among {
            let width = s.embed_width;
            let from = first.max(*at);
            let span_end = at + rows.len() / width;
            let to = end.min(span_end);
            if from < to {
                let rows = stored(&rows[(from - at) * width..(to - at) * width], width);
                self.embeds.push((first_row + from - first, width, rows, to == span_end));
            }
        }
        for ((slots, tables), blocks) in self.own.iter_mut().zip(&s.blocks) {
            slots.extend((first..end).map(|i| slot(blocks, i)));
            tables.push(blocks, end);
        }
        let ends = s.views.iter().skip(1).map(|view| view.first_token).chain([usize::MAX]);
        for (view, until) in s.views.iter().zip(ends) {
            let seen = first.max(view.first_token)..end.min(until);
            if !seen.is_empty() {
                self.cross_start_loc.push(self.cross_rows.len() as u32);
                self.cross_rows.extend(seen.map(|token| (first_row + token - first) as u32));
                self.cross.push(&view.blocks, view.rows.len() / s.own.hidden);
            }
        }
        self.state_slots.push(s.state_slot);
        if end == s.tokens.len() {
            self.logit_rows.push(self.token_ids.len() as u32 - 1);
        }
    }

    fn forward(&self, decoder: &mut dyn Decoder) -> Vec<f32> {
        let embeds: Vec<EmbedRows<'_>> = self
            .embeds
            .iter()
            .map(|(first_row, hidden, rows, ends_span)| EmbedRows {
                first_row: *first_row,
                rows: encoded(rows, *hidden),
                ends_span: *ends_span,
            })
            .collect();
        let adapters: Vec<AdapterRows<'_>> =
            self.adapters.iter().map(|(adapter, rows)| AdapterRows { adapter: *adapter, rows }).collect();
        let groups = self.own.iter();
        let groups: Vec<GroupKv<'_>> = groups
            .map(|(slot_mapping, of)| GroupKv { slot_mapping, tables: of.view(&self.query_start_loc) })
            .collect();
        let mut chosen = decoder
            .forward(&StepInput {
                token_ids: &self.token_ids,
                positions: &self.positions,
                embeds: &embeds,
                self_kv: &groups,
                cross_kv: decoder.info().cross_attention.then(|| self.cross.view(&self.cross_start_loc)),
                cross_rows: decoder.info().cross_optional.then_some(self.cross_rows.as_slice()),
                state_slots: decoder.info().state_slot_bytes.map(|_| self.state_slots.as_slice()),
                adapters: &adapters,
                logit_rows: &self.logit_rows,
                choose: &ChooseBatch::whole(self.logit_rows.len()),
            })
            .expect("a step that fits");
        chosen.rows.get_mut(0, self.logit_rows.len()).expect("every row").to_vec()
    }
}

fn slot(blocks: &[u32], token: usize) -> u32 {
    blocks[token / KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS as u32 + (token % KV_BLOCK_TOKENS) as u32
}

fn argmax(row: &[f32]) -> u32 {
    let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(i, _)| i as u32)
}
