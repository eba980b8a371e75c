//! Modalities, element types, extents, encoded items.

use super::{WireError, fingerprint, key, required};
use crate::v1;
use bytes::Bytes;
use std::sync::Arc;
use triptych_core::lifetime::ItemSource;
use triptych_core::{
    DType, EncodedItem, EncoderId, Extent, FrameSampling, ItemForm, ItemOptions, Modality, Seconds, TowerIdx,
    WindowSpan,
};

impl From<Modality> for v1::Modality {
    fn from(m: Modality) -> Self {
        match m {
            Modality::Image => Self::Image,
            Modality::Audio => Self::Audio,
            Modality::Text => Self::Text,
            Modality::Video => Self::Video,
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
        Ok(v1::Modality::Video) => Ok(Modality::Video),
        Ok(v1::Modality::Unspecified) | Err(_) => {
            Err(WireError::Enum { field: "modality", value, set: "Modality" })
        }
    }
}

/// Reads an encoder of a model: the kind of its items, and the number of its tower.
///
/// # Errors
/// [`WireError::Enum`] for an unset or unknown kind, [`WireError::Value`] for a tower that no model has.
pub fn encoder_id(kind: i32, tower: u32) -> Result<EncoderId, WireError> {
    let known = u8::try_from(tower).ok().filter(|n| *n < TowerIdx::LIMIT);
    let tower = known.map(TowerIdx).ok_or_else(|| WireError::Value {
        field: "tower",
        message: format!("{tower}, allowed are those below {}", TowerIdx::LIMIT),
    })?;
    Ok(EncoderId { modality: modality(kind)?, tower })
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
///
/// # Errors
/// [`WireError::Value`] for a sampling of frames that is none, or for two of them.
pub fn options(o: v1::ItemOptions, form: ItemForm) -> Result<ItemOptions, WireError> {
    let frames = frames(o.fps, o.num_frames)?;
    Ok(ItemOptions { form, prompt: o.prompt, start_ms: o.start_ms, vad: o.vad, src_lang: o.src_lang, frames })
}

/// Reads the format of a job's bytes.
///
/// # Errors
/// [`WireError::Value`] for one that is two at once.
pub fn item_form(request: &v1::EncodeRequest) -> Result<ItemForm, WireError> {
    match (request.item_is_token_ids, request.item_is_embeddings) {
        (false, false) => Ok(ItemForm::Plain),
        (true, false) => Ok(ItemForm::TokenIds),
        (false, true) => Ok(ItemForm::Embeddings),
        (true, true) => Err(WireError::Value {
            field: "item_is_embeddings",
            message: "is set beside item_is_token_ids; one of them is allowed".into(),
        }),
    }
}

/// Reads the frames that are taken of a video.
///
/// # Errors
/// [`WireError::Value`] for a number that is out of range, or for both.
pub fn frames(fps: Option<f64>, num_frames: Option<u32>) -> Result<Option<FrameSampling>, WireError> {
    let wrong = |field: &'static str, message: String| Err(WireError::Value { field, message });
    match (fps, num_frames) {
        (None, None) => Ok(None),
        (Some(_), Some(_)) => wrong("num_frames", "is set beside fps; one of them is allowed".into()),
        (Some(fps), None) => match FrameSampling::rate(fps) {
            None => wrong("fps", format!("is {fps}, allowed is 0.001 to 1000 with three decimals at most")),
            rate => Ok(rate),
        },
        (None, Some(n)) => match FrameSampling::count(n) {
            None => wrong("num_frames", "is 0, allowed is 1 or more".into()),
            count => Ok(count),
        },
    }
}

impl From<ItemOptions> for v1::ItemOptions {
    fn from(o: ItemOptions) -> Self {
        let (fps, num_frames) = match o.frames {
            None => (None, None),
            Some(FrameSampling::Rate { thousandths }) => (Some(f64::from(thousandths) / 1000.0), None),
            Some(FrameSampling::Count(n)) => (None, Some(n)),
        };
        Self { prompt: o.prompt, start_ms: o.start_ms, vad: o.vad, src_lang: o.src_lang, fps, num_frames }
    }
}

impl From<Extent> for v1::Extent {
    fn from(e: Extent) -> Self {
        use v1::extent::{Grid, Kind, Span, Tokens, Video, Windows};
        let kind = match e {
            Extent::Grid { t, h, w } => Kind::Grid(Grid { t, h, w }),
            Extent::Windows { n_windows, duration_ms, spans } => {
                let span = |s: &WindowSpan| Span { start_ms: s.start_ms, end_ms: s.end_ms };
                Kind::Windows(Windows { n_windows, duration_ms, spans: spans.iter().map(span).collect() })
            }
            Extent::Tokens => Kind::Tokens(Tokens {}),
            Extent::Video { t, h, w, interval, times } => {
                let times_s = times.iter().map(|time| time.get()).collect();
                Kind::Video(Video { t, h, w, interval_s: interval.get(), times_s })
            }
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
            Kind::Video(v) => video(v)?,
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

/// There is a time for each temporal patch, and at least one.
fn video(v: v1::extent::Video) -> Result<Extent, WireError> {
    let wrong = |field, message| WireError::Value { field, message };
    let seconds = |field: &'static str| {
        move |s: f64| Seconds::new(s).ok_or_else(|| wrong(field, format!("{s} is no time in seconds")))
    };
    if v.t == 0 || v.times_s.len() != v.t as usize {
        let message = format!("{} times for {} temporal patches", v.times_s.len(), v.t);
        return Err(wrong("extent.video.times_s", message));
    }
    let interval = seconds("extent.video.interval_s")(v.interval_s)?;
    let times = v.times_s.into_iter().map(seconds("extent.video.times_s")).collect::<Result<_, _>>()?;
    Ok(Extent::Video { t: v.t, h: v.h, w: v.w, interval, times })
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
