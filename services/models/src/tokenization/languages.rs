//! Languages of a vocabulary: their codes and tokens.

use super::Tokenizer;

/// Language codes of a model with their tokens, in the order of the tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LanguageTokens(Vec<(String, u32)>);

impl LanguageTokens {
    /// From code and token, in any order.
    pub fn new(mut codes: Vec<(String, u32)>) -> Self {
        codes.sort_by_key(|(_, token)| *token);
        Self(codes)
    }

    /// Languages by spelling: control tokens such as `en_XX` (mBART), `eng_Latn` (NLLB), and `__en__` (M2M100), whose code
    /// is `en`.
    pub fn of_codes(tokenizer: &Tokenizer) -> Self {
        let named = |(spelling, token): (String, u32)| Some((code_of(&spelling)?.to_owned(), token));
        Self::new(tokenizer.controls().filter_map(named).collect())
    }

    /// The token of a code.
    pub fn token(&self, code: &str) -> Option<u32> {
        self.0.iter().find(|(c, _)| c == code).map(|(_, token)| *token)
    }

    /// The code a token names.
    pub fn code(&self, token: u32) -> Option<&str> {
        self.0.iter().find(|(_, t)| *t == token).map(|(code, _)| code.as_str())
    }

    /// Every code.
    pub fn codes(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(code, _)| code.as_str())
    }

    /// Every token.
    pub fn tokens(&self) -> impl Iterator<Item = u32> {
        self.0.iter().map(|(_, token)| *token)
    }

    /// True without any language.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The code that a token's spelling names.
fn code_of(spelling: &str) -> Option<&str> {
    let bare = spelling.strip_prefix("__").and_then(|rest| rest.strip_suffix("__"));
    match bare {
        Some(code) => Some(code).filter(|code| is_language(code)),
        None => Some(spelling).filter(|spelling| is_code(spelling)),
    }
}

fn is_language(code: &str) -> bool {
    (2..=3).contains(&code.len()) && code.bytes().all(|b| b.is_ascii_lowercase())
}

/// A language and a region or script: `en_XX`.
fn is_code(spelling: &str) -> bool {
    spelling.split_once('_').is_some_and(|(language, region)| {
        is_language(language)
            && (2..=4).contains(&region.len())
            && region.bytes().all(|b| b.is_ascii_alphabetic())
            && region.starts_with(|c: char| c.is_ascii_uppercase())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_three_families_name_languages() {
        for (spelling, expect) in [
            ("en_XX", Some("en_XX")),
            ("eng_Latn", Some("eng_Latn")),
            ("__en__", Some("en")),
            ("__ast__", Some("ast")),
            ("__english__", None),
            ("____", None),
            ("<mask>", None),
            ("s_menu", None),
        ] {
            assert_eq!(code_of(spelling), expect, "{spelling}");
        }
    }

    #[test]
    fn languages_read_both_ways() {
        let languages = LanguageTokens::new(vec![("de".into(), 5), ("en".into(), 4)]);
        assert_eq!(languages.token("de"), Some(5));
        assert_eq!(languages.code(4), Some("en"));
        assert_eq!(languages.code(6), None);
        assert_eq!(languages.codes().collect::<Vec<_>>(), ["en", "de"]);
    }
}
