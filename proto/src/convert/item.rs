//! Modalities, element types, extents, encoded items.

use super::{WireError, fingerprint, key, required};
use crate::v1;
use bytes::Bytes;
use std::sync::Arc;
use triptych_core::lifetime::ItemSource;
use triptych_core::{DType, EncodedItem, Extent, ItemForm, ItemOptions, Modality, WindowSpan};

impl From<Modality> for v1::Modality {
    fn from(m: Modality) -> Self {
        match m {
            Modality::Image => Self::Image,
            Modality::Audio => Self::Audio,
            Modality::Text => Self::Text,
        }
    }
}

/// Reads a modality.
///
/// # Errors
/// [`WireError::Enum`] for an unset or unknown number.
pub fn modality(value: i32) -> Result<Modality, WireError> {
    match v1::Modality::try_from(value) {
        Ok(v1::Modality::Image) => Ok(Modality::Image),
        Ok(v1::Modality::Audio) => Ok(Modality::Audio),
        Ok(v1::Modality::Text) => Ok(Modality::Text),
        Ok(v1::Modality::Unspecified) | Err(_) => {
            Err(WireError::Enum { field: "modality", value, set: "Modality" })
        }
    }
}

fn dtype_to_wire(d: DType) -> v1::DType {
    match d {
        DType::F32 => v1::DType::F32,
        DType::Bf16 => v1::DType::Bf16,
        DType::F16 => v1::DType::F16,
        DType::I8 => v1::DType::I8,
        DType::F8 => v1::DType::F8,
    }
}

fn dtype(value: i32) -> Result<DType, WireError> {
    match v1::DType::try_from(value) {
        Ok(v1::DType::F32) => Ok(DType::F32),
        Ok(v1::DType::Bf16) => Ok(DType::Bf16),
        Ok(v1::DType::F16) => Ok(DType::F16),
        Ok(v1::DType::I8) => Ok(DType::I8),
        Ok(v1::DType::F8) => Ok(DType::F8),
        Ok(v1::DType::Unspecified) | Err(_) => Err(WireError::Enum { field: "dtype", value, set: "DType" }),
    }
}

/// Reads processing options; `token_ids` says how the item's bytes are to be read.
pub fn options(o: v1::ItemOptions, token_ids: bool) -> ItemOptions {
    let form = if token_ids { ItemForm::TokenIds } else { ItemForm::Plain };
    ItemOptions { form, prompt: o.prompt, start_ms: o.start_ms, vad: o.vad, src_lang: o.src_lang }
}

impl From<ItemOptions> for v1::ItemOptions {
    fn from(o: ItemOptions) -> Self {
        Self { prompt: o.prompt, start_ms: o.start_ms, vad: o.vad, src_lang: o.src_lang }
    }
}

impl From<Extent> for v1::Extent {
    fn from(e: Extent) -> Self {
        use v1::extent::{Grid, Kind, Span, Tokens, Windows};
        let kind = match e {
            Extent::Grid { t, h, w } => Kind::Grid(Grid { t, h, w }),
            Extent::Windows { n_windows, duration_ms, spans } => {
                let span = |s: &WindowSpan| Span { start_ms: s.start_ms, end_ms: s.end_ms };
                Kind::Windows(Windows { n_windows, duration_ms, spans: spans.iter().map(span).collect() })
            }
            Extent::Tokens => Kind::Tokens(Tokens {}),
        };
        Self { kind: Some(kind) }
    }
}

impl TryFrom<v1::Extent> for Extent {
    type Error = WireError;

    fn try_from(e: v1::Extent) -> Result<Self, WireError> {
        use v1::extent::Kind;
        Ok(match required(e.kind, "extent")? {
            Kind::Grid(g) => Self::Grid { t: g.t, h: g.h, w: g.w },
            Kind::Windows(w) => windows(w)?,
            Kind::Tokens(_) => Self::Tokens,
        })
    }
}

/// Spans are none or one a window, in order, and none ends before it starts.
fn windows(w: v1::extent::Windows) -> Result<Extent, WireError> {
    let span = |s: &v1::extent::Span| WindowSpan { start_ms: s.start_ms, end_ms: s.end_ms };
    let spans: Arc<[WindowSpan]> = w.spans.iter().map(span).collect();
    let in_order = spans.iter().all(|s| s.start_ms <= s.end_ms) && spans.is_sorted_by_key(|s| s.start_ms);
    if !spans.is_empty() && (spans.len() != w.n_windows as usize || !in_order) {
        let message = format!("{} spans for {} windows, or not in order", spans.len(), w.n_windows);
        return Err(WireError::Value { field: "extent.windows.spans", message });
    }
    Ok(Extent::Windows { n_windows: w.n_windows, duration_ms: w.duration_ms, spans })
}

impl From<&EncodedItem> for v1::EncodedItem {
    fn from(item: &EncodedItem) -> Self {
        Self {
            key: Bytes::copy_from_slice(item.key.as_bytes()),
            fingerprint: Bytes::copy_from_slice(item.fingerprint.as_bytes()),
            modality: v1::Modality::from(item.modality).into(),
            n_tokens: item.n_tokens,
            hidden: item.hidden,
            dtype: dtype_to_wire(item.dtype).into(),
            extent: Some(item.extent.clone().into()),
            checksum: Bytes::copy_from_slice(&item.checksum),
        }
    }
}

impl TryFrom<v1::EncodedItem> for EncodedItem {
    type Error = WireError;

    fn try_from(item: v1::EncodedItem) -> Result<Self, WireError> {
        let checksum = item.checksum.as_ref().try_into();
        let checksum = checksum.map_err(|_| WireError::Length {
            field: "checksum",
            expected: 32,
            actual: item.checksum.len(),
        })?;
        let encoded = Self {
            key: key(&item.key, "key")?,
            fingerprint: fingerprint(&item.fingerprint, "fingerprint")?,
            modality: modality(item.modality)?,
            n_tokens: item.n_tokens,
            hidden: item.hidden,
            dtype: dtype(item.dtype)?,
            extent: required(item.extent, "extent")?.try_into()?,
            checksum,
        };
        match encoded.payload_len() {
            None | Some(0) => Err(WireError::Value {
                field: "n_tokens",
                message: format!(
                    "{} rows of {} is no shape of an encoder output",
                    encoded.n_tokens, encoded.hidden
                ),
            }),
            Some(_) => Ok(encoded),
        }
    }
}

impl From<ItemSource> for v1::ItemSource {
    fn from(s: ItemSource) -> Self {
        match s {
            ItemSource::Encoded => Self::Encoded,
            ItemSource::Shared => Self::Shared,
            ItemSource::Cached => Self::Cached,
        }
    }
}
