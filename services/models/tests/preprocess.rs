//! Images and sounds against the reference's processors, and against what clients may send instead of them.

#[path = "support/golden.rs"]
mod golden;

use golden::Tensors;
use image::{DynamicImage, ImageFormat, Rgb, RgbImage};
use std::io::Cursor;
use std::time::Duration;
use triptych_core::limits::Limits;
use triptych_core::{Extent, Modality};
use triptych_models::ItemError;
use triptych_models::preprocess::image::{Size, smart_resize};
use triptych_models::preprocess::{
    AudioProcessor, AudioSettings, EncoderInput, Features, ImageProcessor, ImageSettings, Preprocess, audio,
};

const WHISPER: AudioSettings = AudioSettings { n_mels: 80, n_fft: 400, hop: 160, rate: 16_000, chunk_s: 30 };

fn image_settings(min_pixels: u64, max_pixels: u64) -> ImageSettings {
    let published = ImageSettings::from_dir(&golden::path("qwen2_vl_two_images/model")).unwrap();
    ImageSettings { min_pixels, max_pixels, ..published }
}

fn see(bytes: &[u8]) -> Result<EncoderInput, ItemError> {
    let processor = ImageProcessor::new(image_settings(3136, 12_845_056));
    processor.preprocess(Modality::Image, bytes, &Limits::default())
}

fn hear(bytes: &[u8], limits: &Limits) -> Result<EncoderInput, ItemError> {
    AudioProcessor::new(WHISPER).preprocess(Modality::Audio, bytes, limits)
}

/// `[n_patches, 3, 2, 14, 14]` to `[h, w, 3]` of 0 to 255, from the second frame.
fn pixels_of(input: &EncoderInput, settings: &ImageSettings) -> (usize, usize, Vec<f32>) {
    let (Extent::Grid { t: 1, h, w }, Features::Patches(values)) = (input.extent, &input.features) else {
        panic!("{:?}", input.extent)
    };
    let (h, w) = (h as usize, w as usize);
    assert_eq!(values.len(), h * w * 1176);
    let mut pixels = vec![0.0; h * w * 196 * 3];
    for (i, patch) in values.as_chunks::<1176>().0.iter().enumerate() {
        let (square, inner) = (i / 4, i % 4);
        let (y0, x0) = (square / (w / 2) * 2 + inner / 2, square % (w / 2) * 2 + inner % 2);
        for c in 0..3 {
            for k in 0..196 {
                assert_eq!(patch[c * 392 + k], patch[c * 392 + 196 + k], "both frames are the still image");
                let (y, x) = (y0 * 14 + k / 14, x0 * 14 + k % 14);
                pixels[(y * w * 14 + x) * 3 + c] =
                    (patch[c * 392 + 196 + k] * settings.std[c] + settings.mean[c]) * 255.0;
            }
        }
    }
    (h * 14, w * 14, pixels)
}

fn furthest(got: &[f32], expect: impl Iterator<Item = f32>) -> f32 {
    got.iter().zip(expect).map(|(g, e)| (g - e).abs()).fold(0.0, f32::max)
}

fn png(image: &DynamicImage) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    image.write_to(&mut bytes, ImageFormat::Png).unwrap();
    bytes.into_inner()
}

#[test]
fn pixels_match_the_reference() {
    let tensors = Tensors::read("preprocess/images.safetensors");
    let list = golden::json("preprocess/images.json");
    let rows = list["images"].as_array().unwrap();
    assert!(rows.len() >= 16);
    for row in rows {
        let name = row["name"].as_str().unwrap();
        let settings = image_settings(row["min_pixels"].as_u64().unwrap(), row["max_pixels"].as_u64().unwrap());
        let processor = ImageProcessor::new(settings.clone());
        let bytes = golden::bytes(&format!("preprocess/{}", row["file"].as_str().unwrap()));
        let input = processor.preprocess(Modality::Image, &bytes, &Limits::default()).unwrap();
        let grid = golden::ids(&row["grid_thw"]);
        assert_eq!(input.extent, Extent::Grid { t: grid[0], h: grid[1], w: grid[2] }, "{name}");
        assert_eq!(input.n_tokens, grid[1] * grid[2] / 4, "{name}");
        let (shape, expect) = tensors.u8(&format!("{name}.resized"));
        let (h, w, got) = pixels_of(&input, &settings);
        assert_eq!(shape, [h, w, 3], "{name}");
        // Two JPEG decoders need not agree to the last bit, and a resize can widen that.
        let allowed = if row["file"].as_str().unwrap().ends_with("jpg") { 4.0 } else { 1.0 };
        let off = furthest(&got, expect.iter().map(|v| f32::from(*v)));
        println!("{name}: {off:.3} of 255");
        assert!(off <= allowed + 1e-3, "{name}: {off} of 255");
        if tensors.has(&format!("{name}.pixel_values")) {
            let (_, expect) = tensors.f32(&format!("{name}.pixel_values"));
            let Features::Patches(values) = &input.features else { panic!("{name}") };
            assert!(furthest(values, expect.into_iter()) < 1e-5, "{name}");
        }
    }
}

#[test]
fn sizes_are_the_references() {
    for row in golden::json("preprocess/smart_resize.json").as_array().unwrap() {
        let number = |key: &str| row[key].as_u64().unwrap();
        let mut settings = image_settings(number("min_pixels"), number("max_pixels"));
        settings.patch_size = number("factor") as u32 / settings.merge_size;
        let size = Size { width: number("width") as u32, height: number("height") as u32 };
        let got = smart_resize(size, &settings);
        match row.get("resized") {
            Some(pair) => {
                let pair = golden::ids(pair);
                assert_eq!(got.unwrap(), Size { height: pair[0], width: pair[1] }, "{row}");
            }
            None => assert!(matches!(got, Err(ItemError::TooLarge { .. })), "{row}"),
        }
    }
}

#[test]
fn a_header_that_declares_too_much_is_refused_with_value_and_limit() {
    let mut bytes = png(&DynamicImage::new_rgb8(1, 1));
    bytes[16..20].copy_from_slice(&60_000_u32.to_be_bytes());
    bytes[20..24].copy_from_slice(&60_000_u32.to_be_bytes());
    let crc = crc32(&bytes[12..29]);
    bytes[29..33].copy_from_slice(&crc.to_be_bytes());
    let text = see(&bytes).unwrap_err().to_string();
    assert_eq!(text, "the image is 60000x60000 = 3600000000 pixels, the limit is 50000000 pixels");
    let small = Limits { max_item_bytes: 10, ..Limits::default() };
    let processor = ImageProcessor::new(image_settings(3136, 12_845_056));
    assert!(matches!(
        processor.preprocess(Modality::Image, &bytes, &small),
        Err(ItemError::TooLarge { what: "the item", .. })
    ));
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| if c & 1 == 1 { c >> 1 ^ 0xEDB8_8320 } else { c >> 1 })
    })
}

#[test]
fn what_is_no_image_is_named() {
    let check = |bytes: &[u8], expect: &str| {
        let text = see(bytes).unwrap_err().to_string();
        assert!(text.contains(expect), "{text}");
    };
    check(b"", "no bytes");
    check(b"just words", "a text; read are PNG, JPEG, WebP, GIF and BMP");
    check(b"<!doctype html><p>404", "an HTML text; read are");
    check(b"{\"error\": 1}", "a JSON text; read are");
    check(b"%PDF-1.7", "a PDF document; read are");
    check(&[0; 40], "40 bytes of an unknown format; read are");
    check(&golden::media("speech.mp3"), "read are PNG");
    check(b"\x89PNG\r\n\x1a\n", "a PNG image does not decode");
    let whole = png(&DynamicImage::ImageRgb8(RgbImage::from_fn(40, 40, |x, y| Rgb([x as u8, y as u8, 7]))));
    check(&whole[..whole.len() / 2], "a PNG image does not decode");
    let jpeg = golden::media("gradient_cmyk.jpg");
    check(&jpeg[..20], "a JPEG image does not decode");
}

#[test]
fn no_bytes_make_the_processor_panic() {
    let processors: [Box<dyn Preprocess>; 2] = [
        Box::new(ImageProcessor::new(image_settings(3136, 100_352))),
        Box::new(AudioProcessor::new(AudioSettings { chunk_s: 1, ..WHISPER })),
    ];
    let files = ["speech.mp3", "speech.ogg", "speech.m4a", "speech.flac", "gradient_cmyk.jpg", "two_frames.webp"];
    let mut state = 1_u32;
    for name in files {
        let whole = golden::media(name);
        for round in 0..24 {
            let mut bytes = whole.clone();
            for _ in 0..=round % 6 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let at = state as usize % bytes.len().min(400);
                bytes[at] = (state >> 24) as u8;
            }
            bytes.truncate(bytes.len() - bytes.len() * (round % 4) / 4);
            for processor in &processors {
                let modality = processor.modalities()[0];
                let _ = processor.preprocess(modality, &bytes, &Limits::default());
            }
        }
    }
}

#[test]
fn first_frames_and_odd_colours_are_read() {
    let settings = image_settings(3136, 12_845_056);
    for name in ["two_frames.webp", "two_frames.gif"] {
        let (_, _, got) = pixels_of(&see(&golden::media(name)).unwrap(), &settings);
        let expect = [200.0, 30.0, 40.0].into_iter().cycle().take(got.len());
        assert!(furthest(&got, expect) <= 1.0, "{name}");
    }
    // CMYK, as Pillow reads it: corners of a gradient.
    let (h, w, got) = pixels_of(&see(&golden::media("gradient_cmyk.jpg")).unwrap(), &settings);
    let corner = |y: usize, x: usize| &got[(y * w + x) * 3..(y * w + x) * 3 + 3];
    for (at, expect) in [
        (corner(0, 0), [0.0, 0.0, 0.0]),
        (corner(0, w - 1), [255.0, 0.0, 153.0]),
        (corner(h - 1, 0), [0.0, 254.0, 102.0]),
        (corner(h - 1, w - 1), [255.0, 254.0, 254.0]),
    ] {
        assert!(furthest(at, expect.into_iter()) <= 4.0, "{at:?} {expect:?}");
    }
    // The high byte of 16 bits.
    let grey = image::ImageBuffer::from_pixel(28, 112, image::Luma([0x80FF_u16]));
    let (_, _, got) = pixels_of(&see(&png(&DynamicImage::ImageLuma16(grey))).unwrap(), &settings);
    assert!(furthest(&got, std::iter::repeat_n(128.0, got.len())) < 1e-3);
}

#[test]
fn a_sliver_is_refused_and_a_wrong_modality_too() {
    let text = see(&png(&DynamicImage::new_rgb8(1, 201))).unwrap_err().to_string();
    assert_eq!(text, "the image's longer side over its shorter is 201.0 (1x201), the limit is 200");
    let processor = ImageProcessor::new(image_settings(3136, 12_845_056));
    assert!(processor.preprocess(Modality::Audio, &[1], &Limits::default()).is_err());
}

/// The generator that the golden sounds name.
fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((f64::from(state >> 8) / f64::from(1 << 24)) as f32) - 0.5
        })
        .collect()
}

fn sound(name: &str) -> Vec<f32> {
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
        let (name, n_mels) = (row["name"].as_str().unwrap(), row["n_mels"].as_u64().unwrap() as usize);
        let samples = sound(name);
        assert_eq!(samples.len() as u64, row["n_samples"].as_u64().unwrap(), "{name}");
        let processor = AudioProcessor::new(AudioSettings { n_mels, ..WHISPER });
        let (n_windows, mel) = processor.windows(&samples);
        assert_eq!((n_windows, mel.len()), (1, n_mels * 3000), "{name}");
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
        let (n_windows, mel) = processor.windows(&samples);
        assert_eq!((n_windows as usize, mel.len()), (1, shape[0] * shape[1]));
        let off = furthest(&mel, expect.into_iter());
        println!("{case}: {off:.2e}");
        assert!(off < 1e-4, "{case}: {off}");
    }
}

/// A WAV file of 16-bit samples.
fn wav(rate: u32, n_channels: u16, samples: impl Iterator<Item = i16>) -> Vec<u8> {
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
    let whole = sound("speech");
    for (name, allowed) in [("speech.flac", 1e-4), ("speech.mp3", 0.05), ("speech.ogg", 0.08), ("speech.m4a", 0.05)] {
        let got = audio::decode(&golden::media(name), 16_000, &limits).unwrap();
        let seconds = got.len() as f64 / 16_000.0;
        let expect = if name == "speech.flac" { 1.0 } else { 1.5 };
        assert!((seconds - expect).abs() < 0.15, "{name}: {seconds} s");
        // Codecs shift a little: the best shift must explain nearly all of the energy.
        let energy = |s: &[f32]| s.iter().map(|v| v * v).sum::<f32>();
        let n = got.len().min(whole.len()) - 4000;
        let reference = &whole[2000..2000 + n];
        let rest = (0..4000)
            .map(|shift| {
                got[shift..shift + n].iter().zip(reference).map(|(g, r)| (g - r) * (g - r)).sum::<f32>()
            })
            .fold(f32::INFINITY, f32::min);
        let share = rest / energy(reference);
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
            let expect = |i: usize| 9000.0 / 32768.0 * (std::f64::consts::TAU * 440.0 * i as f64 / 16_000.0).sin();
            let off = (2000..14_000).map(|i| (f64::from(got[i]) - expect(i)).abs()).fold(0.0, f64::max);
            assert!(off < 2e-3, "{rate} Hz, {n_channels} channels: {off}");
        }
    }
    // Left and right of opposite sign cancel.
    let opposite = tone(16_000, 440.0, 0.1).flat_map(|s| [s, -s]);
    let silent = audio::decode(&wav(16_000, 2, opposite), 16_000, &limits).unwrap();
    assert!(silent.iter().all(|s| s.abs() < 1e-6));
}

#[test]
fn a_long_sound_is_windows_and_a_scrap_is_none() {
    let limits = Limits::default();
    let settings = AudioSettings { chunk_s: 1, ..WHISPER };
    let processor = AudioProcessor::new(settings);
    let check = |seconds: f64, n_windows: u32| {
        let bytes = wav(16_000, 1, tone(16_000, 300.0, seconds));
        let input = processor.preprocess(Modality::Audio, &bytes, &limits).unwrap();
        let duration_ms = (seconds * 1000.0).round() as u64;
        assert_eq!(input.extent, Extent::Windows { n_windows, duration_ms }, "{seconds} s");
        assert_eq!(input.n_tokens, n_windows * 50);
        let Features::Mel(mel) = &input.features else { panic!("mel") };
        assert_eq!(mel.len(), n_windows as usize * 80 * 100);
        mel.clone()
    };
    check(0.01, 1);
    check(1.0, 1);
    check(1.01, 1);
    check(1.5, 2);
    let three = check(2.5, 3);
    // Each window is normalised by itself.
    assert_eq!(three[..8000], check(1.0, 1)[..]);
    assert_eq!(three[16_000..], check(0.5, 1)[..]);
}

#[test]
fn sounds_that_cannot_be_used_say_why() {
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
    check(&golden::media("speech.opus"), &limits, "an Ogg Opus sound with a codec that is not read");
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
