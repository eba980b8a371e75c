//! ByT5: a token is a byte of UTF-8. There is no file: pad, end and unknown come first, then the 256 bytes,
//! then the sentinels.
//!
//! Bytes that never become a character are left out of a text, as by the family's own code; elsewhere they are
//! replaced.

use super::directory::TokenizerDir;
use super::parts::{BuiltTokenizer, InputTemplate, TokenizerParts, index};
use super::special::NamedToken;
use crate::error::ModelError;
use crate::tokenization::id_map::Vocabulary;
use crate::tokenization::spelling::char_of;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// Sentinels unless `extra_ids` says otherwise.
const EXTRA_IDS: u32 = 125;

/// More sentinels than any model has.
pub(super) const MAX_EXTRA_IDS: u32 = 4096;

pub(super) fn build(dir: &TokenizerDir<'_>) -> Result<BuiltTokenizer, ModelError> {
    let named = [("pad_token", "<pad>"), ("eos_token", "</s>"), ("unk_token", "<unk>")];
    let named = named.map(|(role, default)| NamedToken {
        strips_left: true,
        strips_right: true,
        ..dir.role(role, default)
    });
    let mut vocabulary = Vocabulary::default();
    for (id, token) in named.iter().enumerate() {
        vocabulary.insert(index(id), &token.content);
    }
    let offset = index(named.len());
    let mut entries = Map::new();
    for byte in 0..=255_u8 {
        let spelled = char_of(byte).to_string();
        vocabulary.insert(offset + u32::from(byte), &spelled);
        entries.insert(spelled, Value::from(byte));
    }
    let n_extra = extra_ids(dir, EXTRA_IDS)?;
    let mut family = named.to_vec();
    family.extend((0..n_extra).map(|i| NamedToken::special(format!("<extra_id_{i}>"))));
    for token in &family[named.len()..] {
        vocabulary.insert(vocabulary.end(), &token.content);
    }
    let added = dir.specials.place(family, &mut vocabulary);
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    Ok(TokenizerParts {
        model: json!({"type": "BPE", "vocab": entries, "merges": []}),
        normalizer: Value::Null,
        pre_tokenizer: bytes.clone(),
        decoder: bytes,
        ids: (0..256).map(|byte| byte + offset).collect(),
        known: HashMap::new(),
        added,
        vocabulary,
        around: InputTemplate::ended(&named[1]),
    }
    .finish())
}

/// Number of sentinels.
pub(super) fn extra_ids(dir: &TokenizerDir<'_>, default: u32) -> Result<u32, ModelError> {
    let n = dir.config.u32("extra_ids")?.unwrap_or(default);
    if n > MAX_EXTRA_IDS {
        return Err(dir.config.wrong("extra_ids", &format!("at most {MAX_EXTRA_IDS}")));
    }
    Ok(n)
}
