//! The head of an EC object: eight bytes of length, then JSON padded with spaces to a multiple of eight.
//!
//! The encoding is canonical: the output of [`write`]. [`read`] parses, writes again, and compares, so that numbers,
//! order, spacing and the head's own checksum are all held by one comparison.

use super::description::{description, hex, write_extent};
use super::error::{MAX_HEAD_BYTES, ObjectError};
use super::mac::Mac;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::sync::Arc;
use triptych_core::key::LAYOUT_VERSION;
use triptych_core::{ContentKey, DType, EncodedItem, Extent, Fingerprint, Modality, Seconds, WindowSpan};

/// Bytes of the length at the start of a safetensors file.
const LEN_BYTES: usize = 8;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head<'a> {
    #[serde(rename = "__metadata__", borrow)]
    metadata: Metadata<'a>,
    /// Of a type whose rows have one each.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    ec_scale: Option<Scales<'a>>,
    #[serde(borrow)]
    ec_cache: Tensor<'a>,
}

/// Safetensors wants every value here to be text.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Metadata<'a> {
    #[serde(borrow)]
    layout: Cow<'a, str>,
    #[serde(borrow)]
    key: Cow<'a, str>,
    #[serde(borrow)]
    fingerprint: Cow<'a, str>,
    #[serde(borrow)]
    modality: Cow<'a, str>,
    #[serde(borrow)]
    extent: Cow<'a, str>,
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    /// BLAKE3 of the rows.
    #[serde(borrow)]
    checksum: Cow<'a, str>,
    /// BLAKE3 of the description, see [`seal`].
    #[serde(borrow)]
    head_checksum: Cow<'a, str>,
    /// Of a signed object, see [`super::mac`].
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    mac: Option<Cow<'a, str>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tensor<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: [u32; 2],
    data_offsets: [u64; 2],
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Scales<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: [u32; 1],
    data_offsets: [u64; 2],
}

/// A parsed head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ParsedHead {
    pub(super) item: EncodedItem,
    pub(super) mac: Option<Mac>,
    /// Length of the head in bytes.
    pub(super) len: usize,
}

/// The head of `item`'s object, its length included.
pub(super) fn write(item: &EncodedItem, mac: Option<&Mac>) -> Vec<u8> {
    // A shape too large for a machine word is written as it saturates; `probe` refuses it by its length.
    let payload = item.payload_len().map_or(u64::MAX, |n| n as u64);
    let scales = item.scales_len().map_or(u64::MAX, |n| n as u64);
    let head = Head {
        metadata: Metadata {
            layout: LAYOUT_VERSION.to_string().into(),
            key: item.key.to_string().into(),
            fingerprint: item.fingerprint.to_string().into(),
            modality: item.modality.as_str().into(),
            extent: write_extent(&item.extent).into(),
            dtype: item.dtype.as_str().into(),
            checksum: hex(&item.checksum).into(),
            head_checksum: hex(&seal(item)).into(),
            mac: mac.map(|mac| hex(mac.as_bytes()).into()),
        },
        ec_scale: item.dtype.is_scaled().then(|| Scales {
            dtype: DType::F32.as_str().into(),
            shape: [item.n_tokens],
            data_offsets: [0, scales],
        }),
        ec_cache: Tensor {
            dtype: item.dtype.as_str().into(),
            shape: [item.n_tokens, item.hidden],
            data_offsets: [scales, payload],
        },
    };
    let json = serde_json::to_vec(&head).expect("plain structs of text and numbers always serialize");
    let padded = json.len().next_multiple_of(LEN_BYTES);
    let mut bytes = Vec::with_capacity(LEN_BYTES + padded);
    bytes.extend_from_slice(&(padded as u64).to_le_bytes());
    bytes.extend_from_slice(&json);
    bytes.resize(LEN_BYTES + padded, b' ');
    bytes
}

/// Parses a head.
pub(super) fn read(bytes: &[u8]) -> Result<ParsedHead, ObjectError> {
    let (len, rest) = bytes
        .split_first_chunk::<LEN_BYTES>()
        .ok_or(ObjectError::Truncated { expected: LEN_BYTES, actual: bytes.len() })?;
    let claimed = u64::from_le_bytes(*len);
    let limit = MAX_HEAD_BYTES - LEN_BYTES;
    let json_len = usize::try_from(claimed)
        .ok()
        .filter(|n| *n <= limit)
        .ok_or(ObjectError::HeadTooLarge { limit, actual: claimed })?;
    let head_len = LEN_BYTES + json_len;
    let json =
        rest.get(..json_len).ok_or(ObjectError::Truncated { expected: head_len, actual: bytes.len() })?;
    let head = serde_json::from_slice::<Head<'_>>(json)?;
    let item = item_of(&head)?;
    let mac = match &head.metadata.mac {
        Some(text) => Some(Mac::from_hex(text).ok_or(ObjectError::Field { field: "mac" })?),
        None => None,
    };
    if bytes.get(..head_len) != Some(write(&item, mac.as_ref()).as_slice()) {
        return Err(ObjectError::Inconsistent);
    }
    Ok(ParsedHead { item, mac, len: head_len })
}

fn item_of(head: &Head<'_>) -> Result<EncodedItem, ObjectError> {
    let unknown = |field| move || ObjectError::Field { field };
    let meta = &head.metadata;
    if meta.layout != LAYOUT_VERSION.to_string() {
        return Err(ObjectError::Field { field: "layout" });
    }
    let [n_tokens, hidden] = head.ec_cache.shape;
    Ok(EncodedItem {
        key: ContentKey::from_hex(&meta.key).ok_or_else(unknown("key"))?,
        fingerprint: Fingerprint::from_hex(&meta.fingerprint).ok_or_else(unknown("fingerprint"))?,
        modality: Modality::parse(&meta.modality).ok_or_else(unknown("modality"))?,
        n_tokens,
        hidden,
        dtype: DType::parse(&meta.dtype).ok_or_else(unknown("dtype"))?,
        extent: read_extent(&meta.extent).ok_or_else(unknown("extent"))?,
        checksum: *blake3::Hash::from_hex(&*meta.checksum)
            .map_err(|_| ObjectError::Field { field: "checksum" })?
            .as_bytes(),
    })
}

/// BLAKE3 of the description as text. The fields hold no `|`, so no two descriptions read the same.
fn seal(item: &EncodedItem) -> [u8; 32] {
    *blake3::Hasher::new_derive_key("triptych ec object head v1")
        .update(description(item).as_bytes())
        .finalize()
        .as_bytes()
}

fn read_extent(text: &str) -> Option<Extent> {
    let words: Vec<&str> = text.split(' ').collect();
    match words.as_slice() {
        ["grid", t, h, w] => {
            Some(Extent::Grid { t: t.parse().ok()?, h: h.parse().ok()?, w: w.parse().ok()? })
        }
        ["windows", n, ms, spans @ ..] => {
            let span = |word: &&str| {
                let (start, end) = word.split_once('-')?;
                Some(WindowSpan { start_ms: start.parse().ok()?, end_ms: end.parse().ok()? })
            };
            let n_windows: u32 = n.parse().ok()?;
            let spans: Arc<[WindowSpan]> = spans.iter().map(span).collect::<Option<_>>()?;
            let fits = spans.is_empty() || spans.len() == n_windows as usize;
            fits.then_some(Extent::Windows { n_windows, duration_ms: ms.parse().ok()?, spans })
        }
        ["tokens"] => Some(Extent::Tokens),
        ["video", t, h, w, interval, times @ ..] => {
            let seconds = |word: &&str| Seconds::new(word.parse().ok()?);
            let times: Arc<[Seconds]> = times.iter().map(seconds).collect::<Option<_>>()?;
            let t: u32 = t.parse().ok()?;
            let (h, w, interval) = (h.parse().ok()?, w.parse().ok()?, seconds(interval)?);
            (times.len() == t as usize).then_some(Extent::Video { t, h, w, interval, times })
        }
        _ => None,
    }
}
