//! The body of a chat request. Every field may be absent or null; unknown ones are ignored.

use super::super::api::AdmittedCall;
use super::super::item_settings::ProcessorSettings;
use super::super::lists::{IsSet, IsWanted, ShortList};
use super::super::sampling::SamplingBody;
use super::super::sse::StreamOptions;
use super::message::RawMessage;
use super::tools::{self, RawChoice, RawTool};
use crate::request::{Api, Request};
use serde::Deserialize;
use serde_json::{Map, Value};
use triptych_core::prompt::{Chat, ChatEnding, Prompt};
use triptych_core::{Failure, ModelName};

/// The body, as parsed. [`SamplingBody`] is read from the same object.
#[derive(Debug, Deserialize)]
pub(crate) struct ChatBody {
    model: Option<String>,
    messages: Option<Vec<RawMessage>>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    tools: Option<ShortList<RawTool>>,
    tool_choice: Option<RawChoice>,
    parallel_tool_calls: Option<bool>,
    reasoning_effort: Option<String>,
    // Extensions.
    src_lang: Option<String>,
    mm_processor_kwargs: Option<ProcessorSettings>,
    include_reasoning: Option<bool>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
    documents: Option<ShortList<Value>>,
    chat_template: Option<String>,
    // Known and not supported: may be present with an empty value.
    functions: Option<IsSet>,
    function_call: Option<IsWanted>,
    modalities: Option<ShortList<String>>,
    audio: Option<IsSet>,
    web_search_options: Option<IsSet>,
    moderation: Option<IsSet>,
    media_io_kwargs: Option<IsSet>,
}

impl ChatBody {
    pub(super) fn stream(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    pub(super) fn include_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|o| o.include_usage).unwrap_or(false)
    }

    /// Refuses unsupported fields that would change the answer.
    pub(crate) fn check_supported(&self) -> Result<(), Failure> {
        let is_given = |value: &Option<IsSet>| value.is_some_and(|value| value.0);
        let is_wanted = |value: &Option<IsWanted>| value.is_some_and(|value| value.0);
        let non_text = self.modalities.iter().flat_map(|list| &list.0).any(|m| m != "text");
        let wanted = [
            ("functions", is_given(&self.functions)),
            ("function_call", is_wanted(&self.function_call)),
            ("modalities", non_text),
            ("audio", is_given(&self.audio)),
            ("web_search_options", is_given(&self.web_search_options)),
            ("moderation", is_given(&self.moderation)),
            ("media_io_kwargs", is_given(&self.media_io_kwargs)),
        ];
        match wanted.into_iter().find(|(_, wanted)| *wanted) {
            Some((field, _)) => {
                Err(Failure::invalid(format!("{field} is not supported by this server")).with_param(field))
            }
            None => Ok(()),
        }
    }

    /// The request. Media stay unresolved: the base64 text of a data URL, or a URL.
    pub(crate) fn into_request(
        mut self,
        call: &AdmittedCall,
        sampling: SamplingBody,
    ) -> Result<Request, Failure> {
        let priority = sampling.priority();
        let sampling = sampling.into_wire(self.logprobs()?)?;
        let mut messages = Vec::new();
        let mut items = Vec::new();
        for (i, message) in self.messages.take().unwrap_or_default().into_iter().enumerate() {
            messages.push(message.into_message(i, &mut items)?);
        }
        self.mm_processor_kwargs.take().unwrap_or_default().apply(&mut items)?;
        let documents = self.documents.take().map(|list| Value::Array(list.0).to_string());
        let chat = Chat {
            messages,
            ending: self.ending()?,
            template_kwargs: self.template_kwargs(),
            template: self.chat_template.take().filter(|text| !text.is_empty()),
            documents: documents.filter(|text| text != "[]"),
            tools: tools::tools(self.tools)?,
            tool_choice: tools::choice(self.tool_choice)?,
            has_single_call: self.parallel_tool_calls == Some(false),
            hides_reasoning: self.include_reasoning == Some(false),
        };
        Ok(Request {
            id: call.id,
            api: Api::Http,
            arrived: call.arrived,
            deadline: call.deadline,
            model: self.model.filter(|m| !m.is_empty()).map(ModelName::new),
            prompt: Prompt::Chat(chat),
            items,
            sampling,
            caller: call.caller.clone(),
            priority,
            encoder_prompt: None,
            src_lang: self.src_lang.filter(|code| !code.is_empty()),
            resumption: call.resumption,
        })
    }

    /// End of the rendered conversation.
    fn ending(&self) -> Result<ChatEnding, Failure> {
        match (self.continue_final_message.unwrap_or(false), self.add_generation_prompt) {
            (true, Some(true)) => {
                let message =
                    "continue_final_message and add_generation_prompt are both true, allowed is one";
                Err(Failure::invalid(message).with_param("continue_final_message"))
            }
            (true, _) => Ok(ChatEnding::OpenMessage),
            (false, Some(false)) => Ok(ChatEnding::LastMessage),
            (false, _) => Ok(ChatEnding::GenerationPrompt),
        }
    }

    /// Variables of the template; `reasoning_effort` is one, as in vLLM.
    fn template_kwargs(&mut self) -> Option<String> {
        let mut variables = self.chat_template_kwargs.take().unwrap_or_default();
        if let Some(effort) = self.reasoning_effort.take() {
            variables.entry("reasoning_effort").or_insert(effort.into());
        }
        (!variables.is_empty()).then(|| Value::Object(variables).to_string())
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
