//! Tokens that the directory's JSON files name: `tokenizer_config.json`, `special_tokens_map.json`,
//! `added_tokens.json`.

use crate::error::ModelError;
use crate::files::JsonFile;
use crate::tokenization::id_map::{MAX_ID, Vocabulary};
use serde_json::Value;
use std::collections::HashSet;
use std::path::Path;

/// A token that is found in text before the model reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamedToken {
    pub(super) content: String,
    /// Its id, where a file gives it.
    pub(super) id: Option<u32>,
    /// True if it steers the model and is no part of a text.
    pub(super) special: bool,
    pub(super) strips_left: bool,
    pub(super) strips_right: bool,
}

impl NamedToken {
    /// A special token that strips no white space.
    pub(super) fn special(content: impl Into<String>) -> Self {
        Self { content: content.into(), id: None, special: true, strips_left: false, strips_right: false }
    }

    /// The same, stripping white space before it, as masks do.
    pub(super) fn after_space(mut self) -> Self {
        self.strips_left = true;
        self
    }

    /// The same, which is a part of a text.
    pub(super) fn ordinary(mut self) -> Self {
        self.special = false;
        self
    }

    /// A string, or an object with `content` and flags.
    fn read(value: &Value) -> Option<Self> {
        let flag = |name: &str| value.get(name).and_then(Value::as_bool);
        let content = value.as_str().or_else(|| value.get("content")?.as_str())?;
        Some(Self {
            content: content.to_owned(),
            id: None,
            special: flag("special").unwrap_or(true),
            strips_left: flag("lstrip").unwrap_or(false),
            strips_right: flag("rstrip").unwrap_or(false),
        })
    }
}

/// Special and added tokens of the JSON files.
#[derive(Clone, Debug)]
pub(super) struct SpecialTokens {
    config: Value,
    map: Value,
    /// From `added_tokens.json` and `added_tokens_decoder`, by id.
    numbered: Vec<NamedToken>,
}

impl SpecialTokens {
    pub(super) fn read(dir: &Path, config: &JsonFile) -> Result<Self, ModelError> {
        let map = JsonFile::read_or_empty(dir, "special_tokens_map.json")?;
        let file = JsonFile::read_or_empty(dir, "added_tokens.json")?;
        let wrong = |name: &str, message: String| ModelError::Format { path: dir.join(name), message };
        let too_large = |token: &str| format!("the id of {token:?} is no integer up to {MAX_ID}");
        let mut numbered = Vec::new();
        for (content, id) in file.value().as_object().into_iter().flatten() {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| *id <= MAX_ID);
            let id = id.ok_or_else(|| wrong("added_tokens.json", too_large(content)))?;
            // The file does not say. `<|en|>` is how control tokens are spelled; `<s_menu>` may be an answer's.
            let special = content.starts_with("<|") && content.ends_with("|>");
            numbered.push(NamedToken { id: Some(id), special, ..NamedToken::special(content) });
        }
        let decoder = config.get("added_tokens_decoder").and_then(Value::as_object);
        for (id, token) in decoder.into_iter().flatten() {
            let added = NamedToken::read(token).ok_or_else(|| {
                wrong("tokenizer_config.json", format!("added_tokens_decoder.{id} has no content"))
            })?;
            let id = id.parse::<u32>().ok().filter(|id| *id <= MAX_ID);
            let id = id.ok_or_else(|| wrong("tokenizer_config.json", too_large(&added.content)))?;
            numbered.retain(|known| known.content != added.content);
            let special = token.get("special").and_then(Value::as_bool).unwrap_or(false);
            numbered.push(NamedToken { id: Some(id), special, ..added });
        }
        numbered.sort_by_key(|token| token.id);
        Ok(Self { config: config.value().clone(), map: map.value().clone(), numbered })
    }

    /// The token with a role such as `eos_token`; `default` where the files are silent, nothing where they
    /// say `null`.
    pub(super) fn role(&self, role: &str, default: &str) -> Option<NamedToken> {
        match self.config.get(role).or_else(|| self.map.get(role)) {
            None => Some(NamedToken::special(default)),
            Some(Value::Null) => None,
            Some(value) => NamedToken::read(value),
        }
    }

    /// Special tokens without a role.
    pub(super) fn others(&self) -> Vec<NamedToken> {
        let lists = [&self.config, &self.map]
            .into_iter()
            .flat_map(|file| ["additional_special_tokens", "extra_special_tokens"].map(|key| file.get(key)));
        lists.flatten().filter_map(Value::as_array).flatten().filter_map(NamedToken::read).collect()
    }

    /// Numbers every token that is found in text: those of the family, those without a role, then those with
    /// an id in a file, which outranks any other. A token that has no id anywhere is put at the end.
    pub(super) fn place(&self, family: Vec<NamedToken>, vocabulary: &mut Vocabulary) -> Vec<NamedToken> {
        let mut placed: Vec<NamedToken> = Vec::new();
        let numbered: HashSet<&str> = self.numbered.iter().map(|token| token.content.as_str()).collect();
        let named: Vec<NamedToken> = family.into_iter().chain(self.others()).collect();
        let special: HashSet<&str> = named.iter().filter(|t| t.special).map(|t| t.content.as_str()).collect();
        let first = self.numbered.iter().cloned().map(|token| {
            let special = token.special || special.contains(token.content.as_str());
            NamedToken { special, ..token }
        });
        let rest = named.iter().filter(|t| !numbered.contains(t.content.as_str())).cloned();
        for token in first.chain(rest) {
            if token.content.is_empty() || placed.iter().any(|known| known.content == token.content) {
                continue;
            }
            let id = token.id.or_else(|| vocabulary.id(&token.content)).unwrap_or_else(|| vocabulary.end());
            vocabulary.place(id, &token.content);
            placed.push(NamedToken { id: Some(id), ..token });
        }
        placed
    }
}
