//! The keyed MAC of an object, which proves that a holder of the key wrote it.
//!
//! A checksum detects accidents. A writer of the store can also create an object of the right key and shape with
//! rows of their own choosing; with a key that only the cluster's workers have, such an object does not verify. The MAC
//! is BLAKE3 in keyed mode over the object's description, which holds the checksum of its rows.

use super::description::description;
use super::error::ObjectError;
use std::fmt;
use std::str::FromStr;
use triptych_core::EncodedItem;

/// A message authentication code. Compared in constant time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mac(blake3::Hash);

impl Mac {
    /// Reads 64 hex digits.
    pub(super) fn from_hex(text: &str) -> Option<Self> {
        blake3::Hash::from_hex(text).ok().map(Self)
    }

    pub(super) fn as_bytes(&self) -> &[u8; 32] {
        self.0.as_bytes()
    }
}

/// The keys of a cluster's objects: the first signs, any of them is accepted, so that keys can be changed while workers
/// run. None: objects are neither signed nor asked for a signature.
#[derive(Clone, Default)]
pub struct MacKeys(Vec<[u8; 32]>);

/// A text that is no list of keys. The error does not quote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("MAC key {key_number} is not 64 hex digits; `openssl rand -hex 32` makes one")]
pub struct InvalidMacKey {
    /// Number of the malformed key, from 1.
    pub key_number: usize,
}

impl MacKeys {
    /// Wraps the keys.
    pub fn new(keys: Vec<[u8; 32]>) -> Self {
        Self(keys)
    }

    /// True without keys.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The MAC of an object of this description.
    pub(super) fn sign(&self, item: &EncodedItem) -> Option<Mac> {
        self.0.first().map(|key| mac(key, item))
    }

    /// # Errors
    /// [`ObjectError::Unsigned`], [`ObjectError::Forged`].
    pub(super) fn verify(&self, item: &EncodedItem, found: Option<&Mac>) -> Result<(), ObjectError> {
        if self.is_empty() {
            return Ok(());
        }
        let found = found.ok_or(ObjectError::Unsigned)?;
        // Every key is tried, so that the time does not reveal which one fits.
        let fits = self.0.iter().fold(false, |fits, key| fits | (mac(key, item) == *found));
        if fits { Ok(()) } else { Err(ObjectError::Forged) }
    }
}

impl FromStr for MacKeys {
    type Err = InvalidMacKey;

    /// Keys of 64 hex digits between white space.
    fn from_str(text: &str) -> Result<Self, InvalidMacKey> {
        let key = |(i, word): (usize, &str)| {
            let hash = blake3::Hash::from_hex(word).map_err(|_| InvalidMacKey { key_number: i + 1 })?;
            Ok(*hash.as_bytes())
        };
        text.split_whitespace().enumerate().map(key).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Debug for MacKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MacKeys({})", self.0.len())
    }
}

fn mac(key: &[u8; 32], item: &EncodedItem) -> Mac {
    Mac(blake3::keyed_hash(key, description(item).as_bytes()))
}
