//! One channel at any rate to the model's rate, chunk by chunk.
//!
//! Computed in f64, as the spectrogram is: one precision of the transform is compiled, not two.

use crate::error::ItemError;
use rubato::audioadapter_buffers::direct::InterleavedSlice;
use rubato::{Fft, FixedSync, Indexing, Resampler, WindowFunction};

/// Input samples of a chunk, at least; rates that share few factors make it longer.
const MIN_CHUNK: usize = 1024;

/// Collects samples at one rate, resampled to another.
pub(super) struct Resampled {
    from: u32,
    to: u32,
    /// `None`: the rates are the same.
    stage: Option<FftStage>,
    n_taken: u64,
    out: Vec<f32>,
}

struct FftStage {
    resampler: Fft<f64>,
    /// Input that does not fill a chunk yet.
    waiting: Vec<f64>,
    chunk: Vec<f64>,
    /// Output samples still to be dropped: the filter's delay.
    n_drop: usize,
}

impl Resampled {
    pub(super) fn new(from: u32, to: u32) -> Result<Self, ItemError> {
        let stage = if from == to {
            None
        } else {
            let rate_in = from as usize;
            let rate_out = to as usize;
            let chunk = chunk(from as usize, to as usize);
            let window = WindowFunction::BlackmanHarris2;
            let resampler = Fft::new_custom(rate_in, rate_out, chunk, 1, 1, window, FixedSync::Both)
                .map_err(|e| {
                    ItemError::Unsupported(format!("audio at {from} Hz cannot be resampled: {e}"))
                })?;
            let chunk = vec![0.0; resampler.output_frames_max()];
            let n_drop = resampler.output_delay();
            Some(FftStage { resampler, waiting: Vec::new(), chunk, n_drop })
        };
        Ok(Self { from, to, stage, n_taken: 0, out: Vec::new() })
    }

    pub(super) fn source_rate(&self) -> u32 {
        self.from
    }

    /// Samples taken so far, at the rate they came with.
    pub(super) fn n_taken(&self) -> u64 {
        self.n_taken
    }

    pub(super) fn push(&mut self, samples: &[f32]) -> Result<(), ItemError> {
        self.n_taken += samples.len() as u64;
        let Some(stage) = &mut self.stage else {
            self.out.extend_from_slice(samples);
            return Ok(());
        };
        stage.waiting.extend(samples.iter().copied().map(f64::from));
        let mut done = 0;
        loop {
            let n = stage.resampler.input_frames_next();
            if stage.waiting.len() - done < n {
                break;
            }
            let part = done..done + n;
            done += n;
            stage.run(part, None, &mut self.out)?;
        }
        stage.waiting.drain(..done);
        Ok(())
    }

    /// Every sample at the new rate; as long as the input was, rounded up.
    pub(super) fn finish(mut self) -> Result<Vec<f32>, ItemError> {
        let Some(stage) = &mut self.stage else { return Ok(self.out) };
        let expected = (self.n_taken * u64::from(self.to)).div_ceil(u64::from(self.from)) as usize;
        let rest = stage.waiting.len();
        stage.run(0..rest, Some(rest), &mut self.out)?;
        while self.out.len() < expected {
            stage.run(0..0, Some(0), &mut self.out)?;
        }
        self.out.truncate(expected);
        Ok(self.out)
    }
}

/// Input samples of a chunk: an even multiple of the shortest period that both rates share. Even, since the filter's
/// delay is half a chunk, and only whole samples of it can be dropped.
fn chunk(from: usize, to: usize) -> usize {
    let mut a = from;
    let mut b = to;
    while b > 0 {
        (a, b) = (b, a % b);
    }
    let pair = 2 * (from / a.max(1));
    MIN_CHUNK.div_ceil(pair.max(1)) * pair
}

impl FftStage {
    /// Resamples `waiting[part]`; `partial`: that is less than a chunk, and silence follows.
    fn run(
        &mut self,
        part: std::ops::Range<usize>,
        partial: Option<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), ItemError> {
        let failed = |e: String| ItemError::Corrupt(format!("the audio cannot be resampled: {e}"));
        let part = &self.waiting[part];
        let input = InterleavedSlice::new(part, 1, part.len()).map_err(|e| failed(e.to_string()))?;
        let len = self.chunk.len();
        let mut output =
            InterleavedSlice::new_mut(&mut self.chunk, 1, len).map_err(|e| failed(e.to_string()))?;
        let indexing = partial.map(|n| Indexing::new().partial_len(n));
        let (_, n) = self
            .resampler
            .process_into_buffer(&input, &mut output, indexing.as_ref())
            .map_err(|e| failed(e.to_string()))?;
        let dropped = self.n_drop.min(n);
        self.n_drop -= dropped;
        out.extend(self.chunk[dropped..n].iter().map(|sample| *sample as f32));
        Ok(())
    }
}
