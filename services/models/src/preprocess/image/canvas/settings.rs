//! Steps and normalisation from `preprocessor_config.json` or `processor_config.json`, old layouts and new.

use super::steps::CanvasStep;
use crate::error::ModelError;
use crate::files::{ItemProcessor, JsonFile};
use crate::preprocess::image::pixels::ImageSize;
use crate::preprocess::image::settings::{ResizeFilter, channels};
use std::path::Path;
use triptych_kernels::cpu::pixels::PixelNorm;

/// Longest side of a canvas.
const MAX_SIDE: u32 = 8192;

const IMAGENET: [[f32; 3]; 2] = [[0.5; 3]; 2];
const OPENAI_CLIP: [[f32; 3]; 2] = [[0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.2613026, 0.2757771]];

/// ImageNet's own, which files call the default.
const IMAGENET_DEFAULT: [[f32; 3]; 2] = [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]];

/// Settings of a processor that makes canvases.
#[derive(Clone, Debug, PartialEq)]
pub struct CanvasSettings {
    /// From image to canvas, in order.
    pub steps: Vec<CanvasStep>,
    /// The filter of every resize.
    pub filter: ResizeFilter,
    /// Means of red, green, blue.
    pub mean: [f32; 3],
    /// Standard deviations of red, green, blue.
    pub std: [f32; 3],
    /// Factor on pixel values before they are normalised.
    pub rescale: f32,
}

/// The processors that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProcessorKind {
    Vit,
    Deit,
    Beit,
    Donut,
    Nougat,
    Clip,
    Siglip,
    LlavaNext,
    LlavaOneVision,
    Idefics,
    GotOcr2,
    DeepseekOcr2,
}

impl ProcessorKind {
    /// True for CLIP's processor, and those that are made of it.
    fn is_clip(self) -> bool {
        matches!(self, Self::Clip | Self::LlavaNext)
    }
}

/// A size as files write it.
enum SizeSetting {
    Exact(ImageSize),
    ShortestEdge(u32),
}

impl CanvasSettings {
    /// Normalisation of pixel values.
    pub(super) fn norm(&self) -> PixelNorm {
        PixelNorm { rescale: self.rescale, mean: self.mean, std: self.std }
    }

    /// Reads the processor of a model directory.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`], or [`ModelError::Config`] for a value that is not supported.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let file = JsonFile::processor(dir, ItemProcessor::Image)?;
        let kind = kind(&file)?;
        let has_clips_colours =
            kind.is_clip() || matches!(kind, ProcessorKind::LlavaOneVision | ProcessorKind::GotOcr2);
        let [mean, std] = match kind {
            _ if has_clips_colours => OPENAI_CLIP,
            ProcessorKind::Nougat => IMAGENET_DEFAULT,
            _ => IMAGENET,
        };
        let (mean, std) = match file.bool("do_normalize")?.unwrap_or(true) {
            true => (channels(&file, "image_mean", mean)?, channels(&file, "image_std", std)?),
            false => ([0.0; 3], [1.0; 3]),
        };
        if std.iter().any(|s| *s <= 0.0) {
            return Err(file.wrong("image_std", "numbers above 0"));
        }
        let rescale = match file.bool("do_rescale")?.unwrap_or(true) {
            true => file.f64("rescale_factor")?.unwrap_or(1.0 / 255.0) as f32,
            false => 1.0,
        };
        let default = match kind {
            ProcessorKind::Vit | ProcessorKind::Donut | ProcessorKind::Nougat => ResizeFilter::Bilinear,
            ProcessorKind::Deit
            | ProcessorKind::Beit
            | ProcessorKind::Clip
            | ProcessorKind::Siglip
            | ProcessorKind::LlavaNext
            | ProcessorKind::LlavaOneVision
            | ProcessorKind::GotOcr2
            | ProcessorKind::DeepseekOcr2 => ResizeFilter::Bicubic,
            ProcessorKind::Idefics => ResizeFilter::Lanczos,
        };
        let steps = match kind {
            ProcessorKind::Donut | ProcessorKind::Nougat => page_steps(&file, kind)?,
            ProcessorKind::Idefics => idefics_steps(&file)?,
            _ => steps(&file, kind)?,
        };
        Ok(Self { steps, filter: ResizeFilter::of(&file, default)?, mean, std, rescale })
    }

    /// A square of `side` pixels by the bicubic filter, colours as ImageNet has them: what code has where no file says it.
    pub(crate) fn imagenet_square(side: u32) -> Self {
        Self::square(side, IMAGENET_DEFAULT)
    }

    /// The same with CLIP's colours.
    pub(crate) fn clip_square(side: u32) -> Self {
        Self::square(side, OPENAI_CLIP)
    }

    fn square(side: u32, [mean, std]: [[f32; 3]; 2]) -> Self {
        let steps = vec![CanvasStep::Exact(ImageSize { width: side, height: side })];
        Self { steps, filter: ResizeFilter::Bicubic, mean, std, rescale: 1.0 / 255.0 }
    }

    /// The size that no canvas exceeds; `None`: an image may stay long on one side.
    pub fn max_size(&self) -> Option<ImageSize> {
        self.steps.last()?.max_size()
    }

    /// The size of every canvas, if it is always the same.
    pub fn fixed_size(&self) -> Option<ImageSize> {
        self.steps.last()?.fixed_size()
    }
}

fn kind(file: &JsonFile) -> Result<ProcessorKind, ModelError> {
    const KEYS: [&str; 2] = ["image_processor_type", "feature_extractor_type"];
    let key = KEYS.into_iter().find(|key| file.get(key).is_some()).unwrap_or(KEYS[0]);
    let name = file.get(key).and_then(|v| v.as_str()).unwrap_or_default();
    let stem = ["Fast", "Pil"].into_iter().fold(name, |name, end| name.strip_suffix(end).unwrap_or(name));
    let stem = ["ImageProcessor", "FeatureExtractor"]
        .into_iter()
        .fold(stem, |name, end| name.strip_suffix(end).unwrap_or(name));
    match stem {
        "ViT" | "Gemma3" => Ok(ProcessorKind::Vit),
        "DeiT" => Ok(ProcessorKind::Deit),
        "Beit" => Ok(ProcessorKind::Beit),
        "Donut" => Ok(ProcessorKind::Donut),
        "Nougat" => Ok(ProcessorKind::Nougat),
        // BiT's, which DINOv2 has, is CLIP's by another name.
        "CLIP" | "Bit" => Ok(ProcessorKind::Clip),
        "Siglip" => Ok(ProcessorKind::Siglip),
        "LlavaNext" => Ok(ProcessorKind::LlavaNext),
        "LlavaOnevision" => Ok(ProcessorKind::LlavaOneVision),
        "Idefics3" | "SmolVLM" => Ok(ProcessorKind::Idefics),
        "GotOcr2" => Ok(ProcessorKind::GotOcr2),
        "DeepseekOcr2" => Ok(ProcessorKind::DeepseekOcr2),
        _ => Err(file.wrong(
            key,
            "ViTImageProcessor, or that of DeiT, Beit, Donut, Nougat, CLIP, Bit, Siglip, LlavaNext, LlavaOnevision, Idefics3, SmolVLM, GotOcr2, DeepseekOcr2 or Gemma3",
        )),
    }
}

/// Resize, then crop.
fn steps(file: &JsonFile, kind: ProcessorKind) -> Result<Vec<CanvasStep>, ModelError> {
    if file.bool("do_resize")? == Some(false) {
        return Err(file.wrong("do_resize", "true"));
    }
    for key in ["do_pad", "do_reduce_labels"] {
        // LLaVA's processors pad a batch with tiles that nobody reads.
        let pads_batch = matches!(kind, ProcessorKind::LlavaNext | ProcessorKind::LlavaOneVision);
        let is_read = key != "do_pad" || !pads_batch;
        if is_read && file.bool(key)? == Some(true) {
            return Err(file.wrong(key, "false"));
        }
    }
    let size = match kind {
        ProcessorKind::Deit => SizeSetting::Exact(ImageSize { width: 256, height: 256 }),
        ProcessorKind::Clip | ProcessorKind::LlavaNext => SizeSetting::ShortestEdge(224),
        ProcessorKind::LlavaOneVision | ProcessorKind::GotOcr2 => {
            SizeSetting::Exact(ImageSize { width: 384, height: 384 })
        }
        ProcessorKind::DeepseekOcr2 => SizeSetting::Exact(ImageSize { width: 1024, height: 1024 }),
        _ => SizeSetting::Exact(ImageSize { width: 224, height: 224 }),
    };
    let mut steps = vec![match size_setting(file, "size", kind)?.unwrap_or(size) {
        SizeSetting::Exact(size) => CanvasStep::Exact(size),
        SizeSetting::ShortestEdge(edge) => CanvasStep::ShortestEdge(edge),
    }];
    let crops = kind == ProcessorKind::Deit || kind.is_clip();
    if file.bool("do_center_crop")?.unwrap_or(crops) {
        let size = size_setting(file, "crop_size", ProcessorKind::Vit)?;
        match size.unwrap_or(SizeSetting::Exact(ImageSize { width: 224, height: 224 })) {
            SizeSetting::Exact(size) => steps.push(CanvasStep::CenterCrop(size)),
            SizeSetting::ShortestEdge(_) => return Err(file.wrong("crop_size", "height and width")),
        }
    }
    Ok(steps)
}

/// One tile, which is the last step of a whole image.
fn idefics_steps(file: &JsonFile) -> Result<Vec<CanvasStep>, ModelError> {
    const KEY: &str = "max_image_size.longest_edge";
    match file.u32(KEY)?.unwrap_or(364) {
        side @ 1..=MAX_SIDE => Ok(vec![CanvasStep::Exact(ImageSize { width: side, height: side })]),
        _ => Err(file.wrong(KEY, "1 to 8192")),
    }
}

/// Crop margins, align, resize, thumbnail, pad: each by its own switch.
fn page_steps(file: &JsonFile, kind: ProcessorKind) -> Result<Vec<CanvasStep>, ModelError> {
    let is_nougat = kind == ProcessorKind::Nougat;
    let page = match is_nougat {
        true => ImageSize { width: 672, height: 896 },
        false => ImageSize { width: 1920, height: 2560 },
    };
    let size = size_setting(file, "size", kind)?;
    let SizeSetting::Exact(size) = size.unwrap_or(SizeSetting::Exact(page)) else {
        return Err(file.wrong("size", "height and width"));
    };
    if file.bool("do_center_crop")? == Some(true) {
        return Err(file.wrong("do_center_crop", "false"));
    }
    if !is_nougat && file.bool("do_crop_margin")? == Some(true) {
        return Err(file.wrong("do_crop_margin", "false"));
    }
    // Nougat's has a filter of its own, whatever `resample` says.
    let filter = is_nougat.then_some(ResizeFilter::Bicubic);
    let switches = [
        ("do_crop_margin", is_nougat, CanvasStep::CropMargin),
        ("do_align_long_axis", false, CanvasStep::AlignLongAxis(size)),
        ("do_resize", true, CanvasStep::ShortestEdge(size.width.min(size.height))),
        ("do_thumbnail", true, CanvasStep::Thumbnail { bounds: size, filter }),
        ("do_pad", true, CanvasStep::Pad(size)),
    ];
    let mut steps = Vec::new();
    for (key, default, step) in switches {
        if file.bool(key)?.unwrap_or(default) {
            steps.push(step);
        }
    }
    Ok(steps)
}

/// A size: a number, a pair, or an object with named sides.
fn size_setting(file: &JsonFile, key: &str, kind: ProcessorKind) -> Result<Option<SizeSetting>, ModelError> {
    let Some(value) = file.get(key) else { return Ok(None) };
    let expected = "1 to 8192: a number, a pair, height and width, or shortest_edge";
    let wrong = || file.wrong(key, expected);
    let side = |value: &serde_json::Value| -> Result<u32, ModelError> {
        let number = value.as_u64().and_then(|n| u32::try_from(n).ok());
        number.filter(|n| (1..=MAX_SIDE).contains(n)).ok_or_else(wrong)
    };
    if value.is_number() {
        let n = side(value)?;
        return Ok(Some(match kind {
            kind if kind.is_clip() => SizeSetting::ShortestEdge(n),
            _ => SizeSetting::Exact(ImageSize { width: n, height: n }),
        }));
    }
    if let Some([first, second]) = value.as_array().map(Vec::as_slice) {
        // Donut's was size_setting across, down.
        let (height, width) = if kind == ProcessorKind::Donut { (second, first) } else { (first, second) };
        return Ok(Some(SizeSetting::Exact(ImageSize { width: side(width)?, height: side(height)? })));
    }
    match (value.get("height"), value.get("width"), value.get("shortest_edge"), value.get("longest_edge")) {
        (Some(height), Some(width), None, None) => {
            Ok(Some(SizeSetting::Exact(ImageSize { width: side(width)?, height: side(height)? })))
        }
        (None, None, Some(edge), None) => Ok(Some(SizeSetting::ShortestEdge(side(edge)?))),
        _ => Err(wrong()),
    }
}
