//! The language that Qwen3-ASR writes before a transcript, taken off: `language English<asr_text>Hello.`
//!
//! As transformers' `Qwen3ASRProcessor.parse_output` does it
//! (<https://github.com/huggingface/transformers/blob/v5.13.0/src/transformers/models/qwen3_asr/processing_qwen3_asr.py>), for text
//! that comes in pieces: what may become the tag is held back, all else is passed on at once. Text of other models never has the
//! mark. Repetitions of characters, which that function also shortens, stay as the model wrote them.

/// Before the name of a language.
const BEFORE: &str = "language ";
/// Behind it.
const MARK: &str = "<asr_text>";
/// Longest name, in bytes.
const MAX_NAME: usize = 32;

/// A reader of one transcript.
#[derive(Debug)]
pub(super) enum LanguageTag {
    /// The start of the transcript, which may be a tag.
    Held(String),
    /// The tag is behind, or there is none.
    Passed,
}

impl Default for LanguageTag {
    fn default() -> Self {
        Self::Held(String::new())
    }
}

impl LanguageTag {
    /// The text of the transcript in the next piece of an answer.
    pub(super) fn read(&mut self, piece: String) -> String {
        let Self::Held(held) = self else { return piece };
        held.push_str(&piece);
        let start = held.trim_start();
        let text = match tag_of(start) {
            Tag::Whole(n_bytes) => start[n_bytes..].to_owned(),
            Tag::Begun => return String::new(),
            Tag::Absent => std::mem::take(held),
        };
        *self = Self::Passed;
        text
    }

    /// The text held back at the end of an answer, which is no tag.
    pub(super) fn rest(&mut self) -> String {
        match std::mem::replace(self, Self::Passed) {
            Self::Held(held) => held,
            Self::Passed => String::new(),
        }
    }
}

/// The tag at the start of a text.
enum Tag {
    /// All of it, so many bytes.
    Whole(usize),
    /// A part, or nothing yet.
    Begun,
    /// None.
    Absent,
}

fn tag_of(text: &str) -> Tag {
    let Some(rest) = text.strip_prefix(BEFORE) else {
        return if BEFORE.starts_with(text) { Tag::Begun } else { Tag::Absent };
    };
    let n_name = rest.bytes().take_while(u8::is_ascii_alphabetic).count();
    let (name, mark) = rest.split_at(n_name);
    if n_name > MAX_NAME || name.starts_with(|first: char| first.is_ascii_lowercase()) {
        return Tag::Absent;
    }
    if n_name > 0 && mark.starts_with(MARK) {
        return Tag::Whole(BEFORE.len() + n_name + MARK.len());
    }
    match mark.is_empty() || (n_name > 0 && MARK.starts_with(mark)) {
        true => Tag::Begun,
        false => Tag::Absent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pieces that come out for those that go in, and what is left at the end.
    fn read(pieces: &[&str]) -> Vec<String> {
        let mut tag = LanguageTag::default();
        let mut out: Vec<String> = pieces.iter().map(|piece| tag.read((*piece).to_owned())).collect();
        out.push(tag.rest());
        out
    }

    #[test]
    fn a_tag_is_taken_off_wherever_it_is_cut() {
        let whole = "language English<asr_text>It is <asr_text> cold.";
        for at in (0..=whole.len()).filter(|at| whole.is_char_boundary(*at)) {
            let (first, second) = whole.split_at(at);
            assert_eq!(read(&[first, second]).concat(), "It is <asr_text> cold.", "{at}");
        }
        assert_eq!(read(&["language ", "None", "<asr", "_text>", ""]).concat(), "");
        assert_eq!(read(&["language Chinese<asr_text>你好", "。"]), ["你好", "。", ""]);
    }

    #[test]
    fn text_that_is_no_tag_is_passed_on_as_soon_as_that_is_known() {
        assert_eq!(read(&["Hello", " there"]), ["Hello", " there", ""]);
        assert_eq!(read(&["language is", " hard"]), ["language is", " hard", ""]);
        assert_eq!(read(&["lang", "ish"]), ["", "langish", ""]);
        assert_eq!(read(&["language English", "<b>"]), ["", "language English<b>", ""]);
        assert_eq!(read(&["language <asr_text>a"]), ["language <asr_text>a", ""]);
        assert_eq!(read(&[" language Eng"]), ["", " language Eng"]);
        let long = format!("language {}", "A".repeat(MAX_NAME + 1));
        assert_eq!(read(&[&long]), [long.as_str(), ""]);
    }
}
