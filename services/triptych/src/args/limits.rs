//! Flags of what one request may cost.

use clap::Args;
use std::ffi::OsString;
use std::time::Duration;
use triptych_core::limits::Limits;

/// Limits of a request.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Limits of a request; every process of a cluster needs the same")]
pub struct LimitArgs {
    /// MiB of an HTTP body or a gRPC message, items included
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_MAX_BODY_MIB", default_value_t = mib(Limits::default().max_body_bytes),
          value_parser = clap::value_parser!(u32).range(1..=2047))]
    pub max_body_mib: u32,
    /// MiB of an image, an audio clip, or a text for an encoder, sent or fetched
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_MAX_ITEM_MIB", default_value_t = mib(Limits::default().max_item_bytes),
          value_parser = clap::value_parser!(u32).range(1..=2047))]
    pub max_item_mib: u32,
    /// Items of a request
    #[arg(long, value_name = "N", env = "TRIPTYCH_MAX_ITEMS", default_value_t = Limits::default().max_items as u32,
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_items: u32,
    /// Pixels of an image, width times height, known before it is decoded
    #[arg(long, value_name = "N", env = "TRIPTYCH_MAX_IMAGE_PIXELS", default_value_t = Limits::default().max_image_pixels,
          value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub max_image_pixels: u64,
    /// Seconds of an audio clip
    #[arg(long, value_name = "S", env = "TRIPTYCH_MAX_AUDIO", default_value_t = Limits::default().max_audio.as_secs(),
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub max_audio: u64,
    /// Videos
    #[command(flatten)]
    pub video: VideoLimitArgs,
    /// Encoder outputs
    #[command(flatten)]
    pub object: ObjectLimitArgs,
    /// Seconds from a request's arrival to its last token
    #[arg(long, value_name = "S", env = "TRIPTYCH_REQUEST_TIMEOUT", default_value_t = Limits::default().max_request_time.as_secs(),
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub request_timeout: u64,
}

/// Limits of a video file, known before a frame is decoded.
#[derive(Args, Clone, Copy, Debug)]
pub struct VideoLimitArgs {
    /// Seconds of a video
    #[arg(long, value_name = "S", env = "TRIPTYCH_MAX_VIDEO", default_value_t = Limits::default().max_video.as_secs(),
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub max_video: u64,
    /// Frames of a video, sampled or not
    #[arg(long, value_name = "N", env = "TRIPTYCH_MAX_VIDEO_FRAMES", default_value_t = Limits::default().max_video_frames,
          value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub max_video_frames: u32,
    /// Pixels of all frames of a video, which bound the time of decoding
    #[arg(long, value_name = "N", env = "TRIPTYCH_MAX_VIDEO_PIXELS", default_value_t = Limits::default().max_video_pixels,
          value_parser = clap::value_parser!(u64).range(1..=1_000_000_000_000))]
    pub max_video_pixels: u64,
}

/// Limit of an encoder output, which stores need too.
#[derive(Args, Clone, Copy, Debug)]
pub struct ObjectLimitArgs {
    /// MiB of an encoder output in the store
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_MAX_OBJECT_MIB", default_value_t = mib(Limits::default().max_object_bytes),
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_object_mib: u32,
}

impl ObjectLimitArgs {
    /// The limit beside the defaults of the others.
    pub fn limits(&self) -> Limits {
        Limits { max_object_bytes: bytes(self.max_object_mib), ..Limits::default() }
    }

    /// The flag, for a child.
    pub fn to_flags(self) -> [OsString; 2] {
        ["--max-object-mib".into(), self.max_object_mib.to_string().into()]
    }
}

impl LimitArgs {
    /// The limits.
    pub fn limits(&self) -> Limits {
        Limits {
            max_body_bytes: bytes(self.max_body_mib),
            max_item_bytes: bytes(self.max_item_mib),
            max_items: self.max_items as usize,
            max_image_pixels: self.max_image_pixels,
            max_audio: Duration::from_secs(self.max_audio),
            max_video: Duration::from_secs(self.video.max_video),
            max_video_frames: self.video.max_video_frames,
            max_video_pixels: self.video.max_video_pixels,
            max_object_bytes: bytes(self.object.max_object_mib),
            max_request_time: Duration::from_secs(self.request_timeout),
        }
    }

    /// The flags, for a child.
    pub fn to_flags(self) -> Vec<OsString> {
        let flags = [
            ("--max-body-mib", self.max_body_mib.into()),
            ("--max-item-mib", self.max_item_mib.into()),
            ("--max-items", self.max_items.into()),
            ("--max-image-pixels", self.max_image_pixels),
            ("--max-audio", self.max_audio),
            ("--max-video", self.video.max_video),
            ("--max-video-frames", self.video.max_video_frames.into()),
            ("--max-video-pixels", self.video.max_video_pixels),
            ("--request-timeout", self.request_timeout),
        ];
        let own =
            flags.into_iter().flat_map(|(name, value): (&str, u64)| [name.into(), value.to_string().into()]);
        own.chain(self.object.to_flags()).collect()
    }
}

fn bytes(mib: u32) -> usize {
    (mib as usize).saturating_mul(1 << 20)
}

fn mib(bytes: usize) -> u32 {
    u32::try_from(bytes >> 20).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        limits: LimitArgs,
    }

    #[test]
    fn limits_are_the_defaults_unless_they_are_set_and_a_child_has_them() {
        let defaults = Flags::parse_from(["x"]).limits;
        assert_eq!(defaults.limits(), Limits::default());
        let flags = ["x", "--max-body-mib", "200", "--max-item-mib", "150", "--max-items", "40"];
        let more = ["--max-image-pixels", "9000", "--max-audio", "7200", "--max-object-mib", "700"];
        let video = ["--max-video", "60", "--max-video-frames", "99", "--max-video-pixels", "12345"];
        let all = flags.into_iter().chain(more).chain(video).chain(["--request-timeout", "900"]);
        let set = Flags::parse_from(all).limits;
        let expect = Limits {
            max_body_bytes: 200 << 20,
            max_item_bytes: 150 << 20,
            max_items: 40,
            max_image_pixels: 9000,
            max_audio: Duration::from_secs(7200),
            max_video: Duration::from_secs(60),
            max_video_frames: 99,
            max_video_pixels: 12_345,
            max_object_bytes: 700 << 20,
            max_request_time: Duration::from_secs(900),
        };
        assert_eq!(set.limits(), expect);
        let child = Flags::parse_from(std::iter::once(OsString::from("x")).chain(set.to_flags()));
        assert_eq!(child.limits.limits(), expect);
    }

    #[test]
    fn a_limit_of_nothing_is_refused() {
        for flag in ["--max-body-mib", "--max-items", "--request-timeout", "--max-audio"] {
            assert!(Flags::try_parse_from(["x", flag, "0"]).is_err(), "{flag}");
        }
    }
}
