//! The body of a completion request. Every field may be absent or null; unknown ones are ignored.

use super::super::api::AdmittedCall;
use super::super::part::{RawPart, items_of};
use super::super::prompt_input::{OnePrompt, PromptInput};
use super::super::sampling::SamplingBody;
use super::super::sse::StreamOptions;
use crate::request::{Api, Item, Request};
use serde::Deserialize;
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::{Failure, ModelName, RequestId};
use triptych_proto::v1;

/// Largest number of prompts in a body; all of them share one permit.
const MAX_PROMPTS: usize = 32;

/// The body, as parsed. [`SamplingBody`] is read from the same object.
#[derive(Debug, Deserialize)]
pub(super) struct CompletionBody {
    model: Option<String>,
    prompt: Option<PromptInput>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    logprobs: Option<u32>,
    // Extensions.
    encoder_prompt: Option<OnePrompt>,
    src_lang: Option<String>,
    items: Option<Vec<RawPart>>,
    // Known and not supported: may be present with an empty value.
    suffix: Option<String>,
    best_of: Option<u32>,
}

impl CompletionBody {
    pub(super) fn stream(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    pub(super) fn include_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|o| o.include_usage).unwrap_or(false)
    }

    /// Refuses unsupported fields that would change the answer.
    pub(super) fn check_supported(&self, sampling: &SamplingBody) -> Result<(), Failure> {
        if self.suffix.as_ref().is_some_and(|s| !s.is_empty()) {
            return Err(Failure::invalid("suffix is not supported by this server").with_param("suffix"));
        }
        match self.best_of {
            Some(best_of) if best_of != sampling.n() => {
                let message = format!("best_of is {best_of}, allowed is n, which is {}", sampling.n());
                Err(Failure::invalid(message).with_param("best_of"))
            }
            _ => Ok(()),
        }
    }

    /// The requests, one per prompt.
    pub(super) fn into_requests(
        self,
        call: &AdmittedCall,
        sampling: SamplingBody,
    ) -> Result<Vec<Request>, Failure> {
        let priority = sampling.priority();
        let sampling = sampling.into_wire(self.logprobs)?;
        let items = items_of(self.items.unwrap_or_default())?;
        let decoder = self.prompt.map(PromptInput::into_list).unwrap_or_default();
        let prompts = prompts(decoder, self.encoder_prompt.map(Into::into), &items)?;
        let n_prompts = prompts.len();
        if n_prompts > MAX_PROMPTS || (n_prompts > 1 && !items.is_empty()) {
            let limit = if items.is_empty() { MAX_PROMPTS } else { 1 };
            let message = format!("prompt has {n_prompts} prompts, the limit is {limit}");
            return Err(Failure::invalid(message).with_param("prompt"));
        }
        let request = |(i, prompt): (usize, Prompt)| Request {
            // The first has the response's id; the others need their own for logs and seeds.
            id: if i == 0 { call.id } else { RequestId::from_bits(rand::random()) },
            api: Api::Http,
            arrived: call.arrived,
            deadline: call.deadline,
            model: self.model.as_deref().filter(|m| !m.is_empty()).map(ModelName::new),
            prompt,
            items: items.clone(),
            sampling: v1::Sampling::clone(&sampling),
            caller: call.caller.clone(),
            priority,
            encoder_prompt: None,
            src_lang: self.src_lang.clone().filter(|code| !code.is_empty()),
            resumption: call.resumption,
        };
        Ok(prompts.into_iter().enumerate().map(request).collect())
    }
}

/// The prompt of each answer. An encoder prompt makes the pair explicit; with items, an absent prompt is the model's own
/// start.
fn prompts(
    decoder: Vec<TextOrTokens>,
    encoder: Option<TextOrTokens>,
    items: &[Item],
) -> Result<Vec<Prompt>, Failure> {
    let start = || TextOrTokens::Tokens(Vec::new());
    match (encoder, decoder.is_empty()) {
        (Some(encoder), true) => Ok(vec![Prompt::Explicit { encoder: Some(encoder), decoder: start() }]),
        (Some(encoder), false) => {
            let pair = |decoder| Prompt::Explicit { encoder: Some(encoder.clone()), decoder };
            Ok(decoder.into_iter().map(pair).collect())
        }
        (None, true) if items.is_empty() => {
            let message = "prompt is missing: text, token ids, a list of either, or encoder_prompt or items";
            Err(Failure::invalid(message).with_param("prompt"))
        }
        (None, true) => Ok(vec![Prompt::Singleton(start())]),
        (None, false) => Ok(decoder.into_iter().map(Prompt::Singleton).collect()),
    }
}
