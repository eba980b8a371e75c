//! A sequence request, checked against the engine's capacity before anything is kept of it.
//!
//! A sequence that can never run is refused here, at once; the scheduler decides when the others run.

use crate::blocks::blocks_for;
use crate::constraint::CompiledConstraint;
use std::sync::Arc;
use std::time::Instant;
use triptych_core::sampling::SamplingParams;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_core::{AdapterId, EncodedItem, Failure, FailureClass, ItemIdx, TenantId};
use triptych_models::decoder::DecoderInfo;
use triptych_models::prompt::{CrossInput, PreparedSequence};

/// Id of a sequence or completion, given by the driver and never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// A sequence to generate, with all its completions. A client request over several audio windows is several of
/// these.
#[derive(Clone, Debug)]
pub struct SequenceRequest {
    /// One id for each completion, `n` of `sampling`: they share one prefill and fork from it. With beams, the
    /// best completion has the first id.
    pub ids: Vec<SequenceId>,
    /// Tokens, positions, item spans and family rules.
    pub prepared: PreparedSequence,
    /// Tokens of the encoder's text, or of the prompt of a model without an encoder, for
    /// `encoder_no_repeat_ngram_size`; empty where that is off.
    pub encoder_tokens: Arc<[u32]>,
    /// Items of the client request; `prepared` names them by index.
    pub items: Vec<EncodedItem>,
    /// Sampling settings; completions under one seed differ by their index in `ids`.
    pub sampling: SamplingParams,
    /// Compiled form of the constraint in `sampling`.
    pub constraint: Option<CompiledConstraint>,
    /// Smaller runs first, and is preempted last.
    pub priority: i32,
    /// Adapter, which is loaded; `None`: the base model alone.
    pub adapter: Option<AdapterId>,
    /// Owner: the salt of its prefix keys, and the unit of fair sharing.
    pub tenant: TenantId,
    /// Time by which it must have ended.
    pub deadline: Instant,
    /// State of a completion that another worker began; then `ids` has one id. `None`: a new sequence.
    pub resumed: Option<Resumed>,
}

/// A completion that another worker began. It continues with the tokens that would have been chosen there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resumed {
    /// Index among the completions of its request, which its random draws depend on.
    pub choice: u32,
    /// Generated tokens so far, without those of an echoed prompt.
    pub tokens: Vec<u32>,
    /// Bytes of text that the client has, those of an echoed prompt included.
    pub text_len: usize,
    /// True if the prompt was echoed already.
    pub is_echoed: bool,
    /// True if the completion had ended: it is counted, and nothing follows.
    pub is_ended: bool,
}

/// Upper bounds of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    /// Sizes of the decoder.
    pub decoder: DecoderInfo,
    /// Number of all self-attention blocks.
    pub self_blocks: usize,
    /// Most rows of a step.
    pub token_budget: usize,
    /// Number of all cross-attention blocks.
    pub cross_blocks: usize,
    /// Run slots; a beam takes one.
    pub max_sequences: usize,
}

impl Capacity {
    /// Most tokens of a sequence: the model's context, or as many as the whole pool holds if that is less.
    pub fn context(&self, request: &SequenceRequest) -> usize {
        let DecoderInfo { kv_groups, max_context, .. } = self.decoder;
        kv_groups.max_tokens(self.self_blocks, self.chunk(request), max_context).min(max_context)
    }

    /// Most tokens of a request that one step computes: a span whose rows attend to each other is not cut.
    fn chunk(&self, request: &SequenceRequest) -> usize {
        let spans = request.prepared.spans.iter().map(|span| span.n_tokens as usize);
        let longest = spans.filter(|_| self.decoder.mutual_items).max().unwrap_or(0);
        self.token_budget.max(longest)
    }

    /// Most tokens of each beam of a request. Beams share the full blocks of their prompt, and the pool must
    /// hold all of them at once, those behind a window too. Where there are recurrent states, beams that were preempted begin with a
    /// checkpoint, which may be gone, and so may share nothing.
    pub fn limit(&self, request: &SequenceRequest) -> usize {
        let width = request.width();
        let context = self.context(request);
        if width == 1 {
            return context;
        }
        let shares = self.decoder.state_slot_bytes.is_none();
        let n_shared = if shares { request.prepared.tokens.len() / KV_BLOCK_TOKENS } else { 0 };
        let n_blocks = self.self_blocks / self.decoder.kv_groups.n_groups();
        let n_each = n_blocks.saturating_sub(n_shared) / width;
        context.min((n_shared + n_each) * KV_BLOCK_TOKENS)
    }

    /// Most blocks that a sequence of so many tokens holds.
    pub fn n_blocks(&self, n_tokens: usize, n_branches: usize) -> usize {
        let groups = self.decoder.kv_groups;
        match n_branches {
            1 => groups.n_blocks(n_tokens, self.token_budget),
            n => groups.without_windows().n_blocks(n_tokens, 0).saturating_mul(n),
        }
    }
}

impl SequenceRequest {
    /// Number of beams; 1 without beam search.
    pub fn width(&self) -> usize {
        self.sampling.beams.map_or(1, |beams| beams.width.max(1) as usize)
    }

    /// Tokens present at arrival: those of the prompt, and those that another worker generated.
    pub fn n_given(&self) -> usize {
        self.prepared.tokens.len() + self.resumed.as_ref().map_or(0, |resumed| resumed.tokens.len())
    }

    /// Fewest tokens of a completion, barring failures: 1, or more when it may not end before.
    pub fn least_tokens(&self) -> usize {
        let least = match self.sampling.max_tokens {
            Some(max) if self.sampling.ignore_eos && self.sampling.stop.is_empty() => max,
            _ => self.sampling.min_tokens,
        };
        least.max(1) as usize
    }

    /// Checks that the sequence can run on an otherwise empty engine.
    ///
    /// # Errors
    /// A message for the client when the request is at fault; [`FailureClass::Internal`] when its parts
    /// contradict each other.
    pub fn check(&self, capacity: &Capacity) -> Result<(), Failure> {
        self.sampling.validate()?;
        self.check_ids(capacity)?;
        if self.sampling.constraint.is_some() != self.constraint.is_some() {
            return Err(Failure::internal("a constraint and its compiled form do not come together"));
        }
        if self.ids.len() != self.sampling.n as usize {
            let counts = (self.ids.len(), self.sampling.n);
            return Err(Failure::internal(format!("names and completions differ in number: {counts:?}")));
        }
        self.check_spans(capacity)?;
        self.check_cross(capacity)?;
        self.check_tokens(capacity)?;
        self.check_resumed(capacity)
    }

    /// Every token that a setting names has a logit.
    fn check_ids(&self, capacity: &Capacity) -> Result<(), Failure> {
        let vocab = capacity.decoder.vocab;
        let biased = self.sampling.logit_bias.iter().map(|(token, _)| ("logit_bias", *token));
        let allowed = self.sampling.allowed_token_ids.iter().map(|token| ("allowed_token_ids", *token));
        match biased.chain(allowed).find(|(_, token)| *token as usize >= vocab) {
            Some((field, token)) => {
                let text = format!("{field} names token {token}, allowed are tokens 0 to {}", vocab - 1);
                Err(Failure::invalid(text).with_param(field))
            }
            None => Ok(()),
        }
    }

    fn check_resumed(&self, capacity: &Capacity) -> Result<(), Failure> {
        let Some(resumed) = &self.resumed else { return Ok(()) };
        if self.ids.len() != 1 || self.sampling.beams.is_some() {
            return Err(Failure::internal("several completions or beams cannot be resumed as one"));
        }
        let limit = capacity.limit(self);
        let vocab = capacity.decoder.n_readable;
        let refuse = |text: String| Err(Failure::invalid(text).with_param("resume"));
        // A prompt that fills the context has room for one token, which ends the completion.
        if self.n_given() > limit.max(self.prepared.tokens.len() + 1) {
            return refuse(format!(
                "prompt and completion have {} tokens, this server holds {limit}",
                self.n_given()
            ));
        }
        match resumed.tokens.iter().find(|token| **token as usize >= vocab) {
            Some(token) => {
                refuse(format!("the completion has token {token}, the model has tokens below {vocab}"))
            }
            None => Ok(()),
        }
    }

    fn check_tokens(&self, capacity: &Capacity) -> Result<(), Failure> {
        let tokens = &self.prepared.tokens;
        if tokens.is_empty() {
            return Err(Failure::invalid("the prompt has no tokens").with_param("prompt"));
        }
        if self.prepared.positions.len() != tokens.len() {
            let counts = (tokens.len(), self.prepared.positions.len());
            return Err(Failure::internal(format!("tokens and positions differ in number: {counts:?}")));
        }
        self.check_beams(capacity)?;
        let limit = capacity.context(self);
        if tokens.len() > limit {
            let text = format!("the prompt has {} tokens, this server holds {limit}", tokens.len());
            return Err(Failure::new(FailureClass::TooLarge, text).with_param("prompt"));
        }
        // Embeddings of placeholders are replaced, so their ids may lie outside the vocabulary.
        let in_span = |i: usize| self.prepared.spans.iter().any(|s| span_of(s).contains(&i));
        let vocab = capacity.decoder.n_readable;
        match tokens.iter().enumerate().find(|(i, t)| **t as usize >= vocab && !in_span(*i)) {
            Some((_, token)) => {
                let text = format!("the prompt has token {token}, the model has tokens below {vocab}");
                Err(Failure::invalid(text).with_param("prompt"))
            }
            None => Ok(()),
        }
    }

    fn check_beams(&self, capacity: &Capacity) -> Result<(), Failure> {
        let width = self.width();
        let most = capacity.max_sequences;
        if width > most {
            let text = format!("num_beams is {width}, this server runs up to {most} at once");
            return Err(Failure::invalid(text).with_param("num_beams"));
        }
        let n_tokens = self.prepared.tokens.len();
        let limit = capacity.limit(self);
        if width > 1 && n_tokens > limit {
            let text =
                format!("the prompt has {n_tokens} tokens, this server holds {limit} with {width} beams");
            return Err(Failure::invalid(text).with_param("num_beams"));
        }
        Ok(())
    }

    fn check_spans(&self, capacity: &Capacity) -> Result<(), Failure> {
        let mut end = 0;
        // Rows of each item in the spans so far; they come in order and none is left out.
        let mut rows = vec![0_u32; self.items.len()];
        for span in &self.prepared.spans {
            let item = self.item(span.item, capacity.decoder.embedded_hidden)?;
            let range = span_of(span);
            let in_order = end <= range.start && range.end <= self.prepared.tokens.len();
            let seen = &mut rows[span.item.0 as usize];
            let next = seen.checked_add(span.n_tokens);
            let next = next.filter(|next| *next <= item.n_tokens);
            match next.filter(|_| in_order && span.first_row == *seen && span.n_tokens > 0) {
                Some(next) => *seen = next,
                None => {
                    let text = format!("span {span:?} does not fit prompt or item {item:?}");
                    return Err(Failure::internal(text));
                }
            }
            end = range.end;
        }
        if capacity.decoder.mutual_items && end > 0 && end == self.prepared.tokens.len() {
            // Its last token is computed by itself where a request has several completions.
            let text = "the prompt ends with an item; this model needs text after the last one";
            return Err(Failure::new(FailureClass::InvalidArgument, text));
        }
        let short = self.items.iter().zip(&rows).find(|(item, n)| **n > 0 && **n != item.n_tokens);
        match short {
            Some((item, n)) => Err(Failure::internal(format!("spans have {n} rows of item {item:?}"))),
            None => Ok(()),
        }
    }

    fn check_cross(&self, capacity: &Capacity) -> Result<(), Failure> {
        let DecoderInfo { cross_attention, cross_optional, .. } = capacity.decoder;
        let inputs = &self.prepared.cross;
        if !cross_optional && inputs.len() != usize::from(cross_attention) {
            let text = format!(
                "{} encoder inputs for a model that needs {}",
                inputs.len(),
                u8::from(cross_attention)
            );
            return Err(Failure::internal(text));
        }
        let mut next_token = 0;
        for cross in inputs {
            let item = self.item(cross.item, capacity.decoder.encoder_hidden)?;
            let end = cross.first_row.checked_add(cross.n_rows);
            let has_rows = cross.n_rows > 0 && end.is_some_and(|end| end <= item.n_tokens);
            let first = cross.first_token as usize;
            let in_order = (next_token..self.prepared.tokens.len()).contains(&first);
            if !cross_attention || !has_rows || !in_order || (first > 0 && !cross_optional) {
                return Err(Failure::internal(format!(
                    "{cross:?} does not fit model, prompt or item {item:?}"
                )));
            }
            next_token = first + 1;
        }
        let n_blocks: usize = cross_runs(inputs)
            .map(|run| blocks_for(run.iter().map(|input| input.n_rows as usize).sum()))
            .sum();
        if n_blocks > capacity.cross_blocks {
            let limit = capacity.cross_blocks * KV_BLOCK_TOKENS;
            let n_rows: u64 = inputs.iter().map(|input| u64::from(input.n_rows)).sum();
            let text = format!(
                "the encoder input has {n_rows} rows, this server's cross-attention cache holds {limit} (--cross-kv-mib)"
            );
            return Err(Failure::new(FailureClass::TooLarge, text));
        }
        Ok(())
    }

    /// An encoder output whose rows are `width` wide.
    fn item(&self, idx: ItemIdx, width: usize) -> Result<&EncodedItem, Failure> {
        let item = self.items.get(idx.0 as usize);
        let item = item.ok_or_else(|| Failure::internal(format!("{idx:?} of {} items", self.items.len())))?;
        if item.hidden as usize != width {
            let text = "an item was encoded for another model";
            let detail = format!("rows are {} wide, the decoder takes {width}", item.hidden);
            return Err(Failure::new(FailureClass::Mismatch, text).with_detail(detail));
        }
        Ok(item)
    }
}

/// Token range of a span.
pub(crate) fn span_of(span: &triptych_models::prompt::ItemSpan) -> std::ops::Range<usize> {
    let first = span.first_token as usize;
    first..first + span.n_tokens as usize
}

/// Inputs that are attended to together: those at consecutive tokens.
pub(crate) fn cross_runs(inputs: &[CrossInput]) -> impl Iterator<Item = &[CrossInput]> {
    inputs.chunk_by(|a, b| a.first_token.checked_add(1) == Some(b.first_token))
}
