//! Languages of a vocabulary: their codes and tokens.

/// Language codes of a model with their tokens, in the order of the tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LanguageTokens(Vec<(String, u32)>);

impl LanguageTokens {
    /// From code and token, in any order.
    pub fn new(mut codes: Vec<(String, u32)>) -> Self {
        codes.sort_by_key(|(_, token)| *token);
        Self(codes)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn languages_read_both_ways() {
        let languages = LanguageTokens::new(vec![("de".into(), 5), ("en".into(), 4)]);
        assert_eq!(languages.token("de"), Some(5));
        assert_eq!(languages.code(4), Some("en"));
        assert_eq!(languages.code(6), None);
        assert_eq!(languages.codes().collect::<Vec<_>>(), ["en", "de"]);
    }
}
