//! An image for one of several towers, each of which reads it as a square of its own size: CogAgent.
//!
//! After `build_conversation_input_ids` of <https://huggingface.co/zai-org/cogagent-chat-hf>: torchvision's resize of a Pillow
//! image by the bicubic filter, whatever its shape, and CLIP's colours. No file of a model directory says so.

use super::canvas::{CanvasSettings, patches};
use crate::error::ItemError;
use crate::preprocess::{EncoderInput, Features, Preprocess, TileRows, admit, check_options};
use crate::spec::EncoderSpec;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};

/// The processor of a tower.
#[derive(Clone, Debug)]
pub struct SquareTowerProcessor {
    settings: CanvasSettings,
    grid: [usize; 2],
    patch: usize,
    /// A learned row stands on either side of the patches.
    is_framed: bool,
}

impl SquareTowerProcessor {
    /// For a tower among several that reads squares of one size; `None` for any other encoder.
    pub fn new(spec: &EncoderSpec) -> Option<Self> {
        spec.extras.tower.as_ref()?;
        let (grid, patch) = (spec.stem.fixed_grid()?, spec.stem.patch_side()?);
        let side = u32::try_from(grid[0] * patch).ok()?;
        let is_framed = spec.extras.learned_rows.len() == 2;
        Some(Self { settings: CanvasSettings::clip_square(side), grid, patch, is_framed })
    }

    fn n_patches(&self) -> usize {
        self.grid[0] * self.grid[1]
    }

    fn n_rows(&self) -> usize {
        self.n_patches() + if self.is_framed { 2 } else { 0 }
    }
}

impl Preprocess for SquareTowerProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Image]
    }

    fn max_rows(&self) -> Option<usize> {
        Some(self.n_rows())
    }

    fn preprocess(
        &self,
        modality: Modality,
        bytes: &[u8],
        options: &ItemOptions,
        limits: &Limits,
    ) -> Result<EncoderInput, ItemError> {
        admit(Modality::Image, modality, bytes, limits)?;
        check_options(options, &[])?;
        let image = self.settings.canvas(modality, bytes, limits)?;
        let patches = patches(&image, &self.settings, self.grid, self.patch);
        // Learned rows are counted behind the patches.
        let n = self.n_patches() as u32;
        let places = std::iter::once(n).chain(0..n).chain([n + 1]);
        Ok(EncoderInput {
            extent: Extent::Grid { t: 1, h: self.grid[0] as u32, w: self.grid[1] as u32 },
            n_tokens: self.n_rows() as u32,
            features: match self.is_framed {
                true => {
                    let rows = TileRows { places: places.collect(), weights: Vec::new() };
                    Features::Tiles { patches, rows }
                }
                false => Features::Patches(patches),
            },
        })
    }
}
