//! The parts of a tokenizer, assembled to the JSON that the library reads.

use super::special::NamedToken;
use crate::tokenization::characters::InvalidBytes;
use crate::tokenization::id_map::{IdMap, Vocabulary};
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// Prefix of entries that no text may reach: a noncharacter, which Unicode keeps out of texts.
pub(crate) const HIDDEN: char = '\u{FDD1}';

/// A tokenizer in the library's JSON, and the model's ids.
pub(crate) struct BuiltTokenizer {
    pub(crate) json: Map<String, Value>,
    pub(crate) id_map: IdMap,
}

/// The tokenizer of prompts and outputs and, where they differ, that of encoder inputs.
pub(crate) struct BuiltTokenizers {
    pub(crate) output: BuiltTokenizer,
    pub(crate) input: Option<BuiltTokenizer>,
    pub(crate) invalid_bytes: InvalidBytes,
}

impl BuiltTokenizers {
    /// One for both sides.
    pub(super) fn of(output: BuiltTokenizer) -> Self {
        Self { output, input: None, invalid_bytes: InvalidBytes::default() }
    }
}

/// The parts of a tokenizer.
pub(super) struct TokenizerParts {
    /// The `model` of the library's JSON.
    pub(super) model: Value,
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    pub(super) decoder: Value,
    /// The model's id of each of the model's entries, by the library's id.
    pub(super) ids: Vec<u32>,
    /// Added tokens that the library's model has an entry for, with the library's id. The others get theirs
    /// from the library.
    pub(super) known: HashMap<String, u32>,
    /// Added tokens, with their ids.
    pub(super) added: Vec<NamedToken>,
    /// Every token by the model's id.
    pub(super) vocabulary: Vocabulary,
    /// Special tokens before and after an encoder input.
    pub(super) around: InputTemplate,
}

/// Special tokens before and after an encoder input.
#[derive(Default)]
pub(super) struct InputTemplate {
    pub(super) before: Vec<String>,
    pub(super) after: Vec<String>,
}

impl InputTemplate {
    /// Nothing before, one token behind.
    pub(super) fn ended(by: &NamedToken) -> Self {
        Self { before: Vec::new(), after: vec![by.content.clone()] }
    }
}

/// A spelling that no text reaches.
pub(super) fn hidden(name: &str) -> String {
    format!("{HIDDEN}{name}")
}

impl TokenizerParts {
    /// Assembles the parts.
    pub(super) fn finish(self) -> BuiltTokenizer {
        let mut ids = self.ids;
        let mut library_ids: HashMap<&str, u32> = HashMap::new();
        let mut added = Vec::new();
        for token in &self.added {
            let Some(id) = token.id else { continue };
            let library_id = match self.known.get(&token.content) {
                Some(known) => *known,
                None => {
                    ids.push(id);
                    index(ids.len() - 1)
                }
            };
            library_ids.insert(&token.content, library_id);
            added.push(json!({
                "id": library_id, "content": token.content, "special": token.special, "single_word": false,
                "lstrip": token.strips_left, "rstrip": token.strips_right, "normalized": false,
            }));
        }
        let post_processor = template(&self.around, &library_ids);
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": self.normalizer, "pre_tokenizer": self.pre_tokenizer,
            "post_processor": post_processor, "decoder": self.decoder, "model": self.model,
        });
        let Value::Object(json) = file else { unreachable!("an object was written above") };
        BuiltTokenizer { json, id_map: IdMap::new(ids, self.vocabulary) }
    }
}

/// An index into a list of entries as an id.
pub(super) fn index(at: usize) -> u32 {
    u32::try_from(at).expect("a vocabulary has fewer than 2^24 entries")
}

/// `before… $A after…`; tokens that the vocabulary lacks are left out.
fn template(around: &InputTemplate, ids: &HashMap<&str, u32>) -> Value {
    let known = |tokens: &[String]| -> Vec<String> {
        tokens.iter().filter(|t| ids.contains_key(t.as_str())).cloned().collect()
    };
    let before = known(&around.before);
    let after = known(&around.after);
    if before.is_empty() && after.is_empty() {
        return Value::Null;
    }
    let token = |t: &String| json!({"SpecialToken": {"id": t, "type_id": 0}});
    let text = |name: &str| json!({"Sequence": {"id": name, "type_id": 0}});
    let wrap = |texts: Vec<Value>| -> Vec<Value> {
        before.iter().map(token).chain(texts).chain(after.iter().map(token)).collect()
    };
    let special: Map<String, Value> = before
        .iter()
        .chain(&after)
        .map(|t| (t.clone(), json!({"id": t, "ids": [ids[t.as_str()]], "tokens": [t]})))
        .collect();
    json!({
        "type": "TemplateProcessing", "single": wrap(vec![text("A")]),
        "pair": wrap(vec![text("A"), text("B")]), "special_tokens": special,
    })
}
