//! Bytes as a video, through a golden model's own processor: refused, or as many patches as it says.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::path::Path;
use std::sync::LazyLock;
use triptych_core::limits::Limits;
use triptych_core::{ItemOptions, Modality};
use triptych_models::preprocess::{Features, Preprocess, VideoKind, VideoProcessor, VideoSettings};

static PROCESSOR: LazyLock<VideoProcessor> = LazyLock::new(|| {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/shapes-qwen2-vl");
    let settings = VideoSettings::from_dir(&dir, VideoKind::PerFrame);
    VideoProcessor::new(settings.expect("the sample model has a processor"))
});

fuzz_target!(
    init: {
        // A decoder that panics is a corrupt item, and that is caught: the fuzzer's own hook would end the process.
        std::panic::set_hook(Box::new(|_| {}));
    },
    |data: &[u8]| {
        let limits = Limits { max_image_pixels: 1 << 18, max_video_pixels: 1 << 22, ..Limits::default() };
        if let Ok(input) = PROCESSOR.preprocess(Modality::Video, data, &ItemOptions::default(), &limits) {
            let Features::Patches(patches) = &input.features else { panic!("a video becomes patches") };
            assert!(input.n_tokens > 0 && !patches.is_empty());
            assert!(patches.iter().all(|v| v.is_finite()));
        }
    }
);
