//! The manifest of an object in Redis: its length, the nonce of its chunks, and its first bytes.
//!
//! `"TEC1"`, length of the object (u64), nonce (u128), length of the first bytes (u32), the first bytes; all
//! little-endian. A plain frame rather than JSON, so that `heads` costs one MGET and a copy.

use crate::object::{MAX_HEAD_BYTES, ObjectError};
use bytes::{Buf, BufMut, Bytes};
use triptych_core::limits::Limits;

/// Largest chunk, fixed by the format.
pub const CHUNK_BYTES: usize = 1 << 20;
const MAGIC: &[u8; 4] = b"TEC1";
const FIXED_BYTES: usize = 4 + 8 + 16 + 4;

/// A parsed manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Manifest {
    /// Length of the whole object, at most the limit.
    pub len: usize,
    /// Nonce of the writer, part of its chunks' keys.
    pub nonce: u128,
    /// The first bytes of the object that describe it, at most [`MAX_HEAD_BYTES`].
    pub first_bytes: Bytes,
}

impl Manifest {
    /// Length of the prefix that is unique to a writer, since it holds the nonce.
    pub(super) const OWN_BYTES: usize = 4 + 8 + 16;
    /// Largest manifest in bytes.
    pub(super) const MAX_BYTES: usize = FIXED_BYTES + MAX_HEAD_BYTES;

    /// The unchecked length of the object, from the manifest's first bytes.
    pub(super) fn len_of(start: &[u8]) -> Option<u64> {
        let len = start.strip_prefix(MAGIC)?.get(..8)?;
        Some(u64::from_le_bytes(len.try_into().ok()?))
    }

    pub(super) fn n_chunks(&self) -> usize {
        self.len.div_ceil(CHUNK_BYTES)
    }

    pub(super) fn write(&self) -> Vec<u8> {
        let mut raw = Vec::with_capacity(FIXED_BYTES + self.first_bytes.len());
        raw.put_slice(MAGIC);
        raw.put_u64_le(self.len as u64);
        raw.put_u128_le(self.nonce);
        raw.put_u32_le(self.first_bytes.len() as u32);
        raw.put_slice(&self.first_bytes);
        raw
    }

    pub(super) fn read(raw: &[u8], limits: &Limits) -> Result<Self, ObjectError> {
        let bad = |reason| ObjectError::Frame { reason };
        let mut rest = raw.strip_prefix(MAGIC).ok_or(bad("no manifest"))?;
        if raw.len() < FIXED_BYTES {
            return Err(bad("the manifest ends early"));
        }
        let (len, nonce, n_first) = (rest.get_u64_le(), rest.get_u128_le(), rest.get_u32_le());
        let limit = limits.max_object_bytes;
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        if len > limit {
            return Err(ObjectError::TooLarge { limit, actual: len });
        }
        if n_first as usize != rest.len() || rest.len() > len.min(MAX_HEAD_BYTES) {
            return Err(bad("the manifest has the wrong length"));
        }
        Ok(Self { len, nonce, first_bytes: Bytes::copy_from_slice(rest) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn manifests_read_back_and_no_prefix_of_one_does(len in 0usize..10_000, nonce in any::<u128>()) {
            let first_bytes = Bytes::from(vec![7; len.min(MAX_HEAD_BYTES)]);
            let manifest = Manifest { len, nonce, first_bytes };
            let raw = manifest.write();
            let limits = Limits::default();
            prop_assert_eq!(&Manifest::read(&raw, &limits).unwrap(), &manifest);
            for end in [0, 1, 3, 4, 31, raw.len() - 1] {
                prop_assert!(Manifest::read(raw.get(..end).unwrap_or(&[]), &limits).is_err());
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(mut raw in proptest::collection::vec(any::<u8>(), 0..64), magic: bool) {
            if magic {
                raw.splice(..0, *MAGIC);
            }
            let _ = Manifest::read(&raw, &Limits::default());
        }
    }
}
