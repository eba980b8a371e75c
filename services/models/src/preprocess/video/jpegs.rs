//! JPEGs one after another: a list of frames that a client took itself.

use super::facts::{FrameSink, VideoFacts, too_many_frames};
use crate::error::ItemError;
use crate::preprocess::image::{ImageSize, decode};
use triptych_core::limits::Limits;

/// A list of JPEGs.
pub(super) struct JpegFrames<'a> {
    frames: Vec<&'a [u8]>,
    /// Size of the first, at a rate that is not in the bytes.
    pub facts: VideoFacts,
}

impl<'a> JpegFrames<'a> {
    /// Finds the frames; decodes none but the first.
    ///
    /// # Errors
    /// [`ItemError`] for bytes that are no JPEGs, or too many.
    pub fn open(bytes: &'a [u8], fps: f64, limits: &Limits) -> Result<Self, ItemError> {
        let mut frames = Vec::new();
        let mut rest = bytes;
        while !rest.is_empty() {
            let len = jpeg_len(rest).ok_or_else(|| {
                ItemError::Corrupt(format!("frame {} of the list is no whole JPEG", frames.len()))
            })?;
            let (frame, behind) = rest.split_at(len);
            frames.push(frame);
            if frames.len() > limits.max_video_frames as usize {
                return too_many_frames(frames.len(), limits);
            }
            rest = behind;
        }
        let size = match frames.first() {
            Some(first) => decode(first, limits)?.size,
            None => ImageSize { width: 0, height: 0 },
        };
        let facts = VideoFacts { n_frames: frames.len(), fps, size, is_sampled: true };
        Ok(Self { frames, facts })
    }

    /// Decodes all frames.
    ///
    /// # Errors
    /// [`ItemError`] for one that does not decode; those of `sink`.
    pub fn decode(self, limits: &Limits, sink: &mut FrameSink<'_>) -> Result<(), ItemError> {
        self.frames.iter().try_for_each(|frame| sink(decode(frame, limits)?))
    }
}

/// Bytes of the JPEG that `bytes` begin with, from its first marker to its last; `None` if it has no end.
fn jpeg_len(bytes: &[u8]) -> Option<usize> {
    const START: [u8; 2] = [0xff, 0xd8];
    if !bytes.starts_with(&START) {
        return None;
    }
    let mut at = START.len();
    loop {
        let (0xff, kind) = (*bytes.get(at)?, *bytes.get(at + 1)?) else { return None };
        match kind {
            // Fill before a marker.
            0xff => at += 1,
            0xd9 => return Some(at + 2),
            // Markers without a segment.
            0x01 | 0xd0..=0xd7 => at += 2,
            0x00 | 0xd8 => return None,
            _ => {
                let len = [*bytes.get(at + 2)?, *bytes.get(at + 3)?];
                at += 2 + usize::from(u16::from_be_bytes(len)).max(2);
                if kind == 0xda {
                    at += scan_len(bytes.get(at..)?)?;
                }
            }
        }
    }
}

/// Bytes of entropy-coded data up to the next marker, where an escaped byte and a restart are none.
fn scan_len(bytes: &[u8]) -> Option<usize> {
    bytes.windows(2).position(|pair| pair[0] == 0xff && !matches!(pair[1], 0x00 | 0xd0..=0xd7))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jpeg_ends_where_its_end_marker_is_not_data() {
        // A segment and a scan that hold end markers, escaped or by length.
        let jpeg = [
            &[0xff, 0xd8, 0xff, 0xe0, 0, 4, 0xff, 0xd9][..],
            &[0xff, 0xda, 0, 3, 1, 7, 0xff, 0x00, 0xd9, 0xff, 0xd0, 8, 0xff, 0xff, 0xd9],
        ]
        .concat();
        let len = Some(jpeg.len());
        assert_eq!(jpeg_len(&jpeg), len);
        assert_eq!(jpeg_len(&[jpeg.clone(), jpeg.clone()].concat()), len);
        for cut in 0..jpeg.len() {
            assert_eq!(jpeg_len(&jpeg[..cut]), None, "{cut}");
        }
        assert_eq!(jpeg_len(&[0xff, 0xd8, 0, 0, 0]), None);
    }
}
