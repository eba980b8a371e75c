//! A sentencepiece model's precompiled normalizer, checked before the library walks it.
//!
//! It is a double-array trie over bytes, then the replacements, each ended by a zero byte. The library that reads
//! it follows offsets without looking whether they stay inside; so every state that a text can reach is visited
//! here once.

use std::collections::HashSet;

/// Larger ones are not made: sentencepiece's own is a quarter of a megabyte.
const MAX_BYTES: usize = 16 << 20;

/// Checks a `precompiled_charsmap`; the error describes the defect. O(states · 256).
pub(crate) fn check(bytes: &[u8]) -> Result<(), String> {
    let wrong = |what: &str| Err(format!("precompiled_charsmap {what}"));
    if bytes.len() > MAX_BYTES {
        return wrong(&format!("has {} bytes, at most {MAX_BYTES} are read", bytes.len()));
    }
    let Some((head, rest)) = bytes.split_first_chunk::<4>() else { return wrong("has no length") };
    let n_bytes = usize::try_from(u32::from_le_bytes(*head)).unwrap_or(usize::MAX);
    if n_bytes == 0 || !n_bytes.is_multiple_of(4) || n_bytes > rest.len() {
        return wrong("has a trie of a length that cannot be");
    }
    let (trie, replacements) = rest.split_at(n_bytes);
    let (units, _) = trie.as_chunks::<4>();
    let units: Vec<u32> = units.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
    let Ok(replacements) = std::str::from_utf8(replacements) else {
        return wrong("has replacements that are not UTF-8");
    };
    walk(&units, replacements).map_or_else(|| wrong("leads out of its own bounds"), Ok)
}

/// Visits every state. `None` if one is out of bounds.
fn walk(units: &[u32], replacements: &str) -> Option<()> {
    let root = offset(*units.first()?);
    let mut seen = HashSet::from([root]);
    let mut open = vec![root];
    while let Some(at) = open.pop() {
        for label in 1..=255_u32 {
            let unit = *units.get(usize::try_from(at ^ label).ok()?)?;
            if unit & (1 << 31 | 0xFF) != label {
                continue;
            }
            let next = (at ^ label) ^ offset(unit);
            if unit >> 8 & 1 == 1 {
                let value = *units.get(usize::try_from(next).ok()?)? & ((1 << 31) - 1);
                replacements.get(usize::try_from(value).ok()?..)?;
            }
            if seen.insert(next) {
                open.push(next);
            }
        }
    }
    Some(())
}

/// Offset of a unit's children.
fn offset(unit: u32) -> u32 {
    (unit >> 10) << ((unit & 1 << 9) >> 6)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charsmap(units: &[u32], replacements: &[u8]) -> Vec<u8> {
        let n = u32::try_from(units.len() * 4).unwrap();
        let units = units.iter().flat_map(|u| u.to_le_bytes());
        n.to_le_bytes().into_iter().chain(units).chain(replacements.iter().copied()).collect()
    }

    /// `a` (97) becomes the replacement at `value`.
    fn one_rule(value: u32) -> Vec<u32> {
        let mut units = vec![0; 512];
        units[0] = 256 << 10;
        units[256 ^ 97] = 97 | 1 << 8 | (128 << 10);
        units[256 ^ 97 ^ 128] = value | 1 << 31;
        units
    }

    #[test]
    fn a_valid_charsmap_passes_and_no_other_does() {
        assert_eq!(check(&charsmap(&one_rule(2), b"a\0b\0")), Ok(()));
        let mut far = one_rule(2);
        far[256 ^ 97] = 97 | (100_000 << 10);
        for bad in [
            charsmap(&one_rule(5), b"a\0b\0"),
            charsmap(&one_rule(1), "ü\0".as_bytes()),
            charsmap(&one_rule(2), b"a\0\xFF\0"),
            charsmap(&far, b"a\0b\0"),
            charsmap(&[], b""),
            vec![1, 0],
            vec![255, 255, 255, 255, 1],
        ] {
            assert!(check(&bad).is_err());
        }
    }
}
