//! Item bytes to encoder input, as the model's own processor does it. Runs on the encoder's CPU pool.

use crate::error::ItemError;
use triptych_core::limits::Limits;
use triptych_core::{Extent, Modality};

/// What an encoder reads.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderInput {
    /// The item's reach.
    pub extent: Extent,
    /// Rows the encoder will make of it.
    pub n_tokens: u32,
    /// The values.
    pub features: Features,
}

/// Values in the layout of the encoder's stem.
#[derive(Clone, Debug, PartialEq)]
pub enum Features {
    /// Image patches `[n_patches, patch_dim]`, in the processor's order (merge groups together).
    Patches(Vec<f32>),
    /// Log-mel `[n_windows, n_mels, n_frames]`.
    Mel(Vec<f32>),
    /// Token ids of encoder text.
    Tokens(Vec<u32>),
}

/// A model's processor.
pub trait Preprocess: Send + Sync {
    /// The kinds of items it reads.
    fn modalities(&self) -> &[Modality];

    /// Decodes and prepares one item. Limits hold before memory is allocated for what a header declares.
    ///
    /// # Errors
    /// [`ItemError`], with a text for the client.
    fn preprocess(&self, modality: Modality, bytes: &[u8], limits: &Limits) -> Result<EncoderInput, ItemError>;
}
