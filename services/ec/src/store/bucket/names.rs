//! Names of objects, leases and temporary data in the bucket.

use object_store::path::Path;
use triptych_core::ContentKey;

/// Names below one root.
#[derive(Clone, Debug)]
pub(super) struct Names {
    /// Empty, or whole segments with a `/` at the end.
    root: String,
}

impl Names {
    pub(super) fn new(prefix: &str, tenant: Option<&str>) -> Self {
        let mut root = String::new();
        for segment in prefix.split('/').filter(|s| !s.is_empty()) {
            root.push_str(segment);
            root.push('/');
        }
        if let Some(tenant) = tenant {
            // No other name below a prefix has a `=`.
            root.push_str(&format!("tenant={tenant}/"));
        }
        Self { root }
    }

    /// Prefix of all objects and nothing else.
    pub(super) fn objects(&self) -> Path {
        Path::from(format!("{}v1", self.root))
    }

    /// Name of a key's object. Names sort as keys do.
    pub(super) fn object(&self, key: &ContentKey) -> Path {
        let hex = key.to_string();
        Path::from(format!("{}v1/{}/{hex}", self.root, shard(&hex)))
    }

    /// Greater than the name of any object.
    pub(super) fn after_all_objects(&self) -> Path {
        Path::from(format!("{}v1/zz", self.root))
    }

    /// The key of an object's name; `None` for foreign names.
    pub(super) fn key_of(&self, name: &Path) -> Option<ContentKey> {
        let key = ContentKey::from_hex(name.filename()?)?;
        (self.object(&key) == *name).then_some(key)
    }

    pub(super) fn lease(&self, key: &ContentKey) -> Path {
        let hex = key.to_string();
        Path::from(format!("{}leases/{}/{hex}", self.root, shard(&hex)))
    }

    pub(super) fn quarantined(&self, key: &ContentKey) -> Path {
        Path::from(format!("{}quarantine/{key}", self.root))
    }

    /// A unique name for an upload.
    pub(super) fn upload(&self) -> Path {
        Path::from(format!("{}tmp/{:032x}", self.root, crate::store::nonce()))
    }

    /// A unique name for a probe.
    pub(super) fn probe(&self) -> Path {
        Path::from(format!("{}probe/{:032x}", self.root, crate::store::nonce()))
    }
}

/// Two digits: services spread their load by the first letters that differ.
fn shard(hex: &str) -> &str {
    hex.get(..2).unwrap_or(hex)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_the_prefix_the_tenant_and_the_key() {
        let key = ContentKey::from_bytes([0xab; 32]);
        let hex = "ab".repeat(32);
        assert_eq!(Names::new("", None).object(&key).as_ref(), format!("v1/ab/{hex}"));
        assert_eq!(Names::new("a/b/", None).object(&key).as_ref(), format!("a/b/v1/ab/{hex}"));
        let names = Names::new("a", Some("acme"));
        assert_eq!(names.object(&key).as_ref(), format!("a/tenant=acme/v1/ab/{hex}"));
        assert_eq!(names.lease(&key).as_ref(), format!("a/tenant=acme/leases/ab/{hex}"));
    }

    #[test]
    fn only_an_objects_name_parses_to_its_key() {
        let (names, key) = (Names::new("a", None), ContentKey::from_bytes([0xab; 32]));
        assert_eq!(names.key_of(&names.object(&key)), Some(key));
        let hex = key.to_string();
        for other in [format!("a/v1/cd/{hex}"), format!("v1/ab/{hex}"), "a/v1/ab/x".into(), "a/v1/ab".into()]
        {
            assert_eq!(names.key_of(&Path::from(other)), None);
        }
        assert_eq!(names.key_of(&names.lease(&key)), None);
        assert!(names.object(&ContentKey::from_bytes([0xff; 32])) < names.after_all_objects());
    }
}
