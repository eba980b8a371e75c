//! Limits on everything whose size a client or a store decides, defined once so that every stage agrees.

use std::time::Duration;

/// Limits of a request and its items. The defaults suit one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest HTTP body or gRPC message in bytes. Default 64 MiB.
    pub max_body_bytes: usize,
    /// Largest item (image or audio file) in bytes. Default 32 MiB.
    pub max_item_bytes: usize,
    /// Most items in a request. Default 16.
    pub max_items: usize,
    /// Largest image in pixels, width times height, checked before anything is allocated. Default 50 million.
    pub max_image_pixels: u64,
    /// Longest audio clip. Default 30 minutes.
    pub max_audio: Duration,
    /// Longest video. Default 30 minutes.
    pub max_video: Duration,
    /// Most frames of a video file, sampled or not, checked before any is decoded. Default 36,000.
    pub max_video_frames: u32,
    /// Most pixels of all frames of a video file, checked before any is decoded: what bounds the time of decoding. Default
    /// 2 billion, which are 32 s of 1080p at 30 frames a second, or 3 minutes of 480p at 24.
    pub max_video_pixels: u64,
    /// Largest EC object in bytes. Default 512 MiB.
    pub max_object_bytes: usize,
    /// Longest time from a request's arrival to its last token. Default 120 s.
    pub max_request_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_body_bytes: 64 << 20,
            max_item_bytes: 32 << 20,
            max_items: 16,
            max_image_pixels: 50_000_000,
            max_audio: Duration::from_secs(30 * 60),
            max_video: Duration::from_secs(30 * 60),
            max_video_frames: 36_000,
            max_video_pixels: 2_000_000_000,
            max_object_bytes: 512 << 20,
            max_request_time: Duration::from_secs(120),
        }
    }
}
