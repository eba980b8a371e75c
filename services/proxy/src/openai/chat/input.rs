//! The body of a chat request. Every field may be absent or null; unknown ones are ignored.

use super::super::api::AdmittedCall;
use super::super::lists::{IsSet, ShortList};
use super::super::sampling::SamplingBody;
use super::super::sse::StreamOptions;
use super::message::RawMessage;
use crate::request::{Api, Request};
use serde::Deserialize;
use triptych_core::prompt::Prompt;
use triptych_core::{Failure, ModelName};

/// The body, as parsed. [`SamplingBody`] is read from the same object.
#[derive(Debug, Deserialize)]
pub(super) struct ChatBody {
    model: Option<String>,
    messages: Option<Vec<RawMessage>>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    // Extension.
    src_lang: Option<String>,
    // Known and not supported: may be present with an empty value.
    tools: Option<IsSet>,
    functions: Option<IsSet>,
    modalities: Option<ShortList<String>>,
}

impl ChatBody {
    pub(super) fn stream(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    pub(super) fn include_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|o| o.include_usage).unwrap_or(false)
    }

    /// Refuses unsupported fields that would change the answer.
    pub(super) fn check_supported(&self) -> Result<(), Failure> {
        let is_given = |value: &Option<IsSet>| value.is_some_and(|value| value.0);
        let non_text = self.modalities.iter().flat_map(|list| &list.0).any(|m| m != "text");
        let wanted = [
            ("tools", is_given(&self.tools)),
            ("functions", is_given(&self.functions)),
            ("modalities", non_text),
        ];
        match wanted.into_iter().find(|(_, wanted)| *wanted) {
            Some((field, _)) => {
                Err(Failure::invalid(format!("{field} is not supported by this server")).with_param(field))
            }
            None => Ok(()),
        }
    }

    /// The request. Media stay unresolved: the base64 text of a data URL, or a URL.
    pub(super) fn into_request(
        self,
        call: &AdmittedCall,
        sampling: SamplingBody,
    ) -> Result<Request, Failure> {
        let priority = sampling.priority();
        let sampling = sampling.into_wire(self.logprobs()?)?;
        let mut messages = Vec::new();
        let mut items = Vec::new();
        for (i, message) in self.messages.unwrap_or_default().into_iter().enumerate() {
            messages.push(message.into_message(i, &mut items)?);
        }
        Ok(Request {
            id: call.id,
            api: Api::Http,
            arrived: call.arrived,
            deadline: call.deadline,
            model: self.model.filter(|m| !m.is_empty()).map(ModelName::new),
            prompt: Prompt::Chat(messages),
            items,
            sampling,
            caller: call.caller.clone(),
            priority,
            encoder_prompt: None,
            src_lang: self.src_lang.filter(|code| !code.is_empty()),
            resumption: call.resumption,
        })
    }

    /// Alternatives to report beside each token, if log-probabilities are wanted.
    fn logprobs(&self) -> Result<Option<u32>, Failure> {
        match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (true, top) => Ok(Some(top.unwrap_or(0))),
            (false, None | Some(0)) => Ok(None),
            (false, Some(_)) => {
                Err(Failure::invalid("top_logprobs needs logprobs: true").with_param("top_logprobs"))
            }
        }
    }
}
