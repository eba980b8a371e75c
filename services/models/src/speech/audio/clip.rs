//! Audio to the log-mel of one item whose rows stand among a decoder's tokens.
//!
//! Decode, one channel, the processor's rate, then the log-mel of one window whose silence is known
//! (<https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/qwen2_audio/processing_qwen2_audio.py>), or of
//! as many as the audio fills
//! (<https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/voxtral/processing_voxtral.py>). A longer
//! audio than one window, which the first of them cuts off, is refused.

use super::mel::LogMel;
use super::settings::{AudioSettings, FRAMES_PER_ROW};
use super::{MAX_WINDOWS, decode};
use crate::error::ItemError;
use crate::preprocess::{EncoderInput, Features, Preprocess, admit, check_options, contained};
use crate::spec::{EncoderSpec, MelWindows, StemSpec};
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};

/// The processor of models that read audio among their tokens.
#[derive(Clone)]
pub struct ClipProcessor {
    settings: AudioSettings,
    log_mel: LogMel,
    windows: MelWindows,
    /// Encoder rows that become one output row.
    merged_rows: usize,
}

impl std::fmt::Debug for ClipProcessor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClipProcessor").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl ClipProcessor {
    /// With these settings, for an encoder.
    pub fn new(settings: AudioSettings, spec: &EncoderSpec) -> Self {
        let windows = match spec.stem {
            StemSpec::Mel { windows, .. } => windows,
            _ => MelWindows::Separate,
        };
        Self { settings, log_mel: LogMel::new(settings), windows, merged_rows: spec.merged_rows() }
    }

    fn seconds(&self, n_samples: usize) -> f64 {
        n_samples as f64 / f64::from(self.settings.rate)
    }

    /// One window, and its output rows.
    ///
    /// # Errors
    /// [`ItemError`] for audio longer than a window, or without an output row.
    fn masked(&self, mut samples: Vec<f32>) -> Result<(Features, usize), ItemError> {
        let n_samples = self.settings.n_samples();
        // A rest shorter than one encoder row is the padding of a codec.
        if samples.len() < n_samples + self.settings.hop * FRAMES_PER_ROW {
            samples.truncate(n_samples);
        }
        if samples.len() > n_samples {
            return Err(ItemError::TooLarge {
                what: "the audio",
                actual: format!("{:.1} s long", self.seconds(samples.len())),
                limit: format!("{} s, the window of this model's encoder", self.settings.chunk_s),
            });
        }
        let n_valid = samples.len().div_ceil(self.settings.hop);
        let n_rows = n_valid.div_ceil(FRAMES_PER_ROW) / self.merged_rows;
        if n_rows == 0 {
            let needed = (FRAMES_PER_ROW * (self.merged_rows - 1)) * self.settings.hop + 1;
            return Err(ItemError::Empty(format!(
                "the audio has {} samples at {} Hz, this model needs at least {needed}",
                samples.len(),
                self.settings.rate
            )));
        }
        let mut mel = Vec::new();
        self.log_mel.extend(&samples, &mut mel);
        Ok((Features::MaskedMel { mel, n_valid: n_valid as u32 }, n_rows))
    }

    /// As many windows as the audio fills, and their output rows.
    ///
    /// # Errors
    /// [`ItemError::TooLarge`] for more windows than an item may have.
    fn whole(&self, samples: Vec<f32>) -> Result<(Features, usize), ItemError> {
        let n_windows = samples.len().div_ceil(self.settings.n_samples()).max(1);
        if n_windows > MAX_WINDOWS {
            return Err(ItemError::TooLarge {
                what: "the audio",
                actual: format!("{n_windows} windows"),
                limit: format!("{MAX_WINDOWS} windows"),
            });
        }
        let mut mel = Vec::new();
        self.log_mel.extend_whole(samples, &mut mel);
        Ok((Features::Mel(mel), n_windows * self.settings.rows_per_window() / self.merged_rows))
    }
}

impl Preprocess for ClipProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Audio]
    }

    fn max_rows(&self) -> Option<usize> {
        match self.windows {
            MelWindows::Masked => Some(self.settings.rows_per_window() / self.merged_rows),
            MelWindows::Separate | MelWindows::Joined => None,
        }
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
        let samples = contained(modality, || decode(bytes, self.settings.rate, limits))?;
        let duration_ms = samples.len() as u64 * 1000 / u64::from(self.settings.rate);
        let n_windows = match self.windows {
            MelWindows::Masked => 1,
            _ => samples.len().div_ceil(self.settings.n_samples()).max(1),
        };
        let (features, n_rows) = match self.windows {
            MelWindows::Masked => self.masked(samples)?,
            MelWindows::Separate | MelWindows::Joined => self.whole(samples)?,
        };
        Ok(EncoderInput {
            n_tokens: n_rows as u32,
            extent: Extent::windows(n_windows as u32, duration_ms),
            features,
        })
    }
}
