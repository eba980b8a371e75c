//! An item of a request, by what its sender declares, and the names by which clients and workers know it.

use super::output_name::OutputName;
use bytes::Bytes;
use triptych_core::limits::Limits;
use triptych_core::prompt::TextOrTokens;
use triptych_core::{Failure, FailureClass, ItemForm, ItemIdx, ItemOptions, Modality};

/// Longest item URL in bytes.
const MAX_URL_BYTES: usize = 8 << 10;

/// An image, a video, an audio clip, or a text for the encoder.
#[derive(Clone, Debug)]
pub struct Item {
    /// Its kind.
    pub modality: Modality,
    /// The source of its bytes.
    pub source: Source,
    /// Options of its processing.
    pub options: ItemOptions,
    /// The sender's name for it: `items[0]`, `messages[0].content[1].image_url`, `file`.
    pub param: String,
}

/// The source of an item's bytes.
#[derive(Clone, Debug)]
pub enum Source {
    /// Here.
    Bytes(Bytes),
    /// Here, as base64 that is not decoded yet.
    Base64(Bytes),
    /// Here, as the frames of a video: base64 of each, with commas between them.
    Base64Frames(Bytes),
    /// Here, as rows of an encoder output and their grid, each base64 of a file; the second may be empty.
    Embeddings {
        /// The rows.
        rows: Bytes,
        /// The grid.
        grid: Bytes,
    },
    /// Behind an http(s) URL.
    Url(String),
    /// Nowhere: its encoder output is in the store.
    Output(OutputName),
}

impl Source {
    /// Bytes the item will have, as far as it says. `None` behind a URL, and for an output.
    pub fn declared_len(&self) -> Option<usize> {
        match self {
            Self::Bytes(bytes) => Some(bytes.len()),
            Self::Base64(text) | Self::Base64Frames(text) => Some(text.len() / 4 * 3),
            Self::Embeddings { rows, grid } => Some((rows.len() + grid.len()) / 4 * 3),
            Self::Url(_) | Self::Output(_) => None,
        }
    }
}

impl Item {
    /// Text for an encoder, or the token ids it stands for.
    pub fn of_text(text: TextOrTokens, param: &str) -> Self {
        let (form, bytes) = match text {
            TextOrTokens::Text(text) => (ItemForm::Plain, Bytes::from(text)),
            TextOrTokens::Tokens(ids) => {
                (ItemForm::TokenIds, ids.iter().flat_map(|id| id.to_le_bytes()).collect())
            }
        };
        let options = ItemOptions { form, ..ItemOptions::default() };
        Self { modality: Modality::Text, source: Source::Bytes(bytes), options, param: param.into() }
    }

    /// Holds its declared size against the limits.
    ///
    /// # Errors
    /// [`Failure`] that names the item.
    pub(super) fn check(&self, limits: &Limits) -> Result<(), Failure> {
        if let Source::Url(url) = &self.source
            && url.len() > MAX_URL_BYTES
        {
            let message = format!("the URL has {} bytes, the limit is {MAX_URL_BYTES}", url.len());
            return Err(Failure::invalid(message).with_param(&*self.param));
        }
        match self.source.declared_len() {
            Some(len) => check_len(len, limits).map_err(|f| f.with_param(&*self.param)),
            None => Ok(()),
        }
    }
}

/// Holds the length of an item against its limit.
///
/// # Errors
/// [`Failure`] with length and limit.
pub fn check_len(len: usize, limits: &Limits) -> Result<(), Failure> {
    match len {
        0 => Err(Failure::invalid("the item is empty: it has 0 bytes")),
        len if len > limits.max_item_bytes => Err(too_large(len, limits)),
        _ => Ok(()),
    }
}

/// An item over the limit; `len` is what is known of its length.
pub fn too_large(len: usize, limits: &Limits) -> Failure {
    let message = format!("the item has {len} bytes or more, the limit is {}", limits.max_item_bytes);
    Failure::new(FailureClass::TooLarge, message)
}

/// The cluster's name for an item.
pub fn param_of_item(idx: ItemIdx) -> String {
    format!("items[{}]", idx.0)
}

/// Reads [`param_of_item`] back.
pub fn item_of_param(param: &str) -> Option<ItemIdx> {
    param.strip_prefix("items[")?.strip_suffix(']')?.parse().ok().map(ItemIdx)
}
