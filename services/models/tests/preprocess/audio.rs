//! Audio against the reference's processor.

use super::golden::{self, Tensors};
use super::{WHISPER, furthest};
use std::time::Duration;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};
use triptych_models::ItemError;
use triptych_models::preprocess::{EncoderInput, Features, Preprocess};
use triptych_models::speech::audio::windows::SilencePolicy;
use triptych_models::speech::audio::{self, AudioProcessor, AudioSettings};
use triptych_models::{LoadFormat, Model, ModelSource};

fn hear(bytes: &[u8], limits: &Limits) -> Result<EncoderInput, ItemError> {
    AudioProcessor::new(WHISPER).preprocess(Modality::Audio, bytes, &ItemOptions::default(), limits)
}

/// The generator that the golden files name.
fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((f64::from(state >> 8) / f64::from(1 << 24)) as f32) - 0.5
        })
        .collect()
}

fn golden_audio(name: &str) -> Vec<f32> {
    use std::f64::consts::PI;
    let t = |i: usize| i as f64 / 16_000.0;
    match name {
        "silence" => vec![0.0; 16_000],
        "sine" => (0..16_000).map(|i| (0.5 * (2.0 * PI * 440.0 * t(i)).sin()) as f32).collect(),
        "impulse" => (0..1000).map(|i| if i == 500 { 1.0 } else { 0.0 }).collect(),
        "noise" => noise(33_333, 7),
        "chirp_full" => (0..480_000)
            .map(|i| (0.8 * (2.0 * PI * (50.0 * t(i) + 125.0 * t(i) * t(i))).sin()) as f32)
            .collect(),
        "noise_too_long" => noise(480_100, 9),
        "speech" => audio::decode(&golden::bytes("inputs/speech.wav"), 16_000, &Limits::default()).unwrap(),
        other => panic!("no recipe for {other}"),
    }
}

#[test]
fn log_mel_matches_the_reference() {
    let tensors = Tensors::read("preprocess/log_mel.safetensors");
    let rows = golden::json("preprocess/log_mel.json");
    for row in rows.as_array().unwrap() {
        let name = row["name"].as_str().unwrap();
        let n_mels = row["n_mels"].as_u64().unwrap() as usize;
        let samples = golden_audio(name);
        assert_eq!(samples.len() as u64, row["n_samples"].as_u64().unwrap(), "{name}");
        let processor = AudioProcessor::new(AudioSettings { n_mels, ..WHISPER });
        let (spans, mel) = processor.windows(&samples, SilencePolicy::Read);
        assert_eq!((spans.len(), mel.len()), (0, n_mels * 3000), "{name}");
        let frames = golden::ids(&row["frames"]);
        let (_, expect) = tensors.f32(&format!("{name}.{n_mels}.frames"));
        let got: Vec<f32> =
            mel.chunks(3000).flat_map(|bin| frames.iter().map(|f| bin[*f as usize])).collect();
        assert_eq!(got.len(), expect.len());
        let off = furthest(&got, expect.into_iter());
        println!("{name}.{n_mels}: {off:.2e}");
        assert!(off < 1e-4, "{name}.{n_mels}: {off}");
        let (_, means) = tensors.f32(&format!("{name}.{n_mels}.row_means"));
        let got: Vec<f32> = mel.chunks(3000).map(|bin| bin.iter().sum::<f32>() / 3000.0).collect();
        assert!(furthest(&got, means.into_iter()) < 1e-4, "{name}.{n_mels} means");
    }
}

#[test]
fn features_of_a_model_directory_match() {
    for case in ["whisper_multilingual", "whisper_en_odd_heads"] {
        let tensors = Tensors::read(&format!("{case}/expected.safetensors"));
        let processor = AudioProcessor::from_dir(&golden::path(&format!("{case}/model"))).unwrap();
        let (_, samples) = tensors.f32("waveform");
        let (shape, expect) = tensors.f32("input_features");
        let (spans, mel) = processor.windows(&samples, SilencePolicy::Read);
        assert_eq!((spans.len(), mel.len()), (0, shape[0] * shape[1]));
        let off = furthest(&mel, expect.into_iter());
        println!("{case}: {off:.2e}");
        assert!(off < 1e-4, "{case}: {off}");
    }
}

/// A WAV file of 16-bit samples.
pub fn wav(rate: u32, n_channels: u16, samples: impl Iterator<Item = i16>) -> Vec<u8> {
    let data: Vec<u8> = samples.flat_map(i16::to_le_bytes).collect();
    let mut bytes = b"RIFF".to_vec();
    bytes.extend((36 + data.len() as u32).to_le_bytes());
    bytes.extend(b"WAVEfmt \x10\0\0\0\x01\0");
    bytes.extend(n_channels.to_le_bytes());
    bytes.extend(rate.to_le_bytes());
    bytes.extend((rate * u32::from(n_channels) * 2).to_le_bytes());
    bytes.extend((n_channels * 2).to_le_bytes());
    bytes.extend(b"\x10\0data");
    bytes.extend((data.len() as u32).to_le_bytes());
    bytes.extend(data);
    bytes
}

fn tone(rate: u32, hz: f64, seconds: f64) -> impl Iterator<Item = i16> {
    let n = (f64::from(rate) * seconds) as usize;
    (0..n).map(move |i| (9000.0 * (std::f64::consts::TAU * hz * i as f64 / f64::from(rate)).sin()) as i16)
}

#[test]
fn every_codec_tells_the_same_words() {
    let limits = Limits::default();
    let whole = golden_audio("speech");
    for (name, allowed) in
        [("speech.flac", 1e-4), ("speech.mp3", 0.05), ("speech.ogg", 0.05), ("speech.m4a", 0.05)]
    {
        let got = audio::decode(&golden::media(name), 16_000, &limits).unwrap();
        let seconds = got.len() as f64 / 16_000.0;
        let expect = if name == "speech.flac" { 1.0 } else { 1.5 };
        assert!((seconds - expect).abs() < 0.15, "{name}: {seconds} s");
        // Codecs shift and scale a little: the best of both must explain nearly all of the energy.
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let n = got.len().min(whole.len()) - 4000;
        let reference = &whole[2000..2000 + n];
        let unlike = |part: &[f32]| {
            1.0 - dot(part, reference).powi(2) / (dot(part, part) * dot(reference, reference)).max(1e-9)
        };
        let share = (0..4000).map(|shift| unlike(&got[shift..shift + n])).fold(f32::INFINITY, f32::min);
        println!("{name}: {share:.4} of the energy is left over");
        assert!(share < allowed, "{name}: {share} of the energy is left over");
    }
}

#[test]
fn a_tone_keeps_its_pitch_level_and_length_at_any_rate() {
    let limits = Limits::default();
    for rate in [8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 44_101, 96_000] {
        for n_channels in [1_u16, 2] {
            let stereo = tone(rate, 440.0, 1.0).flat_map(|s| std::iter::repeat_n(s, usize::from(n_channels)));
            let got = audio::decode(&wav(rate, n_channels, stereo), 16_000, &limits).unwrap();
            assert_eq!(got.len(), 16_000, "{rate} Hz");
            let expect =
                |i: usize| 9000.0 / 32768.0 * (std::f64::consts::TAU * 440.0 * i as f64 / 16_000.0).sin();
            let off = (2000..14_000).map(|i| (f64::from(got[i]) - expect(i)).abs()).fold(0.0, f64::max);
            assert!(off < 2e-3, "{rate} Hz, {n_channels} channels: {off}");
        }
    }
    // Left and right of opposite sign cancel.
    let opposite = tone(16_000, 440.0, 0.1).flat_map(|s| [s, -s]);
    let silent = audio::decode(&wav(16_000, 2, opposite), 16_000, &limits).unwrap();
    assert!(silent.iter().all(|s| s.abs() < 1e-6));
}

/// A second a window; the input's spans as pairs, and its mel.
fn laid_out(samples: impl Iterator<Item = i16>, options: &ItemOptions) -> (Vec<[u32; 2]>, u64, Vec<f32>) {
    let processor = AudioProcessor::new(AudioSettings { chunk_s: 1, ..WHISPER });
    let bytes = wav(16_000, 1, samples);
    let input = processor.preprocess(Modality::Audio, &bytes, options, &Limits::default()).unwrap();
    let Extent::Windows { n_windows, duration_ms, spans } = input.extent else { panic!("windows") };
    let Features::Mel(mel) = input.features else { panic!("mel") };
    assert_eq!((input.n_tokens, mel.len()), (n_windows * 50, n_windows as usize * 80 * 100));
    assert!(spans.is_empty() && n_windows == 1 || spans.len() == n_windows as usize);
    (spans.iter().map(|s| [s.start_ms, s.end_ms]).collect(), duration_ms, mel)
}

#[test]
fn a_long_sound_is_windows_and_a_scrap_is_none() {
    let options = ItemOptions::default();
    let check = |seconds: f64, expect: &[[u32; 2]]| {
        let (spans, duration_ms, mel) = laid_out(tone(16_000, 300.0, seconds), &options);
        assert_eq!((spans.as_slice(), duration_ms), (expect, (seconds * 1000.0).round() as u64));
        mel
    };
    check(0.01, &[]);
    let one = check(1.0, &[]);
    check(1.01, &[]);
    // A tone has no pauses: windows overlap, and each is normalised by itself.
    let two = check(1.5, &[[0, 1000], [667, 1500]]);
    assert_eq!(two[..8000], one[..]);
    check(2.5, &[[0, 1000], [667, 1667], [1334, 2334], [2001, 2500]]);
}

#[test]
fn a_long_sound_is_cut_in_its_pauses_and_silence_is_skipped_when_asked() {
    let audio = || {
        let rest = |seconds: f64| std::iter::repeat_n(0, (seconds * 16_000.0) as usize);
        let parts = tone(16_000, 300.0, 0.75).chain(rest(0.4)).chain(tone(16_000, 300.0, 0.6));
        parts.chain(rest(1.0)).chain(tone(16_000, 300.0, 0.5))
    };
    let (spans, duration_ms, _) = laid_out(audio(), &ItemOptions::default());
    assert_eq!((spans.len(), duration_ms), (4, 3250));
    assert_eq!(spans[..3], [[0, 1000], [1000, 2000], [2000, 3000]], "both pauses go on past their windows");
    let skipping = ItemOptions { vad: true, ..ItemOptions::default() };
    let (spans, ..) = laid_out(audio(), &skipping);
    assert!(spans.iter().all(|s| s[0] < s[1] && s[1] - s[0] <= 1000), "{spans:?}");
    assert!(spans.last().is_some_and(|s| (2500..2750).contains(&s[0])), "{spans:?}");
    // In sequence the window starts at the next speech.
    let resumed = ItemOptions { vad: true, start_ms: Some(2000), ..ItemOptions::default() };
    let (spans, ..) = laid_out(audio(), &resumed);
    assert!((2500..2750).contains(&spans[0][0]) && spans[0][1] == 3250, "{spans:?}");
    let (silent, ..) = laid_out(std::iter::repeat_n(0, 16_000), &skipping);
    assert_eq!(silent, [[1000, 1000]], "one window of no length");
}

#[test]
fn a_window_in_sequence_is_cut_out_of_the_whole_audio() {
    let samples = || tone(16_000, 300.0, 0.5).chain(tone(16_000, 500.0, 1.4).map(|s| s / 4));
    let at =
        |start_ms| laid_out(samples(), &ItemOptions { start_ms: Some(start_ms), ..ItemOptions::default() });
    let (first, duration_ms, a) = at(0);
    let (second, _, b) = at(600);
    let (last, _, c) = at(1500);
    assert_eq!((first, second, last), (vec![[0, 1000]], vec![[600, 1600]], vec![[1500, 1900]]));
    assert_eq!(duration_ms, 1900);
    let row = |mel: &[f32], bin: usize, frames: std::ops::Range<usize>| mel[bin * 100..][frames].to_vec();
    for bin in [0, 20, 79] {
        assert_eq!(row(&a, bin, 60..100), row(&b, bin, 0..40), "the same frames of one spectrogram");
        assert_eq!(row(&b, bin, 90..100), row(&c, bin, 0..10));
        assert!(row(&c, bin, 40..100).iter().all(|v| *v == 0.0), "past the audio it is zero");
    }
}

#[test]
fn refusals_of_audio_give_the_reason() {
    let limits = Limits::default();
    let check = |bytes: &[u8], limits: &Limits, expect: &str| {
        let text = hear(bytes, limits).unwrap_err().to_string();
        assert!(text.contains(expect), "{text}");
    };
    check(b"", &limits, "the audio has no bytes");
    check(&wav(16_000, 1, std::iter::empty()), &limits, "no samples");
    check(b"RIFF nothing of the kind", &limits, "read are WAV, FLAC, MP3, Ogg Vorbis and AAC");
    check(b"words and more words", &limits, "the audio is a text");
    check(&golden::media("two_frames.gif"), &limits, "the audio is a GIF image");
    check(&golden::media("speech.opus"), &limits, "an Ogg Opus file with a codec that is not read");
    // Declared: a header of two hours is enough to refuse.
    let mut two_hours = wav(16_000, 1, tone(16_000, 300.0, 1.0));
    let length = 2 * 3600 * 16_000 * 2_u32;
    two_hours[40..44].copy_from_slice(&length.to_le_bytes());
    two_hours[4..8].copy_from_slice(&(length + 36).to_le_bytes());
    assert!(matches!(hear(&two_hours, &limits), Err(ItemError::TooLarge { what: "the audio", .. })));
    // Not declared: decoding stops at the limit.
    let short = Limits { max_audio: Duration::from_millis(700), ..Limits::default() };
    for name in ["speech.mp3", "speech.ogg", "speech.flac", "speech.m4a"] {
        assert!(matches!(hear(&golden::media(name), &short), Err(ItemError::TooLarge { .. })), "{name}");
    }
    check(&wav(500, 1, tone(500, 30.0, 1.0)), &limits, "500 samples per second");
}

/// Noise as a golden model's own processor reads it.
fn clip(case: &str, n_samples: usize) -> Result<EncoderInput, ItemError> {
    let dir = golden::path("").join(case).join("model");
    let source = ModelSource { dir, name: None, format: LoadFormat::Dummy { seed: 0 }, packed: None };
    let model = Model::open(&source).expect("a golden model");
    let samples: Vec<i16> = noise(n_samples, 3).iter().map(|v| (v * 20_000.0) as i16).collect();
    let file = wav(16_000, 1, samples.into_iter());
    model.preprocess().preprocess(Modality::Audio, &file, &ItemOptions::default(), &Limits::default())
}

#[test]
fn an_audio_among_the_tokens_has_the_rows_of_its_own_length() {
    for (n_samples, n_rows) in
        [(161, None), (320, None), (321, Some(1)), (960, Some(1)), (961, Some(2)), (16_319, Some(25))]
    {
        let input = clip("qwen2_audio_odd_heads", n_samples);
        assert_eq!(input.as_ref().ok().map(|input| input.n_tokens), n_rows, "{n_samples}");
        match input {
            Ok(input) => assert_eq!(input.extent, Extent::windows(1, n_samples as u64 / 16)),
            Err(e) => assert!(e.to_string().contains("needs at least 321"), "{e}"),
        }
    }
}

#[test]
fn an_audio_longer_than_the_only_window_is_refused() {
    let refusal = clip("qwen2_audio_odd_heads", 24_000).unwrap_err().to_string();
    assert_eq!(refusal, "the audio is 1.5 s long, the limit is 1 s, the window of this model's encoder");
}

#[test]
fn an_audio_in_chunks_has_the_rows_of_its_frames_and_at_least_those_of_half_a_second() {
    for (n_samples, n_windows, n_rows) in [
        (1, 1, 7),
        (8159, 1, 7),
        (9120, 1, 8),
        (16_000, 1, 13),
        (16_160, 1, 14),
        (32_159, 1, 26),
        (33_600, 2, 28),
    ] {
        let input = clip("qwen3_asr_odd_heads", n_samples).expect("audio");
        assert_eq!(input.n_tokens, n_rows, "{n_samples}");
        assert_eq!(input.extent, Extent::windows(n_windows, n_samples as u64 / 16));
    }
}

#[test]
fn an_audio_of_several_windows_has_the_rows_of_all() {
    for (n_samples, n_windows) in [(1, 1), (32_000, 1), (32_001, 2), (70_000, 3)] {
        let input = clip("voxtral_odd_heads", n_samples).expect("audio");
        assert_eq!(input.n_tokens, 25 * n_windows, "{n_samples}");
        assert_eq!(input.extent, Extent::windows(n_windows, n_samples as u64 / 16));
    }
}
