//! AudioCache that are read in sequence, decoded once for all their windows.
//!
//! Each window is an encoder job with the whole file, idempotent by its key; what is kept here only saves the work of
//! decoding again, and may be lost at any time.

use super::mel::LogMel;
use crate::error::ItemError;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// Most sounds that are kept.
const MAX_SOUNDS: usize = 8;
/// Most samples that are kept, all sounds together: 128 MiB.
const MAX_SAMPLES: usize = 32 << 20;

/// A decoded sound.
pub struct DecodedAudio {
    /// Its samples, filled up with silence to a window.
    pub samples: Vec<f32>,
    /// Samples before the silence.
    pub n_heard: usize,
    /// The largest value of its log-mel.
    pub loudest: f64,
}

impl DecodedAudio {
    /// Of samples; `least` is the length of a window.
    pub fn new(mut samples: Vec<f32>, least: usize, log_mel: &LogMel) -> Self {
        let n_heard = samples.len();
        samples.resize(n_heard.max(least), 0.0);
        let loudest = log_mel.loudest(&samples);
        Self { samples, n_heard, loudest }
    }
}

type CacheEntries = VecDeque<(blake3::Hash, Arc<DecodedAudio>)>;

/// The last sounds, by their files.
#[derive(Clone, Default)]
pub struct AudioCache(Arc<Mutex<CacheEntries>>);

impl AudioCache {
    /// The sound of a file; decodes it if it is not here.
    ///
    /// # Errors
    /// Those of `decode`.
    pub fn get(
        &self,
        bytes: &[u8],
        decode: impl FnOnce() -> Result<DecodedAudio, ItemError>,
    ) -> Result<Arc<DecodedAudio>, ItemError> {
        let name = blake3::hash(bytes);
        if let Some((_, sound)) = self.0.lock().iter().find(|(kept, _)| *kept == name) {
            return Ok(sound.clone());
        }
        // Not under the lock: two at once decode twice, and none waits for another's file.
        let sound = Arc::new(decode()?);
        let mut kept = self.0.lock();
        kept.push_back((name, sound.clone()));
        while kept.len() > MAX_SOUNDS || n_samples(&kept) > MAX_SAMPLES {
            kept.pop_front();
        }
        Ok(sound)
    }
}

fn n_samples(kept: &CacheEntries) -> usize {
    kept.iter().map(|(_, sound)| sound.samples.len()).sum()
}
