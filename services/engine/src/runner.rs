//! Runs a plan on a decoder: block moves first, then projections, then one forward. It knows no scheduling.

use crate::align::job::AlignJob;
use crate::blocks::BlockPair;
use crate::plan::{BlockMove, GroupTables, ItemEmbedding, ProjectionChunk, StepPlan};
use crate::states::StateMove;
use std::ops::Range;
use thiserror::Error;
use triptych_core::graph_stats::GraphStats;
use triptych_core::{AdapterId, EncodedRows, EncoderOutput};
use triptych_models::ModelError;
use triptych_models::decoder::{
    AdapterRows, AlignInput, DecodeGraphConfig, Decoder, DecoderInfo, EmbedRows, GroupKv, Pending, StepInput,
};
use triptych_models::lora::LoraAdapter;
use triptych_models::sampling::{CarriedToken, Choices, ChooseBatch};

/// A step did not run. Every sequence in it fails; the decoder can run the next step.
#[derive(Debug, Error)]
pub enum RunError {
    /// The decoder refused the step.
    #[error(transparent)]
    Decoder(#[from] ModelError),
    /// An encoder output is shorter than its metadata say.
    #[error("rows {first}..{end} of an encoder output are missing")]
    Rows {
        /// First row wanted.
        first: usize,
        /// One past the last.
        end: usize,
    },
    /// The decoder returned another number of choices than asked for.
    #[error("{actual} choices for {expected}")]
    Choices {
        /// Number asked for.
        expected: usize,
        /// Returned number.
        actual: usize,
    },
}

impl RunError {
    /// `true` if the decoder's device is lost, and every later step fails.
    pub fn is_device_lost(&self) -> bool {
        matches!(self, Self::Decoder(error) if error.is_device_lost())
    }
}

/// A decoder and its sizes.
pub struct Runner {
    decoder: Box<dyn Decoder>,
    info: DecoderInfo,
}

impl Runner {
    /// Wraps a decoder whose caches are allocated.
    pub fn new(decoder: Box<dyn Decoder>) -> Self {
        let info = decoder.info();
        Self { decoder, info }
    }

    /// Sizes of the decoder.
    pub fn info(&self) -> DecoderInfo {
        self.info
    }

    /// From now on decode steps are captured as graphs, as [`Decoder::use_graphs`] says.
    pub fn use_graphs(&mut self, config: Option<DecodeGraphConfig>) {
        self.decoder.use_graphs(config);
    }

    /// Decode steps with and without graphs so far.
    pub fn graph_stats(&self) -> GraphStats {
        self.decoder.graph_stats()
    }

    /// Width of the logits.
    pub fn vocab(&self) -> usize {
        self.info.vocab
    }

    /// Loads an adapter, as [`Decoder::load_adapter`].
    ///
    /// # Errors
    /// [`ModelError`] for an adapter that does not fit the decoder.
    pub fn load_adapter(&mut self, adapter: &LoraAdapter) -> Result<(), ModelError> {
        self.decoder.load_adapter(adapter)
    }

    /// Drops an adapter, which no step under way names.
    pub fn unload_adapter(&mut self, id: AdapterId) {
        self.decoder.unload_adapter(id);
    }

    /// Begins a pass over known tokens; an earlier one is dropped.
    ///
    /// # Errors
    /// [`RunError`].
    pub fn begin_align(&mut self, job: &AlignJob) -> Result<(), RunError> {
        let first = job.first_row as usize;
        let rows = encoded_rows(&job.output, first..first + job.n_rows as usize)?;
        let input = AlignInput { tokens: &job.tokens, rows, heads: &job.heads, adapter: job.adapter };
        Ok(self.decoder.begin_align(&input)?)
    }

    /// Runs a layer of the pass; after the last one its cross-attention weights, `[n_heads, n_tokens, n_rows]`.
    ///
    /// # Errors
    /// [`RunError`]; the pass has ended then.
    pub fn align_layer(&mut self) -> Result<Option<Vec<f32>>, RunError> {
        Ok(self.decoder.align_layer()?)
    }

    /// Runs a plan; returns what `choose` asks of its logits, `[logit_rows, vocab]`.
    ///
    /// # Errors
    /// [`RunError`]; blocks written by then hold nothing that may be read.
    pub fn run(&mut self, plan: &StepPlan, choose: &ChooseBatch) -> Result<Choices, RunError> {
        let pending = self.submit(plan, choose, None)?;
        self.wait(pending, choose)
    }

    /// Begins a plan. `carried`: rows whose tokens the step before chooses, and that step.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn submit(
        &mut self,
        plan: &StepPlan,
        choose: &ChooseBatch,
        carried: Option<(&[CarriedToken], &Pending)>,
    ) -> Result<Pending, RunError> {
        self.move_blocks(&plan.moves)?;
        self.move_states(&plan.state_moves)?;
        self.project(&plan.projections)?;
        if plan.token_ids.is_empty() {
            return Ok(Pending::Done(Choices::default()));
        }
        let embeds = plan.embeds.iter().map(embed_rows);
        let embeds: Vec<EmbedRows<'_>> = embeds.collect::<Result<_, _>>()?;
        let mut known = Vec::new();
        let (token_ids, carried) = match carried {
            None => (&plan.token_ids, &[][..]),
            Some((carried, Pending::UnderWay(_))) => (&plan.token_ids, carried),
            Some((carried, Pending::Done(before))) => {
                known.clone_from(&plan.token_ids);
                carried.iter().for_each(|one| carry(one, before, &mut known));
                (&known, &[][..])
            }
        };
        let adapters: Vec<AdapterRows<'_>> =
            plan.adapters.iter().map(|(adapter, rows)| AdapterRows { adapter: *adapter, rows }).collect();
        let self_kv: Vec<GroupKv<'_>> = plan.self_kv.iter().map(GroupTables::view).collect();
        let step = StepInput {
            token_ids,
            positions: &plan.positions,
            embeds: &embeds,
            self_kv: &self_kv,
            cross_kv: self.info.cross_attention.then(|| plan.cross_kv.view()),
            cross_rows: self.info.cross_optional.then_some(&plan.cross_rows[..]),
            state_slots: self.info.state_slot_bytes.map(|_| &plan.state_slots[..]),
            adapters: &adapters,
            logit_rows: &plan.logit_rows,
            choose,
        };
        let pending = self.decoder.submit(&step, carried)?;
        if !plan.checkpoints.is_empty() {
            self.decoder.copy_states(&plan.checkpoints)?;
        }
        Ok(pending)
    }

    /// Waits for a plan; returns what `choose` asked of its logits.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn wait(&mut self, pending: Pending, choose: &ChooseBatch) -> Result<Choices, RunError> {
        let chosen = self.decoder.wait(pending)?;
        let expected = choose.choices.len();
        let actual = chosen.choices.len();
        if expected == actual { Ok(chosen) } else { Err(RunError::Choices { expected, actual }) }
    }
}

impl Runner {
    /// One call for all rows of an adapter: of several small items they are one product with each layer's weights.
    fn project(&mut self, chunks: &[ProjectionChunk]) -> Result<(), RunError> {
        let mut adapters: Vec<Option<AdapterId>> = Vec::new();
        for chunk in chunks.iter().filter(|chunk| !chunk.slots.is_empty()) {
            if !adapters.contains(&chunk.key.adapter) {
                adapters.push(chunk.key.adapter);
            }
        }
        for adapter in adapters {
            let own = || chunks.iter().filter(|chunk| chunk.key.adapter == adapter);
            let rows = own().map(|chunk| encoded_rows(&chunk.output, chunk.output_rows.clone()));
            let rows: Vec<EncodedRows<'_>> = rows.collect::<Result<_, _>>()?;
            let slots: Vec<u32> = own().flat_map(|chunk| &chunk.slots).copied().collect();
            match adapter {
                Some(adapter) => self.decoder.project_cross_adapted(adapter, &rows, &slots)?,
                None => self.decoder.project_cross(&rows, &slots)?,
            }
        }
        Ok(())
    }

    /// As [`Self::move_blocks`].
    fn move_states(&mut self, moves: &[StateMove]) -> Result<(), ModelError> {
        for alike in moves.chunk_by(|a, b| std::mem::discriminant(a) == std::mem::discriminant(b)) {
            let (mut fresh, mut pairs) = (Vec::new(), Vec::new());
            for one in alike {
                match *one {
                    StateMove::Reset(slot) => fresh.push(slot),
                    StateMove::Copy { from, to } => pairs.push((from, to)),
                }
            }
            match fresh.is_empty() {
                false => self.decoder.reset_states(&fresh)?,
                true => self.decoder.copy_states(&pairs)?,
            }
        }
        Ok(())
    }

    /// Consecutive moves of one kind are one call; their order is kept.
    fn move_blocks(&mut self, moves: &[BlockMove]) -> Result<(), ModelError> {
        for alike in moves.chunk_by(|a, b| std::mem::discriminant(a) == std::mem::discriminant(b)) {
            let pairs: Vec<(u32, u32)> = alike.iter().map(|m| indices(m.pair())).collect();
            match alike[0] {
                BlockMove::Copy(_) => self.decoder.copy_blocks(&pairs)?,
                BlockMove::Out(_) => self.decoder.swap_out(&pairs)?,
                BlockMove::In(_) => self.decoder.swap_in(&pairs)?,
            }
        }
        Ok(())
    }
}

/// Writes a token that is known. One that could not be chosen fails its sequence, and its row is computed in vain.
fn carry(carried: &CarriedToken, before: &Choices, token_ids: &mut [u32]) {
    let token = before.choices.get(carried.choice as usize).and_then(|choice| choice.as_ref().ok());
    if let (Some(id), Some(choice)) = (token_ids.get_mut(carried.row as usize), token) {
        *id = choice.token;
    }
}

fn indices(pair: BlockPair) -> (u32, u32) {
    (pair.from.index(), pair.to.index())
}

/// Rows for the decoder.
fn embed_rows(embed: &ItemEmbedding) -> Result<EmbedRows<'_>, RunError> {
    let rows = encoded_rows(&embed.output, embed.rows.clone())?;
    Ok(EmbedRows { first_row: embed.first_row, rows, ends_span: embed.ends_span })
}

fn encoded_rows(output: &EncoderOutput, rows: Range<usize>) -> Result<EncodedRows<'_>, RunError> {
    let first = rows.start;
    let end = rows.end;
    output.encoded_rows(first, rows.len()).ok_or(RunError::Rows { first, end })
}
