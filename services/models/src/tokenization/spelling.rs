//! The bytes that each token of a vocabulary adds to a text, read off the tokenizer's decoder.
//!
//! A decoder works on whole sequences; what it does to one token in the middle of a text is a short list of
//! rewrites, and this is that list. What happens only at the start of a text (the first space of a
//! sentencepiece text is dropped) is separate, see [`super::Tokenizer::drops_first_space`].

use serde_json::Value;

/// Spelling of the tokens of a vocabulary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Each character of a token stands for a byte, as in GPT-2.
    ByteLevel,
    /// Tokens are text, after these rewrites, in order; and whether the text's first space is dropped.
    Pieces(Vec<TokenRewrite>, bool),
}

/// One thing that a decoder does to a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TokenRewrite {
    /// `<0x0A>` is that byte.
    ByteFallback,
    /// Wherever the first stands, the second does.
    Replace(String, String),
    /// A token with this ending ends a word; the others do not.
    WordEnd(String),
    /// A token with this beginning continues a word; the others begin one. `clean`: but for punctuation.
    Continues { prefix: String, clean: bool },
    /// Every token is a word of its own.
    Words,
}

impl Spelling {
    /// From the `decoder` of a `tokenizer.json`.
    pub(super) fn of_decoder(decoder: Option<&Value>) -> Self {
        let Some(decoder) = decoder.filter(|d| !d.is_null()) else {
            return Self::Pieces(vec![TokenRewrite::Words], true);
        };
        let mut drops = false;
        let one = std::slice::from_ref(decoder);
        let steps = decoder.get("decoders").and_then(Value::as_array).map_or(one, Vec::as_slice);
        let mut rewrites = Vec::new();
        for step in steps {
            let text = |key: &str| step.get(key).and_then(Value::as_str).map(str::to_owned);
            match step.get("type").and_then(Value::as_str) {
                Some("ByteLevel") => return Self::ByteLevel,
                Some("ByteFallback") => rewrites.push(TokenRewrite::ByteFallback),
                Some("Metaspace") => {
                    let replacement = text("replacement").unwrap_or_else(|| "▁".to_owned());
                    rewrites.push(TokenRewrite::Replace(replacement, " ".to_owned()));
                    drops |= text("prepend_scheme").as_deref() != Some("never");
                }
                Some("Replace") => {
                    let pattern = step.pointer("/pattern/String").and_then(Value::as_str);
                    if let (Some(from), Some(to)) = (pattern, text("content")) {
                        rewrites.push(TokenRewrite::Replace(from.to_owned(), to));
                    }
                }
                Some("BPEDecoder") => {
                    rewrites.push(TokenRewrite::WordEnd(text("suffix").unwrap_or_else(|| "</w>".to_owned())));
                }
                Some("WordPiece") => {
                    let clean = step.get("cleanup").and_then(Value::as_bool).unwrap_or(true);
                    let prefix = text("prefix").unwrap_or_else(|| "##".to_owned());
                    rewrites.push(TokenRewrite::Continues { prefix, clean });
                    drops = true;
                }
                Some("Strip") => drops |= step.get("start").and_then(Value::as_u64).is_some_and(|n| n > 0),
                // The rest only joins tokens.
                _ => {}
            }
        }
        Self::Pieces(rewrites, drops)
    }

    /// True if `<0xE4>` is a byte.
    pub(super) fn has_byte_tokens(&self) -> bool {
        matches!(self, Self::Pieces(rewrites, _) if rewrites.contains(&TokenRewrite::ByteFallback))
    }

    /// True if the space that begins a text is dropped.
    pub(super) fn drops_first_space(&self) -> bool {
        matches!(self, Self::Pieces(_, true))
    }

    /// The bytes of a token that stands in the middle of a text.
    pub(super) fn bytes(&self, token: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel => {
                // A token with a character outside the alphabet is text as it stands: an added token.
                let bytes: Option<Vec<u8>> = token.chars().map(byte_of).collect();
                bytes.unwrap_or_else(|| token.as_bytes().to_vec())
            }
            Self::Pieces(rewrites, _) => {
                let mut text = token.to_owned();
                for rewrite in rewrites {
                    match rewrite {
                        TokenRewrite::ByteFallback => {
                            if let Some(byte) = fallback_byte(&text) {
                                return vec![byte];
                            }
                        }
                        TokenRewrite::Replace(from, to) => text = text.replace(from, to),
                        TokenRewrite::WordEnd(end) => text = text.replace(end, " "),
                        TokenRewrite::Continues { prefix, clean } => {
                            text = match text.strip_prefix(prefix) {
                                Some(rest) => rest.to_owned(),
                                None if *clean && ATTACHED.contains(&text.as_str()) => text,
                                None => format!(" {text}"),
                            };
                        }
                        TokenRewrite::Words => text.insert(0, ' '),
                    }
                }
                text.into_bytes()
            }
        }
    }
}

/// Tokens that stand without a space before them in a text that is cleaned up.
const ATTACHED: [&str; 9] = [".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re"];

/// `<0xE4>`.
pub(super) fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// The byte that a character of the byte-level alphabet stands for: printable Latin-1 stands for itself, the
/// other 68 bytes, in order, for the characters from U+0100 on.
pub(super) fn byte_of(c: char) -> Option<u8> {
    let code = u32::from(c);
    match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => u8::try_from(code).ok(),
        0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// The inverse of [`byte_of`].
pub(super) fn char_of(byte: u8) -> char {
    let code = match byte {
        0..=0x20 => 0x100 + u32::from(byte),
        0x7F..=0xA0 => 0x121 + u32::from(byte) - 0x7F,
        0xAD => 0x143,
        other => u32::from(other),
    };
    char::from_u32(code).expect("all below U+0144")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_a_bijection_and_the_librarys_own() {
        let mut alphabet: Vec<char> = (0..=255).map(char_of).collect();
        for byte in 0..=255 {
            assert_eq!(byte_of(char_of(byte)), Some(byte));
        }
        alphabet.sort_unstable();
        let mut library: Vec<char> =
            tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
        library.sort_unstable();
        assert_eq!(alphabet, library);
        assert_eq!(byte_of(' '), None);
    }

    #[test]
    fn each_kind_of_decoder_gives_a_tokens_bytes() {
        let of = |json: Value| Spelling::of_decoder(Some(&json));
        let level = of(serde_json::json!({"type": "ByteLevel"}));
        assert_eq!(level.bytes("Ġa"), b" a");
        assert_eq!(level.bytes("Ã"), [0xC3]);
        assert_eq!(level.bytes("<a b>"), b"<a b>");
        let llama = of(serde_json::json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}));
        assert_eq!(llama.bytes("▁a▁b"), b" a b");
        assert_eq!(llama.bytes("<0xFF>"), [0xFF]);
        assert_eq!(llama.bytes("<0xFFF>"), b"<0xFFF>");
        assert_eq!(of(serde_json::json!({"type": "BPEDecoder", "suffix": "</w>"})).bytes("a</w>"), b"a ");
        assert_eq!(of(serde_json::json!({"type": "WordPiece", "prefix": "##"})).bytes("##a"), b"a");
        assert_eq!(of(serde_json::json!({"type": "WordPiece", "prefix": "##"})).bytes("a"), b" a");
        assert_eq!(of(serde_json::json!({"type": "WordPiece", "prefix": "##"})).bytes("."), b".");
        assert!(llama.drops_first_space() && !level.drops_first_space());
        assert_eq!(Spelling::of_decoder(None).bytes("a"), b" a");
    }
}
