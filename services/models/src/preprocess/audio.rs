//! Sounds to log-mel windows, as transformers' `WhisperFeatureExtractor` makes them.
//!
//! Decode, one channel, 16 kHz → consecutive windows of `chunk_length` seconds, the last filled with silence →
//! log-mel, each window normalised by itself
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/whisper/feature_extraction_whisper.py>).

mod decode;
mod mel;
mod resample;
mod wave;

pub use decode::decode;
pub use mel::LogMel;
pub use wave::WaveProcessor;

use super::{EncoderInput, Features, Preprocess};
use crate::error::{ItemError, ModelError};
use crate::files::JsonFile;
use std::path::Path;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};

const FILE: &str = "preprocessor_config.json";

/// Mel frames that the encoder's stem makes one row of.
const FRAMES_PER_ROW: usize = 2;

/// Settings of an audio processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AudioSettings {
    /// Mel bins.
    pub n_mels: usize,
    /// Samples of a Fourier transform.
    pub n_fft: usize,
    /// Samples from one frame to the next.
    pub hop: usize,
    /// Samples per second.
    pub rate: u32,
    /// Length of a window in seconds.
    pub chunk_s: u32,
}

impl AudioSettings {
    /// Reads `preprocessor_config.json` of a model directory.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`], or [`ModelError::Config`] for a value that is not supported.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let file = JsonFile::read(dir, FILE)?;
        let number = |key: &str, default: u32, most: u32| -> Result<u32, ModelError> {
            let value = file.u32(key)?.unwrap_or(default);
            if (1..=most).contains(&value) {
                Ok(value)
            } else {
                Err(file.wrong(key, &format!("1 to {most}")))
            }
        };
        let settings = Self {
            n_mels: number("feature_size", 80, 512)? as usize,
            n_fft: number("n_fft", 400, 8192)? as usize,
            hop: number("hop_length", 160, 8192)? as usize,
            rate: number("sampling_rate", 16_000, 192_000)?,
            chunk_s: number("chunk_length", 30, 600)?,
        };
        if !settings.n_samples().is_multiple_of(settings.hop * FRAMES_PER_ROW) {
            return Err(file.wrong("chunk_length", "a whole number of encoder rows"));
        }
        if !settings.n_fft.is_multiple_of(2) || settings.n_fft > settings.n_samples() {
            return Err(file.wrong("n_fft", "an even number, less than a window"));
        }
        Ok(settings)
    }

    /// Samples of a window.
    pub fn n_samples(&self) -> usize {
        self.rate as usize * self.chunk_s as usize
    }

    /// Frames of a window.
    pub fn n_frames(&self) -> usize {
        self.n_samples() / self.hop
    }

    /// Encoder rows of a window.
    pub fn rows_per_window(&self) -> usize {
        self.n_frames() / FRAMES_PER_ROW
    }
}

/// The processor of Whisper.
#[derive(Clone)]
pub struct AudioProcessor {
    settings: AudioSettings,
    log_mel: LogMel,
}

impl std::fmt::Debug for AudioProcessor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AudioProcessor").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl AudioProcessor {
    /// With these settings.
    pub fn new(settings: AudioSettings) -> Self {
        Self { settings, log_mel: LogMel::new(settings) }
    }

    /// With the settings of a model directory.
    ///
    /// # Errors
    /// As [`AudioSettings::from_dir`].
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        Ok(Self::new(AudioSettings::from_dir(dir)?))
    }

    /// The settings.
    pub fn settings(&self) -> &AudioSettings {
        &self.settings
    }

    /// Log-mel of samples at the processor's rate: `[n_windows, n_mels, n_frames]`, and the number of windows.
    ///
    /// A rest shorter than one encoder row after a full window is left out: it is the padding of a codec, and
    /// would cost a whole window.
    pub fn windows(&self, samples: &[f32]) -> (u32, Vec<f32>) {
        let n_samples = self.settings.n_samples();
        let (full, rest) = (samples.len() / n_samples, samples.len() % n_samples);
        let n_windows = full + usize::from(rest >= self.settings.hop * FRAMES_PER_ROW || full == 0);
        let mut mel = Vec::with_capacity(n_windows * self.settings.n_mels * self.settings.n_frames());
        for window in samples.chunks(n_samples).take(n_windows) {
            self.log_mel.extend(window, &mut mel);
        }
        (n_windows as u32, mel)
    }
}

impl Preprocess for AudioProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Audio]
    }

    fn preprocess(
        &self,
        modality: Modality,
        bytes: &[u8],
        options: &ItemOptions,
        limits: &Limits,
    ) -> Result<EncoderInput, ItemError> {
        if modality != Modality::Audio {
            return Err(ItemError::Unsupported(format!("this model reads audio items, not {modality}")));
        }
        super::check_options(options, &[])?;
        super::check_bytes(modality, bytes, limits)?;
        let samples = super::contained(modality, || decode(bytes, self.settings.rate, limits))?;
        let (n_windows, mel) = self.windows(&samples);
        let duration_ms = samples.len() as u64 * 1000 / u64::from(self.settings.rate);
        let n_rows = n_windows as usize * self.settings.rows_per_window();
        Ok(EncoderInput {
            extent: Extent::windows(n_windows, duration_ms),
            n_tokens: u32::try_from(n_rows).map_err(|_| ItemError::TooLarge {
                what: "the audio",
                actual: format!("{n_rows} rows"),
                limit: format!("{} rows", u32::MAX),
            })?,
            features: Features::Mel(mel),
        })
    }
}
