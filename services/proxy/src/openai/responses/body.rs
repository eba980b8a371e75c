//! The body of a responses request. Every field may be absent or null; unknown ones are ignored.

use super::super::api::AdmittedCall;
use super::super::item_settings::ProcessorSettings;
use super::super::lists::{IsSet, IsWanted, ShortList};
use super::super::sampling::SamplingBody;
use super::input::{self, Input};
use super::settings::{RawChoice, RawTool, ReasoningSettings, Settings, TextSettings};
use crate::request::{Api, Request};
use serde::Deserialize;
use serde_json::{Map, Value};
use triptych_core::prompt::{Chat, ChatEnding, Prompt};
use triptych_core::{Failure, ModelName};

/// Value of `include` that asks for log-probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";
/// Value of `include` that clients without stored responses send. Reasoning stands in the items in clear.
const ENCRYPTED_REASONING: &str = "reasoning.encrypted_content";

/// The body, as parsed. [`SamplingBody`] is read from the same object.
#[derive(Debug, Deserialize)]
pub(super) struct ResponsesBody {
    model: Option<String>,
    input: Option<Input>,
    instructions: Option<String>,
    stream: Option<bool>,
    max_output_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_logprobs: Option<u32>,
    include: Option<ShortList<String>>,
    tools: Option<ShortList<RawTool>>,
    tool_choice: Option<RawChoice>,
    parallel_tool_calls: Option<bool>,
    reasoning: Option<ReasoningSettings>,
    text: Option<TextSettings>,
    truncation: Option<String>,
    // Repeated in the response.
    max_tool_calls: Option<u32>,
    metadata: Option<Map<String, Value>>,
    prompt_cache_key: Option<String>,
    safety_identifier: Option<String>,
    user: Option<String>,
    // Extensions.
    chat_template_kwargs: Option<Map<String, Value>>,
    mm_processor_kwargs: Option<ProcessorSettings>,
    // Known and not supported: may be present with an empty value.
    moderation: Option<IsSet>,
    background: Option<IsWanted>,
    previous_response_id: Option<IsWanted>,
    conversation: Option<IsWanted>,
    prompt: Option<IsSet>,
    context_management: Option<IsSet>,
    // Names of chat for what has another name here.
    messages: Option<IsSet>,
    max_tokens: Option<IsSet>,
    max_completion_tokens: Option<IsSet>,
    response_format: Option<IsSet>,
}

impl ResponsesBody {
    pub(super) fn is_stream(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    /// Refuses unsupported fields that would change the answer.
    pub(super) fn check_supported(&self, sampling: &SamplingBody) -> Result<(), Failure> {
        let is_given = |value: &Option<IsSet>| value.is_some_and(|value| value.0);
        let is_wanted = |value: &Option<IsWanted>| value.is_some_and(|value| value.0);
        let unstored = "nothing is stored: send the whole conversation as input";
        let wanted = [
            ("moderation", is_given(&self.moderation), "nothing is moderated"),
            ("background", is_wanted(&self.background), "nothing is stored"),
            ("previous_response_id", is_wanted(&self.previous_response_id), unstored),
            ("conversation", is_wanted(&self.conversation), unstored),
            ("prompt", is_given(&self.prompt), "nothing is stored: send the text as instructions"),
            ("context_management", is_given(&self.context_management), "the conversation is the client's"),
            ("messages", is_given(&self.messages), "its name here is input"),
            ("max_tokens", is_given(&self.max_tokens), "its name here is max_output_tokens"),
            (
                "max_completion_tokens",
                is_given(&self.max_completion_tokens),
                "its name here is max_output_tokens",
            ),
            ("response_format", is_given(&self.response_format), "its name here is text.format"),
            ("n", sampling.n() != 1, "a response is one answer"),
            ("prompt_logprobs", sampling.prompt_logprobs(), "a response has no place for them"),
        ];
        if let Some((field, _, why)) = wanted.into_iter().find(|(_, wanted, _)| *wanted) {
            let message = format!("{field} is not supported: {why}");
            return Err(Failure::invalid(message).with_param(field));
        }
        match self.truncation.as_deref() {
            None | Some("disabled") => Ok(()),
            Some(other) => {
                let message = format!("truncation is {other:?}, allowed is disabled");
                Err(Failure::invalid(message).with_param("truncation"))
            }
        }
    }

    /// The settings that the response repeats.
    pub(super) fn settings(&self) -> Settings {
        Settings {
            instructions: self.instructions.clone(),
            max_output_tokens: self.max_output_tokens,
            max_tool_calls: self.max_tool_calls,
            metadata: self.metadata.clone().unwrap_or_default(),
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
            prompt_cache_key: self.prompt_cache_key.clone(),
            reasoning: self.reasoning.clone().unwrap_or_default(),
            safety_identifier: self.safety_identifier.clone(),
            temperature: self.temperature,
            text: self.text.clone().unwrap_or_default(),
            tool_choice: self.tool_choice.clone().unwrap_or_default(),
            tools: self.tools.iter().flat_map(|list| &list.0).cloned().collect(),
            top_logprobs: self.top_logprobs.unwrap_or(0),
            top_p: self.top_p,
            user: self.user.clone(),
        }
    }

    /// The request. Media stay unresolved: the base64 text of a data URL, or a URL.
    pub(super) fn into_request(
        mut self,
        call: &AdmittedCall,
        mut sampling: SamplingBody,
    ) -> Result<Request, Failure> {
        let priority = sampling.priority();
        let format = self.text.take().unwrap_or_default().format()?;
        sampling.set_output(self.max_output_tokens, format);
        let sampling = sampling.into_wire(self.logprobs()?)?;
        let mut items = Vec::new();
        let messages = input::messages(self.instructions.take(), self.input.take(), &mut items)?;
        self.mm_processor_kwargs.take().unwrap_or_default().apply(&mut items)?;
        let tools = self.tools.take().map(|list| list.0).unwrap_or_default().into_iter().enumerate();
        let chat = Chat {
            messages,
            ending: ChatEnding::GenerationPrompt,
            template_kwargs: self.template_kwargs(),
            template: None,
            documents: None,
            tools: tools.map(|(i, tool)| tool.into_tool(i)).collect::<Result<_, _>>()?,
            tool_choice: self.tool_choice.take().unwrap_or_default().into_choice()?,
            has_single_call: self.parallel_tool_calls == Some(false),
            hides_reasoning: false,
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
            src_lang: None,
            resumption: call.resumption,
        })
    }

    /// Variables of the template; `reasoning.effort` is one, under its name in chat.
    fn template_kwargs(&mut self) -> Option<String> {
        let mut variables = self.chat_template_kwargs.take().unwrap_or_default();
        if let Some(effort) = self.reasoning.take().and_then(|reasoning| reasoning.effort) {
            variables.entry("reasoning_effort").or_insert(effort.into());
        }
        (!variables.is_empty()).then(|| Value::Object(variables).to_string())
    }

    /// Alternatives to report beside each token, if log-probabilities are wanted.
    fn logprobs(&self) -> Result<Option<u32>, Failure> {
        let mut is_wanted = false;
        for value in self.include.iter().flat_map(|list| &list.0) {
            match value.as_str() {
                LOGPROBS => is_wanted = true,
                ENCRYPTED_REASONING => {}
                other => {
                    let message =
                        format!("include has {other:?}, allowed are {LOGPROBS} and {ENCRYPTED_REASONING}");
                    return Err(Failure::invalid(message).with_param("include"));
                }
            }
        }
        match self.top_logprobs {
            top if is_wanted => Ok(Some(top.unwrap_or(0))),
            None | Some(0) => Ok(None),
            Some(_) => Err(Failure::invalid(format!("top_logprobs needs {LOGPROBS} in include"))
                .with_param("top_logprobs")),
        }
    }
}
