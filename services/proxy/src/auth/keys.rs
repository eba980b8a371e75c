//! API keys: a file of hashes, one entry a line, and the keys themselves.
//!
//! ```text
//! # fields are separated by spaces; a hash is BLAKE3 of the key in hex, as `triptych keys new` prints it
//! key    8f1c…e2  acme                      a key of tenant acme
//! key    77ab…09  acme  models=vl,asr       a key for two models only
//! key    90c2…7a  acme  priority=10         a key whose requests are never more urgent than priority 10
//! tenant acme  requests_per_s=20 item_kib_per_s=8192 encode_kib_per_s=4096 in_flight=16 body_mib=256
//! ```
//!
//! A key has 256 random bits, so its hash needs neither salt nor stretching. A lookup compares the key with every entry, in
//! constant time.

use super::account::{MAX_TENANT_BYTES, Quota};
use super::error::AuthError;
use super::file::read_text;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;
use subtle::{ConditionallySelectable, ConstantTimeEq};

/// Largest number of entries in a file; a lookup compares with all of them.
const MAX_ENTRIES: usize = 10_000;
/// Largest file in bytes.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// Priorities of a request; smaller is more urgent.
pub const PRIORITIES: RangeInclusive<i32> = -100..=100;
/// Prefix of every key, so that scanners of repositories find one that leaked.
const PREFIX: &str = "tk_";

/// A new key and its hash, in hex. The key is shown once and kept nowhere.
pub fn generate() -> (String, String) {
    let key = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>()));
    let hash = blake3::hash(key.as_bytes()).to_hex().to_string();
    (key, hash)
}

/// The entries of a file.
#[derive(Debug, Default)]
pub struct KeyTable {
    keys: Vec<KeyEntry>,
    quotas: HashMap<String, Quota>,
}

#[derive(Debug)]
struct KeyEntry {
    hash: [u8; 32],
    grant: KeyGrant,
}

/// The tenant of a key, and the models it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyGrant {
    /// The tenant.
    pub tenant: String,
    /// The models; `None`: all.
    pub models: Option<Arc<BTreeSet<String>>>,
    /// The most urgent priority of its requests: smaller is more urgent. `None`: any.
    pub priority: Option<i32>,
}

impl KeyGrant {
    /// The grant with a setting of its line.
    fn with(self, setting: &str) -> Result<Self, String> {
        match setting.split_once('=') {
            Some(("models", names)) if self.models.is_none() => {
                let names = names.split(',').filter(|n| !n.is_empty()).map(str::to_owned);
                Ok(Self { models: Some(Arc::new(names.collect())), ..self })
            }
            Some(("priority", number)) if self.priority.is_none() => {
                let number = number.parse().ok().filter(|n| PRIORITIES.contains(n));
                let number = number.ok_or("priority is not an integer from -100 to 100")?;
                Ok(Self { priority: Some(number), ..self })
            }
            _ => Err("the only settings of a key are `models=A,B` and `priority=N`, each once".into()),
        }
    }
}

impl KeyTable {
    /// Reads a file.
    ///
    /// # Errors
    /// [`AuthError`] with the line at fault.
    pub fn read(path: &Path) -> Result<Self, AuthError> {
        let text = read_text(path, MAX_FILE_BYTES)?;
        Self::parse(&text).map_err(|(line, reason)| AuthError::Content {
            path: path.to_owned(),
            line: Some(line),
            reason,
        })
    }

    fn parse(text: &str) -> Result<Self, (usize, String)> {
        let mut table = Self::default();
        for (i, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default();
            let words: Vec<&str> = line.split_whitespace().collect();
            table.add(&words).map_err(|reason| (i + 1, reason))?;
            let n = table.keys.len() + table.quotas.len();
            if n > MAX_ENTRIES {
                return Err((i + 1, format!("more than {MAX_ENTRIES} entries, the limit")));
            }
        }
        Ok(table)
    }

    fn add(&mut self, words: &[&str]) -> Result<(), String> {
        match words {
            [] => Ok(()),
            ["key", hash, tenant, settings @ ..] => self.add_key(hash, tenant, settings),
            ["tenant", tenant, settings @ ..] => {
                check_tenant(tenant)?;
                let quota = settings.iter().try_fold(Quota::default(), |quota, text| set(quota, text))?;
                match self.quotas.insert((*tenant).to_owned(), quota) {
                    None => Ok(()),
                    Some(_) => Err("a tenant has one line, this one has two".into()),
                }
            }
            // No word of the line is repeated: it may be a key.
            _ => Err("not `key HASH TENANT [models=A,B] [priority=N]` nor `tenant NAME [QUOTA=N …]`".into()),
        }
    }

    fn add_key(&mut self, hash: &str, tenant: &str, settings: &[&str]) -> Result<(), String> {
        let hash = blake3::Hash::from_hex(hash).map_err(
            |_| "a hash is 64 hex digits, as `triptych keys new` prints it, and never the key itself",
        )?;
        check_tenant(tenant)?;
        if self.keys.iter().any(|entry| entry.hash == *hash.as_bytes()) {
            return Err("the hash is there twice".into());
        }
        let grant = KeyGrant { tenant: tenant.to_owned(), models: None, priority: None };
        let grant = settings.iter().try_fold(grant, |grant, setting| grant.with(setting))?;
        self.keys.push(KeyEntry { hash: *hash.as_bytes(), grant });
        Ok(())
    }

    /// The grant of a key. Takes the same time whether it is found or not.
    pub fn find(&self, key: &str) -> Option<KeyGrant> {
        let hash = blake3::hash(key.as_bytes());
        let mut found = u64::MAX;
        for (i, entry) in (0u64..).zip(&self.keys) {
            found.conditional_assign(&i, entry.hash.ct_eq(hash.as_bytes()));
        }
        let entry = self.keys.get(usize::try_from(found).ok()?)?;
        Some(entry.grant.clone())
    }

    /// The tenant's own quota, if the file has one.
    pub fn quota(&self, tenant: &str) -> Option<Quota> {
        self.quotas.get(tenant).copied()
    }
}

fn check_tenant(tenant: &str) -> Result<(), String> {
    match tenant.len() {
        len if len > MAX_TENANT_BYTES => {
            Err(format!("the tenant has {len} bytes, the limit is {MAX_TENANT_BYTES}"))
        }
        _ => Ok(()),
    }
}

fn set(quota: Quota, text: &str) -> Result<Quota, String> {
    const ALLOWED: &str = "requests_per_s, item_kib_per_s, encode_kib_per_s, in_flight, body_mib";
    let (name, value) =
        text.split_once('=').ok_or_else(|| format!("a quota is NAME=N; names are {ALLOWED}"))?;
    let number: u32 =
        value.parse().map_err(|_| format!("{name} is not an integer from 0 to {}", u32::MAX))?;
    let number = NonZeroU32::new(number);
    Ok(match name {
        "requests_per_s" => Quota { requests_per_s: number, ..quota },
        "item_kib_per_s" => Quota { item_kib_per_s: number, ..quota },
        "encode_kib_per_s" => Quota { encode_kib_per_s: number, ..quota },
        "in_flight" => Quota { in_flight: number, ..quota },
        "body_mib" => Quota { body_mib: number, ..quota },
        _ => return Err(format!("there is no such quota; names are {ALLOWED}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_finds_its_tenant_and_nothing_else_does() {
        let ((a, hash_a), (b, hash_b)) = (generate(), generate());
        let text = format!(
            "# two tenants\nkey {hash_a} acme # main\n\nkey {hash_b} other models=vl,asr priority=-5\ntenant acme in_flight=3 body_mib=0\n"
        );
        let table = KeyTable::parse(&text).unwrap();
        assert_eq!(table.find(&a), Some(KeyGrant { tenant: "acme".into(), models: None, priority: None }));
        let KeyGrant { tenant, models, priority } = table.find(&b).unwrap();
        assert_eq!((tenant.as_str(), priority), ("other", Some(-5)));
        assert_eq!(models.unwrap().iter().collect::<Vec<_>>(), ["asr", "vl"]);
        let quota = table.quota("acme").unwrap();
        assert_eq!((quota.in_flight, quota.body_mib), (NonZeroU32::new(3), None));
        assert_eq!(table.quota("other"), None);
        for wrong in ["", "tk_", &a[1..], &hash_a, &format!("{a} ")] {
            assert_eq!(table.find(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_wrong_line_is_named_by_its_number_and_never_repeated() {
        let (secret, hash) = generate();
        let cases = [
            (format!("key {secret} acme"), "64 hex digits"),
            (format!("{secret} acme"), "not `key HASH TENANT"),
            (format!("key {hash}"), "not `key HASH TENANT"),
            (format!("key {hash} a colour=red"), "only settings of a key"),
            (format!("key {hash} a priority=1 priority=2"), "each once"),
            (format!("key {hash} a priority=101"), "-100 to 100"),
            (format!("key {hash} a\nkey {hash} b"), "there twice"),
            (format!("tenant {}", "x".repeat(300)), "300 bytes"),
            ("tenant a in_flight=-1".into(), "not an integer"),
            ("tenant a speed=1".into(), "names are requests_per_s"),
            ("tenant a\ntenant a".into(), "has two"),
        ];
        for (text, expect) in cases {
            let (line, reason) = KeyTable::parse(&text).unwrap_err();
            assert_eq!(line, text.lines().count());
            assert!(reason.contains(expect) && !reason.contains(&secret), "{reason}");
        }
    }
}
