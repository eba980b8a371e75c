//! Text that two successive transcripts of a growing audio agree on: LocalAgreement-2 (Macháček et al. 2023,
//! <https://arxiv.org/abs/2307.14743>).
//!
//! A transcript is of the audio since the last cut. Its first words that are as in the transcript before are certain, and go
//! out; what went out is never taken back. It knows words alone, no audio and no clock.

/// Certain words that are looked for where a transcript has written the beginning in other words than before.
const N_ANCHOR: usize = 5;
/// From this character on (CJK radicals and later), a character is a word: such scripts have no spaces.
const FIRST_WIDE: char = '\u{2E80}';

/// Words of the audio since the last cut.
#[derive(Clone, Debug, Default)]
pub(super) struct Agreement {
    /// Those that went out.
    certain: Vec<String>,
    /// Those of the last transcript that did not.
    open: Vec<String>,
    /// Words of the last transcript that are certain.
    n_certain: usize,
}

impl Agreement {
    /// Takes a transcript; returns the text that became certain by it.
    pub(super) fn observe(&mut self, transcript: &str) -> String {
        let words = words(transcript);
        let start = self.start_of_new(&words);
        let new = &words[start..];
        let n_agreed = self.open.iter().zip(new).take_while(|(a, b)| a == b).count();
        self.certain.extend_from_slice(&new[..n_agreed]);
        self.open = new[n_agreed..].to_vec();
        self.n_certain = start + n_agreed;
        new[..n_agreed].concat()
    }

    /// Takes the last transcript, all of which is certain; returns the text that did not go out. Then the audio is cut.
    pub(super) fn finish(&mut self, transcript: &str) -> String {
        let words = words(transcript);
        let rest = words[self.start_of_new(&words)..].concat();
        *self = Self::default();
        rest
    }

    /// True if the first words of the last transcript, which have this text, are all certain.
    pub(super) fn covers(&self, text: &str) -> bool {
        words(text).len() <= self.n_certain
    }

    /// The audio of the first words is cut off, which have this text in the last transcript and are certain.
    pub(super) fn cut(&mut self, text: &str) {
        let n_kept = self.n_certain.saturating_sub(words(text).len());
        self.certain.drain(..self.certain.len().saturating_sub(n_kept));
        self.n_certain = n_kept;
    }

    /// Index of the first word of a transcript that is behind the certain ones.
    ///
    /// It is their number, unless the last of them stand elsewhere: an anchor, the longest that is found, nearest to there.
    fn start_of_new(&self, words: &[String]) -> usize {
        let n_certain = self.certain.len();
        for len in (1..=N_ANCHOR.min(n_certain)).rev() {
            let anchor = &self.certain[n_certain - len..];
            let ends = (len..=words.len()).filter(|end| same(&words[end - len..*end], anchor));
            if let Some(end) = ends.min_by_key(|end| end.abs_diff(n_certain)) {
                return end;
            }
        }
        n_certain.min(words.len())
    }
}

/// True if words are the same but for white space, case and punctuation.
fn same(a: &[String], b: &[String]) -> bool {
    let plain = |word: &String| -> String {
        word.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
    };
    a.iter().map(plain).eq(b.iter().map(plain))
}

/// The words of a text, each with the white space before it.
fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    // True if a character that is no white space belongs to the last word.
    let mut goes_on = false;
    for c in text.chars() {
        let is_wide = c >= FIRST_WIDE && c.is_alphanumeric();
        let begins = match words.last() {
            None => true,
            Some(last) if c.is_whitespace() => !last.trim().is_empty(),
            Some(last) => !last.trim().is_empty() && (is_wide || !goes_on),
        };
        if begins {
            words.push(String::new());
        }
        if let Some(last) = words.last_mut() {
            last.push(c);
        }
        goes_on = !is_wide;
    }
    if words.last().is_some_and(|last| last.trim().is_empty()) {
        words.pop();
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Transcripts in their order, and the text that each makes certain.
    fn check(steps: &[(&str, &str)]) -> Agreement {
        let mut agreement = Agreement::default();
        for (transcript, expect) in steps {
            assert_eq!(agreement.observe(transcript), *expect, "{transcript}");
        }
        agreement
    }

    #[test]
    fn text_goes_out_when_two_transcripts_in_a_row_have_it() {
        let mut agreement = check(&[
            (" I", ""),
            (" I am", " I"),
            (" I am a doc", " am"),
            (" I am a doctor who", " a"),
            (" I am a doctor who came", " doctor who"),
        ]);
        assert_eq!(agreement.finish(" I am a doctor who came home."), " came home.");
        assert_eq!(agreement.finish(" New."), " New.", "what follows is other audio");
    }

    #[test]
    fn what_went_out_is_neither_repeated_nor_skipped_where_it_is_written_otherwise() {
        check(&[
            (" we are going to go", ""),
            (" we are going to go home", " we are going to go"),
            // One word less than went out.
            (" we are gonna go home now", " home"),
            (" We're going to go home now then", " now"),
        ]);
    }

    #[test]
    fn a_cut_leaves_what_is_behind_it() {
        let mut agreement = check(&[(" One. Two. Three", ""), (" One. Two. Three four", " One. Two. Three")]);
        assert!(agreement.covers(" One. Two.") && !agreement.covers(" One. Two. Three four"));
        agreement.cut(" One. Two.");
        assert_eq!(agreement.observe(" Three four five"), " four");
        assert_eq!(agreement.finish(" Three four five."), " five.");
    }

    #[test]
    fn scripts_without_spaces_have_a_word_in_each_character() {
        assert_eq!(words("今天 天气 ok, no"), ["今", "天", " 天", "气", " ok,", " no"]);
        check(&[("今天天", ""), ("今天天气", "今天天"), ("今天天气很好", "气")]);
        assert_eq!(words("  "), Vec::<String>::new());
        assert_eq!(words("a  b "), ["a", "  b"]);
    }

    #[test]
    fn an_empty_transcript_takes_nothing_back() {
        let mut agreement = check(&[(" a b", ""), (" a b", " a b"), ("", ""), (" a b c", "")]);
        assert_eq!(agreement.observe(" a b c d"), " c");
        assert_eq!(agreement.finish(""), "");
    }
}
