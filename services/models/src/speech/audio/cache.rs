//! Decoded audio of files that are read in sequence: one decode for all their windows.
//!
//! Each window is an encoder job with the whole file, idempotent by its key. An entry only saves another decode, and may
//! be evicted at any time.

use super::mel::LogMel;
use crate::error::ItemError;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// Most files that are kept.
const MAX_FILES: usize = 8;
/// Most samples that are kept, of all files: 128 MiB.
const MAX_SAMPLES: usize = 32 << 20;

/// Decoded audio of a file.
pub struct DecodedAudio {
    /// Samples, padded with silence to a window.
    pub samples: Vec<f32>,
    /// Samples before the padding.
    pub n_samples: usize,
    /// The largest value of the log-mel of all samples, before it is scaled.
    pub loudest: f64,
}

impl DecodedAudio {
    /// Pads samples to `least`, the length of a window.
    pub fn new(mut samples: Vec<f32>, least: usize, log_mel: &LogMel) -> Self {
        let n_samples = samples.len();
        samples.resize(n_samples.max(least), 0.0);
        let loudest = log_mel.loudest(&samples);
        Self { samples, n_samples, loudest }
    }
}

type CacheEntries = VecDeque<(blake3::Hash, Arc<DecodedAudio>)>;

/// Decoded audio of the last files, by their hash; the oldest is evicted first.
#[derive(Clone, Default)]
pub struct AudioCache(Arc<Mutex<CacheEntries>>);

impl AudioCache {
    /// The audio of a file; calls `decode` if it is not in the cache.
    ///
    /// # Errors
    /// Those of `decode`.
    pub fn get(
        &self,
        bytes: &[u8],
        decode: impl FnOnce() -> Result<DecodedAudio, ItemError>,
    ) -> Result<Arc<DecodedAudio>, ItemError> {
        let name = blake3::hash(bytes);
        if let Some((_, audio)) = self.0.lock().iter().find(|(kept, _)| *kept == name) {
            return Ok(audio.clone());
        }
        // Not under the lock: two calls at once decode twice, and no call waits for another file.
        let audio = Arc::new(decode()?);
        let mut kept = self.0.lock();
        kept.push_back((name, audio.clone()));
        while kept.len() > MAX_FILES || total_samples(&kept) > MAX_SAMPLES {
            kept.pop_front();
        }
        Ok(audio)
    }
}

fn total_samples(kept: &CacheEntries) -> usize {
    kept.iter().map(|(_, audio)| audio.samples.len()).sum()
}
