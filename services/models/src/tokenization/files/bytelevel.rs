//! Byte-level BPE: `vocab.json` and `merges.txt`, as GPT-2 wrote them first. BART, BlenderBot, Whisper, Qwen.

use super::directory::TokenizerDir;
use super::parts::{BuiltTokenizer, InputTemplate, TokenizerParts, index};
use super::special::NamedToken;
use crate::error::ModelError;
use crate::tokenization::id_map::{MAX_ID, Vocabulary};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Qwen's pattern that splits a text before its bytes are merged.
const QWEN_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

pub(super) fn build(dir: &TokenizerDir<'_>) -> Result<BuiltTokenizer, ModelError> {
    let entries = read_vocabulary(dir, "vocab.json")?;
    let merges = read_merges(dir)?;
    let mut vocabulary = Vocabulary::default();
    for (id, name) in &entries {
        vocabulary.insert(*id, name);
    }
    let (family, around) = family(dir, &vocabulary);
    let added = dir.specials.place(family, &mut vocabulary);

    // The library numbers entries without gaps, and finds added tokens by itself.
    let merged: HashSet<String> = merges.iter().map(|[left, right]| format!("{left}{right}")).collect();
    let is_added: HashSet<&str> = added.iter().map(|t| t.content.as_str()).collect();
    let mut model = Map::new();
    let mut ids = Vec::new();
    let mut known = HashMap::new();
    for (id, name) in &entries {
        let added = is_added.contains(name.as_str());
        if added && !merged.contains(name) {
            continue;
        }
        let at = index(ids.len());
        if added {
            known.insert(name.clone(), at);
        }
        model.insert(name.clone(), at.into());
        ids.push(vocabulary.id(name).unwrap_or(*id));
    }
    for [left, right] in &merges {
        for part in [left, right, &format!("{left}{right}")] {
            if !model.contains_key(part) {
                return Err(dir.wrong("merges.txt", format!("{part:?} is not in vocab.json")));
            }
        }
    }
    let (normalizer, pre_tokenizer) = splitting(dir)?;
    Ok(TokenizerParts {
        model: json!({"type": "BPE", "vocab": model, "merges": merges}),
        normalizer,
        pre_tokenizer,
        decoder: byte_level(false, true),
        ids,
        known,
        added,
        vocabulary,
        around,
    }
    .finish())
}

fn byte_level(add_prefix_space: bool, use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": use_regex})
}

/// Splitting of a text before its bytes are merged: the normalizer and the pre-tokenizer.
fn splitting(dir: &TokenizerDir<'_>) -> Result<(Value, Value), ModelError> {
    // BlenderBot reads the first word as any other by default.
    let space = dir.config.bool("add_prefix_space")?.unwrap_or(dir.class == "Blenderbot");
    if !dir.class.starts_with("Qwen2") {
        return Ok((Value::Null, byte_level(space, true)));
    }
    let split =
        json!({"type": "Split", "pattern": {"Regex": QWEN_SPLIT}, "behavior": "Isolated", "invert": false});
    let pre_tokenizer = json!({"type": "Sequence", "pretokenizers": [split, byte_level(space, false)]});
    Ok((json!({"type": "NFC"}), pre_tokenizer))
}

/// The family's own special tokens, and its template of an input.
fn family(dir: &TokenizerDir<'_>, vocabulary: &Vocabulary) -> (Vec<NamedToken>, InputTemplate) {
    let roles = |list: &[(&str, &str)]| -> Vec<NamedToken> {
        list.iter().filter_map(|(role, default)| dir.specials.role(role, default)).collect()
    };
    match dir.class.as_str() {
        "Whisper" => {
            let end = "<|endoftext|>";
            let tokens = roles(&[("bos_token", end), ("eos_token", end), ("unk_token", end)]);
            let after = dir.role("eos_token", end).content;
            let before = ["<|startoftranscript|>", "<|notimestamps|>"].map(str::to_owned).to_vec();
            (tokens, InputTemplate { before, after: vec![after] })
        }
        class if class.starts_with("Qwen2") || class == "GPT2" => {
            let end = "<|endoftext|>";
            (roles(&[("eos_token", end), ("unk_token", end)]), InputTemplate::default())
        }
        class => {
            let mut tokens = roles(&[
                ("bos_token", "<s>"),
                ("eos_token", "</s>"),
                ("sep_token", "</s>"),
                ("cls_token", "<s>"),
                ("unk_token", "<unk>"),
                ("pad_token", "<pad>"),
            ]);
            tokens.extend(dir.specials.role("mask_token", "<mask>").map(NamedToken::after_space));
            // A vocabulary that lacks these tokens is of another family: nothing is invented for it.
            let named = !class.is_empty();
            tokens.retain(|t| named || vocabulary.id(&t.content).is_some());
            let cls = dir.role("cls_token", "<s>");
            let sep = dir.role("sep_token", "</s>");
            let around = match class {
                "Blenderbot" => InputTemplate::ended(&dir.role("eos_token", "</s>")),
                _ => InputTemplate { before: vec![cls.content], after: vec![sep.content] },
            };
            (tokens, around)
        }
    }
}

/// A `vocab.json`: names with ids, by id.
pub(super) fn read_vocabulary(
    dir: &TokenizerDir<'_>,
    file: &'static str,
) -> Result<BTreeMap<u32, String>, ModelError> {
    let json = crate::files::JsonFile::read(dir.path, file)?;
    let mut entries = BTreeMap::new();
    for (name, id) in json.value().as_object().into_iter().flatten() {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| *id <= MAX_ID);
        let id =
            id.ok_or_else(|| dir.wrong(file, format!("the id of {name:?} is no integer up to {MAX_ID}")))?;
        if let Some(other) = entries.insert(id, name.clone()) {
            return Err(dir.wrong(file, format!("{other:?} and {name:?} both have the id {id}")));
        }
    }
    if entries.is_empty() {
        return Err(dir.wrong(file, "has no entry"));
    }
    Ok(entries)
}

/// `merges.txt`: two parts a line, the most frequent first.
pub(super) fn read_merges(dir: &TokenizerDir<'_>) -> Result<Vec<[String; 2]>, ModelError> {
    let path = dir.file("merges.txt");
    let text = std::fs::read_to_string(&path).map_err(|source| ModelError::File { path, source })?;
    let mut merges = Vec::new();
    for (n, line) in text.split('\n').enumerate() {
        let line = line.strip_suffix('\r').unwrap_or(line);
        if line.is_empty() || (n == 0 && line.starts_with("#version")) {
            continue;
        }
        let parts: Vec<&str> = line.split(' ').filter(|p| !p.is_empty()).collect();
        let [left, right] = parts[..] else {
            return Err(dir.wrong("merges.txt", format!("line {} is not two parts with a space", n + 1)));
        };
        merges.push([left.to_owned(), right.to_owned()]);
    }
    Ok(merges)
}
