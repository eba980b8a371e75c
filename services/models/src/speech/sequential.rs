//! Long audio, window after window: segments of a window's tokens, and the start of the next window.
//!
//! A window ends at its last pair of times, so that no word is cut. If it ends with a single time, or none, nothing more
//! is in the window, and the next one begins at its end. The arithmetic is that of
//! transformers' long-form generation
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/whisper/generation_whisper.py>).
//! It is pure: decoding and its retries are the caller's.

use std::ops::Range;
use triptych_core::prompt::SpeechResume;

/// Milliseconds of a mel frame.
const FRAME_MS: u32 = 10;
/// Mel frames from one time in the vocabulary to the next.
const FRAMES_PER_TIME: u32 = 2;
/// Seconds from one time in the vocabulary to the next.
const TIME_STEP_S: f64 = 0.02;
/// A window decoded at this temperature or above is no prompt for the next one.
const HIGH_TEMPERATURE: f32 = 0.5;

/// A window of long audio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequentialWindow {
    /// Its start, in milliseconds.
    pub start_ms: u32,
    /// Length of the audio, in milliseconds.
    pub duration_ms: u32,
    /// The model's window, in milliseconds.
    pub window_ms: u32,
    /// Token of 0.00 s; later ones are later times.
    pub first_time: u32,
}

/// A segment as part of a window's tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct WindowSegment {
    /// Start in seconds of the whole audio.
    pub start_s: f64,
    /// End in seconds.
    pub end_s: f64,
    /// Its tokens, times included.
    pub tokens: Range<usize>,
}

/// Segments of a decoded window, and the start of the next window.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodedWindow {
    /// Its segments; their tokens are a prefix of the window's.
    pub segments: Vec<WindowSegment>,
    /// Start of the next window; `None` at the end of the audio.
    pub next_ms: Option<u32>,
}

impl SequentialWindow {
    /// Segments of `tokens`, which were generated freely for this window and hold no end token.
    pub fn decoded(&self, tokens: &[u32]) -> DecodedWindow {
        let is_time = |i: usize| tokens[i] >= self.first_time;
        let pairs: Vec<usize> = (1..tokens.len()).filter(|i| is_time(i - 1) && is_time(*i)).collect();
        let n = tokens.len();
        let single_ending = n >= 2 && is_time(n - 1) && !is_time(n - 2);
        let Some((last_pair, earlier)) = pairs.split_last() else {
            return DecodedWindow {
                segments: vec![self.whole(tokens)],
                next_ms: self.after(self.n_frames()),
            };
        };
        let mut ends = earlier.to_vec();
        // The closing time of the last segment is doubled unless its end is the end of the window.
        ends.extend(if single_ending { vec![*last_pair, n] } else { vec![last_pair + 1] });
        let mut segments = Vec::new();
        let mut first = 0;
        for (i, end) in ends.iter().enumerate() {
            let doubled = i + 1 == ends.len() && !single_ending;
            let closing = end - if doubled { 2 } else { 1 };
            segments.push(WindowSegment {
                start_s: self.time_s(tokens[first]),
                end_s: self.time_s(tokens[closing]),
                tokens: first..*end,
            });
            first = *end;
        }
        let advance = match single_ending {
            true => self.n_frames(),
            false => FRAMES_PER_TIME.saturating_mul(tokens[first - 2].saturating_sub(self.first_time)),
        };
        DecodedWindow { segments, next_ms: self.after(advance) }
    }

    /// Start of the next window after one without speech.
    pub fn skip(&self) -> Option<u32> {
        self.after(self.n_frames())
    }

    /// Frames of the whole audio. Samples at its end that fill no frame are none, as in the reference.
    fn total_frames(&self) -> u32 {
        self.duration_ms / FRAME_MS
    }

    /// Frame at which the window starts.
    fn start_frame(&self) -> u32 {
        self.start_ms / FRAME_MS
    }

    /// Frames of audio in the window. Audio shorter than a window is padded to it.
    fn n_frames(&self) -> u32 {
        let window = self.window_ms / FRAME_MS;
        self.total_frames().max(window).saturating_sub(self.start_frame()).min(window)
    }

    /// The whole window as one segment, up to its only time if it has one.
    fn whole(&self, tokens: &[u32]) -> WindowSegment {
        let time = tokens.iter().rfind(|t| **t >= self.first_time).filter(|t| **t != self.first_time);
        let start_s = f64::from(self.start_ms) / 1000.0;
        let full = f64::from(self.n_frames() / FRAMES_PER_TIME) * TIME_STEP_S;
        let end_s = time.map_or(start_s + full, |t| self.time_s(*t));
        WindowSegment { start_s, end_s, tokens: 0..tokens.len() }
    }

    fn time_s(&self, token: u32) -> f64 {
        let steps = token.saturating_sub(self.first_time);
        f64::from(self.start_ms) / 1000.0 + f64::from(steps) * TIME_STEP_S
    }

    /// Start of the window after `n_frames`. A window without progress would be decoded for ever; it is skipped.
    fn after(&self, n_frames: u32) -> Option<u32> {
        let n_frames = if n_frames == 0 { self.n_frames().max(1) } else { n_frames };
        let next = self.start_frame().saturating_add(n_frames);
        (next < self.total_frames()).then(|| next.saturating_mul(FRAME_MS))
    }
}

/// Limits on the previous tokens in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PreviousLimits {
    /// Token of 0.00 s; later ones are later times.
    pub first_time: u32,
    /// Tokens kept at most; the latest ones stay.
    pub max_tokens: usize,
}

/// Previous tokens for the prompt of the next window: `before`, and then the tokens of this window's segments.
pub fn previous_tokens(
    before: &[u32],
    tokens: &[u32],
    decoded: &DecodedWindow,
    limits: PreviousLimits,
) -> Vec<u32> {
    let PreviousLimits { first_time, max_tokens } = limits;
    let mut previous = before.to_vec();
    for segment in &decoded.segments {
        let part = tokens.get(segment.tokens.clone()).unwrap_or_default();
        // A doubled time closes this segment and opens the next, which will write it itself.
        let doubled = part.len() > 2 && part[part.len() - 2] >= first_time;
        previous.extend_from_slice(&part[..part.len() - usize::from(doubled)]);
    }
    previous.split_off(previous.len().saturating_sub(max_tokens))
}

/// Resumption after a window that was decoded at `temperature`.
pub fn resume(next_ms: u32, previous: Vec<u32>, temperature: f32) -> SpeechResume {
    SpeechResume { start_ms: next_ms, previous, conditioned: temperature < HIGH_TEMPERATURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T0: u32 = 100;
    const WINDOW: SequentialWindow =
        SequentialWindow { start_ms: 5_000, duration_ms: 70_000, window_ms: 30_000, first_time: T0 };

    fn check(
        window: SequentialWindow,
        tokens: &[u32],
        segments: &[(f64, f64, Range<usize>)],
        next_ms: Option<u32>,
    ) {
        let decoded = window.decoded(tokens);
        assert_eq!(decoded.next_ms, next_ms, "{tokens:?}");
        assert_eq!(decoded.segments.len(), segments.len(), "{decoded:?}");
        for (s, (start, end, tokens)) in decoded.segments.iter().zip(segments) {
            assert!((s.start_s - start).abs() < 1e-9 && (s.end_s - end).abs() < 1e-9, "{s:?}");
            assert_eq!(s.tokens, *tokens);
        }
    }

    #[test]
    fn a_window_ends_at_its_last_pair_of_times() {
        let tokens = [T0, 1, T0 + 100, T0 + 100, 2, T0 + 500, T0 + 500, 3];
        check(WINDOW, &tokens, &[(5.0, 7.0, 0..3), (7.0, 15.0, 3..7)], Some(15_000));
        let tokens = [T0, 1, T0 + 100, T0 + 100];
        check(WINDOW, &tokens, &[(5.0, 7.0, 0..4)], Some(7_000));
    }

    #[test]
    fn a_single_time_or_none_at_the_end_ends_the_whole_window() {
        let tokens = [T0, 1, T0 + 100, T0 + 150, 2, T0 + 500];
        check(WINDOW, &tokens, &[(5.0, 7.0, 0..3), (8.0, 15.0, 3..6)], Some(35_000));
        check(WINDOW, &[T0, 1, 2, T0 + 500], &[(5.0, 15.0, 0..4)], Some(35_000));
        check(WINDOW, &[T0, 1, 2], &[(5.0, 35.0, 0..3)], Some(35_000));
        check(WINDOW, &[], &[(5.0, 35.0, 0..0)], Some(35_000));
        let last = SequentialWindow { start_ms: 60_000, ..WINDOW };
        check(last, &[T0, 1, 2], &[(60.0, 70.0, 0..3)], None);
        assert_eq!((WINDOW.skip(), last.skip()), (Some(35_000), None));
    }

    #[test]
    fn short_audio_is_padded_to_a_window_and_ends_with_itself() {
        let short = SequentialWindow { start_ms: 0, duration_ms: 4_000, ..WINDOW };
        check(short, &[T0, 1], &[(0.0, 30.0, 0..2)], None);
        let tokens = [T0, 1, T0 + 100, T0 + 100, 2];
        check(short, &tokens, &[(0.0, 2.0, 0..4)], Some(2_000));
    }

    #[test]
    fn an_audio_ends_with_its_last_whole_frame() {
        // Lengths in ms, the start of the last window, and frames in it, by `n_samples // 160` of the reference.
        let table = [
            (30_000, 0, 3_000),
            (30_009, 0, 3_000),
            (30_010, 30_000, 1),
            (49_911, 30_000, 1_991),
            (49_919, 30_000, 1_991),
            (49_920, 30_000, 1_992),
            (60_001, 30_000, 3_000),
            (60_011, 60_000, 1),
            (89_999, 60_000, 2_999),
        ];
        for (duration_ms, last, n_frames) in table {
            let mut frame = SequentialWindow { start_ms: 0, duration_ms, ..WINDOW };
            while let Some(next) = frame.skip() {
                assert_eq!(frame.decoded(&[T0, 1]).next_ms, Some(next), "no time at the end: {duration_ms}");
                frame.start_ms = next;
            }
            assert_eq!((frame.start_ms, frame.n_frames()), (last, n_frames), "{duration_ms}");
            assert_eq!(frame.decoded(&[T0, 1, T0 + 5, T0 + 6, 2, T0 + 9]).next_ms, None, "{duration_ms}");
        }
        // A window that starts within a frame, where silence ended, begins with that frame.
        let late = SequentialWindow { start_ms: 20_007, duration_ms: 50_009, ..WINDOW };
        assert_eq!(late.skip(), None);
    }

    #[test]
    fn a_window_without_progress_is_skipped() {
        check(WINDOW, &[T0, T0, 1], &[(5.0, 5.0, 0..2)], Some(35_000));
    }

    #[test]
    fn previous_tokens_hold_no_doubled_times() {
        let tokens = [T0, 1, T0 + 100, T0 + 100, 2, T0 + 500, T0 + 500, 3];
        let decoded = WINDOW.decoded(&tokens);
        let all =
            previous_tokens(&[9], &tokens, &decoded, PreviousLimits { first_time: T0, max_tokens: 100 });
        assert_eq!(all, [9, T0, 1, T0 + 100, T0 + 100, 2, T0 + 500]);
        assert_eq!(
            previous_tokens(&[9], &tokens, &decoded, PreviousLimits { first_time: T0, max_tokens: 2 }),
            [2, T0 + 500]
        );
        assert!(resume(1, all.clone(), 0.4).conditioned && !resume(1, all, 0.6).conditioned);
    }
}
