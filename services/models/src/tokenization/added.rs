//! The added tokens of a tokenizer file: control tokens, tokens that are no part of a text, and tokens whose spelling is
//! their text.

use super::files;
use super::scan::ControlToken;
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// Tokens that give an answer its structure, and are text of it whether or not a file calls them special: calls of tools
/// and reasoning are read from it (Mistral, Llama 3, Hermes).
const STRUCTURE: [&str; 10] = [
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "<|python_tag|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
];

/// Control tokens that code adds to the tokenizer of a file; none by default.
#[derive(Clone, Debug, Default)]
pub struct MoreTokens {
    /// The tokens, in order.
    pub contents: Vec<String>,
    /// Tokens of the model: those that would have a higher id are left out.
    pub vocab: usize,
}

impl MoreTokens {
    /// Adds those that a file does not have to it, with the ids behind its last. Returns what was added.
    pub(super) fn append(&self, file: &mut Map<String, Value>) -> Vec<&str> {
        if self.contents.is_empty() {
            return Vec::new();
        }
        let vocab = file.get("model").and_then(|model| model.get("vocab"));
        let of_model = |content: &str| vocab.and_then(|vocab| vocab.get(content)).is_some();
        let n_vocab = match vocab {
            Some(Value::Object(tokens)) => tokens.len(),
            Some(Value::Array(tokens)) => tokens.len(),
            _ => 0,
        };
        let stored =
            file.get("added_tokens").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let is_stored = |content: &str| {
            stored.iter().any(|token| token.get("content").and_then(Value::as_str) == Some(content))
        };
        let end = stored.iter().filter_map(|token| token.get("id").and_then(Value::as_u64)).max();
        let first = n_vocab.max(end.map_or(0, |id| id as usize + 1));
        let missing = self.contents.iter().filter(|content| !of_model(content) && !is_stored(content));
        let added: Vec<&str> = missing.take(self.vocab.saturating_sub(first)).map(String::as_str).collect();
        let token = |(i, content): (usize, &&str)| {
            json!({
                "id": first + i, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true,
            })
        };
        let tokens: Vec<Value> = added.iter().enumerate().map(token).collect();
        let list = file.entry("added_tokens").or_insert_with(|| Value::Array(Vec::new()));
        if let Some(list) = list.as_array_mut() {
            list.extend(tokens);
        }
        added
    }
}

/// The added tokens of a file, not yet numbered.
pub(super) struct AddedTokens(Vec<AddedToken>);

struct AddedToken {
    content: String,
    silent: bool,
    control: bool,
    strips_left: bool,
    strips_right: bool,
}

/// The added tokens of a file by id.
pub(super) struct AddedTokenIds {
    /// Tokens that steer the model.
    pub(super) controls: Vec<ControlToken>,
    /// Tokens that are no part of a text: special ones and times.
    pub(super) silent: HashSet<u32>,
    /// Every added token: its text is its spelling.
    pub(super) verbatim: HashSet<u32>,
}

impl AddedTokens {
    /// Reads them, and marks control tokens in the file as special: those are what the library can be made
    /// blind to.
    pub(super) fn mark(file: &mut Map<String, Value>) -> Self {
        let mut all = Vec::new();
        for token in file.get_mut("added_tokens").and_then(Value::as_array_mut).into_iter().flatten() {
            let flag = |name: &str| token.get(name).and_then(Value::as_bool).unwrap_or(false);
            let special = flag("special");
            let strips_left = flag("lstrip");
            let strips_right = flag("rstrip");
            let Some(content) = token.get("content").and_then(Value::as_str).map(str::to_owned) else {
                continue;
            };
            let control = content.chars().count() > 1 && (special || is_bracketed(&content));
            if let Some(token) = token.as_object_mut() {
                token.insert("special".to_owned(), control.into());
            }
            let silent = (special && !STRUCTURE.contains(&&*content)) || is_time(&content);
            all.push(AddedToken { content, silent, control, strips_left, strips_right });
        }
        Self(all)
    }

    /// Makes a unigram model unable to choose control tokens, which many published vocabularies list as pieces: a client's
    /// `</s>` is then read as its characters, not left out. Returns true if anything changed.
    pub(super) fn spare(&self, file: &mut Map<String, Value>) -> bool {
        let names: HashSet<&str> = self.0.iter().filter(|t| t.control).map(|t| t.content.as_str()).collect();
        let Some(model) = file.get_mut("model").and_then(Value::as_object_mut) else { return false };
        let mut changed = false;
        for entry in model.get_mut("vocab").and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(Value::String(name)) = entry.get_mut(0)
                && names.contains(name.as_str())
            {
                name.insert(0, files::HIDDEN);
                changed = true;
            }
        }
        changed
    }

    /// Numbers them; those without an id are left out.
    pub(super) fn numbered(self, id_of: impl Fn(&str) -> Option<u32>) -> AddedTokenIds {
        let mut out =
            AddedTokenIds { controls: Vec::new(), silent: HashSet::new(), verbatim: HashSet::new() };
        for token in self.0 {
            let Some(id) = id_of(&token.content) else { continue };
            out.verbatim.insert(id);
            if token.silent {
                out.silent.insert(id);
            }
            if token.control {
                let AddedToken { content, strips_left, strips_right, .. } = token;
                out.controls.push(ControlToken { id, content, strips_left, strips_right });
            }
        }
        out
    }
}

/// `<…>`, `>>…<<`: how families spell tokens that steer the model, whether or not their file calls them special.
fn is_bracketed(content: &str) -> bool {
    (content.starts_with('<') && content.ends_with('>')) || files::is_language(content)
}

/// `<|1.20|>`.
fn is_time(content: &str) -> bool {
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    content
        .strip_prefix("<|")
        .and_then(|rest| rest.strip_suffix("|>"))
        .and_then(|number| number.split_once('.'))
        .is_some_and(|(whole, part)| digits(whole) && digits(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ids of the added tokens of a file with three tokens of its own after more were appended.
    fn ids(more: &MoreTokens) -> Vec<(String, u64)> {
        let json = json!({
            "added_tokens": [{ "content": "<c>", "id": 2 }], "model": { "vocab": { "a": 0, "b": 1, "<c>": 2 } },
        });
        let Value::Object(mut file) = json else { unreachable!("an object") };
        let _ = more.append(&mut file);
        let tokens = file["added_tokens"].as_array().expect("a list").iter();
        let pair = |token: &Value| {
            (token["content"].as_str().expect("a text").to_owned(), token["id"].as_u64().expect("an id"))
        };
        tokens.map(pair).collect()
    }

    #[test]
    fn more_tokens_follow_those_of_a_file_and_stay_within_the_model() {
        let check = |contents: &[&str], vocab: usize, expect: &[(&str, u64)]| {
            let contents = contents.iter().map(|content| (*content).to_owned()).collect();
            let expect: Vec<_> = expect.iter().map(|(content, id)| ((*content).to_owned(), *id)).collect();
            assert_eq!(ids(&MoreTokens { contents, vocab }), expect);
        };
        check(&[], 9, &[("<c>", 2)]);
        check(&["<d>", "<c>", "b", "<e>"], 9, &[("<c>", 2), ("<d>", 3), ("<e>", 4)]);
        check(&["<d>", "<e>"], 4, &[("<c>", 2), ("<d>", 3)]);
        check(&["<d>"], 1, &[("<c>", 2)]);
    }
}
