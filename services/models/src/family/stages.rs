//! Which processor and which prompt layout a family has.

use super::Family;
use crate::error::ModelError;
use crate::preprocess::Preprocess;
use crate::preprocess::audio::{AudioProcessor, AudioSettings};
use crate::preprocess::image::{ImageProcessor, ImageSettings};
use crate::prompt::{ChatVl, PromptBuilder, SpeechPrompt};
use crate::spec::{EncoderSpec, StemSpec};
use crate::tokenization::Tokenizer;
use std::path::Path;
use std::sync::Arc;

impl Family {
    /// Reads the processor of a model directory, and checks that it makes what the encoder reads.
    ///
    /// # Errors
    /// [`ModelError`] for a file or key that is missing, not supported, or disagrees with `config.json`.
    pub fn preprocess(self, dir: &Path, spec: &EncoderSpec) -> Result<Arc<dyn Preprocess>, ModelError> {
        Ok(match self {
            Self::Whisper => {
                let settings = AudioSettings::from_dir(dir)?;
                if let StemSpec::Mel { n_mels, n_frames } = spec.stem {
                    agree("feature_size", settings.n_mels, n_mels)?;
                    agree("chunk_length (in frames)", settings.n_frames(), n_frames)?;
                }
                Arc::new(AudioProcessor::new(settings))
            }
            Self::Qwen2Vl | Self::Qwen25Vl => {
                let settings = ImageSettings::from_dir(dir)?;
                if let StemSpec::Patches { patch: [_, n_frames, side, _] } = spec.stem {
                    agree("patch_size", settings.patch_size as usize, side)?;
                    agree("temporal_patch_size", settings.temporal_patch_size as usize, n_frames)?;
                }
                if let Some(merger) = &spec.merger {
                    agree("merge_size", settings.merge_size as usize, merger.side)?;
                }
                Arc::new(ImageProcessor::new(settings))
            }
        })
    }

    /// Reads the prompt layout of a model directory.
    ///
    /// # Errors
    /// [`ModelError`] for a file or key that is missing or not supported.
    pub fn prompts(
        self,
        dir: &Path,
        tokenizer: &Arc<Tokenizer>,
    ) -> Result<Arc<dyn PromptBuilder>, ModelError> {
        let tokenizer = tokenizer.clone();
        Ok(match self {
            Self::Whisper => Arc::new(SpeechPrompt::from_dir(dir, tokenizer)?),
            Self::Qwen2Vl | Self::Qwen25Vl => Arc::new(ChatVl::from_dir(dir, tokenizer)?),
        })
    }
}

/// Refuses a processor setting that is not what the encoder was built for.
fn agree(key: &str, actual: usize, expected: usize) -> Result<(), ModelError> {
    if actual == expected {
        return Ok(());
    }
    Err(ModelError::Config {
        file: "preprocessor_config.json",
        key: key.into(),
        actual: actual.to_string(),
        expected: format!("{expected}, as in config.json"),
    })
}
