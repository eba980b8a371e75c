//! BlenderBot-small: BPE over characters. A piece that the word goes on after ends in `@@`.
//!
//! The library marks the other side: `</w>` at a word's last piece. So `the` is read as `the</w>`, and `th@@`
//! as `th`, which is also how `merges.txt` spells them.

use super::bytelevel::{read_merges, read_vocabulary};
use super::directory::TokenizerDir;
use super::parts::{BuiltTokenizer, InputTemplate, TokenizerParts, hidden, index};
use crate::error::ModelError;
use crate::tokenization::id_map::Vocabulary;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

const WORD_END: &str = "</w>";

pub(super) fn build(dir: &TokenizerDir<'_>) -> Result<BuiltTokenizer, ModelError> {
    let entries = read_vocabulary(dir, "vocab.json")?;
    let merges = read_merges(dir)?;
    let roles = [
        ("unk_token", "__unk__"),
        ("bos_token", "__start__"),
        ("eos_token", "__end__"),
        ("pad_token", "__null__"),
    ];
    let family: Vec<_> = roles.iter().filter_map(|(role, name)| dir.specials.role(role, name)).collect();
    let special: Vec<&str> = family.iter().map(|t| t.content.as_str()).collect();
    let unknown = dir.role("unk_token", "__unk__").content;

    let mut vocabulary = Vocabulary::default();
    let mut model = Map::new();
    let mut ids = Vec::new();
    for (id, name) in &entries {
        let spelled = match name.strip_suffix("@@") {
            _ if special.contains(&name.as_str()) => {
                vocabulary.insert(*id, name);
                continue;
            }
            Some(start) => start.to_owned(),
            None => format!("{name}{WORD_END}"),
        };
        vocabulary.insert(*id, &spelled);
        model.insert(spelled, index(ids.len()).into());
        ids.push(*id);
    }
    let unknown_id = vocabulary
        .id(&unknown)
        .ok_or_else(|| dir.wrong("vocab.json", format!("has no {unknown:?}, the token of unknown text")))?;
    // What merges pass through need not be in the vocabulary; then the piece is unknown.
    let mut passed = vec![hidden(&unknown)];
    for [left, right] in &merges {
        passed.extend([left.clone(), right.clone(), format!("{left}{right}")]);
    }
    for part in passed {
        if !model.contains_key(&part) {
            model.insert(part, index(ids.len()).into());
            ids.push(unknown_id);
        }
    }
    let added = dir.specials.place(family, &mut vocabulary);
    Ok(TokenizerParts {
        model: json!({
            "type": "BPE", "vocab": model, "merges": merges, "unk_token": hidden(&unknown),
            "end_of_word_suffix": WORD_END, "fuse_unk": false,
        }),
        normalizer: normalizer(),
        pre_tokenizer: json!({"type": "WhitespaceSplit"}),
        decoder: json!({"type": "BPEDecoder", "suffix": WORD_END}),
        ids,
        known: HashMap::new(),
        added,
        vocabulary,
        around: InputTemplate::default(),
    }
    .finish())
}

/// Punctuation gets a space before it, apostrophes one on both sides, a line's end its own word, and
/// everything is lower case.
fn normalizer() -> Value {
    let replace =
        |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
    let text = |t: &str| json!({"String": t});
    let mut steps = vec![replace(json!({"Regex": r"(?<=\S)\n"}), " __newln__ ")];
    steps.extend([".", ",", "!", "?", "(", ")"].map(|c| replace(text(c), &format!(" {c}"))));
    steps.push(replace(text("'"), " ' "));
    steps.push(json!({"type": "Lowercase"}));
    json!({"type": "Sequence", "normalizers": steps})
}
