//! Windows of long audio.
//!
//! A window ends with the longest pause of its last third, so that no word is cut, nothing is encoded twice, and the next
//! window starts with speech. Only without a pause do two windows overlap, by a third as in transformers' chunked pipeline,
//! and their texts are joined by the tokens they share: overlapping everywhere would encode one and a half times as much.

use super::vad::{FRAME_MS, FrameLevels};
use triptych_core::WindowSpan;

/// Sizes, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSizes {
    /// The whole audio.
    pub duration_ms: u32,
    /// A window.
    pub window_ms: u32,
    /// A rest shorter than this after the last window is left out.
    pub least_ms: u32,
}

/// Handling of silence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SilencePolicy {
    /// All audio is in a window.
    Read,
    /// A window starts where speech starts, and ends where it ends.
    Skip,
}

/// The windows of audio longer than one, or without its silence; at least one. Audio without speech has one window of no
/// length at its end.
pub fn windows(levels: &FrameLevels, frame: WindowSizes, silence: SilencePolicy) -> Vec<WindowSpan> {
    let ranges = match silence {
        SilencePolicy::Read => std::iter::once(0..frame.duration_ms).collect(),
        SilencePolicy::Skip => levels.speech(),
    };
    let mut spans = Vec::new();
    let mut start = 0;
    let mut from = 0;
    while let Some((begin, end)) = next_range(&ranges, start) {
        let (window, next) = window(levels, frame, begin.max(from), end_of(&ranges, begin, end, frame));
        spans.push(window);
        (start, from) = (next, next);
        if frame.duration_ms.saturating_sub(next) < frame.least_ms.max(1) {
            break;
        }
    }
    if spans.is_empty() {
        spans.push(WindowSpan { start_ms: frame.duration_ms, end_ms: frame.duration_ms });
    }
    spans
}

/// The first range that ends after `from`, from there on.
fn next_range(ranges: &[std::ops::Range<u32>], from: u32) -> Option<(u32, u32)> {
    ranges.iter().find(|r| r.end > from).map(|r| (r.start.max(from), r.end))
}

/// The end of the last range that begins within a window of `begin`: pauses inside a window are kept.
fn end_of(ranges: &[std::ops::Range<u32>], begin: u32, end: u32, frame: WindowSizes) -> u32 {
    let reach = begin.saturating_add(frame.window_ms);
    ranges.iter().filter(|r| r.start < reach).map(|r| r.end).fold(end, u32::max).min(frame.duration_ms)
}

/// A window from `start` over audio that lasts to `end`, and the earliest start of the next one.
fn window(levels: &FrameLevels, frame: WindowSizes, start: u32, end: u32) -> (WindowSpan, u32) {
    let reach = start.saturating_add(frame.window_ms);
    if end < reach.saturating_add(frame.least_ms.max(1)) {
        return (WindowSpan { start_ms: start, end_ms: end.min(reach) }, end.max(start + 1));
    }
    let third = frame.window_ms / 3;
    let frames = |ms: u32| ms as usize / FRAME_MS;
    let (at, pause) = levels.cut(frames(reach - third)..frames(reach));
    if pause {
        let cut = u32::try_from(at * FRAME_MS).unwrap_or(reach).clamp(start + 1, reach);
        return (WindowSpan { start_ms: start, end_ms: cut }, cut);
    }
    (WindowSpan { start_ms: start, end_ms: reach }, reach - third)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: WindowSizes = WindowSizes { duration_ms: 70_000, window_ms: 30_000, least_ms: 20 };

    /// Speech with pauses at these seconds.
    fn levels(seconds: usize, pauses: &[std::ops::Range<f32>]) -> FrameLevels {
        let at = |i: usize| i as f32 / 100.0;
        let level = |i: usize| if pauses.iter().any(|p| p.contains(&at(i))) { -80.0 } else { -20.0 };
        FrameLevels { db: (0..seconds * 100).map(level).collect(), threshold: -50.0 }
    }

    fn check(levels: &FrameLevels, frame: WindowSizes, silence: SilencePolicy, expect: &[[u32; 2]]) {
        let found: Vec<[u32; 2]> =
            windows(levels, frame, silence).iter().map(|s| [s.start_ms, s.end_ms]).collect();
        assert_eq!(found, expect);
    }

    #[test]
    fn windows_end_with_the_longest_pause_of_their_last_third() {
        let audio = levels(70, &[10.0..12.0, 22.0..23.0, 27.0..27.5, 45.0..45.4]);
        check(&audio, FRAME, SilencePolicy::Read, &[[0, 22_800], [22_800, 45_200], [45_200, 70_000]]);
    }

    #[test]
    fn without_a_pause_windows_overlap_by_a_third() {
        check(
            &levels(70, &[]),
            FRAME,
            SilencePolicy::Read,
            &[[0, 30_000], [20_000, 50_000], [40_000, 70_000]],
        );
    }

    #[test]
    fn audio_that_just_fits_is_one_window_and_a_codecs_padding_is_no_window() {
        let short = WindowSizes { duration_ms: 30_000, ..FRAME };
        check(&levels(30, &[]), short, SilencePolicy::Read, &[[0, 30_000]]);
        let padded = WindowSizes { duration_ms: 30_015, ..FRAME };
        check(&levels(31, &[]), padded, SilencePolicy::Read, &[[0, 30_000]]);
    }

    #[test]
    fn without_silence_a_window_starts_where_speech_starts() {
        let audio = levels(70, &[0.0..5.0, 12.0..40.0, 50.0..70.0]);
        check(&audio, FRAME, SilencePolicy::Skip, &[[4_800, 12_200], [39_800, 50_200]]);
        check(&levels(70, &[0.0..70.0]), FRAME, SilencePolicy::Skip, &[[70_000, 70_000]]);
        // A pause inside a window is read.
        let audio = levels(20, &[0.0..2.0, 6.0..9.0]);
        let frame = WindowSizes { duration_ms: 20_000, ..FRAME };
        check(&audio, frame, SilencePolicy::Skip, &[[1_800, 20_000]]);
    }

    #[test]
    fn all_audio_is_in_a_window() {
        for seed in 0..40u32 {
            let pause = |k: u32| {
                let at = (seed.wrapping_mul(2_654_435_761).wrapping_add(k * 40_503) >> 8) % 9_000;
                at as f32 / 100.0..at as f32 / 100.0 + 0.4
            };
            let audio = levels(100, &(0..seed % 9).map(pause).collect::<Vec<_>>());
            let frame = WindowSizes { duration_ms: 100_000, ..FRAME };
            let spans = windows(&audio, frame, SilencePolicy::Read);
            assert_eq!((spans[0].start_ms, spans.last().map(|s| s.end_ms)), (0, Some(100_000)));
            for pair in spans.windows(2) {
                assert!(
                    pair[1].start_ms <= pair[0].end_ms && pair[0].start_ms < pair[1].start_ms,
                    "{spans:?}"
                );
            }
            assert!(spans.iter().all(|s| s.end_ms - s.start_ms <= 30_000), "{spans:?}");
        }
    }
}
