//! Sounds to log-mel windows, as transformers' `WhisperFeatureExtractor` makes them.
//!
//! Decode, one channel, 16 kHz → windows of `chunk_length` seconds ([`layout`]), filled up with silence → log-mel, each
//! window normalised by itself. With the option `start_ms` it is one window of a sound read in sequence, cut out of
//! the log-mel of all of it; with `vad` silence is left out
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/whisper/feature_extraction_whisper.py>).

mod decode;
pub mod layout;
mod mel;
mod resample;
mod sounds;
pub mod vad;
mod wave;

pub use decode::decode;
pub use mel::LogMel;
pub use wave::WaveProcessor;

use super::{EncoderInput, Features, Preprocess};
use crate::error::{ItemError, ModelError};
use crate::files::JsonFile;
use layout::{Frame, Silence};
use sounds::{Sound, Sounds};
use std::path::Path;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality, WindowSpan};
use vad::Levels;

const FILE: &str = "preprocessor_config.json";

/// Mel frames that the encoder's stem makes one row of.
const FRAMES_PER_ROW: usize = 2;

/// Most windows of a sound: as many as the head of an EC object has room to place.
const MAX_WINDOWS: usize = 600;

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
    /// Sounds that are being read in sequence.
    sounds: Sounds,
}

impl std::fmt::Debug for AudioProcessor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AudioProcessor").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl AudioProcessor {
    /// With these settings.
    pub fn new(settings: AudioSettings) -> Self {
        Self { settings, log_mel: LogMel::new(settings), sounds: Sounds::default() }
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

    /// Windows of samples at the processor's rate, each by itself: where they lie (empty for a single one over all
    /// of the sound), and their log-mel `[n_windows, n_mels, n_frames]`.
    ///
    /// A rest shorter than one encoder row after a full window is left out: it is the padding of a codec, and
    /// would cost a whole window.
    pub fn windows(&self, samples: &[f32], silence: Silence) -> (Vec<WindowSpan>, Vec<f32>) {
        let n_samples = self.settings.n_samples();
        let least = self.settings.hop * FRAMES_PER_ROW;
        let mut mel = Vec::new();
        if samples.len() < n_samples + least && silence == Silence::Read {
            self.log_mel.extend(samples, &mut mel);
            return (Vec::new(), mel);
        }
        let levels = Levels::of(samples, self.settings.rate);
        let frame = Frame {
            duration_ms: self.ms(samples.len()),
            window_ms: self.ms(n_samples),
            least_ms: self.ms(least),
        };
        let spans = layout::windows(&levels, frame, silence);
        for span in &spans {
            let range = self.sample(span.start_ms)..self.sample(span.end_ms);
            let range = range.start.min(samples.len())..range.end.min(samples.len());
            self.log_mel.extend(&samples[range], &mut mel);
        }
        (spans, mel)
    }

    /// The window of a sound that is read in sequence, from `start_ms` on.
    fn part(&self, sound: &Sound, start_ms: u64, silence: Silence) -> (Vec<WindowSpan>, Vec<f32>) {
        let (duration_ms, window_ms) = (self.ms(sound.n_heard), self.ms(self.settings.n_samples()));
        let asked = u32::try_from(start_ms).unwrap_or(u32::MAX).min(duration_ms);
        let speech = |levels: Levels| {
            let next = levels.speech().into_iter().find(|r| r.end > asked);
            next.map_or(duration_ms, |r| r.start.max(asked))
        };
        let start_ms = match silence {
            Silence::Read => asked,
            Silence::Skip => speech(Levels::of(&sound.samples[..sound.n_heard], self.settings.rate)),
        };
        let frame = self.sample(start_ms) / self.settings.hop;
        let mut mel = Vec::with_capacity(self.settings.n_mels * self.settings.n_frames());
        self.log_mel.extend_part(&sound.samples, frame, sound.loudest, &mut mel);
        let end_ms = start_ms.saturating_add(window_ms).min(duration_ms);
        (vec![WindowSpan { start_ms, end_ms }], mel)
    }

    fn ms(&self, n_samples: usize) -> u32 {
        let ms = n_samples as u64 * 1000 / u64::from(self.settings.rate);
        u32::try_from(ms).unwrap_or(u32::MAX)
    }

    fn sample(&self, ms: u32) -> usize {
        (u64::from(ms) * u64::from(self.settings.rate) / 1000) as usize
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
        super::admit(Modality::Audio, modality, bytes, limits)?;
        super::check_options(options, &["start_ms", "vad"])?;
        let samples = || super::contained(modality, || decode(bytes, self.settings.rate, limits));
        let silence = if options.vad { Silence::Skip } else { Silence::Read };
        let (n_heard, (spans, mel)) = match options.start_ms {
            None => {
                let samples = samples()?;
                (samples.len(), self.windows(&samples, silence))
            }
            Some(start_ms) => {
                let sound = self.sounds.get(bytes, || {
                    samples().map(|s| Sound::new(s, self.settings.n_samples(), &self.log_mel))
                })?;
                (sound.n_heard, self.part(&sound, start_ms, silence))
            }
        };
        let too_many = |limit: String| ItemError::TooLarge {
            what: "the audio",
            actual: format!("{} windows", spans.len()),
            limit,
        };
        if spans.len() > MAX_WINDOWS {
            return Err(too_many(format!("{MAX_WINDOWS} windows")));
        }
        let n_windows = spans.len().max(1) as u32;
        let n_rows = u32::try_from(n_windows as usize * self.settings.rows_per_window());
        let duration_ms = n_heard as u64 * 1000 / u64::from(self.settings.rate);
        Ok(EncoderInput {
            n_tokens: n_rows.map_err(|_| too_many(format!("{} rows", u32::MAX)))?,
            extent: Extent::Windows { n_windows, duration_ms, spans: spans.into() },
            features: Features::Mel(mel),
        })
    }
}
