//! Tokens of a speech window to segments with times, as the tokens come.
//!
//! The grammar is Whisper's: `<|start|> words <|end|><|start|> words <|end|>`, times relative to the window
//! (<https://github.com/openai/whisper/blob/v20240930/whisper/transcribe.py>). It knows no text: a segment holds tokens.

use crate::prompt::{OutputKind, PreparedSequence};

/// Seconds between two times next to each other in the vocabulary.
const TIME_STEP_S: f64 = 0.02;

/// Speech from one time to another, in seconds of the whole audio.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// Start, in seconds.
    pub start_s: f64,
    /// End, in seconds; never before the start, never after the window's audio.
    pub end_s: f64,
    /// Text tokens, without times, task tokens and end tokens.
    pub tokens: Vec<u32>,
    /// Index of the first of them among the freely generated tokens of the window; they are consecutive.
    pub first_token: usize,
}

/// Collects the generated tokens of one window into segments.
#[derive(Clone, Debug)]
pub struct Segmenter {
    /// Token of 0.00 s; `None`: the window is one segment.
    first_time: Option<u32>,
    offset_s: f64,
    limit_s: f64,
    /// Generated tokens that are still task tokens.
    n_steps_left: usize,
    end_tokens: Vec<u32>,
    /// Freely generated tokens so far.
    n_free: usize,
    open: Segment,
}

impl Segmenter {
    /// Starts a window. `None` if the sequence is not speech.
    pub fn for_sequence(sequence: &PreparedSequence) -> Option<Self> {
        let OutputKind::Speech { offset_s, end_s, timestamps } = sequence.output else { return None };
        let first_time = sequence.rules.timestamps.as_ref().filter(|_| timestamps).map(|rule| rule.first);
        Some(Self {
            first_time,
            offset_s,
            limit_s: end_s.max(offset_s),
            n_steps_left: sequence.rules.steps.len(),
            end_tokens: sequence.end_tokens.clone(),
            n_free: 0,
            open: Segment { start_s: offset_s, end_s: offset_s, tokens: Vec::new(), first_token: 0 },
        })
    }

    /// Adds a generated token. Returns the segment that it closes.
    pub fn push(&mut self, token: u32) -> Option<Segment> {
        if self.n_steps_left > 0 {
            self.n_steps_left -= 1;
            return None;
        }
        if self.end_tokens.contains(&token) {
            return None;
        }
        let place = self.n_free;
        self.n_free += 1;
        match self.first_time.and_then(|first| token.checked_sub(first)) {
            None => {
                if self.open.tokens.is_empty() {
                    self.open.first_token = place;
                }
                self.open.tokens.push(token);
                None
            }
            Some(steps) => {
                let time = (self.offset_s + f64::from(steps) * TIME_STEP_S).min(self.limit_s);
                self.mark(time)
            }
        }
    }

    /// Ends the window. Returns the open segment, which lasts to the end of the window's audio.
    pub fn finish(mut self) -> Option<Segment> {
        let end = self.limit_s;
        self.mark(end)
    }

    /// A time closes a segment that has words, and opens one otherwise.
    fn mark(&mut self, time_s: f64) -> Option<Segment> {
        let next = Segment { start_s: time_s, end_s: time_s, tokens: Vec::new(), first_token: self.n_free };
        let mut closed = std::mem::replace(&mut self.open, next);
        closed.end_s = time_s.max(closed.start_s);
        (!closed.tokens.is_empty()).then_some(closed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::LogitRules;
    use crate::speech::timestamps::TimestampRule;

    const T0: u32 = 100;

    fn segmenter(timestamps: bool, n_steps: usize) -> Segmenter {
        let rule = TimestampRule { first: T0, no_timestamps: 99, end: 50, max_initial: None };
        let rules = LogitRules {
            steps: vec![[1].into(); n_steps],
            timestamps: timestamps.then_some(rule),
            ..LogitRules::default()
        };
        Segmenter::for_sequence(&PreparedSequence {
            tokens: vec![51],
            positions: vec![[0; 3]],
            next_position: 1,
            spans: Vec::new(),
            cross: Vec::new(),
            rules,
            end_tokens: vec![50],
            output: OutputKind::Speech { offset_s: 30.0, end_s: 31.0, timestamps },
        })
        .unwrap()
    }

    fn check(mut segmenter: Segmenter, tokens: &[u32], expect: &[(f64, f64, &[u32])]) {
        let mut got: Vec<Segment> = tokens.iter().filter_map(|t| segmenter.push(*t)).collect();
        got.extend(segmenter.finish());
        let got: Vec<_> = got.iter().map(|s| (s.start_s, s.end_s, s.tokens.as_slice())).collect();
        assert_eq!(got.len(), expect.len(), "{got:?}");
        for (g, e) in got.iter().zip(expect) {
            assert!((g.0 - e.0).abs() < 1e-9 && (g.1 - e.1).abs() < 1e-9 && g.2 == e.2, "{g:?} {e:?}");
        }
    }

    #[test]
    fn a_closing_time_emits_the_segment_at_once() {
        let mut live = segmenter(true, 2);
        let emitted: Vec<bool> =
            [7, 8, T0, 1, 2, T0 + 10, T0 + 10].iter().map(|t| live.push(*t).is_some()).collect();
        assert_eq!(emitted, [false, false, false, false, false, true, false]);
    }

    #[test]
    fn times_become_segments_of_the_whole_audio() {
        check(
            segmenter(true, 0),
            &[T0, 1, 2, T0 + 10, T0 + 10, 3, T0 + 25, 50],
            &[(30.0, 30.2, &[1, 2]), (30.2, 30.5, &[3])],
        );
        // Cut off: the open segment lasts to the end.
        check(segmenter(true, 0), &[T0, 1, T0 + 10, T0 + 15, 2], &[(30.0, 30.2, &[1]), (30.3, 31.0, &[2])]);
        // Past the audio, backwards, doubled, and without words.
        check(segmenter(true, 0), &[T0 + 30, 1, T0 + 500, 2], &[(30.6, 31.0, &[1]), (31.0, 31.0, &[2])]);
        check(segmenter(true, 0), &[T0 + 30, 1, T0 + 10], &[(30.6, 30.6, &[1])]);
        check(segmenter(true, 0), &[T0, T0, 1, T0 + 5], &[(30.0, 30.1, &[1])]);
        check(segmenter(true, 0), &[T0, T0 + 5, 50], &[]);
        check(segmenter(true, 0), &[], &[]);
    }

    #[test]
    fn without_times_a_window_is_one_segment() {
        check(segmenter(false, 1), &[9, 1, 2, 50], &[(30.0, 31.0, &[1, 2])]);
        check(segmenter(false, 0), &[50], &[]);
    }
}
