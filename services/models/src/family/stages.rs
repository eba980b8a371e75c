//! The processor and the prompt layout of a family.

use super::{Family, moonshine};
use crate::error::ModelError;
use crate::files::{ItemProcessor, JsonFile};
use crate::preprocess::image::{
    AnyResolutionProcessor, AspectRatioProcessor, CanvasProcessor, CanvasSettings, ImageProcessor,
    ImageSettings, LongestEdgeProcessor, PanAndScanProcessor, SlidingWindowsProcessor, SplitProcessor,
    SquareTowerProcessor, TileProcessor, ViewsProcessor,
};
use crate::preprocess::{
    CaptionProcessor, Preprocess, QwenProcessor, TextProcessor, VideoKind, VideoProcessor, VideoSettings,
};
use crate::prompt::{
    ChatCross, ChatText, ChatTowers, ChatVl, FrameTimes, PlaceholderSpec, PromptBuilder, PromptLimits,
    Seq2SeqLimits, Seq2SeqPrompt, TowerRows,
};
use crate::spec::{EncoderSpec, MelWindows, ModelSpec, StemSpec, TilingSpec};
use crate::speech::audio::{AudioProcessor, AudioSettings, ChunkProcessor, ClipProcessor, WaveProcessor};
use crate::speech::{MoonshinePrompt, WhisperPrompt};
use crate::tokenization::Tokenizer;
use std::path::Path;
use std::sync::Arc;
use triptych_core::Modality;

impl Family {
    /// Reads the processor of a model directory, and checks that it makes what the encoder reads.
    ///
    /// # Errors
    /// [`ModelError`] for a file or key that is missing, not supported, or disagrees with `config.json`.
    pub fn preprocess(
        self,
        dir: &Path,
        spec: &EncoderSpec,
        tokenizer: &Arc<Tokenizer>,
    ) -> Result<Arc<dyn Preprocess>, ModelError> {
        if let Some(tiled) = tiled(dir, spec)? {
            return Ok(tiled);
        }
        if let Some(windows) = SlidingWindowsProcessor::new(spec) {
            return Ok(Arc::new(windows));
        }
        if let Some(tower) = SquareTowerProcessor::new(spec) {
            return Ok(Arc::new(tower));
        }
        Ok(match spec.stem {
            StemSpec::Captioned(ref captioned) => {
                let canvas = canvas(dir, spec)?;
                Arc::new(CaptionProcessor::from_dir(dir, canvas, tokenizer.clone(), captioned)?)
            }
            StemSpec::Mel { n_mels, n_frames, windows } => {
                let settings = AudioSettings::from_dir(dir)?;
                let file = JsonFile::processor(dir, ItemProcessor::Audio)?;
                agree(&file, "feature_size", settings.n_mels, n_mels)?;
                agree(&file, "chunk_length (in frames)", settings.n_frames(), n_frames)?;
                match windows {
                    MelWindows::Separate => Arc::new(AudioProcessor::new(settings)),
                    MelWindows::Masked | MelWindows::Joined => Arc::new(ClipProcessor::new(settings, spec)),
                }
            }
            StemSpec::MelChunks(chunks) => {
                let file = JsonFile::processor(dir, ItemProcessor::Audio)?;
                let settings = AudioSettings::from_dir(dir)?;
                agree(&file, "feature_size", settings.n_mels, chunks.n_mels)?;
                let n_window = file.u32("n_window")?.map_or(chunks.n_frames / 2, |n| n as usize);
                agree(&file, "n_window", n_window, chunks.n_frames / 2)?;
                let least = file.u32("min_length")?.unwrap_or(ChunkProcessor::MIN_SAMPLES);
                Arc::new(ChunkProcessor::new(settings, chunks, least))
            }
            StemSpec::Wave(wave) => Arc::new(WaveProcessor::from_dir(dir, wave)?),
            StemSpec::Tiles(ref tiles) => Arc::new(TileProcessor::from_dir(dir, tiles)?),
            StemSpec::Patches { .. } if matches!(self, Self::Llava | Self::Mistral3 | Self::LightOnOcr) => {
                Arc::new(LongestEdgeProcessor::from_dir(dir, spec)?)
            }
            StemSpec::Patches { patch: [_, n_frames, side, _], .. } => {
                let read = |processor, settings: &ImageSettings| -> Result<(), ModelError> {
                    let file = JsonFile::processor(dir, processor)?;
                    agree(&file, "patch_size", settings.patch_size as usize, side)?;
                    agree(&file, "temporal_patch_size", settings.temporal_patch_size as usize, n_frames)?;
                    agree(&file, "merge_size", settings.merge_size as usize, spec.merged_side())
                };
                let images = ImageSettings::from_dir(dir)?;
                read(ItemProcessor::Image, &images)?;
                let images = ImageProcessor::new(images);
                let kind = match self {
                    Self::Qwen2Vl | Self::Qwen25Vl => VideoKind::PerFrame,
                    Self::Qwen3Vl | Self::Qwen3VlMoe | Self::Qwen35 | Self::Qwen35Moe => {
                        VideoKind::OverFrames
                    }
                    _ => return Ok(Arc::new(images)),
                };
                let videos = VideoSettings::from_dir(dir, kind)?;
                read(ItemProcessor::Video, &videos.image)?;
                Arc::new(QwenProcessor::new(images, VideoProcessor::new(videos)))
            }
            StemSpec::PrefixedPatches { .. }
            | StemSpec::Swin(_)
            | StemSpec::Sam(_)
            | StemSpec::SquareViews(_) => Arc::new(canvas(dir, spec)?),
            StemSpec::Tokens { vocab, max_tokens, .. } => {
                Arc::new(TextProcessor::new(tokenizer.clone(), vocab, max_tokens))
            }
        })
    }

    /// The spec for the images that the processor of a model directory makes: where all have one size, and it is not that of the
    /// position table, the table is resampled.
    ///
    /// # Errors
    /// [`ModelError`] for a file or key that is missing or not supported.
    pub fn resized(self, dir: &Path, spec: ModelSpec) -> Result<ModelSpec, ModelError> {
        let (Self::VisionEncoderDecoder, Some(encoder)) = (self, &spec.encoder) else { return Ok(spec) };
        let Some(own) = encoder.stem.fixed_grid() else { return Ok(spec) };
        let Some(size) = CanvasSettings::from_dir(dir)?.fixed_size() else { return Ok(spec) };
        let grid = [size.height, size.width].map(|side| encoder.stem.patches_along(side as usize));
        match encoder.clone().resized(grid) {
            Some(resized) if grid != own => Ok(ModelSpec { encoder: Some(resized), ..spec }),
            // Another size is refused with the processor.
            _ => Ok(spec),
        }
    }

    /// Reads the prompt layout of a model directory.
    ///
    /// # Errors
    /// [`ModelError`] for a file or key that is missing or not supported.
    pub fn prompts(
        self,
        dir: &Path,
        spec: &ModelSpec,
        tokenizer: &Arc<Tokenizer>,
    ) -> Result<Arc<dyn PromptBuilder>, ModelError> {
        let tokenizer = tokenizer.clone();
        let limits = PromptLimits { vocab: spec.decoder.vocab, max_context: spec.decoder.max_context };
        Ok(match self {
            Self::Whisper => Arc::new(WhisperPrompt::from_dir(dir, tokenizer)?),
            Self::Moonshine => Arc::new(MoonshinePrompt::from_dir(dir, tokenizer, moonshine::WAVE)?),
            Self::Mllama => Arc::new(ChatCross::from_dir(dir, tokenizer)?),
            Self::CogAgent => Arc::new(ChatTowers::from_dir(dir, tokenizer, tower_rows(spec), limits)?),
            Self::Llama
            | Self::Mistral
            | Self::Mixtral
            | Self::Qwen2
            | Self::Qwen2Moe
            | Self::Qwen3
            | Self::Qwen35Text
            | Self::Qwen3Moe
            | Self::Gemma2
            | Self::Gemma3Text => Arc::new(ChatText::from_dir(dir, tokenizer, limits)?),
            Self::Qwen2Vl
            | Self::Qwen25Vl
            | Self::Qwen3Vl
            | Self::Qwen3VlMoe
            | Self::Qwen35
            | Self::Qwen35Moe => {
                let times = match self {
                    Self::Qwen2Vl => FrameTimes::Counted,
                    Self::Qwen25Vl => FrameTimes::PerSecond,
                    _ => FrameTimes::Written,
                };
                Arc::new(ChatVl::from_dir(dir, tokenizer, &PlaceholderSpec::qwen(times), limits)?)
            }
            Self::Step3 | Self::Idefics3 | Self::SmolVlm | Self::Gemma3 => {
                Arc::new(ChatVl::from_dir(dir, tokenizer, &self.tiled_placeholder(spec), limits)?)
            }
            Self::GlmOcr => Arc::new(ChatVl::from_dir(dir, tokenizer, &PlaceholderSpec::GLM, limits)?),
            Self::DeepseekOcr2 | Self::Mistral3 | Self::Llava | Self::LlavaNext | Self::LlavaOneVision => {
                Arc::new(ChatVl::from_dir(dir, tokenizer, &llava_placeholder(spec.encoder.as_ref()), limits)?)
            }
            Self::LightOnOcr => {
                Arc::new(ChatVl::from_dir(dir, tokenizer, &PlaceholderSpec::LIGHTON_OCR, limits)?)
            }
            Self::Qwen2Audio => {
                Arc::new(ChatVl::from_dir(dir, tokenizer, &PlaceholderSpec::QWEN_AUDIO, limits)?)
            }
            Self::Qwen3Asr => Arc::new(ChatVl::from_dir(dir, tokenizer, &PlaceholderSpec::QWEN_ASR, limits)?),
            Self::Voxtral => Arc::new(ChatVl::from_dir(dir, tokenizer, &PlaceholderSpec::VOXTRAL, limits)?),
            Self::InternVlChat => {
                let chat = ChatVl::from_dir(dir, tokenizer, &PlaceholderSpec::INTERNVL, limits)?;
                Arc::new(chat.with_string_contents())
            }
            Self::InternVl => Arc::new(ChatVl::from_dir(dir, tokenizer, &PlaceholderSpec::INTERNVL, limits)?),
            Self::VisionEncoderDecoder
            | Self::EncoderDecoder
            | Self::Florence2
            | Self::Bart
            | Self::MBart
            | Self::M2M100
            | Self::Pegasus
            | Self::Marian
            | Self::Blenderbot
            | Self::BlenderbotSmall
            | Self::T5
            | Self::Mt5
            | Self::Umt5 => Arc::new(Seq2SeqPrompt::from_dir(dir, tokenizer, seq2seq_limits(spec))?),
        })
    }

    /// The place of the rows of an image's tiles.
    fn tiled_placeholder(self, spec: &ModelSpec) -> PlaceholderSpec {
        let encoder = spec.encoder.as_ref();
        match self {
            Self::Step3 => {
                let (grid, n_rows) = view_rows(encoder);
                PlaceholderSpec::step3(grid, n_rows)
            }
            Self::Gemma3 => {
                let (grid, n_rows) = tile_rows(encoder);
                PlaceholderSpec::gemma(grid, n_rows)
            }
            _ => {
                let (grid, n_rows) = tile_rows(encoder);
                PlaceholderSpec::idefics(grid, n_rows)
            }
        }
    }
}

fn seq2seq_limits(spec: &ModelSpec) -> Seq2SeqLimits {
    Seq2SeqLimits {
        modality: spec.encoder.as_ref().map_or(Modality::Text, |encoder| encoder.modality),
        vocab: spec.decoder.vocab,
        max_context: spec.decoder.max_context,
    }
}

/// The processor of an encoder that reads tiles of an image; `None` for another.
fn tiled(dir: &Path, spec: &EncoderSpec) -> Result<Option<Arc<dyn Preprocess>>, ModelError> {
    Ok(Some(match spec.extras.tiling {
        Some(TilingSpec::AnyResolution { .. }) => Arc::new(AnyResolutionProcessor::from_dir(dir, spec)?),
        Some(TilingSpec::AspectRatio | TilingSpec::AspectRatioWithin { .. }) => {
            Arc::new(AspectRatioProcessor::from_dir(dir, spec)?)
        }
        Some(TilingSpec::PanAndScan) => Arc::new(PanAndScanProcessor::from_dir(dir, spec)?),
        Some(TilingSpec::Split) => Arc::new(SplitProcessor::from_dir(dir, spec)?),
        Some(TilingSpec::Views) => Arc::new(ViewsProcessor::from_dir(dir, spec)?),
        Some(TilingSpec::SlidingWindows) | None => return Ok(None),
    }))
}

/// The processor of an encoder that reads a canvas. Canvases of a fixed size are checked here, so that a processor and an
/// encoder that disagree are found before the first image.
fn canvas(dir: &Path, spec: &EncoderSpec) -> Result<CanvasProcessor, ModelError> {
    let stem = &spec.stem;
    let settings = CanvasSettings::from_dir(dir)?;
    let file = JsonFile::processor(dir, ItemProcessor::Image)?;
    let wrong = |actual: String, expected: &str| file.refused("size", actual, expected);
    match (settings.fixed_size(), stem) {
        (Some(size), _) => {
            let grid = [size.height as usize, size.width as usize].map(|side| stem.patches_along(side));
            if stem.image_rows(grid).is_none() {
                let actual = format!("{} by {}", size.height, size.width);
                return Err(wrong(
                    actual,
                    "a size that config.json allows, such as its image_size; positions are resampled only from a square",
                ));
            }
        }
        (None, StemSpec::PrefixedPatches { grid, patch: [.., side], .. }) => {
            let expected = format!("{} by {}, as in config.json", grid[0] * side, grid[1] * side);
            return Err(wrong("as the image has it".into(), &expected));
        }
        (None, _) => {}
    }
    Ok(CanvasProcessor::new(settings, spec.clone()))
}

/// The place of an image's rows: line by line where the tower reads images of any size, as Pixtral's.
fn llava_placeholder(encoder: Option<&EncoderSpec>) -> PlaceholderSpec {
    match encoder {
        Some(spec) if matches!(spec.stem, StemSpec::Patches { .. }) => {
            PlaceholderSpec::pixtral(spec.merged_side() as u32)
        }
        _ => PlaceholderSpec::LLAVA,
    }
}

/// Patches of a tile, down and across, and its output rows.
fn tile_rows(spec: Option<&EncoderSpec>) -> ([u32; 2], u32) {
    let grid = match spec.map(|encoder| &encoder.stem) {
        Some(StemSpec::PrefixedPatches { grid, .. }) => *grid,
        _ => [0; 2],
    };
    let n_rows = spec.and_then(|encoder| encoder.image_tokens(grid)).unwrap_or_default();
    (grid.map(|n| n as u32), n_rows as u32)
}

/// Patches of a part, down and across, and output rows of a part and of a whole image.
fn view_rows(spec: Option<&EncoderSpec>) -> ([u32; 2], [u32; 2]) {
    let sides = match spec.map(|encoder| &encoder.stem) {
        Some(StemSpec::SquareViews(stem)) => stem.sides,
        _ => [0; 2],
    };
    let n_rows = |side| spec.and_then(|encoder| encoder.image_tokens([side; 2])).unwrap_or_default() as u32;
    ([sides[0] as u32; 2], sides.map(n_rows))
}

/// Rows of an image that two towers read.
fn tower_rows(spec: &ModelSpec) -> TowerRows {
    let n_patches = |encoder: &EncoderSpec| {
        encoder.stem.fixed_grid().and_then(|grid| encoder.image_tokens(grid)).unwrap_or_default() as u32
    };
    let mut towers = spec.encoder.iter().flat_map(EncoderSpec::towers);
    let n_tokens = |encoder: &EncoderSpec| n_patches(encoder) + encoder.extras.learned_rows.len() as u32;
    TowerRows { n_tokens: towers.next().map_or(0, n_tokens), n_cross: towers.next().map_or(0, n_patches) }
}

/// Refuses a processor setting that is not what the encoder was built for.
fn agree(file: &JsonFile, key: &str, actual: usize, expected: usize) -> Result<(), ModelError> {
    match actual == expected {
        true => Ok(()),
        false => Err(file.refused(key, actual.to_string(), &format!("{expected}, as in config.json"))),
    }
}
