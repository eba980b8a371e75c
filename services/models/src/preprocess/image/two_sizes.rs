//! An image for two towers, each at a size of its own: CogAgent.
//!
//! After `build_conversation_input_ids` of <https://huggingface.co/zai-org/cogagent-chat-hf>: torchvision's resize of a Pillow
//! image by the bicubic filter, whatever its shape, and CLIP's colours. No file of a model directory says so.

use super::canvas::{CanvasSettings, patches};
use super::decode;
use super::pixels::RgbPixels;
use crate::error::ItemError;
use crate::preprocess::{EncoderInput, Features, Preprocess, TileRows, admit, check_options, contained};
use crate::spec::EncoderSpec;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};

/// The processor of an encoder with two towers.
#[derive(Clone, Debug)]
pub struct TwoSizesProcessor {
    first: Tower,
    second: Tower,
    // Rows that a row of the first tower becomes.
    row_parts: usize,
}

/// A tower that reads squares of one size.
#[derive(Clone, Debug)]
struct Tower {
    settings: CanvasSettings,
    grid: [usize; 2],
    patch: usize,
}

impl TwoSizesProcessor {
    /// For an encoder with a second tower, both of which read one grid; `None` for any other.
    pub fn new(spec: &EncoderSpec) -> Option<Self> {
        let second = spec.extras.second.as_deref()?;
        let projector = spec.projector.as_ref()?;
        let row_parts = projector.out(spec.stack.hidden).checked_div(second.output_width())?;
        Some(Self { first: Tower::new(spec)?, second: Tower::new(second)?, row_parts })
    }

    /// Output rows of an image, as many of the second tower's width.
    fn n_rows(&self) -> usize {
        self.first_rows() * self.row_parts + self.second.n_patches()
    }

    /// Rows of the first tower: its patches, and a learned row on either side.
    fn first_rows(&self) -> usize {
        self.first.n_patches() + 2
    }
}

impl Tower {
    fn new(spec: &EncoderSpec) -> Option<Self> {
        let (grid, patch) = (spec.stem.fixed_grid()?, spec.stem.patch_side()?);
        let side = u32::try_from(grid[0] * patch).ok()?;
        Some(Self { settings: CanvasSettings::clip_square(side), grid, patch })
    }

    fn n_patches(&self) -> usize {
        self.grid[0] * self.grid[1]
    }

    fn extent(&self) -> Extent {
        Extent::Grid { t: 1, h: self.grid[0] as u32, w: self.grid[1] as u32 }
    }

    fn patches(&self, mut image: RgbPixels, limits: &Limits) -> Result<Vec<f32>, ItemError> {
        for step in &self.settings.steps {
            image = step.apply(image, self.settings.filter, limits)?;
        }
        Ok(patches(&image, &self.settings, self.grid, self.patch))
    }
}

impl Preprocess for TwoSizesProcessor {
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
        let image = contained(modality, || decode::decode(bytes, limits))?;
        // The learned rows are counted behind the patches.
        let n = self.first.n_patches() as u32;
        let places = std::iter::once(n).chain(0..n).chain([n + 1]).collect();
        let first = EncoderInput {
            extent: self.first.extent(),
            n_tokens: self.first_rows() as u32,
            features: Features::Tiles {
                patches: self.first.patches(image.clone(), limits)?,
                rows: TileRows { places, weights: Vec::new() },
            },
        };
        let second = EncoderInput {
            extent: self.second.extent(),
            n_tokens: self.second.n_patches() as u32,
            features: Features::Patches(self.second.patches(image, limits)?),
        };
        Ok(EncoderInput {
            extent: self.first.extent(),
            n_tokens: self.n_rows() as u32,
            features: Features::Towers(Box::new([first, second])),
        })
    }
}
