//! Images and audio against the reference's processors, and against malformed input from clients.

#[path = "support/golden.rs"]
mod golden;

#[path = "preprocess/bombs.rs"]
mod bombs;
#[path = "preprocess/canvases.rs"]
mod canvases;
#[path = "preprocess/images.rs"]
mod images;
#[path = "preprocess/audio.rs"]
mod audio;
#[path = "preprocess/videos.rs"]
mod videos;
#[path = "preprocess/texts.rs"]
mod texts;
#[path = "preprocess/rows.rs"]
mod rows;

use std::sync::Arc;
use triptych_core::ItemOptions;
use triptych_core::limits::Limits;
use triptych_models::preprocess::{ImageProcessor, ImageSettings, Preprocess};
use triptych_models::speech::audio::{AudioProcessor, AudioSettings};
use triptych_models::{LoadFormat, Model, ModelSource};

const WHISPER: AudioSettings = AudioSettings { n_mels: 80, n_fft: 400, hop: 160, rate: 16_000, chunk_s: 30 };

fn image_settings(min_pixels: u64, max_pixels: u64) -> ImageSettings {
    let published = ImageSettings::from_dir(&golden::path("qwen2_vl_two_images/model")).unwrap();
    ImageSettings { min_pixels, max_pixels, ..published }
}

fn furthest(got: &[f32], expect: impl Iterator<Item = f32>) -> f32 {
    got.iter().zip(expect).map(|(g, e)| (g - e).abs()).fold(0.0, f32::max)
}

#[test]
fn no_bytes_make_the_processor_panic() {
    let of = |case: &str| {
        let source = ModelSource {
            dir: golden::path(&format!("{case}/model")),
            name: None,
            format: LoadFormat::Safetensors,
            packed: None,
        };
        Model::open(&source).unwrap().preprocess()
    };
    let processors: [Arc<dyn Preprocess>; 4] = [
        Arc::new(ImageProcessor::new(image_settings(3136, 100_352))),
        Arc::new(AudioProcessor::new(AudioSettings { chunk_s: 1, ..WHISPER })),
        of("mllama_small_f32"),
        of("moonshine_deep_f16"),
    ];
    let files =
        ["speech.mp3", "speech.ogg", "speech.m4a", "speech.flac", "gradient_cmyk.jpg", "two_frames.webp"];
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
                let _ = processor.preprocess(modality, &bytes, &ItemOptions::default(), &Limits::default());
            }
        }
    }
}
