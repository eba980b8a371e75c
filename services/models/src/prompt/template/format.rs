//! The format of a model's conversations, read from the text of its chat template.

use triptych_core::prompt::{ChatFormat, ReasoningSyntax, ToolSyntax};

/// The format of a template with this text, whose variables are `is_variable`.
///
/// The markers are those of the published templates: Hermes 2 Pro and Qwen write `<tool_call>` around JSON, Qwen3-Coder and
/// GLM tags of their own within it, Mistral `[TOOL_CALLS]`, Llama 3 `<|python_tag|>` or an object with `"parameters"`.
pub(super) fn format_of(source: &str, is_variable: impl Fn(&str) -> bool) -> ChatFormat {
    let has = |text: &str| source.contains(text);
    let reads_tools = is_variable("tools");
    let tool_syntax = if !reads_tools {
        None
    } else if has("[TOOL_CALLS]") {
        Some(ToolSyntax::Mistral)
    } else if has("<tool_call>") {
        Some(match (has("<function="), has("<arg_key>")) {
            (true, _) => ToolSyntax::Qwen3Coder,
            (false, true) => ToolSyntax::Glm45,
            (false, false) => ToolSyntax::Hermes,
        })
    } else if has("<|python_tag|>") || has("\"parameters\":") {
        Some(ToolSyntax::Llama3Json)
    } else {
        None
    };
    ChatFormat {
        reads_tools,
        reads_documents: is_variable("documents"),
        tool_syntax,
        has_named_args: tool_syntax == Some(ToolSyntax::Mistral) && has("[ARGS]"),
        reasoning: if has("[THINK]") {
            Some(ReasoningSyntax::Mistral)
        } else {
            (has("</think>") || has("<think>")).then_some(ReasoningSyntax::ThinkTags)
        },
    }
}
