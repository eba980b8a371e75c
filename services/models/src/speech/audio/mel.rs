//! Log-mel spectrogram of one window.

use super::settings::AudioSettings;
use realfft::num_complex::Complex;
use realfft::{RealFftPlanner, RealToComplex};
use std::ops::Range;
use std::sync::Arc;

/// Highest frequency that the bins cover, in Hz, whatever the rate.
const MAX_HZ: f64 = 8000.0;
/// Energy of a bin below which it counts as silent.
const LEAST_ENERGY: f64 = 1e-10;

/// Computes log-mel windows. Immutable; one serves all threads.
#[derive(Clone)]
pub struct LogMel {
    settings: AudioSettings,
    fft: Arc<dyn RealToComplex<f64>>,
    /// Periodic Hann, `[n_fft]`.
    hann: Arc<[f64]>,
    filters: Arc<[MelFilter]>,
}

/// One triangular bin: its first frequency and its weights from there on.
#[derive(Clone, Debug)]
struct MelFilter {
    first: usize,
    weights: Vec<f64>,
}

impl LogMel {
    /// Plans the transform and lays out the bins.
    pub fn new(settings: AudioSettings) -> Self {
        let n = settings.n_fft;
        let hann = |i: usize| 0.5 - 0.5 * (2.0 * std::f64::consts::PI * i as f64 / n as f64).cos();
        Self {
            settings,
            fft: RealFftPlanner::new().plan_fft_forward(n),
            hann: (0..n).map(hann).collect(),
            filters: filters(settings),
        }
    }

    /// Appends the log-mel of a window, `[n_mels, n_frames]`, to `out`.
    ///
    /// `samples` past a window's length are not read; too few are followed by silence. Frames are centred, the
    /// window mirrored at both ends.
    pub fn extend(&self, samples: &[f32], out: &mut Vec<f32>) {
        let n_fft = self.settings.n_fft;
        let n_samples = self.settings.n_samples();
        let n_frames = self.settings.n_frames();
        let mel = self.log_energies(&mirrored(samples, n_samples, n_fft / 2), n_frames);
        let loudest = mel.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        out.extend(mel.iter().map(|v| scaled(*v, loudest)));
    }

    /// The largest value in the log-mel of a whole file, before it is scaled.
    pub fn loudest(&self, samples: &[f32]) -> f64 {
        let n_frames = self.settings.n_frames();
        let hop = self.settings.hop;
        let starts = (0..samples.len() / hop).step_by(n_frames);
        starts.fold(f64::NEG_INFINITY, |loudest, first| {
            let mel = self.part(samples, first..first + n_frames);
            mel.iter().copied().fold(loudest, f64::max)
        })
    }

    /// Appends the window of a whole file that starts at a frame, `[n_mels, n_frames]`, to `out`.
    ///
    /// Frames at its ends reach into the audio around it, and `loudest` is that of the whole file, as in transformers'
    /// long-form generation; frames past the audio are 0.
    pub fn extend_part(&self, samples: &[f32], first_frame: usize, loudest: f64, out: &mut Vec<f32>) {
        let n_frames = self.settings.n_frames();
        let mel = self.part(samples, first_frame..first_frame + n_frames);
        let n_found = mel.len() / self.settings.n_mels;
        for bin in 0..self.settings.n_mels {
            let row = &mel[bin * n_found..(bin + 1) * n_found];
            out.extend(row.iter().map(|v| scaled(*v, loudest)));
            out.extend(std::iter::repeat_n(0.0, n_frames - n_found));
        }
    }

    /// Appends the windows of a whole file that is filled up with silence to an integer number of them, `[n_windows, n_mels,
    /// n_frames]`, to `out`; at least one. Frames at their ends reach into the audio around them, and the loudest value is that
    /// of the whole file.
    pub fn extend_whole(&self, mut samples: Vec<f32>, out: &mut Vec<f32>) {
        let n_frames = self.settings.n_frames();
        let n_windows = samples.len().div_ceil(self.settings.n_samples()).max(1);
        samples.resize(n_windows * self.settings.n_samples(), 0.0);
        let first = out.len();
        let mut loudest = f64::NEG_INFINITY;
        for window in 0..n_windows {
            let mel = self.part(&samples, window * n_frames..(window + 1) * n_frames);
            loudest = mel.iter().copied().fold(loudest, f64::max);
            out.extend(mel.iter().map(|v| *v as f32));
        }
        out[first..].iter_mut().for_each(|v| *v = scaled(f64::from(*v), loudest));
    }

    /// Appends the log-mel of a whole file in chunks of `n_frames`, `[n_chunks, n_mels, n_frames]`, to `out`, zeros behind its end;
    /// returns its frames. Frames at the ends of chunks reach into the audio around them, and the loudest value is that of the
    /// whole file.
    pub fn extend_chunks(&self, samples: &[f32], n_frames: usize, out: &mut Vec<f32>) -> usize {
        let n_valid = samples.len() / self.settings.hop;
        let parts: Vec<Vec<f64>> = (0..n_valid)
            .step_by(n_frames.max(1))
            .map(|first| self.part(samples, first..first + n_frames))
            .collect();
        let loudest = parts.iter().flatten().copied().fold(f64::NEG_INFINITY, f64::max);
        for part in parts {
            let n_found = (part.len() / self.settings.n_mels).max(1);
            for row in part.chunks(n_found) {
                out.extend(row.iter().map(|v| scaled(*v, loudest)));
                out.extend(std::iter::repeat_n(0.0, n_frames - n_found));
            }
        }
        n_valid
    }

    /// The frames of a range that the audio has, before they are scaled: `[n_mels, n_found]`.
    fn part(&self, samples: &[f32], frames: Range<usize>) -> Vec<f64> {
        let AudioSettings { n_fft, hop, .. } = self.settings;
        let first_frame = frames.start;
        let n_found = (samples.len() / hop).min(frames.end).saturating_sub(first_frame);
        let edge = n_fft / 2;
        let at = |i: usize| {
            // `i` counts from `edge` samples before the audio; the outermost sample is not repeated.
            let i = edge.abs_diff(i);
            let last = samples.len().saturating_sub(1);
            samples.get(if i > last { (2 * last).saturating_sub(i) } else { i }).copied().unwrap_or(0.0)
        };
        if n_found == 0 {
            return Vec::new();
        }
        let first = first_frame * hop;
        let piece: Vec<f32> = (first..first + (n_found - 1) * hop + n_fft).map(at).collect();
        self.log_energies(&piece, n_found)
    }

    /// Logarithms of the energies in the bins, `[n_mels, n_frames]`; frame `t` begins at sample `t · hop`. Frames of digital
    /// silence, which fill up a window, are not transformed.
    fn log_energies(&self, samples: &[f32], n_frames: usize) -> Vec<f64> {
        let AudioSettings { n_mels, n_fft, hop, .. } = self.settings;
        let mut mel = vec![LEAST_ENERGY.log10(); n_mels * n_frames];
        let mut frame = self.fft.make_input_vec();
        let mut spectrum = self.fft.make_output_vec();
        let mut scratch = self.fft.make_scratch_vec();
        let mut power = vec![0.0_f64; spectrum.len()];
        for t in 0..n_frames {
            let part = &samples[t * hop..t * hop + n_fft];
            if part.iter().all(|sample| *sample == 0.0) {
                continue;
            }
            for ((f, s), w) in frame.iter_mut().zip(part).zip(self.hann.iter()) {
                *f = f64::from(*s) * w;
            }
            self.fft
                .process_with_scratch(&mut frame, &mut spectrum, &mut scratch)
                .expect("the buffers come from the plan");
            for (p, s) in power.iter_mut().zip(&spectrum) {
                *p = Complex::norm_sqr(s);
            }
            for (bin, filter) in self.filters.iter().enumerate() {
                let energy: f64 = filter.weights.iter().zip(&power[filter.first..]).map(|(w, p)| w * p).sum();
                mel[bin * n_frames + t] = energy.max(LEAST_ENERGY).log10();
            }
        }
        mel
    }
}

/// Clips to eight decades below the loudest value, and centres the range around zero.
fn scaled(value: f64, loudest: f64) -> f32 {
    ((value.max(loudest - 8.0) + 4.0) / 4.0) as f32
}

/// `samples` filled up to `len`, then `edge` more at both ends, mirrored without repeating the outermost.
fn mirrored(samples: &[f32], len: usize, edge: usize) -> Vec<f32> {
    let samples = &samples[..samples.len().min(len)];
    let at = |i: usize| samples.get(i).copied().unwrap_or(0.0);
    let mut all = Vec::with_capacity(len + 2 * edge);
    all.extend((1..=edge).rev().map(at));
    all.extend_from_slice(samples);
    all.resize(edge + len, 0.0);
    all.extend((1..=edge).map(|i| at(len - 1 - i)));
    all
}

/// Slaney's bins, of about equal energy.
fn filters(settings: AudioSettings) -> Arc<[MelFilter]> {
    let n_freqs = settings.n_fft / 2 + 1;
    let hz_of_bin = |k: usize| f64::from(settings.rate / 2) * k as f64 / (n_freqs - 1) as f64;
    let top = hz_to_mel(MAX_HZ);
    let edges: Vec<f64> =
        (0..settings.n_mels + 2).map(|i| mel_to_hz(top * i as f64 / (settings.n_mels + 1) as f64)).collect();
    edges
        .windows(3)
        .map(|edge| {
            let low = edge[0];
            let mid = edge[1];
            let high = edge[2];
            let weight = |k: usize| {
                let hz = hz_of_bin(k);
                let slope = ((hz - low) / (mid - low)).min((high - hz) / (high - mid));
                // The reference keeps its bins in f64 and computes with f32.
                f64::from((slope.max(0.0) * 2.0 / (high - low)) as f32)
            };
            let inside: Vec<usize> = (0..n_freqs).filter(|k| weight(*k) > 0.0).collect();
            let first = inside.first().copied().unwrap_or(0);
            let n = inside.last().map_or(0, |last| last + 1 - first);
            MelFilter { first, weights: (first..first + n).map(weight).collect() }
        })
        .collect()
}

/// Linear to 1 kHz, logarithmic above.
fn hz_to_mel(hz: f64) -> f64 {
    if hz < 1000.0 { hz * 3.0 / 200.0 } else { 15.0 + (hz / 1000.0).ln() * 27.0 / 6.4_f64.ln() }
}

fn mel_to_hz(mel: f64) -> f64 {
    if mel < 15.0 { mel * 200.0 / 3.0 } else { 1000.0 * ((mel - 15.0) * 6.4_f64.ln() / 27.0).exp() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_frames_are_what_their_transform_gives() {
        let settings = AudioSettings { rate: 16_000, n_fft: 400, hop: 160, n_mels: 80, chunk_s: 2 };
        let (log_mel, n_samples) = (LogMel::new(settings), settings.n_samples());
        let tone = |i: usize| if i % 9_000 < 4_000 { (i as f32 * 0.1).sin() } else { 0.0 };
        let with = |silence: f32| {
            let samples: Vec<f32> =
                (0..n_samples).map(tone).map(|s| if s == 0.0 { silence } else { s }).collect();
            let mut out = Vec::new();
            log_mel.extend(&samples, &mut out);
            out
        };
        let (silent, transformed) = (with(0.0), with(1e-30));
        assert_eq!(silent, transformed, "energies below the least one count as it");
        let quietest = silent.iter().copied().fold(f32::INFINITY, f32::min);
        let n_quiet = silent.iter().filter(|v| **v == quietest).count();
        assert!(n_quiet > silent.len() / 4 && n_quiet < silent.len(), "{n_quiet} of {}", silent.len());
    }
}
