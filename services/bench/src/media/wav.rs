//! WAV files: one channel of 16 bits at 16 kHz, a few tones that come and go over noise, so that neither a detector
//! of silence nor a codec finds nothing in it.

use crate::seed::{Purpose, rng};
use rand::RngExt;
use std::f32::consts::TAU;

const HZ: u32 = 16_000;
/// A syllable.
const SYLLABLE_S: f32 = 0.18;

/// An audio clip with this content.
pub(super) fn audio_clip(millis: u32, content: u64) -> Vec<u8> {
    let mut rng = rng(content, Purpose::Requests, 2);
    let n = u64::from(millis) * u64::from(HZ) / 1000;
    let mut wav = header(n);
    let syllable = (SYLLABLE_S * HZ as f32) as u64;
    let mut pitch = 150.0f32;
    let mut loudness = 0.5f32;
    let mut phase = 0.0f32;
    for i in 0..n {
        if i % syllable == 0 {
            pitch = rng.random_range(90.0..300.0);
            loudness = if rng.random_range(0..6) == 0 { 0.02 } else { rng.random_range(0.2..0.6) };
        }
        phase = (phase + pitch / HZ as f32).fract();
        let tone: f32 = (1..=4).map(|k| (TAU * phase * k as f32).sin() / k as f32).sum();
        let noise = rng.random_range(-0.05f32..0.05);
        let sample = ((tone * loudness * 0.4 + noise) * 32_000.0).clamp(-32_767.0, 32_767.0) as i16;
        wav.extend_from_slice(&sample.to_le_bytes());
    }
    wav
}

fn header(n_samples: u64) -> Vec<u8> {
    // An hour of audio, the longest clip, is 115 MB.
    let n_bytes = (n_samples * 2) as u32;
    let mut wav = Vec::with_capacity(44 + n_bytes as usize);
    wav.extend_from_slice(b"RIFF");
    wav.extend_from_slice(&(36 + n_bytes).to_le_bytes());
    wav.extend_from_slice(b"WAVEfmt ");
    wav.extend_from_slice(&16u32.to_le_bytes());
    for field in [1u16, 1] {
        wav.extend_from_slice(&field.to_le_bytes());
    }
    wav.extend_from_slice(&HZ.to_le_bytes());
    wav.extend_from_slice(&(HZ * 2).to_le_bytes());
    for field in [2u16, 16] {
        wav.extend_from_slice(&field.to_le_bytes());
    }
    wav.extend_from_slice(b"data");
    wav.extend_from_slice(&n_bytes.to_le_bytes());
    wav
}
