//! Bytes of tokens to characters, where a token need not hold a whole one.
//!
//! A vocabulary with single bytes can spell what is no UTF-8. Such bytes are replaced by U+FFFD, or left out, one
//! character at a time: what follows a whole character never changes it. So a text that grows only ever changes in
//! the character at its end, of which at most three bytes are there.

use super::spelling::fallback_byte;

/// Replacement of bytes that are no character.
pub(super) const REPLACEMENT: char = '\u{FFFD}';

/// Most bytes of a character that has not ended.
pub(super) const MAX_UNFINISHED: usize = 3;

/// Treatment of bytes that are no character.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum InvalidBytes {
    /// They are replaced by U+FFFD.
    #[default]
    Replaced,
    /// They are left out, as ByT5's own code does.
    Dropped,
}

/// Number of bytes at the end that begin a character and do not end it; at most [`MAX_UNFINISHED`].
pub(super) fn n_unfinished(bytes: &[u8]) -> usize {
    let begins = |n: &usize| {
        let end = std::str::from_utf8(&bytes[bytes.len() - n..]);
        end.is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
    };
    (1..=bytes.len().min(MAX_UNFINISHED)).find(begins).unwrap_or(0)
}

/// The characters among bytes; what is in none of them is left out.
pub(super) fn only_characters(bytes: &[u8]) -> String {
    bytes.utf8_chunks().map(|chunk| chunk.valid()).collect()
}

/// Spells byte tokens (`<0xE4>`) that are in no character as U+FFFD, each by itself, for a decoder that joins bytes.
///
/// The library replaces every byte of a run that has one wrong byte in it, whole characters too. sentencepiece, whose
/// vocabularies these are, decodes a run character by character, and so does this. An empty token after each character
/// ends the library's run.
pub(super) fn replace_lone_bytes(names: &[String]) -> Vec<String> {
    let mut out = Vec::with_capacity(names.len());
    let mut rest = names;
    while let Some(first) = rest.first() {
        let run: Vec<u8> = rest.iter().map_while(|name| fallback_byte(name)).collect();
        if run.is_empty() {
            out.push(first.clone());
        }
        let mut at = 0;
        for chunk in run.utf8_chunks() {
            for c in chunk.valid().chars() {
                out.extend_from_slice(&rest[at..at + c.len_utf8()]);
                out.push(String::new());
                at += c.len_utf8();
            }
            let n_lone = chunk.invalid().len();
            out.extend(std::iter::repeat_n(REPLACEMENT.to_string(), n_lone));
            at += n_lone;
        }
        rest = &rest[run.len().max(1)..];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_character_at_the_end_is_unfinished() {
        let check = |bytes: &[u8], n: usize| assert_eq!(n_unfinished(bytes), n, "{bytes:02X?}");
        check(b"", 0);
        check(b"a", 0);
        check("é".as_bytes(), 0);
        check(b"a\xC3", 1);
        check(b"\xE2\x96", 2);
        check(b"\xF0\x9F\xA6", 3);
        check(b"\xF0\x9F\xA6\x80", 0);
        // A lone continuation, a byte of no character, a lead after a lead, an overlong and a surrogate.
        check(b"\x96", 0);
        check(b"\xFF", 0);
        check(b"\xF0\xC3", 1);
        check(b"\xC0", 0);
        check(b"\xED\xA0", 0);
    }

    #[test]
    fn a_byte_in_no_character_costs_no_other() {
        let names = |list: &[&str]| list.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let check = |given: &[&str], expect: &[&str]| {
            assert_eq!(replace_lone_bytes(&names(given)), names(expect), "{given:?}");
        };
        check(&[], &[]);
        check(&["a", "<0x41>", "b"], &["a", "<0x41>", "", "b"]);
        check(&["<0x41>", "<0xC3>"], &["<0x41>", "", "\u{FFFD}"]);
        check(&["<0xE2>", "<0x96>", "<0x41>"], &["\u{FFFD}", "\u{FFFD}", "<0x41>", ""]);
        check(&["<0xC3>", "<0xA9>", "<0xA9>"], &["<0xC3>", "<0xA9>", "", "\u{FFFD}"]);
        assert_eq!(only_characters(b"a\xE2\x96b\xFF\xEF\xBF\xBD"), "ab\u{FFFD}");
    }
}
