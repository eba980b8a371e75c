//! The parts of a family that read items and lay out prompts, from a model directory.

use super::Family;
use crate::error::{ItemError, ModelError, PromptError};
use crate::preprocess::{EncoderInput, Preprocess};
use crate::prompt::{PreparedSequence, PromptBuilder, SamplingDefaults};
use crate::tokenization::Tokenizer;
use std::path::Path;
use std::sync::Arc;
use triptych_core::limits::Limits;
use triptych_core::prompt::Prompt;
use triptych_core::{EncodedItem, Modality};

struct Nothing;

impl Preprocess for Nothing {
    fn modalities(&self) -> &[Modality] {
        &[]
    }
    fn preprocess(&self, _: Modality, _: &[u8], _: &Limits) -> Result<EncoderInput, ItemError> {
        Err(ItemError::Unsupported("not yet".into()))
    }
}

impl PromptBuilder for Nothing {
    fn prepare(&self, _: &Prompt, _: &[EncodedItem]) -> Result<Vec<PreparedSequence>, PromptError> {
        Err(PromptError::Invalid("not yet".into()))
    }
    fn sampling_defaults(&self) -> SamplingDefaults {
        SamplingDefaults { temperature: 0.0, top_p: 1.0, top_k: None }
    }
}

impl Family {
    /// Its processor.
    pub(crate) fn preprocess(self, _dir: &Path) -> Result<Arc<dyn Preprocess>, ModelError> {
        Ok(Arc::new(Nothing))
    }

    /// Its prompt layout.
    pub(crate) fn prompts(self, _dir: &Path, _t: &Arc<Tokenizer>) -> Result<Arc<dyn PromptBuilder>, ModelError> {
        Ok(Arc::new(Nothing))
    }
}
