//! The name of an encoder output that is in the store, as clients have it: the kind of its item, its content key, and a tag. An
//! item that several towers read has an output of each, and one name with all their keys.
//!
//! The tag is a keyed hash of both under the tenant's secret. So a name is of use to the tenant that it was given to, and no
//! client can make one of a key that it has seen. It knows no store.

use std::fmt;
use std::str::FromStr;
use triptych_core::{ContentKey, Modality, TowerIdx};

const PREFIX: &str = "eco";
/// Context of the tag's key, as BLAKE3 asks for one.
const CONTEXT: &str = "triptych 2025-11 name of an encoder output";
/// Between two keys.
const KEY_SEPARATOR: char = '.';
/// Bytes of a tag.
const TAG_BYTES: usize = 16;

/// Name of an encoder output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputName {
    /// Kind of the item.
    pub modality: Modality,
    // At least one, and no more than there may be towers.
    keys: Vec<ContentKey>,
    tag: [u8; TAG_BYTES],
}

impl OutputName {
    /// The name that a tenant with this secret is given; the keys are in the order of the towers.
    pub fn new(modality: Modality, keys: Vec<ContentKey>, tenant_secret: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
        hasher.update(&(tenant_secret.len() as u64).to_le_bytes());
        hasher.update(tenant_secret);
        hasher.update(modality.as_str().as_bytes());
        for key in &keys {
            hasher.update(key.as_bytes());
        }
        let mut tag = [0; TAG_BYTES];
        hasher.finalize_xof().fill(&mut tag);
        Self { modality, keys, tag }
    }

    /// Keys of the outputs, one for each tower.
    pub fn keys(&self) -> &[ContentKey] {
        &self.keys
    }

    /// True if it was given to the tenant with this secret.
    pub fn is_of(&self, tenant_secret: &[u8]) -> bool {
        let own = Self::new(self.modality, self.keys.clone(), tenant_secret);
        subtle::ConstantTimeEq::ct_eq(&own.tag[..], &self.tag[..]).into()
    }
}

impl fmt::Display for OutputName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}-{}-", self.modality.as_str())?;
        for (i, key) in self.keys.iter().enumerate() {
            if i > 0 {
                write!(f, "{KEY_SEPARATOR}")?;
            }
            write!(f, "{key}")?;
        }
        write!(f, "-")?;
        self.tag.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for OutputName {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.split('-');
        let [prefix, modality, keys, tag] = std::array::from_fn(|_| parts.next().unwrap_or_default());
        let modalities = [Modality::Image, Modality::Audio, Modality::Video];
        let modality = modalities.into_iter().find(|kind| kind.as_str() == modality).ok_or(())?;
        let keys = keys.split(KEY_SEPARATOR).take(usize::from(TowerIdx::LIMIT) + 1);
        let keys = keys.map(|key| ContentKey::from_hex(key).ok_or(())).collect::<Result<Vec<_>, ()>>()?;
        let is_hex = tag.len() == 2 * TAG_BYTES && tag.bytes().all(|byte| byte.is_ascii_hexdigit());
        if prefix != PREFIX || !is_hex || keys.len() > usize::from(TowerIdx::LIMIT) || parts.next().is_some()
        {
            return Err(());
        }
        let mut bytes = [0; TAG_BYTES];
        for (byte, pair) in bytes.iter_mut().zip(tag.as_bytes().as_chunks::<2>().0) {
            let digits = std::str::from_utf8(pair).map_err(|_| ())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| ())?;
        }
        Ok(Self { modality, keys, tag: bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_back_and_is_of_its_tenant_alone() {
        let key = ContentKey::from_bytes([7; 32]);
        let name = OutputName::new(Modality::Image, vec![key], b"one");
        let read: OutputName = name.to_string().parse().unwrap();
        assert_eq!(read, name);
        assert!(read.is_of(b"one") && !read.is_of(b"two") && !read.is_of(b""));
        let eight = ContentKey::from_bytes([8; 32]);
        let other = OutputName { keys: vec![eight], ..name.clone() };
        let more = OutputName { keys: vec![key, eight], ..name.clone() };
        let as_audio = OutputName { modality: Modality::Audio, ..name };
        assert!([other, more, as_audio].iter().all(|forged| !forged.is_of(b"one")));
    }

    #[test]
    fn a_name_of_several_towers_has_all_their_keys() {
        let keys = [7, 8].map(|n| ContentKey::from_bytes([n; 32])).to_vec();
        let name = OutputName::new(Modality::Image, keys.clone(), b"one");
        let read: OutputName = name.to_string().parse().unwrap();
        assert!(read == name && read.keys() == keys && read.is_of(b"one"));
        let many = OutputName::new(Modality::Image, vec![keys[0]; 9], b"one").to_string();
        assert_eq!(many.parse::<OutputName>(), Err(()), "more than there may be towers");
    }

    #[test]
    fn what_is_no_name_is_refused() {
        let name = OutputName::new(Modality::Audio, vec![ContentKey::from_bytes([7; 32])], b"").to_string();
        for text in [
            "",
            "eco",
            "eco-audio",
            &name[1..],
            &name[..name.len() - 1],
            &format!("{name}-"),
            &format!("{name}0"),
        ] {
            assert_eq!(text.parse::<OutputName>(), Err(()), "{text}");
        }
        assert_eq!(name.replacen("audio", "text", 1).parse::<OutputName>(), Err(()));
        assert_eq!(format!("{}é", &name[..name.len() - 2]).parse::<OutputName>(), Err(()));
    }
}
