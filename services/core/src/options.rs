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
    /// Rows of an encoder output that the client computed, and their grid.
    Embeddings,
}

/// Frames that are taken of a video.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameSampling {
    /// So many of each second, as thousandths: 2000 are two frames a second. Never 0.
    Rate {
        /// Frames of a thousand seconds.
        thousandths: u32,
    },
    /// So many of the whole video. Never 0.
    Count(u32),
}

impl FrameSampling {
    /// A rate in frames per second; `None` unless it is above 0, at most 1000, and has three decimals at most.
    pub fn rate(fps: f64) -> Option<Self> {
        let thousandths = (fps * 1000.0).round();
        let fits = (1.0..=1_000_000.0).contains(&thousandths) && (thousandths / 1000.0 - fps).abs() < 1e-9;
        fits.then_some(Self::Rate { thousandths: thousandths as u32 })
    }

    /// A number of frames; `None` for 0.
    pub fn count(n_frames: u32) -> Option<Self> {
        (n_frames > 0).then_some(Self::Count(n_frames))
    }
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
    /// Frames that are taken of a video; `None`: those that the model's own processor takes.
    pub frames: Option<FrameSampling>,
}

impl ItemOptions {
    /// The options as text: empty for the default, and different for different options.
    pub fn canonical(&self) -> String {
        let mut text = String::new();
        match self.form {
            ItemForm::Plain => {}
            ItemForm::TokenIds => text.push_str("form=tokens\n"),
            ItemForm::Embeddings => text.push_str("form=embeddings\n"),
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
        match self.frames {
            None => {}
            Some(FrameSampling::Rate { thousandths }) => {
                let _ = writeln!(text, "fps={thousandths}/1000");
            }
            Some(FrameSampling::Count(n)) => {
                let _ = writeln!(text, "num_frames={n}");
            }
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
            ("embeddings", self.form == ItemForm::Embeddings),
            ("start_ms", self.start_ms.is_some()),
            ("vad", self.vad),
            ("src_lang", self.src_lang.is_some()),
            ("fps", matches!(self.frames, Some(FrameSampling::Rate { .. }))),
            ("num_frames", matches!(self.frames, Some(FrameSampling::Count(_)))),
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
        let form = prop_oneof![Just(ItemForm::Plain), Just(ItemForm::TokenIds), Just(ItemForm::Embeddings)];
        let prompt = prop::option::of("[a-z=\n]{0,12}");
        let src_lang = prop::option::of("[a-z=\"\n]{0,3}");
        let rate = (1u32..9).prop_map(|thousandths| FrameSampling::Rate { thousandths });
        let frames = prop::option::of(prop_oneof![rate, (1u32..9).prop_map(FrameSampling::Count)]);
        (form, prompt, prop::option::of(0u64..20), any::<bool>(), src_lang, frames).prop_map(
            |(form, prompt, start_ms, vad, src_lang, frames)| ItemOptions {
                form,
                prompt,
                start_ms,
                vad,
                src_lang,
                frames,
            },
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

    #[test]
    fn a_rate_of_frames_is_read_to_the_thousandth() {
        let of = |fps| match FrameSampling::rate(fps) {
            Some(FrameSampling::Rate { thousandths }) => Some(thousandths),
            _ => None,
        };
        assert_eq!([of(2.0), of(0.3), of(29.97), of(1000.0)], [2000, 300, 29_970, 1_000_000].map(Some));
        let refused =
            [of(0.0), of(-1.0), of(0.0004), of(1.00049), of(1001.0), of(f64::NAN), of(f64::INFINITY)];
        assert_eq!(refused, [None; 7]);
    }

    proptest! {
        #[test]
        fn different_options_read_differently(a in options(), b in options()) {
            prop_assert_eq!(a == b, a.canonical() == b.canonical());
        }
    }
}
