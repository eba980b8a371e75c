//! Content keys: the identity of an encoder output.
//!
//! A key covers everything the output depends on: who may share it (tenant salt), what computes it
//! (fingerprint), what it is computed from (modality, options, bytes). Every part is framed by its length,
//! so no two different lists of parts hash the same bytes. The hash is BLAKE3: 240 bits of it in a content key, whose
//! last 16 name the tenant so that they can only be compared; 256 in all others.

use crate::Modality;
use std::fmt;

/// Layout version of keys and objects; a change of either makes every stored object a miss.
pub const LAYOUT_VERSION: u32 = 1;

macro_rules! digest {
    ($(#[$doc:meta])* $type:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $type([u8; 32]);

        impl $type {
            /// Wraps 32 bytes as they are.
            pub const fn from_bytes(bytes: [u8; 32]) -> Self {
                Self(bytes)
            }

            /// Reads exactly 32 bytes. `None` for any other length.
            pub fn from_slice(bytes: &[u8]) -> Option<Self> {
                bytes.try_into().ok().map(Self)
            }

            /// Reads 64 hex digits. `None` for anything else.
            pub fn from_hex(text: &str) -> Option<Self> {
                blake3::Hash::from_hex(text).ok().map(|h| Self(*h.as_bytes()))
            }

            /// The raw bytes.
            pub const fn as_bytes(&self) -> &[u8; 32] {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(blake3::Hash::from_bytes(self.0).to_hex().as_str())
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($what, ":{}"), &blake3::Hash::from_bytes(self.0).to_hex()[..12])
            }
        }
    };
}

digest! {
    /// Identity of one item's encoder output. 64 hex digits as text.
    ContentKey, "key"
}
digest! {
    /// Identity of an encoder: weights, processor settings, output dtype, layout version.
    ///
    /// Encoders and PD workers both announce it; a pair that disagrees is refused when it connects.
    Fingerprint, "fp"
}

digest! {
    /// Identity of a tenant, the client that a request comes from. Nothing computed for one tenant is found by another,
    /// and work is divided fairly between them. All requests without a tenant belong to [`TenantId::SHARED`].
    TenantId, "tenant"
}

impl TenantId {
    /// The tenant of requests that name none.
    pub const SHARED: Self = Self([0; 32]);

    /// The tenant with this secret; an empty one is the shared tenant's.
    pub fn of(salt: &[u8]) -> Self {
        if salt.is_empty() {
            return Self::SHARED;
        }
        let mut hash = FramedHash::new("triptych tenant v1");
        hash.part(salt);
        Self(hash.finish())
    }
}

impl Default for TenantId {
    fn default() -> Self {
        Self::SHARED
    }
}

digest! {
    /// Identity of a LoRA adapter: its settings and weights, whatever it is called.
    AdapterId, "lora"
}

impl AdapterId {
    /// The identity of an adapter that depends on `parts`.
    pub fn of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hash = FramedHash::new("triptych adapter v1");
        for part in parts {
            hash.part(part);
        }
        Self(hash.finish())
    }
}

digest! {
    /// Identity of a full block of decoder KV: all that its keys and values depend on, from the first token on.
    PrefixKey, "prefix"
}

impl PrefixKey {
    /// The key before the first block; `parts` are what every block depends on.
    pub fn root<'a>(tenant: &TenantId, parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        Self::chain(tenant.as_bytes(), parts)
    }

    /// The key of the block after this one; `parts` are what it holds.
    pub fn then<'a>(&self, parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        Self::chain(&self.0, parts)
    }

    fn chain<'a>(before: &[u8], parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hash = FramedHash::new("triptych prefix key v1");
        hash.part(before);
        for part in parts {
            hash.part(part);
        }
        Self(hash.finish())
    }
}

/// The inputs of a content key.
#[derive(Clone, Copy, Debug)]
pub struct KeyParts<'a> {
    /// Secret of the tenant; outputs are shared only under the same salt. Empty: one shared tenant.
    pub tenant_salt: &'a [u8],
    /// The encoder that computes the output.
    pub fingerprint: &'a Fingerprint,
    /// The kind of item.
    pub modality: Modality,
    /// Canonical text of the request's processing options; empty when it has none.
    pub options: &'a str,
    /// The item as the encoder worker will receive it.
    pub item: &'a [u8],
}

/// A short hash of the tenant that an object belongs to, so that a store can divide its capacity: [`ContentKey::owner`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner([u8; OWNER_BYTES]);

/// Bytes of a key that name its owner. The other 30 identify the object: 240 bits of the hash.
const OWNER_BYTES: usize = 2;

impl ContentKey {
    /// The tenant that the object belongs to, as a hash of the cluster's secret and the tenant. A store needs it to keep
    /// one tenant from taking the capacity of all. The hash is so short that many tenants share one, so a store learns
    /// nothing else. All objects without a salt have the same owner.
    pub fn owner(&self) -> Owner {
        let [.., a, b] = self.0;
        Owner([a, b])
    }

    /// Hashes the parts; the last bytes are the owner's. O(bytes of the item).
    pub fn of(parts: KeyParts<'_>) -> Self {
        let mut hash = FramedHash::new("triptych content key v1");
        hash.part(parts.tenant_salt);
        hash.part(parts.fingerprint.as_bytes());
        hash.part(parts.modality.as_str().as_bytes());
        hash.part(parts.options.as_bytes());
        hash.part(parts.item);
        let mut key = hash.finish();
        let mut owner = FramedHash::new("triptych owner of an object v1");
        owner.part(parts.tenant_salt);
        let name = owner.finish();
        key[32 - OWNER_BYTES..].copy_from_slice(&name[..OWNER_BYTES]);
        Self(key)
    }
}

impl ContentKey {
    /// Identity of rows of several encoder outputs one after another; `parts` say which outputs, and which rows. No store has
    /// an object of such a key.
    pub fn joined<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hash = FramedHash::new("triptych joined content key v1");
        for part in parts {
            hash.part(part);
        }
        Self(hash.finish())
    }
}

impl Fingerprint {
    /// Hashes the parts that decide what an encoder computes, in the order given.
    pub fn of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hash = FramedHash::new("triptych encoder fingerprint v1");
        hash.part(&LAYOUT_VERSION.to_le_bytes());
        for part in parts {
            hash.part(part);
        }
        Self(hash.finish())
    }
}

/// BLAKE3 over length-framed parts under a context string.
struct FramedHash(blake3::Hasher);

impl FramedHash {
    fn new(context: &str) -> Self {
        Self(blake3::Hasher::new_derive_key(context))
    }

    fn part(&mut self, bytes: &[u8]) {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    fn finish(self) -> [u8; 32] {
        *self.0.finalize().as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(salt: &[u8], options: &str, item: &[u8]) -> ContentKey {
        let fingerprint = Fingerprint::of([b"weights".as_slice()]);
        ContentKey::of(KeyParts {
            tenant_salt: salt,
            fingerprint: &fingerprint,
            modality: Modality::Image,
            options,
            item,
        })
    }

    #[test]
    fn bytes_that_move_between_parts_change_the_key() {
        assert_ne!(key(b"ab", "", b"c"), key(b"a", "", b"bc"));
        assert_ne!(key(b"", "x", b"y"), key(b"", "", b"xy"));
        assert_ne!(Fingerprint::of([b"a".as_slice(), b"b"]), Fingerprint::of([b"ab".as_slice()]));
    }

    #[test]
    fn all_objects_of_a_tenant_have_one_owner() {
        let owner = |salt: &[u8], item: &[u8]| key(salt, "", item).owner();
        assert_eq!(owner(b"a", b"1"), owner(b"a", b"2"));
        assert_ne!(owner(b"a", b"1"), owner(b"b", b"1"));
        assert_ne!(key(b"a", "", b"1"), key(b"a", "", b"2"));
    }

    #[test]
    fn hex_reads_back() {
        let key = key(b"s", "o", b"i");
        assert_eq!(ContentKey::from_hex(&key.to_string()), Some(key));
        assert_eq!(ContentKey::from_hex("00"), None);
        assert_eq!(ContentKey::from_slice(&[0; 31]), None);
    }

    proptest! {
        #[test]
        fn different_parts_give_different_keys(a in any::<(Vec<u8>, String, Vec<u8>)>(), b in any::<(Vec<u8>, String, Vec<u8>)>()) {
            prop_assert_eq!(a == b, key(&a.0, &a.1, &a.2) == key(&b.0, &b.1, &b.2));
        }
    }
}
