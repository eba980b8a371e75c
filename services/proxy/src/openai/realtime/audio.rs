//! Audio of a live stream: the formats in which clients send it, and the file as which a part of it is transcribed.

use bytes::{BufMut, Bytes, BytesMut};
use serde::Serialize;
use triptych_core::Failure;

/// Sampling rates of `audio/pcm`, in Hz. OpenAI's is 24000.
const RATES: std::ops::RangeInclusive<u32> = 8000..=48_000;
/// Rate of G.711.
const TELEPHONE_RATE: u32 = 8000;

/// Format of the audio that a client sends; one channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "type")]
pub(super) enum AudioFormat {
    /// Little-endian 16-bit samples.
    #[serde(rename = "audio/pcm")]
    Pcm {
        /// Samples a second.
        rate: u32,
    },
    /// G.711, µ-law.
    #[serde(rename = "audio/pcmu")]
    MuLaw,
    /// G.711, A-law.
    #[serde(rename = "audio/pcma")]
    ALaw,
}

impl Default for AudioFormat {
    fn default() -> Self {
        Self::Pcm { rate: 24_000 }
    }
}

impl AudioFormat {
    /// The format with this name and, of `audio/pcm`, this rate.
    ///
    /// # Errors
    /// Invalid, with what is allowed.
    pub(super) fn new(name: &str, rate: Option<u32>) -> Result<Self, Failure> {
        match (name, rate) {
            ("audio/pcm", None) => Ok(Self::default()),
            ("audio/pcm", Some(rate)) if RATES.contains(&rate) => Ok(Self::Pcm { rate }),
            ("audio/pcmu", None | Some(TELEPHONE_RATE)) => Ok(Self::MuLaw),
            ("audio/pcma", None | Some(TELEPHONE_RATE)) => Ok(Self::ALaw),
            ("audio/pcm" | "audio/pcmu" | "audio/pcma", Some(rate)) => Err(Failure::invalid(format!(
                "the rate of {name} is {rate}, allowed are 8000 to 48000 of audio/pcm and 8000 of the others"
            ))),
            (other, _) => {
                let shown = super::super::error::quoted(other);
                let allowed = "audio/pcm, audio/pcmu and audio/pcma";
                Err(Failure::invalid(format!("the format is {shown}, allowed are {allowed}")))
            }
        }
    }

    /// Samples a second.
    pub(super) const fn rate(self) -> u32 {
        match self {
            Self::Pcm { rate } => rate,
            Self::MuLaw | Self::ALaw => TELEPHONE_RATE,
        }
    }

    /// Samples of bytes.
    ///
    /// # Errors
    /// Half a sample at the end.
    pub(super) fn samples(self, bytes: &[u8]) -> Result<Vec<i16>, Failure> {
        match self {
            Self::Pcm { .. } => {
                let (pairs, rest) = bytes.as_chunks::<2>();
                if !rest.is_empty() {
                    let text =
                        format!("the audio has {} bytes, 16-bit samples have an even number", bytes.len());
                    return Err(Failure::invalid(text));
                }
                Ok(pairs.iter().map(|pair| i16::from_le_bytes(*pair)).collect())
            }
            Self::MuLaw => Ok(bytes.iter().map(|byte| from_mu_law(*byte)).collect()),
            Self::ALaw => Ok(bytes.iter().map(|byte| from_a_law(*byte)).collect()),
        }
    }
}

/// A sample of µ-law (ITU-T G.711, table 2a): sign, exponent and mantissa of the inverted bits, with a bias of 33.
fn from_mu_law(byte: u8) -> i16 {
    let bits = !byte;
    let magnitude = ((i16::from(bits & 0x0F) << 3) + 0x84) << ((bits >> 4) & 7);
    if bits & 0x80 == 0 { magnitude - 0x84 } else { 0x84 - magnitude }
}

/// A sample of A-law (ITU-T G.711, table 1a), whose even bits are inverted.
fn from_a_law(byte: u8) -> i16 {
    let bits = byte ^ 0x55;
    let mantissa = i16::from(bits & 0x0F) << 4;
    let magnitude = match (bits >> 4) & 7 {
        0 => mantissa + 8,
        exponent => (mantissa + 0x108) << (exponent - 1),
    };
    if bits & 0x80 == 0 { -magnitude } else { magnitude }
}

/// A WAV file of 16-bit samples in one channel.
pub(super) fn wav(samples: &[i16], rate: u32) -> Bytes {
    // Parts of a stream are less than a minute long.
    let n_bytes = u32::try_from(samples.len() * 2).unwrap_or(u32::MAX);
    let mut file = BytesMut::with_capacity(44 + samples.len() * 2);
    file.put_slice(b"RIFF");
    file.put_u32_le(n_bytes.saturating_add(36));
    file.put_slice(b"WAVEfmt ");
    file.put_u32_le(16);
    file.put_u16_le(1);
    file.put_u16_le(1);
    file.put_u32_le(rate);
    file.put_u32_le(rate.saturating_mul(2));
    file.put_u16_le(2);
    file.put_u16_le(16);
    file.put_slice(b"data");
    file.put_u32_le(n_bytes);
    samples.iter().for_each(|sample| file.put_i16_le(*sample));
    file.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_telephones_are_those_of_the_recommendation() {
        for (byte, expect) in
            [(0xFF, 0), (0x7F, 0), (0x80, 32_124), (0x00, -32_124), (0xF0, 120), (0x8F, 16_764)]
        {
            assert_eq!(from_mu_law(byte), expect, "{byte:#x}");
        }
        for (byte, expect) in
            [(0xD5, 8), (0x55, -8), (0xAA, 32_256), (0x2A, -32_256), (0xC5, 264), (0xD4, 24)]
        {
            assert_eq!(from_a_law(byte), expect, "{byte:#x}");
        }
    }

    #[test]
    fn formats_are_read_and_others_refused_with_what_is_allowed() {
        assert_eq!(AudioFormat::new("audio/pcm", None).unwrap().rate(), 24_000);
        assert_eq!(AudioFormat::new("audio/pcm", Some(16_000)).unwrap().rate(), 16_000);
        assert_eq!(AudioFormat::new("audio/pcmu", None), Ok(AudioFormat::MuLaw));
        for (name, rate) in [("audio/pcm", Some(7999)), ("audio/pcma", Some(16_000)), ("audio/ogg", None)] {
            let refused = AudioFormat::new(name, rate).unwrap_err();
            assert!(refused.message.contains("allowed are"), "{refused}");
        }
        assert_eq!(AudioFormat::default().samples(&[1, 0, 255, 255]).unwrap(), [1, -1]);
        assert!(AudioFormat::default().samples(&[1]).is_err());
    }

    #[test]
    fn a_file_has_its_lengths_in_its_head() {
        let file = wav(&[1, -1], 16_000);
        assert_eq!(file.len(), 48);
        assert_eq!((&file[..4], &file[8..16], &file[36..40]), (&b"RIFF"[..], &b"WAVEfmt "[..], &b"data"[..]));
        assert_eq!((&file[4..8], &file[40..44]), (&[40, 0, 0, 0][..], &[4, 0, 0, 0][..]));
        assert_eq!(&file[44..], [1, 0, 255, 255]);
    }
}
