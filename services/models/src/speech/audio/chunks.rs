//! Audio of any length to the log-mel of one item in chunks, as transformers' `Qwen3ASRFeatureExtractor` makes it
//! (<https://github.com/huggingface/transformers/blob/v5.13.0/src/transformers/models/qwen3_asr/feature_extraction_qwen3_asr.py>).
//!
//! Audio that is very short is filled up with silence, which counts as audio; the last chunk is filled up behind the log-mel, which
//! does not.

use super::mel::LogMel;
use super::settings::AudioSettings;
use super::{MAX_WINDOWS, decode};
use crate::error::ItemError;
use crate::preprocess::{EncoderInput, Features, Preprocess, admit, check_options, contained};
use crate::spec::MelChunksSpec;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};

/// The processor of models whose encoder reads chunks of log-mel.
#[derive(Clone)]
pub struct ChunkProcessor {
    settings: AudioSettings,
    log_mel: LogMel,
    chunks: MelChunksSpec,
    min_samples: usize,
}

impl std::fmt::Debug for ChunkProcessor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChunkProcessor").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl ChunkProcessor {
    /// Samples of the shortest audio, where a processor does not say.
    pub const MIN_SAMPLES: u32 = 8000;

    /// With these settings, for an encoder; shorter audio than `min_samples` is filled up.
    pub fn new(settings: AudioSettings, chunks: MelChunksSpec, min_samples: u32) -> Self {
        // The mirrored ends of the first and the last frame are in the audio.
        let min_samples =
            (min_samples as usize).clamp(settings.hop.max(settings.n_fft), settings.n_samples());
        Self { settings, log_mel: LogMel::new(settings), chunks, min_samples }
    }
}

impl Preprocess for ChunkProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Audio]
    }

    fn max_rows(&self) -> Option<usize> {
        None
    }

    fn preprocess(
        &self,
        modality: Modality,
        bytes: &[u8],
        options: &ItemOptions,
        limits: &Limits,
    ) -> Result<EncoderInput, ItemError> {
        admit(Modality::Audio, modality, bytes, limits)?;
        check_options(options, &[])?;
        let mut samples = contained(modality, || decode(bytes, self.settings.rate, limits))?;
        let duration_ms = samples.len() as u64 * 1000 / u64::from(self.settings.rate);
        samples.resize(samples.len().max(self.min_samples), 0.0);
        let n_frames = samples.len() / self.settings.hop;
        let n_windows = n_frames.div_ceil(self.chunks.n_chunks * self.chunks.n_frames);
        if n_windows > MAX_WINDOWS {
            return Err(ItemError::TooLarge {
                what: "the audio",
                actual: format!("{n_windows} windows"),
                limit: format!("{MAX_WINDOWS} windows"),
            });
        }
        let mut mel = Vec::new();
        let n_valid = self.log_mel.extend_chunks(&samples, self.chunks.n_frames, &mut mel);
        Ok(EncoderInput {
            n_tokens: self.chunks.n_rows(n_valid) as u32,
            extent: Extent::windows(n_windows as u32, duration_ms),
            features: Features::MaskedMel { mel, n_valid: n_valid as u32 },
        })
    }
}
