//! A sentencepiece model, read and turned into the library's terms. It knows no family.

use super::proto::{ModelProto, PieceKind};
use crate::error::ModelError;
use crate::tokenization::files::charsmap;
use crate::tokenization::files::parts::{hidden, index};
use crate::tokenization::id_map::MAX_ID;
use base64::Engine;
use prost::Message;
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};
use std::path::Path;

/// Algorithm that splits a text into pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpmAlgorithm {
    Unigram,
    Bpe,
}

/// Treatment of spaces at the end of a text, where the file says that extra ones are removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpacesAtEnd {
    /// They are removed, as sentencepiece does.
    Removed,
    /// One stays, as in transformers' classes of Pegasus and mBART-50.
    One,
}

/// A model whose settings are all supported.
pub(crate) struct Spm {
    pub(crate) pieces: Vec<SpmPiece>,
    algorithm: SpmAlgorithm,
    byte_fallback: bool,
    charsmap: Vec<u8>,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
}

/// An entry; its place is its id in the file.
pub(crate) struct SpmPiece {
    pub(crate) name: String,
    score: f32,
    kind: PieceKind,
}

impl SpmPiece {
    /// `Some` for a token that is matched before the model splits a text: true if it is no part of the text.
    pub(crate) fn added(&self) -> Option<bool> {
        match self.kind {
            PieceKind::Control => Some(true),
            // One with a space in it is found by the model, which sees spaces as pieces have them.
            PieceKind::UserDefined if !self.name.contains('▁') => Some(false),
            _ => None,
        }
    }
}

impl Spm {
    /// Reads a `.model` or `.spm` file.
    pub(crate) fn read(path: &Path) -> Result<Self, ModelError> {
        let bytes = std::fs::read(path).map_err(|source| ModelError::File { path: path.into(), source })?;
        Self::from_bytes(&bytes).map_err(|message| ModelError::Format { path: path.into(), message })
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let model = ModelProto::decode(bytes).map_err(|e| format!("is no sentencepiece model: {e}"))?;
        let trainer = model.trainer.unwrap_or_default();
        let normalizer = model.normalizer.unwrap_or_default();
        let algorithm = match trainer.model_type() {
            1 => SpmAlgorithm::Unigram,
            2 => SpmAlgorithm::Bpe,
            other => return Err(format!("model_type is {other}, supported are 1 (unigram) and 2 (BPE)")),
        };
        if trainer.treat_whitespace_as_suffix() {
            return Err("treat_whitespace_as_suffix is true, only false is supported".into());
        }
        if !normalizer.escape_whitespaces() {
            return Err("escape_whitespaces is false, only true is supported".into());
        }
        let charsmap = normalizer.precompiled_charsmap().to_vec();
        if !charsmap.is_empty() {
            charsmap::check(&charsmap)?;
        }
        if model.pieces.len() > MAX_ID as usize {
            return Err(format!("has {} pieces, at most {MAX_ID} are read", model.pieces.len()));
        }
        let mut names = HashSet::new();
        let mut pieces = Vec::with_capacity(model.pieces.len());
        for (id, piece) in model.pieces.into_iter().enumerate() {
            let score = piece.score();
            let kind = piece.kind();
            let name = piece.piece.unwrap_or_default();
            if name.is_empty() || !names.insert(name.clone()) {
                return Err(format!("piece {id} is empty or there twice: {name:?}"));
            }
            if !score.is_finite() {
                return Err(format!("the score of piece {id} is {score}"));
            }
            pieces.push(SpmPiece { name, score, kind });
        }
        if !pieces.iter().any(|p| p.kind == PieceKind::Unknown) {
            return Err("has no piece for unknown text".into());
        }
        Ok(Self {
            pieces,
            algorithm,
            byte_fallback: trainer.byte_fallback(),
            charsmap,
            add_dummy_prefix: normalizer.add_dummy_prefix(),
            remove_extra_whitespaces: normalizer.remove_extra_whitespaces(),
        })
    }

    /// The place of the piece for what has no entry.
    pub(crate) fn unknown(&self) -> usize {
        let found = self.pieces.iter().position(|p| p.kind == PieceKind::Unknown);
        found.expect("a model without it is refused when it is read")
    }

    /// The library's model, whose ids are the file's. Entries that no text may reach, and those in `excluded`,
    /// are spelled so that none does.
    pub(crate) fn model(&self, excluded: &HashSet<&str>) -> Value {
        let spelled = |piece: &SpmPiece| {
            let reached = match piece.kind {
                PieceKind::Normal | PieceKind::Byte => true,
                PieceKind::UserDefined => piece.added().is_none(),
                PieceKind::Unknown | PieceKind::Control | PieceKind::Unused => false,
            };
            let reached = reached && !excluded.contains(piece.name.as_str());
            if reached { piece.name.clone() } else { hidden(&piece.name) }
        };
        match self.algorithm {
            SpmAlgorithm::Unigram => {
                let vocab: Vec<Value> = self.pieces.iter().map(|p| json!([spelled(p), p.score])).collect();
                json!({
                    "type": "Unigram", "unk_id": self.unknown(), "vocab": vocab,
                    "byte_fallback": self.byte_fallback,
                })
            }
            SpmAlgorithm::Bpe => {
                let names: Vec<String> = self.pieces.iter().map(spelled).collect();
                let vocab: Map<String, Value> =
                    names.iter().enumerate().map(|(id, name)| (name.clone(), id.into())).collect();
                json!({
                    "type": "BPE", "vocab": vocab, "merges": self.merges(&names), "fuse_unk": true,
                    "unk_token": names[self.unknown()], "byte_fallback": self.byte_fallback,
                })
            }
        }
    }

    /// Every way in which two pieces make a third, the best third first. O(characters of all pieces).
    fn merges(&self, names: &[String]) -> Vec<[String; 2]> {
        let ids: HashMap<&str, usize> =
            names.iter().enumerate().map(|(id, name)| (name.as_str(), id)).collect();
        let mut found = Vec::new();
        for (piece, name) in self.pieces.iter().zip(names) {
            let splits = name.char_indices().skip(1).map(|(at, _)| name.split_at(at));
            let mut local: Vec<(usize, usize, &str, &str)> = splits
                .filter_map(|(left, right)| Some((*ids.get(left)?, *ids.get(right)?, left, right)))
                .collect();
            local.sort_unstable_by_key(|(left, right, ..)| (*left, *right));
            found.extend(local.into_iter().map(|(_, _, left, right)| (piece.score, left, right)));
        }
        let n_chars = |text: &str| text.chars().count();
        found.sort_by(|a, b| {
            b.0.total_cmp(&a.0)
                .then_with(|| n_chars(b.1).cmp(&n_chars(a.1)))
                .then_with(|| n_chars(b.2).cmp(&n_chars(a.2)))
        });
        found.into_iter().map(|(_, left, right)| [left.to_owned(), right.to_owned()]).collect()
    }

    /// Normalisation of a text: the file's own map; spaces at the ends and repeated ones removed, one prepended; all of
    /// them spelled `▁`.
    pub(crate) fn normalizer(&self, at_end: SpacesAtEnd) -> Value {
        let mut steps = Vec::new();
        let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        if !self.charsmap.is_empty() {
            let map = base64::engine::general_purpose::STANDARD.encode(&self.charsmap);
            steps.push(json!({"type": "Precompiled", "precompiled_charsmap": map}));
        }
        let one_stays = self.remove_extra_whitespaces && at_end == SpacesAtEnd::One;
        if one_stays {
            steps.push(replace(json!({"Regex": " {2,}"}), " "));
            steps.push(replace(json!({"Regex": "^ (?=[^ ])"}), ""));
        } else if self.remove_extra_whitespaces {
            steps.push(replace(json!({"Regex": "^ +|[ ▁]+$"}), ""));
            steps.push(replace(json!({"Regex": " {2,}"}), " "));
        }
        if self.add_dummy_prefix {
            steps.push(json!({"type": "Prepend", "prepend": "▁"}));
        }
        steps.push(replace(json!({"String": " "}), "▁"));
        if one_stays && self.add_dummy_prefix {
            // A text of spaces is one space, not the prepended one and its own.
            steps.push(replace(json!({"Regex": "^▁▁$"}), "▁"));
        }
        json!({"type": "Sequence", "normalizers": steps})
    }

    /// Splits before every space, unless a piece goes over one.
    pub(crate) fn pre_tokenizer(&self) -> Value {
        let over_space = |piece: &SpmPiece| piece.name.chars().skip(1).any(|c| c == '▁');
        if self.pieces.iter().any(over_space) {
            return Value::Null;
        }
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": true})
    }

    /// Bytes, then spaces; what was put before the text is dropped.
    pub(crate) fn decoder(&self) -> Value {
        let bytes = json!({"type": "ByteFallback"});
        if !self.remove_extra_whitespaces {
            let spaces = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
            let first =
                json!({"type": "Strip", "content": " ", "start": u8::from(self.add_dummy_prefix), "stop": 0});
            return json!({"type": "Sequence", "decoders": [bytes, spaces, {"type": "Fuse"}, first]});
        }
        // This one drops every space of the first token, as sentencepiece does.
        let spaces =
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
        if self.byte_fallback { json!({"type": "Sequence", "decoders": [bytes, spaces]}) } else { spaces }
    }

    /// The ids of the file, for a family that keeps them.
    pub(crate) fn own_ids(&self) -> Vec<u32> {
        (0..self.pieces.len()).map(index).collect()
    }
}
