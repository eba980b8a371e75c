//! Families with one sentencepiece model: T5, Pegasus, mBART, XLM-RoBERTa, Llama. Each keeps the file's ids or
//! moves them, adds its tokens, and puts some around an input.

mod proto;
mod spm;

pub(super) use spm::{SpacesAtEnd, Spm};

use super::byt5::extra_ids;
use super::directory::TokenizerDir;
use super::parts::{BuiltTokenizer, InputTemplate, TokenizerParts, index};
use super::special::NamedToken;
use crate::error::ModelError;
use crate::tokenization::id_map::Vocabulary;
use std::collections::{HashMap, HashSet};

/// mBART's languages, in the order of their ids; mBART-50 has the second list behind them.
const MBART: [&str; 25] = [
    "ar_AR", "cs_CZ", "de_DE", "en_XX", "es_XX", "et_EE", "fi_FI", "fr_XX", "gu_IN", "hi_IN", "it_IT",
    "ja_XX", "kk_KZ", "ko_KR", "lt_LT", "lv_LV", "my_MM", "ne_NP", "nl_XX", "ro_RO", "ru_RU", "si_LK",
    "tr_TR", "vi_VN", "zh_CN",
];
const MBART_50: [&str; 27] = [
    "af_ZA", "az_AZ", "bn_IN", "fa_IR", "he_IL", "hr_HR", "id_ID", "ka_GE", "km_KH", "mk_MK", "ml_IN",
    "mn_MN", "mr_IN", "pl_PL", "ps_AF", "pt_XX", "sv_SE", "sw_KE", "ta_IN", "te_IN", "th_TH", "tl_XX",
    "uk_UA", "ur_PK", "xh_ZA", "gl_ES", "sl_SI",
];

/// A family's ids and tokens over a sentencepiece model.
struct SpmFamily {
    /// The model's id of each piece.
    ids: Vec<u32>,
    vocabulary: Vocabulary,
    added: Vec<NamedToken>,
    around: InputTemplate,
}

pub(super) fn build(dir: &TokenizerDir<'_>, file: &str) -> Result<BuiltTokenizer, ModelError> {
    let spm = Spm::read(&dir.file(file))?;
    let family = match dir.class.as_str() {
        "T5" | "MT5" => t5(dir, &spm)?,
        "Pegasus" => pegasus(dir, &spm)?,
        "MBart" => mbart(dir, &spm, &MBART)?,
        "MBart50" => mbart(dir, &spm, &[MBART.as_slice(), &MBART_50].concat())?,
        "M2M100" | "Nllb" | "NLLB" => {
            let message = format!(
                "{file} of a {} tokenizer without tokenizer.json: its ids and languages are in its class alone; save \
                 one with transformers' AutoTokenizer",
                dir.class
            );
            return Err(ModelError::Format { path: dir.path.join(file), message });
        }
        "XLMRoberta" | "Camembert" => xlm_roberta(dir, &spm),
        _ => plain(dir, &spm)?,
    };
    let SpmFamily { ids, mut vocabulary, added: mut named, around } = family;
    named.extend(pieces_found_first(&spm));
    let added = dir.specials.place(named, &mut vocabulary);
    let excluded: HashSet<&str> = added.iter().map(|t| t.content.as_str()).collect();
    let model = spm.model(&excluded);
    let at_end = match dir.class.as_str() {
        "Pegasus" | "MBart50" => SpacesAtEnd::One,
        _ => SpacesAtEnd::Removed,
    };
    let normalizer = spm.normalizer(at_end);
    let pre_tokenizer = spm.pre_tokenizer();
    let decoder = spm.decoder();
    let known = HashMap::new();
    let parts =
        TokenizerParts { model, normalizer, pre_tokenizer, decoder, ids, known, added, vocabulary, around };
    Ok(parts.finish())
}

/// Pieces that are found in a text before it is split.
pub(super) fn pieces_found_first(spm: &Spm) -> impl Iterator<Item = NamedToken> {
    spm.pieces.iter().filter_map(|piece| {
        let token = NamedToken::special(&piece.name);
        Some(if piece.added()? { token } else { token.ordinary() })
    })
}

/// The file's own numbering.
fn own_vocabulary(spm: &Spm) -> Vocabulary {
    let mut vocabulary = Vocabulary::default();
    for (id, piece) in spm.pieces.iter().enumerate() {
        vocabulary.insert(index(id), &piece.name);
    }
    vocabulary
}

/// The file's ids, its sentinels behind them from the last to the first, the end behind an input.
fn t5(dir: &TokenizerDir<'_>, spm: &Spm) -> Result<SpmFamily, ModelError> {
    let mut vocabulary = own_vocabulary(spm);
    let end = dir.role("eos_token", "</s>");
    let mut added = vec![dir.role("pad_token", "<pad>"), end.clone(), dir.role("unk_token", "<unk>")];
    for i in (0..extra_ids(dir, 100)?).rev() {
        let name = format!("<extra_id_{i}>");
        if vocabulary.id(&name).is_none() {
            vocabulary.insert(vocabulary.end(), &name);
        }
        added.push(NamedToken::special(name));
    }
    Ok(SpmFamily { ids: spm.own_ids(), vocabulary, added, around: InputTemplate::ended(&end) })
}

/// Pad and end come first, then the two masks and what was left unused in training; pieces behind.
fn pegasus(dir: &TokenizerDir<'_>, spm: &Spm) -> Result<SpmFamily, ModelError> {
    let offset = dir.config.u32("offset")?.unwrap_or(103);
    if offset > super::byt5::MAX_EXTRA_IDS {
        return Err(dir.config.wrong("offset", &format!("at most {}", super::byt5::MAX_EXTRA_IDS)));
    }
    let pad = dir.role("pad_token", "<pad>");
    let end = dir.role("eos_token", "</s>");
    let mut vocabulary = Vocabulary::default();
    let mut added = vec![pad, end.clone()];
    for (id, token) in added.iter().enumerate() {
        vocabulary.insert(index(id), &token.content);
    }
    let sentence = dir.specials.role("mask_token_sent", "<mask_1>");
    let mask = dir.specials.role("mask_token", "<mask_2>");
    if sentence.is_some() {
        for (id, token) in [(2, sentence), (3, mask.clone())] {
            let Some(token) = token else { continue };
            vocabulary.insert(id, &token.content);
            added.push(token);
        }
    }
    for i in 2..offset {
        let name = format!("<unk_{i}>");
        vocabulary.insert(i + 2, &name);
        added.push(NamedToken::special(name));
    }
    let mut ids = Vec::with_capacity(spm.pieces.len());
    for (at, piece) in spm.pieces.iter().enumerate() {
        let id = if at < 2 { index(at) } else { index(at) + offset };
        if at >= 2 {
            vocabulary.insert(id, &piece.name);
        }
        ids.push(id);
    }
    added.push(dir.role("unk_token", "<unk>"));
    added.extend(mask);
    Ok(SpmFamily { ids, vocabulary, added, around: InputTemplate::ended(&end) })
}

/// fairseq's first four ids, then the pieces behind the file's first three.
fn fairseq(dir: &TokenizerDir<'_>, spm: &Spm) -> (Vec<u32>, Vocabulary, Vec<NamedToken>) {
    let first = [("bos_token", "<s>"), ("pad_token", "<pad>"), ("eos_token", "</s>"), ("unk_token", "<unk>")];
    let added: Vec<NamedToken> = first.iter().map(|(role, name)| dir.role(role, name)).collect();
    let mut vocabulary = Vocabulary::default();
    for (id, token) in added.iter().enumerate() {
        vocabulary.insert(index(id), &token.content);
    }
    let mut ids = Vec::with_capacity(spm.pieces.len());
    for (at, piece) in spm.pieces.iter().enumerate() {
        // The file begins with unknown, begin and end, in an order of its own.
        let id = if at < 3 { vocabulary.id(&piece.name).unwrap_or(3) } else { index(at) + 1 };
        if at >= 3 {
            vocabulary.insert(id, &piece.name);
        }
        ids.push(id);
    }
    (ids, vocabulary, added)
}

/// fairseq's ids, the languages and the mask behind them. mBART puts end and language behind an input,
/// mBART-50 the language before it and the end behind.
fn mbart(dir: &TokenizerDir<'_>, spm: &Spm, languages: &[&str]) -> Result<SpmFamily, ModelError> {
    let (ids, mut vocabulary, mut added) = fairseq(dir, spm);
    let end = added[2].content.clone();
    let mask = dir.role("mask_token", "<mask>").after_space();
    for token in languages.iter().map(|code| NamedToken::special(*code)).chain([mask]) {
        vocabulary.insert(vocabulary.end(), &token.content);
        added.push(token);
    }
    let language = match dir.config.get("src_lang").map(|v| v.as_str()) {
        None => "en_XX".to_owned(),
        Some(Some(code)) if languages.contains(&code) => code.to_owned(),
        Some(_) => return Err(dir.config.wrong("src_lang", &format!("one of {}", languages.join(", ")))),
    };
    let around = if dir.class == "MBart50" {
        InputTemplate { before: vec![language], after: vec![end] }
    } else {
        InputTemplate { before: Vec::new(), after: vec![end, language] }
    };
    Ok(SpmFamily { ids, vocabulary, added, around })
}

/// fairseq's ids, the mask behind them, begin and end around an input.
fn xlm_roberta(dir: &TokenizerDir<'_>, spm: &Spm) -> SpmFamily {
    let (ids, mut vocabulary, mut added) = fairseq(dir, spm);
    let around =
        InputTemplate { before: vec![added[0].content.clone()], after: vec![added[2].content.clone()] };
    let mask = dir.role("mask_token", "<mask>").after_space();
    vocabulary.insert(vocabulary.end(), &mask.content);
    added.push(mask);
    SpmFamily { ids, vocabulary, added, around }
}

/// The file's ids and nothing more; Llama puts a begin before an input, and what `add_bos_token` and
/// `add_eos_token` say goes for any class.
fn plain(dir: &TokenizerDir<'_>, spm: &Spm) -> Result<SpmFamily, ModelError> {
    let roles = [("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>")];
    let [begin, end, unknown] = roles.map(|(role, name)| dir.role(role, name));
    let around = |key: &str, default: bool, token: &NamedToken| -> Result<Vec<String>, ModelError> {
        Ok(match dir.config.bool(key)?.unwrap_or(default) {
            true => vec![token.content.clone()],
            false => Vec::new(),
        })
    };
    let around = InputTemplate {
        before: around("add_bos_token", dir.class == "Llama", &begin)?,
        after: around("add_eos_token", false, &end)?,
    };
    let mut added = vec![begin, end, unknown];
    added.retain(|token| spm.pieces.iter().any(|p| p.name == token.content));
    Ok(SpmFamily { ids: spm.own_ids(), vocabulary: own_vocabulary(spm), added, around })
}
