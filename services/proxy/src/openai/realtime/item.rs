//! An item of a session: audio between two commits, and the text of it so far.
//!
//! Audio is transcribed from the last cut on. It is cut behind the last segment whose text is certain, once it is long; where
//! no segment tells a place, before it exceeds a window of the model, and then all of its text is certain. It knows no sockets
//! and asks nobody.

use super::agreement::Agreement;
use super::audio;
use super::transcript::Transcript;
use bytes::Bytes;

/// Seconds of new audio after which it is transcribed again.
const STEP_S: f64 = 1.0;
/// Seconds of audio from which on it is cut where a segment ends.
const CUT_S: f64 = 15.0;
/// Most seconds of audio that are transcribed at once: less than a window of 30 s.
const PART_S: f64 = 28.0;
/// Least seconds of audio of an item, as OpenAI has it.
const LEAST_S: f64 = 0.1;
/// Most characters of the text before a cut that prompt the transcript behind it.
const CONTEXT_CHARS: usize = 200;
/// As in `agreement`: texts in these characters have no spaces.
const FIRST_WIDE: char = '\u{2E80}';

/// An item: audio, and its text so far.
#[derive(Debug)]
pub(super) struct LiveItem {
    pub(super) id: String,
    /// True once the client ended it.
    pub(super) is_committed: bool,
    rate: u32,
    /// Audio since the last cut.
    samples: Vec<i16>,
    /// Samples of it that were transcribed.
    n_heard: usize,
    /// Samples before it.
    n_cut: u64,
    agreement: Agreement,
    /// Text that went out.
    text: String,
    /// Text of the audio before the last cut, as far as it prompts the next transcript.
    context: String,
    is_after_cut: bool,
}

/// Progress of an item by a transcript.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Progress {
    /// Text that goes out.
    pub(super) delta: String,
    /// True if it is the last of the item.
    pub(super) is_complete: bool,
}

impl LiveItem {
    /// An item without audio.
    pub(super) fn new(id: String, rate: u32) -> Self {
        Self {
            id,
            is_committed: false,
            rate,
            samples: Vec::new(),
            n_heard: 0,
            n_cut: 0,
            agreement: Agreement::default(),
            text: String::new(),
            context: String::new(),
            is_after_cut: false,
        }
    }

    /// Adds audio.
    pub(super) fn push(&mut self, samples: &[i16]) {
        self.samples.extend_from_slice(samples);
    }

    /// Seconds of audio that wait or may be transcribed again.
    pub(super) fn held_s(&self) -> f64 {
        self.seconds(self.samples.len())
    }

    /// Seconds of all its audio.
    pub(super) fn duration_s(&self) -> f64 {
        (self.n_cut as f64 + self.samples.len() as f64) / f64::from(self.rate)
    }

    /// True if it is too short to be committed.
    pub(super) fn is_too_short(&self) -> bool {
        self.duration_s() < LEAST_S
    }

    /// True if it is committed, and all its audio was cut: nothing is left to transcribe.
    pub(super) fn is_done(&self) -> bool {
        self.is_committed && self.samples.is_empty()
    }

    /// Its text, all of it once it is complete.
    pub(super) fn text(&self) -> &str {
        self.text.trim()
    }

    /// Text before its audio, for models that are prompted with it.
    pub(super) fn context(&self) -> &str {
        self.context.trim()
    }

    /// Samples to transcribe next; `None`: it waits for more audio.
    pub(super) fn next_part(&self) -> Option<usize> {
        let n = self.samples.len().min(self.n_samples(PART_S));
        let is_full = n >= self.n_samples(PART_S);
        let has_new = n - self.n_heard.min(n) >= self.n_samples(STEP_S);
        (self.is_committed || is_full || has_new).then_some(n)
    }

    /// The first `n` samples as a file.
    pub(super) fn part(&self, n: usize) -> Bytes {
        audio::wav(self.samples.get(..n).unwrap_or(&self.samples), self.rate)
    }

    /// Takes the transcript of the first `n` samples.
    pub(super) fn heard(&mut self, n: usize, transcript: &Transcript) -> Progress {
        let is_complete = self.is_committed && n == self.samples.len();
        if is_complete {
            let delta = self.agreement.finish(&transcript.text);
            self.drop_front(n);
            return Progress { delta: self.append(delta), is_complete };
        }
        let delta = self.agreement.observe(&transcript.text);
        let mut delta = self.append(delta);
        self.n_heard = n;
        let is_cut = self.seconds(n) >= CUT_S && self.cut_at_segment(n, transcript);
        if !is_cut && n >= self.n_samples(PART_S) {
            let rest = self.agreement.finish(&transcript.text);
            delta += &self.append(rest);
            self.context = self.text.clone();
            self.drop_front(n);
        }
        Progress { delta, is_complete }
    }

    /// Cuts the audio behind the last segment whose text is certain. False if there is none.
    fn cut_at_segment(&mut self, n: usize, transcript: &Transcript) -> bool {
        let mut text = String::new();
        let mut found = None;
        for segment in &transcript.segments {
            text.push_str(&segment.text);
            let end = self.n_samples(segment.end_s.clamp(0.0, PART_S)).min(n);
            if !self.agreement.covers(&text) {
                break;
            }
            if end > 0 {
                found = Some((end, text.clone()));
            }
        }
        let Some((end, text)) = found else { return false };
        self.agreement.cut(&text);
        self.context.push_str(&text);
        self.drop_front(end);
        true
    }

    fn drop_front(&mut self, n: usize) {
        self.samples.drain(..n.min(self.samples.len()));
        self.n_cut += n as u64;
        self.n_heard = 0;
        self.is_after_cut = true;
        let n_chars = self.context.chars().count().saturating_sub(CONTEXT_CHARS);
        self.context = self.context.chars().skip(n_chars).collect();
    }

    /// Adds text; returns what goes out of it: without white space at the beginning of the item, and with a space where
    /// a model's text begins without one behind a cut.
    fn append(&mut self, text: String) -> String {
        let mut delta = text;
        if self.text.is_empty() {
            delta = delta.trim_start().to_owned();
        } else if self.is_after_cut
            && !self.text.ends_with(char::is_whitespace)
            && delta.starts_with(|c: char| !c.is_whitespace() && c < FIRST_WIDE)
        {
            delta.insert(0, ' ');
        }
        if !delta.is_empty() {
            self.is_after_cut = false;
        }
        self.text.push_str(&delta);
        delta
    }

    fn seconds(&self, n: usize) -> f64 {
        n as f64 / f64::from(self.rate)
    }

    fn n_samples(&self, seconds: f64) -> usize {
        // Seconds are at most those of a part.
        (seconds * f64::from(self.rate)) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::super::transcript::TranscriptSegment;
    use super::*;

    const RATE: u32 = 100;

    fn item() -> LiveItem {
        LiveItem::new("item".into(), RATE)
    }

    /// Transcribes what is due, with a text, and segments by their ends.
    fn hear(item: &mut LiveItem, text: &str, segments: &[(f64, &str)]) -> Progress {
        let n = item.next_part().expect("audio is due");
        let segment = |(end_s, text): &(f64, &str)| TranscriptSegment { end_s: *end_s, text: (*text).into() };
        let segments = segments.iter().map(segment).collect();
        item.heard(n, &Transcript { text: text.into(), segments })
    }

    fn goes_out(delta: &str) -> Progress {
        Progress { delta: delta.into(), is_complete: false }
    }

    #[test]
    fn audio_is_due_by_the_second_and_at_the_commit() {
        let mut item = item();
        assert!(item.next_part().is_none() && item.is_too_short());
        item.push(&[0; 99]);
        assert_eq!(item.next_part(), None);
        item.push(&[0]);
        assert_eq!(hear(&mut item, " one two", &[]), goes_out(""));
        assert_eq!(item.next_part(), None);
        item.push(&[0; 100]);
        assert_eq!(hear(&mut item, " one two three", &[]), goes_out("one two"));
        item.push(&[0; 3]);
        item.is_committed = true;
        assert_eq!(
            hear(&mut item, " one two three four", &[]),
            Progress { delta: " three four".into(), is_complete: true }
        );
        assert_eq!((item.text(), item.duration_s()), ("one two three four", 2.03));
    }

    #[test]
    fn long_audio_is_cut_behind_a_segment_that_is_certain() {
        let mut item = item();
        item.push(&[0; 1600]);
        let segments = [(7.5, " One."), (12.0, " Two."), (16.0, " Three")];
        assert_eq!(hear(&mut item, " One. Two. Three", &segments), goes_out(""));
        item.push(&[0; 100]);
        assert_eq!(hear(&mut item, " One. Two. Thirty", &segments), goes_out("One. Two."));
        assert_eq!((item.held_s(), item.context()), (5.0, "One. Two."));
        item.push(&[0; 100]);
        assert_eq!(hear(&mut item, " Thirty four", &[]), goes_out(" Thirty"));
        item.is_committed = true;
        assert_eq!(hear(&mut item, " Thirty four.", &[]).delta, " four.");
        assert_eq!((item.text(), item.duration_s()), ("One. Two. Thirty four.", 18.0));
    }

    #[test]
    fn audio_of_which_nothing_is_certain_is_cut_before_a_window_is_full() {
        let mut item = item();
        item.push(&[0; 6000]);
        assert_eq!(item.next_part(), Some(2800));
        assert_eq!(hear(&mut item, "Lorem ipsum", &[]), goes_out("Lorem ipsum"));
        assert_eq!((item.held_s(), item.context()), (32.0, "Lorem ipsum"));
        assert_eq!(hear(&mut item, "dolor", &[]), goes_out(" dolor"));
        item.is_committed = true;
        assert_eq!(hear(&mut item, "", &[]), Progress { delta: String::new(), is_complete: true });
        assert_eq!((item.text(), item.duration_s()), ("Lorem ipsum dolor", 60.0));
    }
}
