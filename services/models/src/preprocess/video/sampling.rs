//! The frames that are taken of a video, and their times.

use super::facts::VideoFacts;
use super::settings::{VideoKind, VideoSettings};
use crate::error::ItemError;
use std::sync::Arc;
use triptych_core::{FrameSampling, Seconds};

/// Frames that are taken of a video.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sampled {
    /// Indices in the order of display, ascending, none of them twice.
    pub frames: Vec<usize>,
    /// Time from one temporal patch to the next, on average.
    pub interval: Seconds,
    /// Time of each temporal patch: the mean of those of its first and last frame, where the last of all is repeated.
    pub times: Arc<[Seconds]>,
}

/// Frames that a request or the processor asks for.
#[derive(Clone, Copy, Debug)]
enum Wanted {
    /// So many a second.
    Rate(f64),
    /// So many.
    Count(u32),
}

impl Sampled {
    /// The frames of a video; of one that is sampled already, all.
    ///
    /// # Errors
    /// [`ItemError`] if it has too few frames for the sampling.
    pub fn of(
        facts: &VideoFacts,
        settings: &VideoSettings,
        asked: Option<FrameSampling>,
    ) -> Result<Self, ItemError> {
        let total = facts.n_frames;
        let most = settings.max_frames as usize;
        if facts.is_sampled && total > most {
            return Err(ItemError::TooLarge {
                what: "the list of frames",
                actual: format!("{total} frames"),
                limit: format!("{most} frames, the model's max_frames"),
            });
        }
        let frames = match facts.is_sampled {
            true => (0..total).collect(),
            false => indices(facts, settings, asked)?,
        };
        let fps = facts.fps;
        let patch = settings.image.temporal_patch_size as usize;
        if frames.len() < patch && !facts.is_sampled || frames.is_empty() {
            let text = format!("the video has {total} frames, {patch} or more are needed");
            return Err(ItemError::Unsupported(text));
        }
        let seconds = |value: f64| {
            let text = || ItemError::Corrupt("the video's frames have no times".into());
            Seconds::new(value).ok_or_else(text)
        };
        let time = |of: &[usize]| -> Result<Seconds, ItemError> {
            let at = |i: usize| of.get(i).or(of.last()).map_or(0.0, |idx| *idx as f64 / fps);
            seconds((at(0) + at(patch - 1)) / 2.0)
        };
        let times = frames.chunks(patch.max(1)).map(time).collect::<Result<_, _>>()?;
        let sampled_fps = frames.len() as f64 / total as f64 * fps;
        Ok(Self { interval: seconds(patch as f64 / sampled_fps)?, times, frames })
    }
}

/// The frames that the processor's `sample_frames` takes, in the arithmetic of Python.
fn indices(
    facts: &VideoFacts,
    settings: &VideoSettings,
    asked: Option<FrameSampling>,
) -> Result<Vec<usize>, ItemError> {
    let total = facts.n_frames;
    let wanted = match (asked, settings.num_frames) {
        (Some(FrameSampling::Count(n)), _) | (None, Some(n)) => Wanted::Count(n),
        (Some(FrameSampling::Rate { thousandths }), _) => Wanted::Rate(f64::from(thousandths) / 1000.0),
        (None, None) => Wanted::Rate(settings.fps),
    };
    let patch = f64::from(settings.image.temporal_patch_size);
    let [least, most, all] =
        [settings.min_frames as usize, settings.max_frames as usize, total].map(|n| n as f64);
    let whole = |n: f64| (n / patch).floor() * patch;
    let n = match (wanted, settings.kind) {
        (Wanted::Count(n), kind) => {
            let n = match kind {
                VideoKind::PerFrame => (f64::from(n) / patch).round_ties_even() * patch,
                VideoKind::OverFrames => f64::from(n),
            };
            if n > all || n > most {
                return Err(ItemError::TooLarge {
                    what: "num_frames",
                    actual: format!("{n}"),
                    limit: format!("{}, of {total} frames of the video and max_frames {most}", all.min(most)),
                });
            }
            n
        }
        (Wanted::Rate(fps), kind) => {
            let n = all / facts.fps * fps;
            match kind {
                VideoKind::PerFrame => whole(n.max(least).min(whole(most.min(all))).min(all)),
                VideoKind::OverFrames => n.trunc().max(least).min(most).min(all),
            }
        }
    };
    let n = n as usize;
    let at = |i: usize| match settings.kind {
        // A range of floats in single precision, cut.
        VideoKind::PerFrame => (i as f64 * (all / n as f64)) as f32 as usize,
        VideoKind::OverFrames if i + 1 == n => total - 1,
        VideoKind::OverFrames => (i as f64 * ((all - 1.0) / (n as f64 - 1.0))).round_ties_even() as usize,
    };
    let last = total.saturating_sub(1);
    let mut frames: Vec<usize> = (0..n).map(|i| if n == 1 { 0 } else { at(i).min(last) }).collect();
    frames.dedup();
    Ok(frames)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preprocess::image::ImageSize;
    use serde_json::Value;
    use std::path::Path;

    fn settings(kind: VideoKind, keys: &Value) -> VideoSettings {
        let dir = tempfile::tempdir().expect("a folder");
        let mut keys = keys.clone();
        // Without the key, large videos share fewer pixels than in the reference.
        if keys.get("cap_pixels_per_frame").is_none() {
            keys["cap_pixels_per_frame"] = false.into();
        }
        std::fs::write(dir.path().join("video_preprocessor_config.json"), keys.to_string()).expect("a file");
        VideoSettings::from_dir(dir.path(), kind).expect("settings")
    }

    #[test]
    fn frames_times_and_sizes_are_the_references() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/video/sampling.json");
        let bytes = std::fs::read(path).expect("a golden file");
        let records: Vec<Value> = serde_json::from_slice(&bytes).expect("JSON");
        assert!(records.len() > 80);
        for record in &records {
            let kind = match record["kind"].as_str() {
                Some("per_frame") => VideoKind::PerFrame,
                _ => VideoKind::OverFrames,
            };
            let settings = settings(kind, &record["settings"]);
            let number = |value: &Value| value.as_u64().expect("a number") as usize;
            let [height, width] = [0, 1].map(|i| number(&record["size"][i]) as u32);
            let facts = VideoFacts {
                n_frames: number(&record["n_frames"]),
                fps: record["fps"].as_f64().expect("a rate"),
                size: ImageSize { width, height },
                is_sampled: false,
            };
            let got = Sampled::of(&facts, &settings, None);
            let expect = &record["expect"];
            if expect.is_null() {
                assert!(got.is_err(), "{record}");
                continue;
            }
            let got = got.unwrap_or_else(|e| panic!("{e}: {record}"));
            let frames: Vec<usize> =
                expect["frames"].as_array().expect("frames").iter().map(number).collect();
            assert_eq!(got.frames, frames, "{record}");
            let times: Vec<String> = got.times.iter().map(|time| format!("{:.1}", time.get())).collect();
            assert_eq!(serde_json::json!(times), expect["times"], "{record}");
            // Numbers of JSON are read to their last bit but one.
            let interval = expect["interval"].as_f64().expect("an interval");
            assert!((got.interval.get() / interval - 1.0).abs() < 4e-15, "{record}");
            let size = settings.target(facts.size, got.frames.len()).expect("a size");
            assert_eq!(serde_json::json!([size.height, size.width]), expect["size"], "{record}");
        }
    }

    #[test]
    fn a_request_asks_for_a_rate_or_a_number() {
        let settings = settings(VideoKind::PerFrame, &serde_json::json!({}));
        let size = ImageSize { width: 64, height: 64 };
        let facts = VideoFacts { n_frames: 100, fps: 25.0, size, is_sampled: false };
        let n = |asked| Sampled::of(&facts, &settings, asked).map(|sampled| sampled.frames.len());
        assert_eq!(n(None), Ok(8));
        assert_eq!(n(FrameSampling::rate(5.0)), Ok(20));
        assert_eq!(n(FrameSampling::count(11)), Ok(12));
        assert!(n(FrameSampling::count(101)).is_ok_and(|n| n == 100));
        let refused = n(FrameSampling::count(200)).unwrap_err().to_string();
        assert!(refused.contains("num_frames is 200, the limit is 100"), "{refused}");
        let list = VideoFacts { is_sampled: true, n_frames: 3, ..facts };
        assert_eq!(Sampled::of(&list, &settings, None).map(|sampled| sampled.frames), Ok(vec![0, 1, 2]));
        let long = VideoFacts { n_frames: 769, ..list };
        assert!(Sampled::of(&long, &settings, None).is_err());
    }
}
