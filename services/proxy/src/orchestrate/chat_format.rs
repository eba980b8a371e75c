//! A conversation beside the format of its model: what is refused, the grammar of calls that must be made, and the parts that
//! are read from the answer.

use crate::fleet::catalog::Served;
use crate::request::Request;
use crate::tool_calls::{AnswerFormat, call_grammar, calls_or_json_grammar, strict_grammar};
use serde_json::{Value, json};
use triptych_core::Failure;
use triptych_core::prompt::{Chat, ChatEnding, MessagePart, Prompt, Tool, ToolChoice, ToolSyntax};
use triptych_proto::v1;

/// Holds a request against the format of its model's conversations, and constrains an answer that has to call tools.
///
/// # Errors
/// [`Failure`] that names a field of the request which the model's chat template does not know.
pub(super) fn apply(request: &mut Request, served: &Served) -> Result<AnswerFormat, Failure> {
    let Prompt::Chat(chat) = &request.prompt else { return Ok(AnswerFormat::default()) };
    check_template(chat, served)?;
    let mut format = served.chat.unwrap_or_default();
    let mut calls = calls(chat, served)?;
    let is_tagged = calls.is_some_and(ToolSyntax::is_tagged);
    // Tags have no grammar: what a model chooses to write in them is held to nothing.
    let is_strict = calls.is_some() && !is_tagged && chat.tools.iter().any(|tool| tool.is_strict);
    let is_forced = matches!(chat.tool_choice, ToolChoice::Required | ToolChoice::Named(_));
    let json = request.sampling.constraint.as_ref().and_then(schema_of);
    // Calls that begin with a mark of their own can stand beside JSON; others begin as JSON does.
    let is_marked = matches!(calls, Some(ToolSyntax::Hermes | ToolSyntax::Mistral));
    let is_either = is_marked && !is_forced && json.is_some();
    let is_refused = if is_forced { json.is_none() } else { is_strict && !is_either };
    if is_refused && request.sampling.constraint.is_some() {
        let (param, why) = match is_forced {
            true => ("tool_choice", "tool_choice asks for a call"),
            false => ("tools", "a tool is strict"),
        };
        let message = format!("{why}, so the answer can have no other format: leave response_format out");
        return Err(Failure::invalid(message).with_param(param));
    }
    let is_held = is_forced || is_strict || is_either;
    if is_tagged && is_held {
        calls = Some(ToolSyntax::Llama3Json);
        format.tool_syntax = calls;
    }
    let answer = AnswerFormat {
        calls,
        tools: chat.tools.iter().map(|tool| tool.name.clone()).collect(),
        schemas: chat.tools.iter().filter(|_| is_tagged).filter_map(schema_by_name).collect(),
        // A constrained answer begins at once with what it is held to.
        reasoning: format.reasoning.filter(|_| !is_forced && request.sampling.constraint.is_none()),
        hides_reasoning: chat.hides_reasoning,
    };
    if request.sampling.echo {
        return Ok(AnswerFormat::default());
    }
    if is_held {
        let tools: Vec<&Tool> = match &chat.tool_choice {
            ToolChoice::Named(name) => chat.tools.iter().filter(|tool| tool.name == *name).collect(),
            _ => chat.tools.iter().collect(),
        };
        let is_single = chat.has_single_call || matches!(chat.tool_choice, ToolChoice::Named(_));
        let grammar = match json.filter(|_| is_either) {
            Some(schema) => calls_or_json_grammar(format, &tools, is_single, &schema),
            // An answer that is a call has no text that the format could be of.
            None if is_forced => call_grammar(format, &tools, is_single),
            None => strict_grammar(format, &tools),
        };
        let kind = Some(v1::constraint::Kind::Grammar(grammar));
        request.sampling.constraint = Some(v1::Constraint { kind });
    }
    Ok(answer)
}

/// Name and schema of a tool.
fn schema_by_name(tool: &Tool) -> Option<(String, Value)> {
    let schema = serde_json::from_str(tool.parameters.as_deref()?).ok()?;
    Some((tool.name.clone(), schema))
}

/// The schema of an answer that must be JSON.
fn schema_of(constraint: &v1::Constraint) -> Option<Value> {
    use v1::constraint::Kind;
    match constraint.kind.as_ref()? {
        Kind::JsonObject(_) => Some(json!({"type": "object"})),
        Kind::JsonSchema(text) => serde_json::from_str(text).ok(),
        Kind::Regex(_) | Kind::Choice(_) | Kind::Grammar(_) => None,
    }
}

/// Syntax in which the answer's calls are read; `None`: they are text.
fn calls(chat: &Chat, served: &Served) -> Result<Option<ToolSyntax>, Failure> {
    let format = served.chat.unwrap_or_default();
    let refused = |message: String| Err(Failure::invalid(message).with_param("tools"));
    if chat.tools.is_empty() {
        return Ok(None);
    }
    match chat.tool_choice {
        ToolChoice::None => Ok(None),
        ToolChoice::Required | ToolChoice::Named(_) => {
            Ok(Some(format.tool_syntax.unwrap_or(ToolSyntax::Llama3Json)))
        }
        ToolChoice::Auto if !format.reads_tools => refused(format!(
            "the chat template of model {:?} shows no tools to it: leave tools out, or have a call made by tool_choice, \
             \"required\" or of one tool",
            served.name
        )),
        ToolChoice::Auto => match format.tool_syntax {
            Some(syntax) => Ok(Some(syntax)),
            None => refused(format!(
                "model {:?} writes calls of tools in a syntax that is not known; --tool-parser of its PD workers names one",
                served.name
            )),
        },
    }
}

/// Refuses what only a template could honour, of a model whose template does not.
fn check_template(chat: &Chat, served: &Served) -> Result<(), Failure> {
    let refused = |field: &str, why: &str| {
        let message = format!("{field} is for the chat template, {why} of model {:?}", served.name);
        Err(Failure::invalid(message).with_param(field))
    };
    let format = served.chat.unwrap_or_default();
    if chat.documents.is_some() && !format.reads_documents && chat.template.is_none() {
        return refused("documents", "which shows none in the one");
    }
    if served.chat.is_some() {
        return Ok(());
    }
    let parts = || chat.messages.iter().flat_map(|message| &message.parts);
    let of_template = |part: &MessagePart| !matches!(part, MessagePart::Text(_) | MessagePart::Item(_));
    let fields = [
        ("chat_template_kwargs", chat.template_kwargs.is_some()),
        ("add_generation_prompt", chat.ending == ChatEnding::LastMessage),
        ("continue_final_message", chat.ending == ChatEnding::OpenMessage),
        ("chat_template", chat.template.is_some()),
        ("messages", parts().any(of_template)),
    ];
    match fields.into_iter().find(|(_, is_set)| *is_set) {
        Some((field, _)) => refused(field, "and there is none"),
        None => Ok(()),
    }
}
