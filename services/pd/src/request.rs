//! A validated request: its prompt, sequences and permits, and the worker's parts that it uses.

use crate::coalesce::StreamTicks;
use crate::driver::Driver;
use crate::loads::EcLoads;
use crate::meters::PdMeters;
use crate::resume::{PriorOutput, PriorOutputs};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;
use triptych_core::prompt::Prompt;
use triptych_core::sampling::SamplingParams;
use triptych_core::{AdapterId, EncodedItem, Failure, RequestId, TenantId};
use triptych_ec::connector::ItemHint;
use triptych_engine::constraint::CompiledConstraint;
use triptych_engine::{SequenceId, SequenceRequest};
use triptych_models::prompt::{OutputKind, PreparedSequence};
use triptych_models::speech::SpeechInfo;
use triptych_models::tokenization::Tokenizer;
use triptych_runtime::start_journal::Starting;

/// A validated request with its prompt laid out.
pub struct AdmittedRequest {
    /// Request id.
    pub request: RequestId,
    /// Prompt, for the summary.
    pub prompt: Prompt,
    /// Encoded items.
    pub items: Vec<EncodedItem>,
    /// Tokens whose n-grams the answer may not repeat; empty: none.
    pub encoder_tokens: Arc<[u32]>,
    /// Locations of their outputs, in the order of items; an item without one is in the store.
    pub hints: Vec<ItemHint>,
    /// Sequences, one for each window.
    pub windows: Vec<PreparedSequence>,
    /// Sampling settings.
    pub sampling: SamplingParams,
    /// Compiled form of the constraint in `sampling`.
    pub constraint: Option<CompiledConstraint>,
    /// Output of choices that another worker began.
    pub prior: PriorOutputs,
    /// Adapter of its sequences.
    pub adapter: Option<AdapterId>,
    /// Owner.
    pub tenant: TenantId,
    /// Smaller runs first.
    pub priority: i32,
    /// Time of arrival.
    pub arrived: Instant,
    /// Time by which it must have ended.
    pub deadline: Instant,
    /// Entry in the journal, until the request has begun to answer.
    pub starting: Option<Starting>,
    /// Permits, held to the end of the request.
    pub _permits: RequestPermits,
}

impl AdmittedRequest {
    /// True if the engine can resume another worker's output: one sequence for each choice, whose text streams.
    pub fn can_resume(&self) -> bool {
        let is_text = |w: &PreparedSequence| matches!(w.output, OutputKind::Text);
        !self.prior.is_empty()
            && self.sampling.beams.is_none()
            && matches!(&self.windows[..], [one] if is_text(one))
    }

    /// One sequence for each choice, resumed where another worker left it.
    pub fn resumed(
        &self,
        ids: &[SequenceId],
        sampling: &SamplingParams,
    ) -> Result<Vec<SequenceRequest>, Failure> {
        let echo = self.windows.first().filter(|_| sampling.echo).map(|w| &w.tokens[..]);
        let nothing = PriorOutput::default();
        let request = |(choice, id): (u32, &SequenceId)| {
            let resumed = self.prior.get(&choice).unwrap_or(&nothing).resumed(choice, echo)?;
            let prompt_logprobs = sampling.prompt_logprobs.filter(|_| choice == 0);
            let request =
                self.sequence(0, vec![*id], SamplingParams { n: 1, prompt_logprobs, ..sampling.clone() });
            Ok(SequenceRequest { resumed: Some(resumed), ..request })
        };
        (0..).zip(ids).map(request).collect()
    }

    /// The sequence of a window with completions `ids`.
    pub fn sequence(&self, window: usize, ids: Vec<SequenceId>, sampling: SamplingParams) -> SequenceRequest {
        SequenceRequest {
            ids,
            prepared: self.windows[window].clone(),
            encoder_tokens: Arc::clone(&self.encoder_tokens),
            items: self.items.clone(),
            sampling,
            constraint: self.constraint.clone(),
            priority: self.priority,
            adapter: self.adapter,
            tenant: self.tenant,
            deadline: self.deadline,
            resumed: None,
        }
    }
}

/// Permits of a request and its sequences, released when dropped.
pub struct RequestPermits {
    /// Permit of the request.
    pub _request: Arc<OwnedSemaphorePermit>,
    /// Permits of its sequences.
    pub _sequences: OwnedSemaphorePermit,
}

/// Parts of the worker that a request uses.
pub struct RequestContext {
    /// Driver of the model's engine.
    pub driver: Driver,
    /// EC connector.
    pub loads: EcLoads,
    /// Tokenizer, for languages and segments.
    pub tokenizer: Arc<Tokenizer>,
    /// Properties of the speech model, if it is one.
    pub speech: Option<SpeechInfo>,
    /// Tokens that begin and end the model's reasoning, if it thinks.
    pub reasoning_tokens: Option<[u32; 2]>,
    /// Metrics of the model.
    pub meters: PdMeters,
    /// Ticks of held messages.
    pub stream_ticks: StreamTicks,
    /// Cancelled when the process must end.
    pub abort: CancellationToken,
}

/// Position of a sequence in the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChoiceWindow {
    /// Index of the choice.
    pub choice: u32,
    /// Index of the window within the choice.
    pub window: usize,
}
