//! The processor of a model that has no encoder: it reads no items, and refuses each by its kind.

use super::{EncoderInput, Preprocess};
use crate::error::ItemError;
use triptych_core::limits::Limits;
use triptych_core::{ItemOptions, Modality};

/// Refuses every item.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoItems;

impl Preprocess for NoItems {
    fn modalities(&self) -> &[Modality] {
        &[]
    }

    fn max_rows(&self) -> Option<usize> {
        None
    }

    fn preprocess(
        &self,
        modality: Modality,
        _: &[u8],
        _: &ItemOptions,
        _: &Limits,
    ) -> Result<EncoderInput, ItemError> {
        Err(ItemError::Unsupported(format!("this model reads the text of its prompt, no {modality} items")))
    }
}
