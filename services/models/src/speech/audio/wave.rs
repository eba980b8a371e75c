//! Audio to raw samples, as transformers' `Wav2Vec2FeatureExtractor` makes them.
//!
//! Decode, one channel, the model's rate → consecutive windows, the last as long as it is → each window of mean 0
//! and variance 1 where the model wants that
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/wav2vec2/feature_extraction_wav2vec2.py>).

use super::decode::decode;
use crate::error::{ItemError, ModelError};
use crate::files::{ItemProcessor, JsonFile};
use crate::preprocess::{EncoderInput, Features, Preprocess, admit, check_options, contained};
use crate::spec::WaveSpec;
use std::path::Path;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};

/// Added to the variance.
const EPS: f64 = 1e-7;

/// The processor of models that read samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WaveProcessor {
    wave: WaveSpec,
    normalize: bool,
}

impl WaveProcessor {
    /// With the settings of a model directory, for an encoder with this stem.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`], or [`ModelError::Config`] for a value that is not supported.
    pub fn from_dir(dir: &Path, wave: WaveSpec) -> Result<Self, ModelError> {
        let file = JsonFile::processor(dir, ItemProcessor::Audio)?;
        if file.u32("feature_size")?.is_some_and(|size| size != 1) {
            return Err(file.wrong("feature_size", "1: samples of one channel"));
        }
        if file.u32("sampling_rate")?.is_some_and(|rate| rate != wave.rate) {
            return Err(file.wrong("sampling_rate", &format!("{}, the encoder's", wave.rate)));
        }
        Ok(Self { wave, normalize: file.bool("do_normalize")?.unwrap_or(true) })
    }

    /// The windows of samples at the model's rate, one after the other.
    ///
    /// A rest too short for a row after a full window is left out: it is the padding of a codec.
    ///
    /// # Errors
    /// [`ItemError::Empty`] for less than one row.
    fn windows(&self, mut samples: Vec<f32>) -> Result<Vec<f32>, ItemError> {
        let least = self.wave.min_samples();
        let rest = samples.len() % self.wave.window;
        if samples.len() < least {
            let ms = |n: usize| n as f64 * 1000.0 / f64::from(self.wave.rate);
            let found = ms(samples.len());
            let needed = ms(least);
            let text = format!("the audio is {found:.1} ms long, this model needs at least {needed:.1} ms");
            return Err(ItemError::Empty(text));
        }
        if rest < least {
            samples.truncate(samples.len() - rest);
        }
        if self.normalize {
            samples.chunks_mut(self.wave.window).for_each(normalize);
        }
        Ok(samples)
    }
}

impl Preprocess for WaveProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Audio]
    }

    fn max_rows(&self) -> Option<usize> {
        Some(self.wave.n_rows(self.wave.window))
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
        let samples = contained(modality, || decode(bytes, self.wave.rate, limits))?;
        let duration_ms = samples.len() as u64 * 1000 / u64::from(self.wave.rate);
        let samples = self.windows(samples)?;
        let windows = samples.chunks(self.wave.window);
        let too_long = |n: usize| ItemError::TooLarge {
            what: "the audio",
            actual: format!("{n} rows"),
            limit: format!("{} rows", u32::MAX),
        };
        let n_windows = windows.len();
        let n_rows = windows.map(|w| self.wave.n_rows(w.len())).sum();
        Ok(EncoderInput {
            extent: Extent::windows(u32::try_from(n_windows).map_err(|_| too_long(n_rows))?, duration_ms),
            n_tokens: u32::try_from(n_rows).map_err(|_| too_long(n_rows))?,
            features: Features::Samples(samples),
        })
    }
}

/// Brings samples to mean 0 and variance 1.
fn normalize(samples: &mut [f32]) {
    let n = samples.len() as f64;
    let mean = samples.iter().map(|s| f64::from(*s)).sum::<f64>() / n;
    let variance = samples.iter().map(|s| (f64::from(*s) - mean).powi(2)).sum::<f64>() / n;
    let scale = 1.0 / (variance + EPS).sqrt();
    for sample in samples {
        *sample = ((f64::from(*sample) - mean) * scale) as f32;
    }
}
