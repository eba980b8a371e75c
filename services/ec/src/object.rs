//! The EC object: one encoder output as bytes on the wire and in stores.
//!
//! A safetensors file (<https://github.com/huggingface/safetensors>, "Format") with a tensor `ec_cache` `[n_tokens,
//! hidden]` (before it `ec_scale` `[n_tokens]` where rows have a scale each), and in `__metadata__` everything an
//! [`EncodedItem`] says, and perhaps a MAC. Any reader of the format opens it. Ours trusts nothing: each length is
//! checked against a limit before it is used, the head must be byte for byte what [`encode`] writes for the item it
//! describes, and the rows must hash to its checksum. So a flipped bit anywhere in the file is an [`ObjectError`],
//! never another item and never a panic.

mod description;
mod error;
mod head;
mod mac;

pub use error::{MAX_HEAD_BYTES, ObjectError};
pub use mac::{InvalidMacKey, MacKeys};

use bytes::{Bytes, BytesMut};
use std::sync::Arc;
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem, EncoderOutput};

/// Writes the object. The same output gives the same bytes. Copies the rows once: O(bytes).
pub fn encode(output: &EncoderOutput) -> Bytes {
    encode_signed(output, &MacKeys::default())
}

/// As [`encode`], signed with the first key if there is one.
pub fn encode_signed(output: &EncoderOutput, keys: &MacKeys) -> Bytes {
    let head = head::write(output.item(), keys.sign(output.item()).as_ref());
    let mut object = BytesMut::with_capacity(head.len() + output.rows().len());
    object.extend_from_slice(&head);
    object.extend_from_slice(output.rows());
    object.freeze()
}

/// The head of an unsigned object of `item`: all bytes before its rows.
pub fn encode_head(item: &EncodedItem) -> Bytes {
    head::write(item, None).into()
}

/// Length of an unsigned object of `item` in bytes. `None` if it overflows.
pub fn object_len(item: &EncodedItem) -> Option<usize> {
    head::write(item, None).len().checked_add(item.payload_len()?)
}

/// Length of an object's head as the object claims it, at most [`MAX_HEAD_BYTES`] and the object's length.
pub fn head_bytes(object: &[u8]) -> usize {
    let most = object.len().min(MAX_HEAD_BYTES);
    let claimed =
        object.first_chunk().map(|len| u64::from_le_bytes(*len).saturating_add(size_of::<u64>() as u64));
    claimed.and_then(|len| usize::try_from(len).ok()).map_or(most, |len| len.min(most))
}

/// Reads the description of an object from its first bytes; [`MAX_HEAD_BYTES`] are always enough.
///
/// Knows nothing of the rows: they may be missing or wrong.
///
/// # Errors
/// [`ObjectError`] if the bytes are no head of this version.
pub fn parse_head(first_bytes: &[u8]) -> Result<EncodedItem, ObjectError> {
    head::read(first_bytes).map(|head| head.item)
}

/// Reads the description of the object of `key`, which is `len` bytes long, from its first bytes.
///
/// # Errors
/// [`ObjectError`] if the head is wrong, is of another key, or does not fit `len` and the limits.
pub fn probe(
    first_bytes: &[u8],
    len: usize,
    key: &ContentKey,
    limits: &Limits,
) -> Result<EncodedItem, ObjectError> {
    probe_parts(first_bytes, len, key, limits).map(|head| head.item)
}

/// Reads and verifies a whole object. Copies and hashes the rows, O(bytes), so an async caller runs it on a blocking
/// thread.
///
/// # Errors
/// [`ObjectError`] if the object is anything but a whole, verified object of `key` within the limits.
pub fn decode(object: Bytes, key: &ContentKey, limits: &Limits) -> Result<EncoderOutput, ObjectError> {
    decode_signed(object, key, limits, &MacKeys::default())
}

/// As [`decode`], and requires a signature of one of `keys`, if there are any.
///
/// # Errors
/// As [`decode`]; [`ObjectError::Unsigned`], [`ObjectError::Forged`].
pub fn decode_signed(
    object: Bytes,
    key: &ContentKey,
    limits: &Limits,
    keys: &MacKeys,
) -> Result<EncoderOutput, ObjectError> {
    let first_bytes = object.get(..MAX_HEAD_BYTES).unwrap_or(&object);
    let head = probe_parts(first_bytes, object.len(), key, limits)?;
    keys.verify(&head.item, head.mac.as_ref())?;
    let rows =
        object.get(head.len..).ok_or(ObjectError::Truncated { expected: head.len, actual: object.len() })?;
    Ok(EncoderOutput::verify(head.item, Arc::from(rows))?)
}

/// Verifies a whole object as [`decode`] does, without copies. Does not check signatures. Hashes all rows.
///
/// # Errors
/// As [`decode`].
pub fn verify(object: &[u8], key: &ContentKey, limits: &Limits) -> Result<EncodedItem, ObjectError> {
    let first_bytes = object.get(..MAX_HEAD_BYTES).unwrap_or(object);
    let head = probe_parts(first_bytes, object.len(), key, limits)?;
    let rows = object.get(head.len..).unwrap_or_default();
    if *blake3::hash(rows).as_bytes() != head.item.checksum {
        return Err(triptych_core::item::OutputError::Checksum.into());
    }
    Ok(head.item)
}

fn probe_parts(
    first_bytes: &[u8],
    len: usize,
    key: &ContentKey,
    limits: &Limits,
) -> Result<head::ParsedHead, ObjectError> {
    let limit = limits.max_object_bytes;
    if len > limit {
        return Err(ObjectError::TooLarge { limit, actual: len });
    }
    let head = head::read(first_bytes)?;
    if head.item.key != *key {
        return Err(ObjectError::WrongKey { expected: *key, actual: head.item.key });
    }
    let expected = head
        .item
        .payload_len()
        .and_then(|rows| rows.checked_add(head.len))
        .ok_or(ObjectError::TooLarge { limit, actual: usize::MAX })?;
    match len.cmp(&expected) {
        std::cmp::Ordering::Less => Err(ObjectError::Truncated { expected, actual: len }),
        std::cmp::Ordering::Greater => Err(ObjectError::TrailingBytes { expected, actual: len }),
        std::cmp::Ordering::Equal => Ok(head),
    }
}
