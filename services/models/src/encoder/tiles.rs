//! Images that are cut into tiles: rows, and sequences of attention.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/mllama/modeling_mllama.py>
//! (`MllamaVisionModel`). Every image is computed with the full number of tiles, and each tile is filled up with rows:
//! real rows attend to all of them, filling rows to real rows only. So the filling is not padding that could be left out,
//! and it does not depend on the other items of the batch.

mod rows;
mod sequences;

pub(super) use rows::{TileRows, TiledImage};
pub(super) use sequences::{StagedTileSequences, TileSequences};

use super::units::EncodeUnit;
use crate::spec::TilesSpec;

/// The images of units.
pub(super) fn images(tiles: &TilesSpec, units: &[EncodeUnit<'_>]) -> Vec<TiledImage> {
    units.iter().map(|unit| TiledImage::of(tiles, unit)).collect()
}
