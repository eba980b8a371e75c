//! Item bytes to encoder input, as the model's own processor does it. Runs on the encoder's CPU pool.
//!
//! [`ImageProcessor`] is made with `from_dir(model directory)`, or from its settings, as all processors are; those of
//! speech models are in [`crate::speech::audio`].
//! Bytes come from clients: what a header declares is checked against [`Limits`] before memory is allocated
//! for it, and a decoder that panics is a corrupt item. It knows no encoder and no cache.

pub mod absent;
pub mod captioned;
pub mod embeddings;
pub mod image;
pub mod text;
pub mod video;

pub use absent::NoItems;
pub use captioned::CaptionProcessor;
pub use image::{CanvasProcessor, CanvasSettings, ImageProcessor, ImageSettings};
pub use text::TextProcessor;
pub use video::{FrameStack, QwenProcessor, VideoKind, VideoProcessor, VideoSettings};

use crate::error::ItemError;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};

/// Input of an encoder: one item, preprocessed.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderInput {
    /// Extent of the item: its grid, its windows, or tokens.
    pub extent: Extent,
    /// Rows the encoder will make of it.
    pub n_tokens: u32,
    /// Values in the layout of the stem.
    pub features: Features,
}

/// Values in the layout of the encoder's stem.
#[derive(Clone, Debug, PartialEq)]
pub enum Features {
    /// Image patches `[n_patches, patch_dim]`, in the processor's order (merge groups are contiguous).
    Patches(Vec<f32>),
    /// Tiles of an image, each as large as the encoder reads, and the output rows that are taken of them.
    Tiles {
        /// `[n_tiles, n_patches, patch_dim]`, patches row by row.
        patches: Vec<f32>,
        /// The output rows.
        rows: TileRows,
    },
    /// Square views of an image, of one size or another, and the output rows that are taken of them.
    Views {
        /// `[Σ side², patch_dim]`, view by view, patches row by row.
        patches: Vec<f32>,
        /// Patches on a side of each view.
        sides: Vec<u32>,
        /// The output rows.
        rows: TileRows,
    },
    /// Patches of an image, as in [`Self::Patches`], and the ids of the text that is encoded with it.
    Captioned {
        /// `[n_patches, patch_dim]`.
        patches: Vec<f32>,
        /// Special tokens included.
        tokens: Vec<u32>,
    },
    /// Log-mel `[n_windows, n_mels, n_frames]`.
    Mel(Vec<f32>),
    /// Log-mel of one window, or of chunks, filled up with silence that is not attended to.
    MaskedMel {
        /// `[n_mels, n_frames]`, of each chunk if there are several.
        mel: Vec<f32>,
        /// Frames before the silence.
        n_valid: u32,
    },
    /// Audio samples at the model's rate, its windows one after the other.
    Samples(Vec<f32>),
    /// Token ids of encoder text.
    Tokens(Vec<u32>),
}

impl Features {
    /// Bytes in memory.
    pub fn n_bytes(&self) -> usize {
        let of_rows = |rows: &TileRows| size_of_val(&*rows.places) + size_of_val(&*rows.weights);
        match self {
            Self::Patches(values)
            | Self::Mel(values)
            | Self::Samples(values)
            | Self::MaskedMel { mel: values, .. } => size_of_val(&**values),
            Self::Tiles { patches, rows } => size_of_val(&**patches) + of_rows(rows),
            Self::Views { patches, sides, rows } => {
                size_of_val(&**patches) + size_of_val(&**sides) + of_rows(rows)
            }
            Self::Captioned { patches, tokens } => size_of_val(&**patches) + size_of_val(&**tokens),
            Self::Tokens(tokens) => size_of_val(&**tokens),
        }
    }
}

/// Output rows taken of tiles. A place counts the rows of all tiles, one tile's after another's, and after them the learned
/// rows.
#[derive(Clone, Debug, PartialEq)]
pub struct TileRows {
    /// Places, [`Self::n_terms`] for each output row.
    pub places: Vec<u32>,
    /// Weights of the rows at these places, as many; empty: 1 each.
    pub weights: Vec<f32>,
}

impl TileRows {
    /// Rows that an output row is a weighted sum of, at most.
    pub const N_TERMS: usize = 4;

    /// All rows of all tiles, in their order.
    pub fn whole(n_tokens: u32) -> Self {
        Self { places: (0..n_tokens).collect(), weights: Vec::new() }
    }

    /// Places of an output row.
    pub fn n_terms(&self) -> usize {
        if self.weights.is_empty() { 1 } else { Self::N_TERMS }
    }

    /// Output rows.
    pub fn n_rows(&self) -> usize {
        self.places.len() / self.n_terms()
    }
}

/// A model's processor.
pub trait Preprocess: Send + Sync {
    /// The kinds of items it reads.
    fn modalities(&self) -> &[Modality];

    /// True if the encoder reads a text with the item ([`ItemOptions::prompt`]).
    fn takes_prompt(&self) -> bool {
        false
    }

    /// Most encoder rows that one sequence reads of an item: all of it, or of audio one window. `None`: as many as the
    /// limits on items leave.
    fn max_rows(&self) -> Option<usize>;

    /// Decodes and prepares one item, as the options ask. Limits hold before memory is allocated for what a header declares.
    ///
    /// # Errors
    /// [`ItemError`], with a text for the client.
    fn preprocess(
        &self,
        modality: Modality,
        bytes: &[u8],
        options: &ItemOptions,
        limits: &Limits,
    ) -> Result<EncoderInput, ItemError>;
}

/// Refuses an option that a processor does not know.
pub(crate) fn check_options(options: &ItemOptions, allowed: &[&str]) -> Result<(), ItemError> {
    match options.given().find(|name| !allowed.contains(name)) {
        None => Ok(()),
        Some(name) => {
            let known = if allowed.is_empty() { "none".to_owned() } else { allowed.join(", ") };
            Err(ItemError::Unsupported(format!(
                "this model does not take the item option {name}, it takes {known}"
            )))
        }
    }
}

/// The checks that every kind of item shares.
pub(crate) fn admit(
    reads: Modality,
    modality: Modality,
    bytes: &[u8],
    limits: &Limits,
) -> Result<(), ItemError> {
    if modality != reads {
        return Err(ItemError::Unsupported(format!("this model reads {reads} items, not {modality}")));
    }
    if bytes.is_empty() {
        return Err(ItemError::Empty(format!("the {modality} has no bytes")));
    }
    if bytes.len() > limits.max_item_bytes {
        return Err(ItemError::TooLarge {
            what: "the item",
            actual: format!("{} bytes", bytes.len()),
            limit: format!("{} bytes", limits.max_item_bytes),
        });
    }
    Ok(())
}

/// Runs a decoder of foreign bytes. The libraries are not ours to trust: a panic of theirs costs the item, not
/// the process.
pub(crate) fn contained<T>(
    modality: Modality,
    decode: impl FnOnce() -> Result<T, ItemError>,
) -> Result<T, ItemError> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(decode))
        .unwrap_or_else(|_| Err(ItemError::Corrupt(format!("the {modality} cannot be decoded"))))
}

/// Description of the format of `bytes`, for the text of an error.
pub(crate) fn look(bytes: &[u8]) -> String {
    const KNOWN: &[(usize, &[u8], &str)] = &[
        (0, b"\x89PNG\r\n\x1a\n", "a PNG image"),
        (0, b"\xff\xd8\xff", "a JPEG image"),
        (0, b"GIF8", "a GIF image"),
        (8, b"WEBP", "a WebP image"),
        (0, b"BM", "a BMP image"),
        (0, b"II*\0", "a TIFF image"),
        (0, b"MM\0*", "a TIFF image"),
        (4, b"ftypavif", "an AVIF image"),
        (4, b"ftypheic", "a HEIC image"),
        (4, b"ftypmif1", "a HEIF image"),
        (0, b"%PDF", "a PDF document"),
        (0, b"PK\x03\x04", "a ZIP archive"),
        (0, b"\x1f\x8b", "a gzip file"),
        (8, b"WAVE", "a WAV file"),
        (8, b"AVI ", "an AVI video"),
        (0, b"fLaC", "a FLAC file"),
        (28, b"OpusHead", "an Ogg Opus file"),
        (0, b"OggS", "an Ogg file"),
        (0, b"ID3", "an MP3 file"),
        (0, b"#!AMR", "an AMR file"),
        (0, b"\x1a\x45\xdf\xa3", "a Matroska or WebM file"),
        (4, b"ftyp", "an MP4 file"),
    ];
    let found = KNOWN.iter().find(|(at, magic, _)| bytes.get(*at..).is_some_and(|b| b.starts_with(magic)));
    if let Some((_, _, name)) = found {
        return (*name).to_owned();
    }
    let start = &bytes[..bytes.len().min(64)];
    let trimmed = start.trim_ascii_start();
    let is_text = std::str::from_utf8(start).map_or_else(|e| e.error_len().is_none(), |_| true)
        && !start.iter().any(|b| *b < 9);
    match is_text {
        true if trimmed.starts_with(b"<svg") || trimmed.starts_with(b"<?xml") => "an SVG or XML text".into(),
        true if trimmed.starts_with(b"<") => "an HTML text".into(),
        true if trimmed.starts_with(b"{") || trimmed.starts_with(b"[") => "a JSON text".into(),
        true => "a text".into(),
        false => format!("{} bytes of an unknown format", bytes.len()),
    }
}
