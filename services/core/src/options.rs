//! Processing options of an item: everything that a request can set beside the item's bytes.
//!
//! Options decide what the encoder computes, so their canonical text is part of the content key. An encoder refuses
//! one that its model does not know: an output never ignores an option silently.

use std::fmt::Write;

/// Format of an item's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ItemForm {
    /// A file, or UTF-8 text.
    #[default]
    Plain,
    /// Token ids for a text encoder, as little-endian `u32`.
    TokenIds,
}

/// Processing options of one item. The default sets none.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ItemOptions {
    /// Format of its bytes.
    pub form: ItemForm,
    /// Text that the encoder reads together with the item.
    pub prompt: Option<String>,
    /// Offset in an audio clip to start from, in milliseconds; `None`: the beginning.
    pub start_ms: Option<u64>,
    /// Voice activity detection: skip the silent parts of an audio clip.
    pub vad: bool,
    /// Language of an encoder text, by the name of the model's token for it (`de_DE`); `None`: the model's default.
    pub src_lang: Option<String>,
}

impl ItemOptions {
    /// The options as text: empty for the default, and different for different options.
    pub fn canonical(&self) -> String {
        let mut text = String::new();
        if self.form == ItemForm::TokenIds {
            text.push_str("form=tokens\n");
        }
        if let Some(ms) = self.start_ms {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "start_ms={ms}");
        }
        if self.vad {
            text.push_str("vad\n");
        }
        if let Some(language) = &self.src_lang {
            // Escaped: a line break in it begins no other option.
            let _ = writeln!(text, "src_lang={language:?}");
        }
        // Free text comes last, so that nothing in it can be taken for another option.
        if let Some(prompt) = &self.prompt {
            let _ = write!(text, "prompt={prompt}");
        }
        text
    }

    /// Names of the options that differ from the default.
    pub fn given(&self) -> impl Iterator<Item = &'static str> {
        let given = [
            ("tokens", self.form == ItemForm::TokenIds),
            ("start_ms", self.start_ms.is_some()),
            ("vad", self.vad),
            ("src_lang", self.src_lang.is_some()),
            ("prompt", self.prompt.is_some()),
        ];
        given.into_iter().filter(|(_, given)| *given).map(|(name, _)| name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn options() -> impl Strategy<Value = ItemOptions> {
        let form = prop_oneof![Just(ItemForm::Plain), Just(ItemForm::TokenIds)];
        let prompt = prop::option::of("[a-z=\n]{0,12}");
        let src_lang = prop::option::of("[a-z=\"\n]{0,3}");
        (form, prompt, prop::option::of(0u64..20), any::<bool>(), src_lang).prop_map(
            |(form, prompt, start_ms, vad, src_lang)| ItemOptions { form, prompt, start_ms, vad, src_lang },
        )
    }

    #[test]
    fn default_options_have_an_empty_text() {
        assert_eq!(ItemOptions::default().canonical(), "");
        assert_eq!(ItemOptions::default().given().count(), 0);
    }

    #[test]
    fn a_source_language_is_part_of_the_key_and_spells_no_other_option() {
        let of = |code: &str| ItemOptions { src_lang: Some(code.into()), ..ItemOptions::default() };
        assert_ne!(of("de_DE").canonical(), of("en_XX").canonical());
        assert_ne!(of("de_DE").canonical(), ItemOptions::default().canonical());
        let two = ItemOptions { prompt: Some("x".into()), ..of("a") };
        assert_ne!(of("a\"\nprompt=x").canonical(), two.canonical());
        assert_eq!(of("de_DE").given().collect::<Vec<_>>(), ["src_lang"]);
    }

    proptest! {
        #[test]
        fn different_options_read_differently(a in options(), b in options()) {
            prop_assert_eq!(a == b, a.canonical() == b.canonical());
        }
    }
}
