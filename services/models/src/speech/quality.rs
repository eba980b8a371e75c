//! Quality of a decoded window, judged as in transformers' temperature fallback.
//!
//! Three numbers decide: the compression ratio of the *tokens* (high for repetitive text), their mean log-probability with
//! the end token, and the probability of "no speech" after the start token
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/whisper/generation_whisper.py>;
//! openai-whisper compresses the text instead). It decodes nothing itself.

use flate2::Compression;
use flate2::write::ZlibEncoder;
use std::io::Write;
use triptych_core::prompt::SpeechFallback;

/// Three numbers about a window's tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WindowQuality {
    /// Bytes of the tokens over bytes of the tokens compressed.
    pub compression_ratio: f32,
    /// Mean log-probability of the tokens, the end token included.
    pub logprob: f32,
    /// Probability of "no speech".
    pub no_speech: f32,
}

/// Verdict on a decoded window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowVerdict {
    /// Its tokens are kept.
    Keep,
    /// It is decoded again at a higher temperature.
    Again,
    /// It holds no speech, and gets no text.
    Silent,
}

/// Judges a window.
pub fn judge(fallback: &SpeechFallback, quality: WindowQuality) -> WindowVerdict {
    let over = |limit: Option<f32>, value: f32| limit.is_some_and(|limit| value > limit);
    let is_improbable = fallback.logprob.is_some_and(|limit| quality.logprob < limit);
    let silent = over(fallback.no_speech, quality.no_speech);
    if silent && (is_improbable || fallback.logprob.is_none()) {
        WindowVerdict::Silent
    } else if is_improbable || over(fallback.compression_ratio, quality.compression_ratio) {
        WindowVerdict::Again
    } else {
        WindowVerdict::Keep
    }
}

/// Compression ratio of the tokens under zlib, each as the fewest little-endian bytes that hold `vocab`.
///
/// The encoder here always brings its own code table, which zlib leaves out where the standard one is shorter: for
/// short texts. The lesser of both lengths is taken. O(n²) in the worst case, of a few hundred tokens.
pub fn compression_ratio(tokens: &[u32], vocab: usize) -> f32 {
    let width = (vocab.max(1).ilog2() / 8 + 1).min(4) as usize;
    let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()[..width].to_vec()).collect();
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    let packed = encoder.write_all(&bytes).and_then(|()| encoder.finish());
    // Writing to memory cannot fail.
    packed.map_or(0.0, |packed| bytes.len() as f32 / packed.len().min(standard_len(&bytes)).max(1) as f32)
}

/// Bytes of the stream with zlib's head and sum in one block with the standard code table (RFC 1951, 3.2.6).
fn standard_len(bytes: &[u8]) -> usize {
    let mut at = 0;
    let mut bits = 3 + 7;
    while at < bytes.len() {
        let (len, distance) = longest_match(bytes, at);
        // A longer match one byte on is worth a literal.
        let lazy = len >= 3 && at + 1 < bytes.len() && longest_match(bytes, at + 1).0 > len;
        if len < 3 || lazy {
            bits += if bytes[at] < 144 { 8 } else { 9 };
            at += 1;
        } else {
            bits += length_bits(len) + 5 + extra_bits(distance - 1, 4, 1);
            at += len;
        }
    }
    2 + usize::div_ceil(bits, 8) + 4
}

/// Length and distance of the longest repetition, of equally long ones the nearest.
fn longest_match(bytes: &[u8], at: usize) -> (usize, usize) {
    let mut best = (0, 0);
    // Zlib takes a repetition of the very first byte for none.
    for from in (at.saturating_sub(32_768).max(1)..at).rev() {
        let len = (0..258.min(bytes.len() - at)).take_while(|i| bytes[from + i] == bytes[at + i]).count();
        if len > best.0 {
            best = (len, at - from);
        }
    }
    best
}

/// Bits of a length, 3 to 258: codes of 7 bits up to a length of 114, then of 8.
fn length_bits(len: usize) -> usize {
    let extra = if len == 258 { 0 } else { extra_bits(len - 3, 8, 2) };
    extra + if len < 115 { 7 } else { 8 }
}

/// Bits beside the code: none below `first`, then one more each time the value doubles.
fn extra_bits(value: usize, first: usize, shift: u32) -> usize {
    if value < first { 0 } else { (value.ilog2() - shift) as usize }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_threshold_decides_its_part() {
        let all = SpeechFallback::default();
        let none = SpeechFallback {
            compression_ratio: None,
            logprob: None,
            no_speech: None,
            ..SpeechFallback::default()
        };
        let check = |fallback: &SpeechFallback, numbers: [f32; 3], expect| {
            let [compression_ratio, logprob, no_speech] = numbers;
            let found = judge(fallback, WindowQuality { compression_ratio, logprob, no_speech });
            assert_eq!(found, expect, "{numbers:?}");
        };
        check(&all, [1.0, -0.5, 0.1], WindowVerdict::Keep);
        check(&all, [2.4, -1.0, 0.6], WindowVerdict::Keep);
        check(&all, [2.5, -0.5, 0.9], WindowVerdict::Again);
        check(&all, [1.0, -1.1, 0.6], WindowVerdict::Again);
        check(&all, [9.0, -1.1, 0.7], WindowVerdict::Silent);
        check(&none, [9.0, -9.0, 1.0], WindowVerdict::Keep);
        check(&SpeechFallback { logprob: None, ..all }, [1.0, -0.1, 0.7], WindowVerdict::Silent);
    }

    #[test]
    fn repetitive_tokens_compress() {
        let varied: Vec<u32> = (0..60u32).map(|i| i.wrapping_mul(2_654_435_761) % 50_000).collect();
        assert!(compression_ratio(&varied, 51_865) < 1.1);
        assert!(compression_ratio(&[7, 8, 9].repeat(40), 51_865) > 8.0);
        assert!(compression_ratio(&[], 51_865) < 0.5);
    }
}
