//! Generation settings from `generation_config.json` and `config.json`, for every family; [`keys`] lists all keys.

mod keys;

use super::{AnswerLength, SamplingDefaults};
use crate::error::ModelError;
use crate::files::JsonFile;
use crate::rules::LogitRules;
use std::path::Path;
use triptych_core::sampling::{BeamParams, EarlyStopping, MAX_BEAMS};

/// Sections of `config.json` that may hold the decoder's keys: its top, or one level down.
pub(super) const SECTIONS: [&str; 3] = ["", "text_config.", "decoder."];

/// The two files, read once.
pub(crate) struct GenerationFiles {
    /// `config.json`.
    pub(crate) config: JsonFile,
    /// `generation_config.json`; empty when there is none.
    pub(crate) generation: JsonFile,
}

impl GenerationFiles {
    /// # Errors
    /// [`ModelError`] for a file that cannot be read, or sets a key that is not served.
    pub(crate) fn read(dir: &Path) -> Result<Self, ModelError> {
        let files = Self {
            config: JsonFile::read(dir, "config.json")?,
            generation: JsonFile::read_or_empty(dir, "generation_config.json")?,
        };
        keys::check(files.source())?;
        Ok(files)
    }

    /// A number of the text model, which newer files keep one level down.
    pub(crate) fn text_u32(&self, key: &str) -> Result<u32, ModelError> {
        let nested = format!("text_config.{key}");
        match self.config.u32(&nested)? {
            Some(value) => Ok(value),
            None => self.config.u32(key)?.ok_or_else(|| self.config.wrong(key, "an integer")),
        }
    }

    /// Tokens that end a sequence.
    pub(crate) fn end_tokens(&self) -> Result<Vec<u32>, ModelError> {
        const KEY: &str = "eos_token_id";
        let found = match self.generation.ids(KEY)? {
            Some(ids) => Some(ids),
            None => {
                let keys = SECTIONS.map(|section| format!("{section}{KEY}"));
                let lists = keys.iter().map(|key| self.config.ids(key)).collect::<Result<Vec<_>, _>>()?;
                lists.into_iter().flatten().next()
            }
        };
        found.filter(|ids| !ids.is_empty()).ok_or_else(|| self.generation.wrong(KEY, "a token id"))
    }

    /// The file with the generation settings: `config.json` for models older than `generation_config.json`.
    pub(crate) fn source(&self) -> &JsonFile {
        let is_empty = self.generation.value().as_object().is_none_or(serde_json::Map::is_empty);
        if is_empty { &self.config } else { &self.generation }
    }

    /// Greedy, or beams, unless the file says `do_sample`.
    pub(crate) fn sampling_defaults(&self) -> Result<SamplingDefaults, ModelError> {
        let file = self.source();
        let length = |new: &str, with_prompt: &str| -> Result<Option<AnswerLength>, ModelError> {
            Ok(match file.u32(new)? {
                Some(n) => Some(AnswerLength::New(n)),
                None => file.u32(with_prompt)?.map(AnswerLength::WithPrompt),
            })
        };
        let defaults = SamplingDefaults {
            repetition_penalty: file.f64("repetition_penalty")?.map(|p| p as f32).filter(|p| *p != 1.0),
            no_repeat_ngram_size: file.u32("no_repeat_ngram_size")?.filter(|n| *n > 0),
            encoder_no_repeat_ngram_size: file.u32("encoder_no_repeat_ngram_size")?.filter(|n| *n > 0),
            renormalize_logits: file.bool("renormalize_logits")?.unwrap_or(false),
            max_length: length("max_new_tokens", "max_length")?,
            min_length: length("min_new_tokens", "min_length")?,
            ..SamplingDefaults::default()
        };
        if file.bool("do_sample")? != Some(true) {
            return Ok(SamplingDefaults { beams: self.beams()?, ..defaults });
        }
        if file.u32("num_beams")?.is_some_and(|width| width > 1) {
            return Err(file.wrong("num_beams", "1 beside do_sample: beams are searched, not drawn"));
        }
        let temperature = file.f64("temperature")?.unwrap_or(1.0) as f32;
        let top_p = file.f64("top_p")?.unwrap_or(1.0) as f32;
        let min_p = file.f64("min_p")?.unwrap_or(0.0) as f32;
        if !(0.0..=2.0).contains(&temperature) {
            return Err(file.wrong("temperature", "0 to 2"));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(file.wrong("top_p", "above 0, up to 1"));
        }
        if !(0.0..=1.0).contains(&min_p) {
            return Err(file.wrong("min_p", "0 to 1"));
        }
        let top_k = file.u32("top_k")?.filter(|k| *k > 0);
        Ok(SamplingDefaults { temperature, top_p, top_k, min_p, ..defaults })
    }

    /// Beam search, where the file asks for more than one beam.
    fn beams(&self) -> Result<Option<BeamParams>, ModelError> {
        let file = self.source();
        let width = match file.u32("num_beams")? {
            None | Some(0 | 1) => return Ok(None),
            Some(width) if width <= MAX_BEAMS => width,
            Some(_) => return Err(file.wrong("num_beams", &format!("at most {MAX_BEAMS}"))),
        };
        const EARLY: &str = "early_stopping";
        let early_stopping = match file.get(EARLY) {
            None | Some(serde_json::Value::Bool(false)) => EarlyStopping::Heuristic,
            Some(serde_json::Value::Bool(true)) => EarlyStopping::Immediately,
            Some(value) if value == "never" => EarlyStopping::Never,
            Some(_) => return Err(file.wrong(EARLY, "true, false or \"never\"")),
        };
        let length_penalty = file.f64("length_penalty")?.unwrap_or(1.0) as f32;
        Ok(Some(BeamParams { width, length_penalty, early_stopping }))
    }

    /// Rules on logits that every family has: tokens that are never generated, or not first, runs of tokens that are
    /// never completed, and the token that is forced last.
    pub(crate) fn logit_rules(&self) -> Result<LogitRules, ModelError> {
        let ids = |key: &str| Ok::<_, ModelError>(self.source().ids(key)?.unwrap_or_default());
        let (suppress, bad_words) = self.never()?;
        Ok(LogitRules {
            suppress: suppress.into(),
            begin_suppress: ids("begin_suppress_tokens")?.into(),
            bad_words: bad_words.into(),
            last: ids("forced_eos_token_id")?.into(),
            ..LogitRules::default()
        })
    }

    /// Tokens, and token sequences, that are never generated: `suppress_tokens` and `bad_words_ids`.
    fn never(&self) -> Result<(Vec<u32>, Vec<Vec<u32>>), ModelError> {
        let file = self.source();
        let mut tokens = file.ids("suppress_tokens")?.unwrap_or_default();
        let (single, runs): (Vec<_>, Vec<_>) =
            file.id_lists("bad_words_ids")?.unwrap_or_default().into_iter().partition(|run| run.len() == 1);
        tokens.extend(single.into_iter().flatten());
        tokens.sort_unstable();
        tokens.dedup();
        Ok((tokens, runs))
    }
}
