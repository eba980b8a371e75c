//! Audio bytes to samples of one channel at the model's rate, within limits.
//!
//! Decoding is a stream: the duration limit holds while it runs, so bytes that decode to hours cost no more
//! than the limit.

use super::resample::Resampled;
use crate::error::ItemError;
use crate::preprocess::look;
use std::io::Cursor;
use symphonia::core::audio::GenericAudioBufferRef;
use symphonia::core::codecs::audio::{AudioDecoder, AudioDecoderOptions};
use symphonia::core::errors::Error;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatReader, Track, TrackType};
use symphonia::core::io::MediaSourceStream;
use triptych_core::limits::Limits;

/// Formats that are read, for the texts of errors.
const READ: &str = "read are WAV, FLAC, MP3, Ogg Vorbis and AAC (M4A, ADTS)";
/// Sample rates that are accepted, in Hz.
const RATES: std::ops::RangeInclusive<u32> = 1_000..=384_000;
/// Most channels that are accepted.
const MAX_CHANNELS: usize = 32;
/// Consecutive packets that may fail before the rest is given up.
const MAX_BAD_PACKETS: usize = 100;

/// Decodes the first track, mixes its channels evenly, resamples to `rate`.
///
/// Truncated audio is decoded as far as it goes.
///
/// # Errors
/// [`ItemError`]: a format that is not read, audio over the limit, or without a single sample.
pub fn decode(bytes: &[u8], rate: u32, limits: &Limits) -> Result<Vec<f32>, ItemError> {
    let unsupported =
        |why: String| ItemError::Unsupported(format!("the audio is {}{why}; {READ}", look(bytes)));
    let stream = MediaSourceStream::new(Box::new(Cursor::new(bytes)), Default::default());
    let mut format = symphonia::default::get_probe()
        .probe(&Hint::new(), stream, Default::default(), Default::default())
        .map_err(|_| unsupported(String::new()))?;
    let track = format
        .default_track(TrackType::Audio)
        .or_else(|| format.tracks().first())
        .ok_or_else(|| ItemError::Empty(format!("the audio is {} without an audio track", look(bytes))))?;
    check_declared(track, limits)?;
    let mut decoder = track
        .codec_params
        .as_ref()
        .and_then(|params| params.audio())
        .and_then(|audio| {
            let options = AudioDecoderOptions::default();
            symphonia::default::get_codecs().make_audio_decoder(audio, &options).ok()
        })
        .ok_or_else(|| unsupported(" with a codec that is not read".into()))?;
    let track_id = track.id;
    let mut mono = MonoMixer { to: rate, limits, resampled: None, mix: Vec::new(), interleaved: Vec::new() };
    let broken = drain(&mut *format, track_id, &mut *decoder, &mut mono)?;
    let resampled = mono.resampled.filter(|r| r.n_taken() > 0);
    match (resampled, broken) {
        (Some(resampled), _) => resampled.finish(),
        (None, Some(why)) => Err(ItemError::Corrupt(format!("{} does not decode: {why}", look(bytes)))),
        (None, None) => Err(ItemError::Empty("the audio has no samples".into())),
    }
}

/// Decodes packet after packet. Returns the error of the last bad one.
fn drain(
    format: &mut dyn FormatReader,
    track_id: u32,
    decoder: &mut dyn AudioDecoder,
    mono: &mut MonoMixer<'_>,
) -> Result<Option<String>, ItemError> {
    let mut bad = 0;
    let mut why = None;
    loop {
        let packet = match format.next_packet() {
            Ok(Some(packet)) => packet,
            Ok(None) => return Ok(why),
            Err(e) => return Ok(Some(e.to_string())),
        };
        if packet.track_id != track_id {
            continue;
        }
        match decoder.decode(&packet) {
            Ok(buffer) => {
                bad = 0;
                mono.push(&buffer)?;
            }
            Err(e @ (Error::IoError(_) | Error::DecodeError(_))) if bad < MAX_BAD_PACKETS => {
                bad += 1;
                why = Some(e.to_string());
            }
            Err(e) => return Ok(Some(e.to_string())),
        }
    }
}

/// Refuses audio by its header, before anything is decoded.
fn check_declared(track: &Track, limits: &Limits) -> Result<(), ItemError> {
    let Some(audio) = track.codec_params.as_ref().and_then(|params| params.audio()) else { return Ok(()) };
    if let Some(channels) = &audio.channels {
        check_channels(channels.count())?;
    }
    let Some(rate) = audio.sample_rate else { return Ok(()) };
    check_rate(rate)?;
    match track.num_frames {
        Some(n) if n > max_samples(rate, limits) => Err(too_long(n as f64 / f64::from(rate), limits)),
        _ => Ok(()),
    }
}

fn check_channels(n: usize) -> Result<(), ItemError> {
    if n <= MAX_CHANNELS {
        return Ok(());
    }
    let limit = format!("{MAX_CHANNELS} channels");
    Err(ItemError::TooLarge { what: "the audio", actual: format!("{n} channels"), limit })
}

fn check_rate(rate: u32) -> Result<(), ItemError> {
    if RATES.contains(&rate) {
        return Ok(());
    }
    let allowed = format!("{} to {} Hz", RATES.start(), RATES.end());
    Err(ItemError::Unsupported(format!("the audio has {rate} samples per second; read are {allowed}")))
}

fn max_samples(rate: u32, limits: &Limits) -> u64 {
    (limits.max_audio.as_secs_f64() * f64::from(rate)) as u64
}

fn too_long(seconds: f64, limits: &Limits) -> ItemError {
    ItemError::TooLarge {
        what: "the audio",
        actual: format!("{seconds:.1} s or longer"),
        limit: format!("{:.1} s", limits.max_audio.as_secs_f64()),
    }
}

/// Collects decoded packets as one channel.
struct MonoMixer<'a> {
    to: u32,
    limits: &'a Limits,
    /// Created when the first packet states the rate.
    resampled: Option<Resampled>,
    mix: Vec<f32>,
    interleaved: Vec<f32>,
}

impl MonoMixer<'_> {
    fn push(&mut self, buffer: &GenericAudioBufferRef<'_>) -> Result<(), ItemError> {
        let rate = buffer.spec().rate();
        let n_channels = buffer.num_planes();
        if buffer.frames() == 0 || n_channels == 0 {
            return Ok(());
        }
        check_rate(rate)?;
        check_channels(n_channels)?;
        let resampled = match &mut self.resampled {
            Some(resampled) => resampled,
            none => none.insert(Resampled::new(rate, self.to)?),
        };
        if resampled.source_rate() != rate {
            return Err(ItemError::Unsupported("the audio changes its sample rate".into()));
        }
        let n = resampled.n_taken() + buffer.frames() as u64;
        if n > max_samples(rate, self.limits) {
            return Err(too_long(n as f64 / f64::from(rate), self.limits));
        }
        buffer.copy_to_vec_interleaved(&mut self.interleaved);
        self.mix.clear();
        let share = 1.0 / n_channels as f32;
        self.mix.extend(self.interleaved.chunks_exact(n_channels).map(|frame| {
            let sum: f32 = frame.iter().sum();
            // Float formats can carry anything; one NaN would silence the whole window.
            if sum.is_finite() { sum * share } else { 0.0 }
        }));
        resampled.push(&self.mix)
    }
}
