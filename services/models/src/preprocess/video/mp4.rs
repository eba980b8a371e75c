//! The video track of an MP4: its packets, in the order in which they are decoded.

use super::codec::AvcDecoder;
use super::facts::{FrameSink, READ, VideoFacts, too_many_frames};
use crate::error::ItemError;
use crate::preprocess::image::{self, RgbPixels};
use std::io::Cursor;
use symphonia::core::codecs::video::well_known::extra_data::VIDEO_EXTRA_DATA_ID_AVC_DECODER_CONFIG;
use symphonia::core::codecs::video::well_known::{
    CODEC_ID_AV1, CODEC_ID_H264, CODEC_ID_HEVC, CODEC_ID_MPEG1, CODEC_ID_MPEG2, CODEC_ID_MPEG4, CODEC_ID_VP8,
    CODEC_ID_VP9,
};
use symphonia::core::codecs::video::{CODEC_ID_NULL_VIDEO, VideoCodecParameters};
use symphonia::core::errors::Error;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatReader, Track, TrackType};
use symphonia::core::io::MediaSourceStream;
use triptych_core::limits::Limits;

/// Packets of a track.
type Packets = Vec<Box<[u8]>>;

/// A video track.
pub(super) struct Mp4 {
    codec: TrackCodec,
    packets: Packets,
    /// Size, as its headers declare it.
    pub facts: VideoFacts,
}

/// The codec of a track.
enum TrackCodec {
    H264(Box<AvcDecoder>),
    Jpeg,
}

impl Mp4 {
    /// Reads the track's packets, and decodes none of them but the first of motion JPEG.
    ///
    /// # Errors
    /// [`ItemError`] for a file without a video track, a codec that is not read, or too many frames.
    pub fn open(bytes: &[u8], limits: &Limits) -> Result<Self, ItemError> {
        let corrupt = |e: Error| ItemError::Corrupt(format!("the MP4 file cannot be read: {e}"));
        let stream = MediaSourceStream::new(Box::new(Cursor::new(bytes)), Default::default());
        let mut format = symphonia::default::get_probe()
            .probe(&Hint::new(), stream, Default::default(), Default::default())
            .map_err(corrupt)?;
        let no_video = || ItemError::Unsupported(format!("the MP4 file has no video track; {READ}"));
        let track = video_track(&*format).ok_or_else(no_video)?;
        let params = track.codec_params.as_ref().and_then(|params| params.video()).cloned();
        let (id, time_base) = (track.id, track.time_base);
        let (packets, ticks) = packets(&mut *format, id, [bytes.len(), limits.max_video_frames as usize])?;
        if packets.len() > limits.max_video_frames as usize {
            return too_many_frames(packets.len(), limits);
        }
        let tick = time_base.map_or(0.0, |base| f64::from(base.numer.get()) / f64::from(base.denom.get()));
        let fps = packets.len() as f64 / (ticks as f64 * tick);
        let (codec, size) = codec(params.as_ref(), &packets, limits)?;
        let facts = VideoFacts { n_frames: packets.len(), fps, size, is_sampled: false };
        Ok(Self { codec, packets, facts })
    }

    /// Decodes up to the last frame wanted.
    ///
    /// # Errors
    /// [`ItemError`] for what does not decode; those of `sink`.
    pub fn decode(
        self,
        wanted: &[usize],
        limits: &Limits,
        sink: &mut FrameSink<'_>,
    ) -> Result<(), ItemError> {
        match self.codec {
            TrackCodec::H264(decoder) => decoder.decode(&self.packets, wanted, sink),
            TrackCodec::Jpeg => {
                wanted.iter().filter_map(|idx| self.packets.get(*idx)).try_for_each(|packet| {
                    let frame: RgbPixels = image::decode(packet, limits)?;
                    sink(frame)
                })
            }
        }
    }
}

/// The first track of video; one of an unknown codec may be motion JPEG.
fn video_track(format: &dyn FormatReader) -> Option<&Track> {
    let is_unknown =
        |track: &&Track| track.codec_params.as_ref().is_none_or(|params| params.video().is_some());
    format.default_track(TrackType::Video).or_else(|| format.tracks().iter().find(is_unknown))
}

/// Packets of a track, and the sum of their durations in ticks; no more than `most`, and one. Tables of a hostile file may name
/// the same bytes many times: all packets together have no more than `n_bytes`, the file's.
fn packets(
    format: &mut dyn FormatReader,
    track: u32,
    [n_bytes, most]: [usize; 2],
) -> Result<(Packets, u64), ItemError> {
    let (mut packets, mut total, mut ticks) = (Vec::new(), 0_usize, 0_u64);
    while packets.len() <= most {
        let packet = match format.next_packet() {
            Ok(Some(packet)) => packet,
            Ok(None) => break,
            Err(e) => return Err(ItemError::Corrupt(format!("the MP4 file ends early: {e}"))),
        };
        total = total.saturating_add(packet.data.len().max(1));
        if total > n_bytes {
            return Err(ItemError::Corrupt("the packets of the MP4 file overlap".into()));
        }
        if packet.track_id == track {
            ticks = ticks.saturating_add(packet.dur.get());
            packets.push(packet.data);
        }
    }
    Ok((packets, ticks))
}

/// The decoder of a track, and the size of its frames.
fn codec(
    params: Option<&VideoCodecParameters>,
    packets: &[Box<[u8]>],
    limits: &Limits,
) -> Result<(TrackCodec, image::ImageSize), ItemError> {
    let first = packets.first().ok_or_else(|| ItemError::Empty("the video has no frames".into()))?;
    if first.starts_with(&[0xff, 0xd8, 0xff]) {
        return Ok((TrackCodec::Jpeg, image::decode(first, limits)?.size));
    }
    let id = params.map_or(CODEC_ID_NULL_VIDEO, |params| params.codec);
    if id != CODEC_ID_H264 {
        let name = match id {
            CODEC_ID_HEVC => "H.265",
            CODEC_ID_AV1 => "AV1",
            CODEC_ID_VP8 => "VP8",
            CODEC_ID_VP9 => "VP9",
            CODEC_ID_MPEG4 => "MPEG-4 part 2",
            CODEC_ID_MPEG1 | CODEC_ID_MPEG2 => "MPEG-1 or MPEG-2",
            _ => "a codec that is not known",
        };
        return Err(ItemError::Unsupported(format!("the video is {name} in MP4; {READ}")));
    }
    let config = params.into_iter().flat_map(|params| &params.extra_data);
    let config =
        config.filter(|data| data.id == VIDEO_EXTRA_DATA_ID_AVC_DECODER_CONFIG).map(|d| &*d.data).next();
    let config = config.ok_or_else(|| ItemError::Corrupt("the MP4 file has H.264 without avcC".into()))?;
    let decoder = AvcDecoder::new(config)?;
    let size = decoder.size();
    Ok((TrackCodec::H264(Box::new(decoder)), size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// The checksum of RFC 1950.
    fn adler32(parts: [&[u8]; 3]) -> u64 {
        let (a, b) = parts.into_iter().flatten().fold((1, 0), |(a, b), byte| {
            let a = (a + u64::from(*byte)) % 65_521;
            (a, (b + a) % 65_521)
        });
        b << 16 | a
    }

    #[test]
    fn planes_are_those_of_another_decoder_to_the_bit() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/video");
        let read = |name: &str| std::fs::read(dir.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let facts: serde_json::Value = serde_json::from_slice(&read("media.json")).expect("JSON");
        for name in ["high.mp4", "baseline.mp4"] {
            let expect: Vec<u64> = serde_json::from_value(facts[name]["adler32"].clone()).expect("checksums");
            let Mp4 { codec, packets, facts } = Mp4::open(&read(name), &Limits::default()).expect("a video");
            assert_eq!((facts.n_frames, facts.fps), (expect.len(), 12.0), "{name}");
            let TrackCodec::H264(decoder) = codec else { panic!("{name} is not H.264") };
            let wanted: Vec<usize> = (0..expect.len()).collect();
            let mut sums = Vec::new();
            let mut sink = |frame: &super::super::yuv::YuvFrame| {
                sums.push(adler32([&frame.luma, &frame.chroma[0], &frame.chroma[1]]));
                Ok(())
            };
            decoder.planes(&packets, &wanted, &mut sink).expect("frames");
            assert_eq!(sums, expect, "{name}");
        }
    }
}
