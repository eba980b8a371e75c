//! What `generation_config.json` and `config.json` say about generating, for every family.

use super::SamplingDefaults;
use crate::error::ModelError;
use crate::files::JsonFile;
use std::path::Path;

/// The two files, read once.
pub(super) struct GenerationFiles {
    /// `config.json`.
    pub(super) config: JsonFile,
    /// `generation_config.json`; empty when there is none.
    pub(super) generation: JsonFile,
}

impl GenerationFiles {
    pub(super) fn read(dir: &Path) -> Result<Self, ModelError> {
        Ok(Self {
            config: JsonFile::read(dir, "config.json")?,
            generation: JsonFile::read_or_empty(dir, "generation_config.json")?,
        })
    }

    /// A number of the text model, which newer files keep one level down.
    pub(super) fn text_u32(&self, key: &str) -> Result<u32, ModelError> {
        let nested = format!("text_config.{key}");
        match self.config.u32(&nested)? {
            Some(value) => Ok(value),
            None => self.config.u32(key)?.ok_or_else(|| self.config.wrong(key, "a whole number")),
        }
    }

    /// Tokens that end a sequence.
    pub(super) fn end_tokens(&self) -> Result<Vec<u32>, ModelError> {
        const KEY: &str = "eos_token_id";
        let found = match self.generation.ids(KEY)? {
            Some(ids) => Some(ids),
            None => match self.config.ids(KEY)? {
                Some(ids) => Some(ids),
                None => self.config.ids("text_config.eos_token_id")?,
            },
        };
        found.filter(|ids| !ids.is_empty()).ok_or_else(|| self.generation.wrong(KEY, "a token id"))
    }

    /// Greedy unless the file says `do_sample`.
    pub(super) fn sampling_defaults(&self) -> Result<SamplingDefaults, ModelError> {
        let file = &self.generation;
        if file.bool("do_sample")? != Some(true) {
            return Ok(SamplingDefaults { temperature: 0.0, top_p: 1.0, top_k: None });
        }
        let temperature = file.f64("temperature")?.unwrap_or(1.0) as f32;
        let top_p = file.f64("top_p")?.unwrap_or(1.0) as f32;
        if !(0.0..=2.0).contains(&temperature) {
            return Err(file.wrong("temperature", "0 to 2"));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(file.wrong("top_p", "above 0, up to 1"));
        }
        Ok(SamplingDefaults { temperature, top_p, top_k: file.u32("top_k")?.filter(|k| *k > 0) })
    }
}
