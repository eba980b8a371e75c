//! Voice activity detection: the level of the speech band against the level of its pauses.
//!
//! A frame is 10 ms. Its level is the energy between 150 Hz and 4 kHz, so that hum and rumble do not count. Speech is
//! what rises above the noise floor of the audio. Audio without contrast is left whole, because a wrong pause costs words
//! and a wrong word costs time. A margin around speech keeps quiet consonants. No model, no state.

use realfft::RealFftPlanner;
use std::ops::Range;

/// Milliseconds of a frame.
pub const FRAME_MS: usize = 10;
/// Band of speech, in Hz.
const BAND_HZ: [usize; 2] = [150, 4_000];
/// Levels below this are silence, in dB of full scale.
const SILENCE_DB: f32 = -60.0;
/// Audio whose loud and quiet frames differ by less has no pauses, in dB.
const CONTRAST_DB: f32 = 9.0;
/// Rise of speech above the floor, as a share of the contrast.
const RISE: f32 = 0.35;
/// A pause shorter than this is part of speech, in frames.
const MIN_PAUSE: usize = 30;
/// Less speech than this in one piece is a click, in frames.
const MIN_SPEECH: usize = 6;
/// Frames kept on both sides of speech.
const MARGIN: usize = 20;

/// Levels of audio, one for each frame.
#[derive(Clone, Debug)]
pub struct FrameLevels {
    /// dB of full scale, `[n_frames]`.
    pub db: Vec<f32>,
    /// Level of speech: frames at or above it may be speech.
    pub threshold: f32,
}

impl FrameLevels {
    /// Levels of samples at `rate` per second. O(n).
    pub fn of(samples: &[f32], rate: u32) -> Self {
        let hop = (rate as usize * FRAME_MS / 1000).max(1);
        let n_fft = (hop * 2).next_power_of_two();
        let fft = RealFftPlanner::<f64>::new().plan_fft_forward(n_fft);
        let mut frame = fft.make_input_vec();
        let mut spectrum = fft.make_output_vec();
        let bin = |hz: usize| hz * n_fft / rate.max(1) as usize;
        let band = bin(BAND_HZ[0]).min(spectrum.len())..(bin(BAND_HZ[1]) + 1).min(spectrum.len());
        let hann = |i: usize| 0.5 - 0.5 * (std::f64::consts::TAU * i as f64 / n_fft as f64).cos();
        let window: Vec<f64> = (0..n_fft).map(hann).collect();
        // A sine of full scale has the energy n²/16 in its bin under this window.
        let scale = 16.0 / (n_fft as f64 * n_fft as f64);
        let level = |at: usize| {
            for (i, (f, w)) in frame.iter_mut().zip(&window).enumerate() {
                *f = f64::from(samples.get(at + i).copied().unwrap_or(0.0)) * w;
            }
            // Its only error is a buffer of another size.
            let _ = fft.process(&mut frame, &mut spectrum);
            let energy: f64 = spectrum[band.clone()].iter().map(|c| c.norm_sqr()).sum();
            (10.0 * (energy * scale).max(1e-12).log10()) as f32
        };
        let db: Vec<f32> = (0..samples.len()).step_by(hop).map(level).collect();
        let threshold = threshold(&db);
        Self { db, threshold }
    }

    /// Ranges of speech in milliseconds, ascending and disjoint.
    pub fn speech(&self) -> Vec<Range<u32>> {
        let mut found: Vec<Range<usize>> = Vec::new();
        for (at, level) in self.db.iter().enumerate() {
            if *level < self.threshold {
                continue;
            }
            match found.last_mut() {
                Some(last) if at - last.end < MIN_PAUSE => last.end = at + 1,
                _ => found.push(at..at + 1),
            }
        }
        found.retain(|r| r.len() >= MIN_SPEECH);
        let mut wide: Vec<Range<usize>> = Vec::new();
        for r in found {
            let r = r.start.saturating_sub(MARGIN)..(r.end + MARGIN).min(self.db.len());
            match wide.last_mut() {
                Some(last) if r.start <= last.end => last.end = r.end,
                _ => wide.push(r),
            }
        }
        let ms = |frame: usize| u32::try_from(frame * FRAME_MS).unwrap_or(u32::MAX);
        wide.into_iter().map(|r| ms(r.start)..ms(r.end)).collect()
    }

    /// The best frame to cut at within `frames`, and true if it is in a pause: the end of the longest pause, just before
    /// speech goes on, or the quietest frame if there is no pause. A pause that goes on past `frames` ends with them.
    pub fn cut(&self, frames: Range<usize>) -> (usize, bool) {
        let inside = frames.start.min(self.db.len())..frames.end.min(self.db.len());
        let mut longest = inside.start..inside.start;
        let mut run = inside.start;
        for at in inside.clone() {
            if self.db[at] >= self.threshold {
                run = at + 1;
            } else if at + 1 - run >= longest.len() {
                // Of equal pauses the later one leaves the window fuller.
                longest = run..at + 1;
            }
        }
        if longest.len() >= MIN_PAUSE / 2 {
            let margin = if longest.end == inside.end { 0 } else { MARGIN.min(longest.len() / 2) };
            return (longest.end - margin, true);
        }
        let quietest = inside.clone().min_by(|a, b| self.db[*a].total_cmp(&self.db[*b]));
        (quietest.unwrap_or(inside.end), false)
    }
}

/// Threshold between the noise floor of audio and its loud parts.
fn threshold(db: &[f32]) -> f32 {
    let mut sorted: Vec<f32> = db.to_vec();
    sorted.sort_unstable_by(f32::total_cmp);
    let share = |percent: usize| sorted.get(sorted.len() * percent / 100).copied().unwrap_or(SILENCE_DB);
    let floor = share(10).max(-90.0);
    let loud = share(95);
    if loud - floor < CONTRAST_DB {
        return SILENCE_DB;
    }
    (floor + RISE * (loud - floor)).max(SILENCE_DB)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: u32 = 16_000;

    /// Seconds of a tone (or of noise at 0 Hz) at an amplitude, one after another.
    fn audio(parts: &[(f32, f32, f32)]) -> Vec<f32> {
        let mut seed = 1u32;
        let mut noise = move || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / 8_388_608.0 - 1.0
        };
        let mut samples = Vec::new();
        for (seconds, hz, amplitude) in parts {
            for i in 0..(seconds * RATE as f32) as usize {
                let tone = (std::f32::consts::TAU * hz * i as f32 / RATE as f32).sin();
                samples.push(amplitude * if *hz == 0.0 { noise() } else { tone } + 0.0005 * noise());
            }
        }
        samples
    }

    fn check(parts: &[(f32, f32, f32)], expect: &[[u32; 2]]) {
        let found = FrameLevels::of(&audio(parts), RATE).speech();
        assert_eq!(found.len(), expect.len(), "{found:?}");
        for (f, e) in found.iter().zip(expect) {
            assert!(f.start.abs_diff(e[0]) <= 250 && f.end.abs_diff(e[1]) <= 250, "{found:?}");
            assert!(f.start <= e[0] + 20 && f.end + 20 >= e[1], "nothing of it is cut: {found:?}");
        }
    }

    #[test]
    fn pauses_are_found_and_hum_and_clicks_are_pauses() {
        check(
            &[(1.0, 500.0, 0.0), (1.0, 500.0, 0.3), (2.0, 500.0, 0.0), (1.0, 900.0, 0.1)],
            &[[1000, 2000], [4000, 5000]],
        );
        // A pause of a breath is none.
        check(
            &[(1.0, 500.0, 0.0), (1.0, 500.0, 0.3), (0.2, 500.0, 0.0), (1.0, 500.0, 0.3), (1.0, 0.0, 0.0)],
            &[[1000, 3200]],
        );
        check(&[(2.0, 50.0, 0.5), (1.0, 500.0, 0.3), (2.0, 50.0, 0.5)], &[[2000, 3000]]);
        check(
            &[(2.0, 500.0, 0.0), (0.02, 500.0, 0.5), (2.0, 500.0, 0.0), (2.0, 500.0, 0.3)],
            &[[4020, 6020]],
        );
        // Quiet fricatives of noise count too.
        check(&[(2.0, 500.0, 0.0), (1.0, 500.0, 0.3), (0.3, 0.0, 0.03), (2.0, 500.0, 0.0)], &[[2000, 3300]]);
    }

    #[test]
    fn audio_without_contrast_is_all_speech_and_silence_is_none() {
        check(&[(3.0, 0.0, 0.2)], &[[0, 3000]]);
        assert!(FrameLevels::of(&[0.0; 48_000], RATE).speech().is_empty());
        assert!(FrameLevels::of(&[], RATE).speech().is_empty());
    }

    #[test]
    fn a_cut_is_in_the_longest_pause_or_at_the_quietest_place() {
        let levels = FrameLevels::of(&audio(&[(1.0, 500.0, 0.3), (0.5, 0.0, 0.0), (1.0, 500.0, 0.3)]), RATE);
        let (at, pause) = levels.cut(50..200);
        assert!(pause && (115..135).contains(&at), "{at}");
        let (at, pause) = levels.cut(160..240);
        assert!(!pause && (160..240).contains(&at), "{at}");
        assert_eq!(levels.cut(900..950), (250, false));
    }
}
