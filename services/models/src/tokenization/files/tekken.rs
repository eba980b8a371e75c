//! Byte-level BPE by ranks: `tekken.json`, Mistral's own format.
//!
//! After <https://github.com/mistralai/mistral-common/blob/v1.8.0/src/mistral_common/tokens/tokenizers/tekken.py>. Tokens are bytes by
//! rank, and the pair whose token has the lowest rank is merged first. The library merges by a list of pairs: every way to
//! cut a token into two others, in the order of ranks, is the same. Special tokens have the first ids.

use super::directory::TokenizerDir;
use super::parts::{BuiltTokenizer, InputTemplate, TokenizerParts, index};
use super::special::NamedToken;
use crate::error::ModelError;
use crate::files::JsonFile;
use crate::tokenization::id_map::{MAX_ID, Vocabulary};
use base64::Engine as _;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// Name of the file.
pub(super) const FILE: &str = "tekken.json";

/// Start of a text.
const START: &str = "<s>";

/// The bytes of every token, by rank, and the pattern that splits a text.
struct Ranks {
    tokens: Vec<Vec<u8>>,
    pattern: String,
    n_special: u32,
}

pub(super) fn build(dir: &TokenizerDir<'_>) -> Result<BuiltTokenizer, ModelError> {
    let file = JsonFile::read(dir.path, FILE)?;
    let ranks = Ranks::read(dir, &file)?;
    let mut vocabulary = Vocabulary::default();
    let mut model = Map::new();
    let mut ids = Vec::with_capacity(ranks.tokens.len());
    for token in &ranks.tokens {
        let name = spelled(token);
        let id = ranks.n_special + index(ids.len());
        vocabulary.insert(id, &name);
        model.insert(name, index(ids.len()).into());
        ids.push(id);
    }
    let added = special_tokens(dir, &file, ranks.n_special)?;
    for token in &added {
        vocabulary.place(token.id.unwrap_or_default(), &token.content);
    }
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let split = json!({
        "type": "Split", "pattern": {"Regex": ranks.pattern}, "behavior": "Isolated", "invert": false,
    });
    Ok(TokenizerParts {
        model: json!({"type": "BPE", "vocab": model, "merges": ranks.merges(), "ignore_merges": true}),
        normalizer: Value::Null,
        pre_tokenizer: json!({"type": "Sequence", "pretokenizers": [split, byte_level]}),
        decoder: byte_level,
        ids,
        known: HashMap::new(),
        added,
        vocabulary,
        around: InputTemplate { before: vec![START.to_owned()], after: Vec::new() },
    }
    .finish())
}

impl Ranks {
    fn read(dir: &TokenizerDir<'_>, file: &JsonFile) -> Result<Self, ModelError> {
        let size = |key: &str| -> Result<u32, ModelError> {
            let found = file.u32(&format!("config.{key}"))?.filter(|n| *n <= MAX_ID);
            found.ok_or_else(|| file.wrong(&format!("config.{key}"), &format!("an integer up to {MAX_ID}")))
        };
        let (n_all, n_special) = (size("default_vocab_size")?, size("default_num_special_tokens")?);
        let pattern = file.get("config.pattern").and_then(Value::as_str);
        let pattern = pattern.ok_or_else(|| file.wrong("config.pattern", "a text"))?.to_owned();
        let entries = file.get("vocab").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let n_tokens = n_all.saturating_sub(n_special) as usize;
        let Some(entries) = entries.get(..n_tokens).filter(|entries| !entries.is_empty()) else {
            return Err(
                dir.wrong(FILE, format!("vocab has {} tokens, config says {n_tokens}", entries.len()))
            );
        };
        let token = |(rank, entry): (usize, &Value)| {
            let is_next = entry.get("rank").and_then(Value::as_u64) == Some(rank as u64);
            let text = entry.get("token_bytes").and_then(Value::as_str).filter(|_| is_next);
            let bytes = text.and_then(|t| base64::engine::general_purpose::STANDARD.decode(t).ok());
            bytes.filter(|b| !b.is_empty() && (rank >= 256 || **b == [rank as u8])).ok_or_else(|| {
                dir.wrong(
                    FILE,
                    format!("vocab[{rank}] is not the token of rank {rank} in base64, bytes first"),
                )
            })
        };
        let tokens = entries.iter().enumerate().map(token).collect::<Result<_, _>>()?;
        Ok(Self { tokens, pattern, n_special })
    }

    /// Pairs of tokens that are a token together, in the order of its rank, then of theirs.
    fn merges(&self) -> Vec<[String; 2]> {
        let ranks: HashMap<&[u8], usize> =
            self.tokens.iter().enumerate().map(|(rank, token)| (token.as_slice(), rank)).collect();
        let mut merges = Vec::with_capacity(self.tokens.len());
        for token in &self.tokens {
            let cuts = (1..token.len()).filter_map(|at| {
                let (left, right) = token.split_at(at);
                Some(([*ranks.get(left)?, *ranks.get(right)?], [spelled(left), spelled(right)]))
            });
            let mut cuts: Vec<([usize; 2], [String; 2])> = cuts.collect();
            cuts.sort_by_key(|(ranks, _)| *ranks);
            merges.extend(cuts.into_iter().map(|(_, pair)| pair));
        }
        merges
    }
}

/// The special tokens: those of the file, and fillers up to `n_special`.
fn special_tokens(
    dir: &TokenizerDir<'_>,
    file: &JsonFile,
    n_special: u32,
) -> Result<Vec<NamedToken>, ModelError> {
    let Some(entries) = file.get("special_tokens").and_then(Value::as_array) else {
        return Err(file.wrong("special_tokens", "a list of tokens, as versions from v7 have"));
    };
    let mut names: HashMap<u32, String> =
        (0..n_special.min(index(1 << 16))).map(|id| (id, format!("<SPECIAL_{id}>"))).collect();
    for (i, entry) in entries.iter().enumerate() {
        let rank = entry.get("rank").and_then(Value::as_u64).and_then(|rank| u32::try_from(rank).ok());
        let text = entry.get("token_str").and_then(Value::as_str).filter(|text| !text.is_empty());
        match (rank.filter(|rank| names.contains_key(rank)), text) {
            (Some(rank), Some(text)) => names.insert(rank, text.to_owned()),
            _ => {
                let text = format!("special_tokens[{i}] has no token_str, or no rank below {n_special}");
                return Err(dir.wrong(FILE, text));
            }
        };
    }
    let mut tokens: Vec<NamedToken> = names
        .into_iter()
        .map(|(id, name)| NamedToken { id: Some(id), ..NamedToken::special(name) })
        .collect();
    tokens.sort_by_key(|token| token.id);
    Ok(tokens)
}

/// Bytes as the library's byte-level models spell them: printable Latin-1 as it is, the others from U+0100 on.
fn spelled(bytes: &[u8]) -> String {
    let printable = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let spell = |b: &u8| match printable(*b) {
        true => char::from(*b),
        false => {
            let before = (0..*b).filter(|b| !printable(*b)).count() as u32;
            char::from_u32(0x100 + before).expect("fewer than 256 follow U+0100")
        }
    };
    bytes.iter().map(spell).collect()
}
