//! A tokenizer from the files that came before `tokenizer.json`.
//!
//! Published directories hold what the family's own code once read: a sentencepiece model, a vocabulary with
//! merges, or nothing at all (ByT5). The contents of these files, and the additions of the family's code (its
//! ids, its special tokens, the template of an input), is assembled here to the same JSON that
//! `tokenizer.json` would hold, and read by the same library. The rules are those of transformers'
//! `convert_slow_tokenizer.py` and tokenizer classes.

mod byt5;
mod bytelevel;
mod charbpe;
mod charsmap;
mod directory;
mod marian;
mod parts;
mod sentencepiece;
mod special;
mod tekken;
mod wordpiece;

pub(super) use charsmap::check as check_charsmap;
pub(super) use marian::is_language;
pub(super) use parts::{BuiltTokenizers, HIDDEN};

use super::characters::InvalidBytes;
use crate::error::ModelError;
use crate::files::JsonFile;
use directory::TokenizerDir;
use special::SpecialTokens;
use std::path::Path;

/// Every set of files that would do, in the order they are looked for.
const LOOKED_FOR: &str = "tokenizer.json; source.spm, target.spm and vocab.json; spiece.model, \
    sentencepiece.bpe.model or tokenizer.model; vocab.json and merges.txt; vocab.txt; tekken.json; or tokenizer_config.json \
    with tokenizer_class ByT5Tokenizer";

/// Builds a tokenizer from the files of a directory.
///
/// # Errors
/// [`ModelError::Format`] if nothing can be made of it, which names the files that were looked for; otherwise
/// what is wrong with the files that are there.
pub(super) fn build(path: &Path) -> Result<BuiltTokenizers, ModelError> {
    let config = JsonFile::read_or_empty(path, "tokenizer_config.json")?;
    let class = class(path, &config)?;
    let specials = SpecialTokens::read(path, &config)?;
    let dir = TokenizerDir { path, config, class, specials };
    if dir.class == "ByT5" {
        let invalid_bytes = InvalidBytes::Dropped;
        return Ok(BuiltTokenizers { invalid_bytes, ..BuiltTokenizers::of(byt5::build(&dir)?) });
    }
    if ["source.spm", "target.spm", "vocab.json"].iter().all(|name| dir.has(name)) {
        return marian::build(&dir);
    }
    for name in ["spiece.model", "sentencepiece.bpe.model", "tokenizer.model"] {
        if dir.has(name) {
            return Ok(BuiltTokenizers::of(sentencepiece::build(&dir, name)?));
        }
    }
    let output = if dir.has("vocab.json") && dir.has("merges.txt") {
        if dir.class == "BlenderbotSmall" { charbpe::build(&dir)? } else { bytelevel::build(&dir)? }
    } else if dir.has("vocab.txt") {
        wordpiece::build(&dir)?
    } else if dir.has(tekken::FILE) {
        tekken::build(&dir)?
    } else {
        let message = format!("holds no tokenizer; looked for {LOOKED_FOR}");
        return Err(ModelError::Format { path: path.to_owned(), message });
    };
    Ok(BuiltTokenizers::of(output))
}

/// The tokenizer's class as the directory names it, or the one that goes with its model.
fn class(path: &Path, config: &JsonFile) -> Result<String, ModelError> {
    if let Some(name) = config.get("tokenizer_class").and_then(serde_json::Value::as_str) {
        let name = name.strip_suffix("Fast").unwrap_or(name);
        return Ok(name.strip_suffix("Tokenizer").unwrap_or(name).to_owned());
    }
    let model = JsonFile::read_or_empty(path, "config.json")?;
    let model_type = model.get("model_type").and_then(serde_json::Value::as_str).unwrap_or_default();
    // ByT5 is T5 with another vocabulary, and no file distinguishes the two.
    let class = match model_type {
        "t5" | "mt5" | "umt5" => "T5",
        "bart" | "florence2" => "Bart",
        "blenderbot" => "Blenderbot",
        "blenderbot-small" => "BlenderbotSmall",
        "marian" => "Marian",
        "mbart" => "MBart",
        "pegasus" => "Pegasus",
        "whisper" => "Whisper",
        "xlm-roberta" => "XLMRoberta",
        "llama" | "mistral" | "mixtral" => "Llama",
        "bert" => "Bert",
        "qwen2" | "qwen2_moe" | "qwen3" | "qwen3_moe" | "qwen2_vl" | "qwen2_5_vl" | "qwen3_vl"
        | "qwen3_vl_moe" => "Qwen2",
        _ => "",
    };
    Ok(class.to_owned())
}
