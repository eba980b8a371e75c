//! Audio to log-mel windows, as transformers' `WhisperFeatureExtractor` makes them.
//!
//! Decode, one channel, 16 kHz → windows of `chunk_length` seconds ([`windows`]), filled up with silence → log-mel, each
//! window normalised by itself. With the option `start_ms` it is one window of audio read in sequence, cut out of
//! the log-mel of all of it; with `vad` silence is left out
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/whisper/feature_extraction_whisper.py>).

mod cache;
mod chunks;
mod clip;
mod decode;
mod mel;
mod resample;
mod settings;
pub mod vad;
mod wave;
pub mod windows;

pub use chunks::ChunkProcessor;
pub use clip::ClipProcessor;
pub use decode::decode;
pub use mel::LogMel;
pub use settings::AudioSettings;
pub use wave::WaveProcessor;

use crate::error::{ItemError, ModelError};
use crate::preprocess::{EncoderInput, Features, Preprocess, admit, check_options, contained};
use cache::{AudioCache, DecodedAudio};
use settings::FRAMES_PER_ROW;
use std::path::Path;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality, WindowSpan};
use vad::FrameLevels;
use windows::{SilencePolicy, WindowSizes};

/// Most windows of an item: as many spans as the head of an EC object has room for.
const MAX_WINDOWS: usize = 600;

/// The processor of Whisper.
#[derive(Clone)]
pub struct AudioProcessor {
    settings: AudioSettings,
    log_mel: LogMel,
    /// Decoded audio of long files that are read in sequence.
    cache: AudioCache,
}

impl std::fmt::Debug for AudioProcessor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AudioProcessor").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl AudioProcessor {
    /// With these settings.
    pub fn new(settings: AudioSettings) -> Self {
        Self { settings, log_mel: LogMel::new(settings), cache: AudioCache::default() }
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

    /// Windows of samples at the processor's rate, each by itself: their spans (empty for a single one over all
    /// of the audio), and their log-mel `[n_windows, n_mels, n_frames]`.
    ///
    /// A rest shorter than one encoder row after a full window is left out: it is the padding of a codec, and
    /// would cost a whole window.
    pub fn windows(&self, samples: &[f32], silence: SilencePolicy) -> (Vec<WindowSpan>, Vec<f32>) {
        let n_samples = self.settings.n_samples();
        let least = self.settings.hop * FRAMES_PER_ROW;
        let mut mel = Vec::new();
        if samples.len() < n_samples + least && silence == SilencePolicy::Read {
            self.log_mel.extend(samples, &mut mel);
            return (Vec::new(), mel);
        }
        let levels = FrameLevels::of(samples, self.settings.rate);
        let frame = WindowSizes {
            duration_ms: self.ms(samples.len()),
            window_ms: self.ms(n_samples),
            least_ms: self.ms(least),
        };
        let spans = windows::windows(&levels, frame, silence);
        for span in &spans {
            let range = self.sample(span.start_ms)..self.sample(span.end_ms);
            let range = range.start.min(samples.len())..range.end.min(samples.len());
            self.log_mel.extend(&samples[range], &mut mel);
        }
        (spans, mel)
    }

    /// The window from `start_ms` on of audio that is read in sequence.
    fn part(
        &self,
        audio: &DecodedAudio,
        start_ms: u64,
        silence: SilencePolicy,
    ) -> (Vec<WindowSpan>, Vec<f32>) {
        let duration_ms = self.ms(audio.n_samples);
        let window_ms = self.ms(self.settings.n_samples());
        let asked = u32::try_from(start_ms).unwrap_or(u32::MAX).min(duration_ms);
        let speech = |levels: FrameLevels| {
            let next = levels.speech().into_iter().find(|r| r.end > asked);
            next.map_or(duration_ms, |r| r.start.max(asked))
        };
        let start_ms = match silence {
            SilencePolicy::Read => asked,
            SilencePolicy::Skip => {
                speech(FrameLevels::of(&audio.samples[..audio.n_samples], self.settings.rate))
            }
        };
        let frame = self.sample(start_ms) / self.settings.hop;
        let mut mel = Vec::with_capacity(self.settings.n_mels * self.settings.n_frames());
        self.log_mel.extend_part(&audio.samples, frame, audio.loudest, &mut mel);
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

    fn max_rows(&self) -> Option<usize> {
        Some(self.settings.rows_per_window())
    }

    fn preprocess(
        &self,
        modality: Modality,
        bytes: &[u8],
        options: &ItemOptions,
        limits: &Limits,
    ) -> Result<EncoderInput, ItemError> {
        admit(Modality::Audio, modality, bytes, limits)?;
        check_options(options, &["start_ms", "vad"])?;
        let samples = || contained(modality, || decode(bytes, self.settings.rate, limits));
        let silence = if options.vad { SilencePolicy::Skip } else { SilencePolicy::Read };
        let (n_samples, (spans, mel)) = match options.start_ms {
            None => {
                let samples = samples()?;
                (samples.len(), self.windows(&samples, silence))
            }
            Some(start_ms) => {
                let audio = self.cache.get(bytes, || {
                    samples().map(|s| DecodedAudio::new(s, self.settings.n_samples(), &self.log_mel))
                })?;
                (audio.n_samples, self.part(&audio, start_ms, silence))
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
        let duration_ms = n_samples as u64 * 1000 / u64::from(self.settings.rate);
        Ok(EncoderInput {
            n_tokens: n_rows.map_err(|_| too_many(format!("{} rows", u32::MAX)))?,
            extent: Extent::Windows { n_windows, duration_ms, spans: spans.into() },
            features: Features::Mel(mel),
        })
    }
}
