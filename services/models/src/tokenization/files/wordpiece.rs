//! WordPiece: `vocab.txt`, a piece a line, as BERT has it.

use super::directory::TokenizerDir;
use super::parts::{BuiltTokenizer, InputTemplate, TokenizerParts, hidden, index};
use crate::error::ModelError;
use crate::tokenization::id_map::Vocabulary;
use serde_json::{Map, json};
use std::collections::HashMap;

pub(super) fn build(dir: &TokenizerDir<'_>) -> Result<BuiltTokenizer, ModelError> {
    let path = dir.file("vocab.txt");
    let text = std::fs::read_to_string(&path).map_err(|source| ModelError::File { path, source })?;
    let roles = [
        ("unk_token", "[UNK]"),
        ("sep_token", "[SEP]"),
        ("pad_token", "[PAD]"),
        ("cls_token", "[CLS]"),
        ("mask_token", "[MASK]"),
    ];
    let family: Vec<_> = roles.iter().filter_map(|(role, name)| dir.specials.role(role, name)).collect();
    let unknown = dir.role("unk_token", "[UNK]").content;
    let mut vocabulary = Vocabulary::default();
    let mut model = Map::new();
    let mut ids = Vec::new();
    for (line, piece) in text.lines().enumerate() {
        let id = index(line);
        vocabulary.insert(id, piece);
        let special = family.iter().any(|t| t.content == piece);
        let spelled = if special { hidden(piece) } else { piece.to_owned() };
        if let serde_json::map::Entry::Vacant(place) = model.entry(spelled) {
            place.insert(index(ids.len()).into());
            ids.push(id);
        }
    }
    if vocabulary.id(&unknown).is_none() {
        return Err(dir.wrong("vocab.txt", format!("has no {unknown:?}, the token of unknown text")));
    }
    let added = dir.specials.place(family, &mut vocabulary);
    let lowercase = dir.config.bool("do_lower_case")?.unwrap_or(true);
    let strip_accents = dir.config.bool("strip_accents")?;
    let chinese = dir.config.bool("tokenize_chinese_chars")?.unwrap_or(true);
    Ok(TokenizerParts {
        model: json!({
            "type": "WordPiece", "vocab": model, "unk_token": hidden(&unknown),
            "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
        }),
        normalizer: json!({
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": chinese,
            "strip_accents": strip_accents, "lowercase": lowercase,
        }),
        pre_tokenizer: json!({"type": "BertPreTokenizer"}),
        decoder: json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        ids,
        known: HashMap::new(),
        added,
        vocabulary,
        around: InputTemplate {
            before: vec![dir.role("cls_token", "[CLS]").content],
            after: vec![dir.role("sep_token", "[SEP]").content],
        },
    }
    .finish())
}
