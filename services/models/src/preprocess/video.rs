//! Videos to patches: some of the frames, each resized, two of them to a temporal patch.
//!
//! [`VideoProcessor`] is transformers' `Qwen2VLVideoProcessor` and `Qwen3VLVideoProcessor`
//! (<https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/qwen2_vl/video_processing_qwen2_vl.py>,
//! `qwen3_vl/video_processing_qwen3_vl.py` beside it): frames → RGB → a size whose sides are multiples of patch · merge →
//! normalise → patches in the order of the merger. What a file declares (frames, pixels, duration) is held against the limits
//! before a frame is decoded; frames are decoded one after another, and one that is not sampled is dropped at once.

mod animation;
mod codec;
mod facts;
mod jpegs;
mod mp4;
mod sampling;
mod settings;
mod source;
mod yuv;

pub use settings::{VideoKind, VideoSettings};

use super::image::{ImageProcessor, ImageSize, RgbPixels, add_patches, resample};
use super::{EncoderInput, Features, Preprocess};
use crate::error::ItemError;
use facts::VideoFacts;
use sampling::Sampled;
use source::Video;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};

/// Most pixels of the sampled frames of a video together, after resizing: three floats each.
const MAX_SAMPLED_PIXELS: u64 = 48 << 20;

/// Frames of one size, at a rate.
#[derive(Clone, Debug, PartialEq)]
pub struct FrameStack {
    /// Pixels of a frame.
    pub size: ImageSize,
    /// Frames per second.
    pub fps: f64,
    /// `[n_frames, height, width, 3]`, red, green, blue.
    pub rgb: Vec<u8>,
}

/// The video processor of Qwen-VL.
#[derive(Clone, Debug)]
pub struct VideoProcessor {
    settings: VideoSettings,
}

impl VideoProcessor {
    /// With these settings.
    pub fn new(settings: VideoSettings) -> Self {
        Self { settings }
    }

    /// Patches of frames that are decoded already; all are taken.
    ///
    /// # Errors
    /// [`ItemError`] for no frames, or more than the processor takes.
    pub fn of_frames(&self, frames: &FrameStack) -> Result<EncoderInput, ItemError> {
        let FrameStack { size, fps, rgb } = frames;
        let of_frame = size.width as usize * size.height as usize * 3;
        let frames = rgb.chunks_exact(of_frame.max(1));
        let facts = VideoFacts { n_frames: frames.len(), fps: *fps, size: *size, is_sampled: true };
        let sampled = Sampled::of(&facts, &self.settings, None)?;
        let mut frames = frames.map(|rgb| RgbPixels { size: *size, rgb: rgb.to_vec() });
        self.prepare(&facts, &sampled, |sink| frames.try_for_each(sink))
    }

    fn read(&self, bytes: &[u8], options: &ItemOptions, limits: &Limits) -> Result<EncoderInput, ItemError> {
        let video = Video::open(bytes, &self.settings, options.frames, limits)?;
        let facts = video.facts();
        facts.check(limits)?;
        let sampled = Sampled::of(&facts, &self.settings, options.frames)?;
        self.prepare(&facts, &sampled, |sink| video.decode(&sampled.frames, limits, sink))
    }

    /// The sampled frames, which `decode` hands over in their order, as patches.
    fn prepare(
        &self,
        facts: &VideoFacts,
        sampled: &Sampled,
        decode: impl FnOnce(&mut dyn FnMut(RgbPixels) -> Result<(), ItemError>) -> Result<(), ItemError>,
    ) -> Result<EncoderInput, ItemError> {
        let image = &self.settings.image;
        let n_frames = sampled.frames.len();
        let target = self.settings.target(facts.size, n_frames)?;
        let pixels = u64::from(target.width) * u64::from(target.height) * n_frames as u64;
        if pixels > MAX_SAMPLED_PIXELS {
            return Err(ItemError::TooLarge {
                what: "the video, as the model's processor samples and resizes it,",
                actual: format!("{n_frames} frames of {}x{} = {pixels} pixels", target.width, target.height),
                limit: format!("{MAX_SAMPLED_PIXELS} pixels; fps or num_frames make it less"),
            });
        }
        let mut values = Vec::new();
        let mut waiting: Vec<RgbPixels> = Vec::new();
        let per_patch = image.temporal_patch_size as usize;
        let mut n_decoded = 0;
        decode(&mut |frame| {
            if frame.size != facts.size {
                let text = format!(
                    "frame {n_decoded} of those sampled has {}x{} pixels, the video {}x{}",
                    frame.size.width, frame.size.height, facts.size.width, facts.size.height
                );
                return Err(ItemError::Unsupported(text));
            }
            n_decoded += 1;
            waiting.push(resample(frame, target, image.filter));
            if waiting.len() == per_patch || n_decoded == n_frames {
                add_patches(&mut values, &waiting.iter().collect::<Vec<_>>(), image);
                waiting.clear();
            }
            Ok(())
        })?;
        if n_decoded != n_frames {
            let text = format!("the video ends after {n_decoded} of the {n_frames} frames that are sampled");
            return Err(ItemError::Corrupt(text));
        }
        let [h, w] = [target.height, target.width].map(|side| side / image.patch_size);
        let t = n_frames.div_ceil(per_patch) as u32;
        Ok(EncoderInput {
            extent: Extent::Video { t, h, w, interval: sampled.interval, times: sampled.times.clone() },
            n_tokens: t * h * w / (image.merge_size * image.merge_size),
            features: Features::Patches(values),
        })
    }
}

impl Preprocess for VideoProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Video]
    }

    fn max_rows(&self) -> Option<usize> {
        let row = u64::from(self.settings.image.factor());
        usize::try_from(MAX_SAMPLED_PIXELS / (row * row)).ok()
    }

    fn preprocess(
        &self,
        modality: Modality,
        bytes: &[u8],
        options: &ItemOptions,
        limits: &Limits,
    ) -> Result<EncoderInput, ItemError> {
        super::admit(Modality::Video, modality, bytes, limits)?;
        super::check_options(options, &["fps", "num_frames"])?;
        super::contained(modality, || self.read(bytes, options, limits))
    }
}

/// The processor of a model that reads images and videos.
#[derive(Clone, Debug)]
pub struct QwenProcessor {
    images: ImageProcessor,
    videos: VideoProcessor,
}

impl QwenProcessor {
    /// Of these two.
    pub fn new(images: ImageProcessor, videos: VideoProcessor) -> Self {
        Self { images, videos }
    }
}

impl Preprocess for QwenProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Image, Modality::Video]
    }

    fn max_rows(&self) -> Option<usize> {
        Some(self.images.max_rows()?.max(self.videos.max_rows()?))
    }

    fn preprocess(
        &self,
        modality: Modality,
        bytes: &[u8],
        options: &ItemOptions,
        limits: &Limits,
    ) -> Result<EncoderInput, ItemError> {
        match modality {
            Modality::Image => self.images.preprocess(modality, bytes, options, limits),
            Modality::Video => self.videos.preprocess(modality, bytes, options, limits),
            Modality::Audio | Modality::Text => {
                Err(ItemError::Unsupported(format!("this model reads image and video items, not {modality}")))
            }
        }
    }
}
