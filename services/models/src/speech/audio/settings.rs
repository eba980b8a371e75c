//! Settings of Whisper's audio processor.

use crate::error::ModelError;
use crate::files::{ItemProcessor, JsonFile};
use std::path::Path;

/// Mel frames that the encoder's stem makes one row of.
pub(super) const FRAMES_PER_ROW: usize = 2;

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
    /// Reads the feature extractor of a model directory.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`], or [`ModelError::Config`] for a value that is not supported.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let file = JsonFile::processor(dir, ItemProcessor::Audio)?;
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
            return Err(file.wrong("chunk_length", "a multiple of an encoder row"));
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
