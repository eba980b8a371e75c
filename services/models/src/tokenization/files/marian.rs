//! Marian: two sentencepiece models that split, and a `vocab.json` that numbers. `source.spm` splits what the
//! encoder reads, `target.spm` what the decoder does.
//!
//! A piece that the list lacks is unknown. A language asked for, `>>fra<<`, is a token.

use super::bytelevel::read_vocabulary;
use super::directory::TokenizerDir;
use super::parts::BuiltTokenizers;
use super::parts::{BuiltTokenizer, InputTemplate, TokenizerParts};
use super::sentencepiece::{SpacesAtEnd, Spm, pieces_found_first};
use super::special::NamedToken;
use crate::error::ModelError;
use crate::tokenization::id_map::Vocabulary;
use std::collections::{HashMap, HashSet};

pub(super) fn build(dir: &TokenizerDir<'_>) -> Result<BuiltTokenizers, ModelError> {
    let separate = dir.config.bool("separate_vocabs")?.unwrap_or(false);
    let target = if separate { "target_vocab.json" } else { "vocab.json" };
    let output = side(dir, "target.spm", target)?;
    let input = Some(side(dir, "source.spm", "vocab.json")?);
    Ok(BuiltTokenizers { input, ..BuiltTokenizers::of(output) })
}

fn side(dir: &TokenizerDir<'_>, spm_file: &str, list: &'static str) -> Result<BuiltTokenizer, ModelError> {
    let spm = Spm::read(&dir.file(spm_file))?;
    let mut vocabulary = Vocabulary::default();
    for (id, name) in read_vocabulary(dir, list)? {
        vocabulary.insert(id, &name);
    }
    let unknown = dir.role("unk_token", "<unk>");
    let unknown_id = vocabulary
        .id(&unknown.content)
        .ok_or_else(|| dir.wrong(list, format!("has no {:?}, the token of unknown text", unknown.content)))?;
    let ids = spm.pieces.iter().map(|p| vocabulary.id(&p.name).unwrap_or(unknown_id)).collect();
    let end = dir.role("eos_token", "</s>");
    let mut named = vec![unknown, end.clone(), dir.role("pad_token", "<pad>")];
    let languages = vocabulary.names().map(|(_, name)| name).filter(|name| is_language(name));
    named.extend(languages.map(|name| NamedToken::special(name).ordinary()));
    named.extend(pieces_found_first(&spm).filter(|t| vocabulary.id(&t.content).is_some()));
    let added = dir.specials.place(named, &mut vocabulary);
    let excluded: HashSet<&str> = added.iter().map(|t| t.content.as_str()).collect();
    Ok(TokenizerParts {
        model: spm.model(&excluded),
        normalizer: spm.normalizer(SpacesAtEnd::Removed),
        pre_tokenizer: spm.pre_tokenizer(),
        decoder: spm.decoder(),
        ids,
        known: HashMap::new(),
        added,
        vocabulary,
        around: InputTemplate::ended(&end),
    }
    .finish())
}

/// `>>fra<<`.
pub(crate) fn is_language(name: &str) -> bool {
    name.strip_prefix(">>").and_then(|rest| rest.strip_suffix("<<")).is_some_and(|code| !code.is_empty())
}
