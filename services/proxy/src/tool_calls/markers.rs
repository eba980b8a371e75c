//! The texts around calls of tools, by syntax.

use triptych_core::prompt::ToolSyntax;

/// Begins a call of Hermes' syntax.
pub(super) const CALL: &str = "<tool_call>";
/// Ends it.
pub(super) const END_OF_CALL: &str = "</tool_call>";
/// Begins Mistral's calls.
pub(super) const TOOL_CALLS: &str = "[TOOL_CALLS]";
/// Stands between a name and the id of its call.
const CALL_ID: &str = "[CALL_ID]";
/// Stands before the arguments of a named call.
pub(super) const ARGS: &str = "[ARGS]";
/// Begins a call of Llama 3, unless its object stands alone.
pub(super) const PYTHON_TAG: &str = "<|python_tag|>";

/// Longest beginning of a call with its name before `[ARGS]`, in bytes.
const MAX_NAMED: usize = 512;

/// The marker that begins calls.
pub(super) fn opening(syntax: ToolSyntax) -> &'static str {
    match syntax {
        ToolSyntax::Hermes | ToolSyntax::Qwen3Coder | ToolSyntax::Glm45 => CALL,
        ToolSyntax::Llama3Json => PYTHON_TAG,
        ToolSyntax::Mistral => TOOL_CALLS,
    }
}

/// Beginning of a call with its name before its arguments: `name[ARGS]{`, `name[CALL_ID]id[ARGS]{` or `name{`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NamedHead {
    /// It may become one.
    Partial,
    /// It is one, of this tool.
    Complete(String),
    /// It is none.
    Other,
}

/// Reads the text behind `[TOOL_CALLS]`.
pub(super) fn named_head(text: &str) -> NamedHead {
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let end = text.find(|c| !is_name(c)).unwrap_or(text.len());
    let (name, mut rest) = text.split_at(end);
    if text.len() > MAX_NAMED || (name.is_empty() && !rest.is_empty()) {
        return NamedHead::Other;
    }
    if let Some(id) = rest.strip_prefix(CALL_ID) {
        rest = id.trim_start_matches(|c: char| c.is_ascii_alphanumeric());
        if rest.starts_with('{') {
            return NamedHead::Other;
        }
    }
    if let Some(arguments) = rest.strip_prefix(ARGS) {
        rest = arguments.trim_start();
        if !rest.is_empty() && rest != "{" {
            return NamedHead::Other;
        }
    }
    match rest {
        "{" => NamedHead::Complete(name.to_owned()),
        rest if ARGS.starts_with(rest) || CALL_ID.starts_with(rest) => NamedHead::Partial,
        _ => NamedHead::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_call_is_known_at_its_first_brace() {
        for text in ["f[ARGS]{", "f[CALL_ID]abc123XYZ[ARGS]{", "f{", "f[ARGS] {"] {
            assert_eq!(named_head(text), NamedHead::Complete("f".into()), "{text}");
            for end in 0..text.len() {
                assert_eq!(named_head(&text[..end]), NamedHead::Partial, "{}", &text[..end]);
            }
        }
        for text in ["[ARGS]{", "f [ARGS]{", "f[ARGS]x", "f[X", "f[CALL_ID]a{", " "] {
            assert_eq!(named_head(text), NamedHead::Other, "{text}");
        }
    }
}
