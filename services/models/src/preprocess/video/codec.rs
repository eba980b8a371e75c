//! H.264 packets of an MP4 to frames in the order of display.
//!
//! Frames leave the decoder in the order of decoding. They wait until no later one can come before them: an IDR frame shows all
//! that wait, and no stream holds back more than the frames of its level's buffer (ITU-T H.264, C.4.5.3). Field coding, other
//! chroma than 4:2:0 and more than 8 bits are refused by the decoder, by name.

use super::facts::{FrameSink, READ};
use super::yuv::YuvFrame;
use crate::error::ItemError;
use crate::preprocess::image::ImageSize;
use rusty_h264_common::nal::emulation_unprevent;
use rusty_h264_decoder::{DecodeError, Decoder, Sps};

/// Squares of 16 by 16 pixels of the largest frame: those of level 5.2.
const MAX_SQUARES: usize = 36_864;
/// Such squares of all frames that a stream of level 5.2 holds back.
const BUFFERED_SQUARES: usize = 184_320;
/// Frames that a stream of any level holds back at most.
const MAX_BUFFERED: usize = 16;

const START_CODE: [u8; 4] = [0, 0, 0, 1];
const SPS: u8 = 7;
const IDR: u8 = 5;

/// Takes the wanted frames, in order.
type PlaneSink<'s> = dyn FnMut(&YuvFrame) -> Result<(), ItemError> + 's;

/// A decoder that has its parameter sets.
pub(super) struct AvcDecoder {
    decoder: Decoder,
    /// Bytes of the length before a unit of a packet.
    length_bytes: usize,
    size: ImageSize,
    /// Frames that wait for an earlier one at most.
    n_buffered: usize,
}

impl AvcDecoder {
    /// Reads an `AVCDecoderConfigurationRecord` (ISO/IEC 14496-15).
    ///
    /// # Errors
    /// [`ItemError`] for a record that is none, and for a stream that is not decoded.
    pub fn new(config: &[u8]) -> Result<Self, ItemError> {
        let corrupt = || ItemError::Corrupt("the avcC of the MP4 file does not decode".into());
        let sets = parameter_sets(config).ok_or_else(corrupt)?;
        let first = sets.iter().find(|unit| kind(unit) == Some(SPS)).ok_or_else(corrupt)?;
        let sps = checked_sps(first)?;
        let size = display_size(&sps).ok_or_else(corrupt)?;
        let n_squares = (sps.pic_width_in_mbs * sps.pic_height_in_mbs).max(1);
        let mut decoder = Self {
            decoder: Decoder::new(),
            length_bytes: usize::from(config.get(4).ok_or_else(corrupt)? & 3) + 1,
            size,
            n_buffered: (BUFFERED_SQUARES / n_squares).clamp(1, MAX_BUFFERED),
        };
        decoder.feed(&sets)?;
        Ok(decoder)
    }

    /// Pixels of a frame.
    pub fn size(&self) -> ImageSize {
        self.size
    }

    /// Decodes packets up to the last of the frames `wanted`, ascending in the order of display.
    ///
    /// # Errors
    /// [`ItemError`] for what does not decode; those of `sink`.
    pub fn decode(
        self,
        packets: &[Box<[u8]>],
        wanted: &[usize],
        sink: &mut FrameSink<'_>,
    ) -> Result<(), ItemError> {
        let cut_off = || ItemError::Corrupt("a frame of the video is cut off".into());
        self.planes(packets, wanted, &mut |frame| sink(frame.to_rgb().ok_or_else(cut_off)?))
    }

    /// The same, as planes.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn planes(
        mut self,
        packets: &[Box<[u8]>],
        wanted: &[usize],
        sink: &mut PlaneSink<'_>,
    ) -> Result<(), ItemError> {
        let mut shown = Shown { n_shown: 0, wanted, sink };
        let mut waiting: Vec<(i32, YuvFrame)> = Vec::new();
        for (i, packet) in packets.iter().enumerate() {
            let units = units(packet, self.length_bytes)
                .ok_or_else(|| ItemError::Corrupt(format!("packet {i} of the video is cut off")))?;
            if units.iter().any(|unit| kind(unit) == Some(IDR)) {
                shown.all(&mut waiting)?;
            }
            if let Some(frame) = self.feed(&units)? {
                waiting.push((self.decoder.last_poc(), frame));
            }
            if waiting.len() > self.n_buffered {
                shown.earliest(&mut waiting)?;
            }
            if shown.wanted.is_empty() {
                return Ok(());
            }
        }
        shown.all(&mut waiting)
    }

    /// Decodes the units of a packet.
    fn feed(&mut self, units: &[&[u8]]) -> Result<Option<YuvFrame>, ItemError> {
        for unit in units.iter().filter(|unit| kind(unit) == Some(SPS)) {
            // Later frames may be declared larger than the first: the decoder takes their memory at once.
            if display_size(&checked_sps(unit)?) != Some(self.size) {
                return Err(ItemError::Unsupported("the size of the video's frames changes".into()));
            }
        }
        let access_unit: Vec<u8> =
            units.iter().flat_map(|unit| START_CODE.iter().chain(*unit)).copied().collect();
        let Some(frame) = self.decoder.decode(&access_unit).map_err(refused)? else { return Ok(None) };
        let size = ImageSize { width: frame.width as u32, height: frame.height as u32 };
        Ok(Some(YuvFrame { size, luma: frame.y, chroma: [frame.u, frame.v] }))
    }
}

/// Frames that were shown, and those still wanted.
struct Shown<'a, 's> {
    n_shown: usize,
    wanted: &'a [usize],
    sink: &'a mut PlaneSink<'s>,
}

impl Shown<'_, '_> {
    /// Shows the earliest of the frames that wait.
    fn earliest(&mut self, waiting: &mut Vec<(i32, YuvFrame)>) -> Result<(), ItemError> {
        let earliest = waiting.iter().enumerate().min_by_key(|(_, (order, _))| *order);
        let Some((at, _)) = earliest else { return Ok(()) };
        let (_, frame) = waiting.swap_remove(at);
        if let Some((first, rest)) = self.wanted.split_first()
            && *first == self.n_shown
        {
            self.wanted = rest;
            (self.sink)(&frame)?;
        }
        self.n_shown += 1;
        Ok(())
    }

    /// Shows all frames that wait.
    fn all(&mut self, waiting: &mut Vec<(i32, YuvFrame)>) -> Result<(), ItemError> {
        while !waiting.is_empty() {
            self.earliest(waiting)?;
        }
        Ok(())
    }
}

/// Kind of a unit.
fn kind(unit: &[u8]) -> Option<u8> {
    Some(unit.first()? & 31)
}

fn checked_sps(unit: &[u8]) -> Result<Sps, ItemError> {
    let sps = Sps::parse(&emulation_unprevent(unit.get(1..).unwrap_or_default())).map_err(refused)?;
    let n_squares = sps.pic_width_in_mbs.saturating_mul(sps.pic_height_in_mbs);
    if n_squares > MAX_SQUARES {
        return Err(ItemError::TooLarge {
            what: "a frame of the video",
            actual: format!("{}x{}", sps.coded_width(), sps.coded_height()),
            limit: format!("{MAX_SQUARES} squares of 16x16 pixels, those of level 5.2"),
        });
    }
    Ok(sps)
}

fn display_size(sps: &Sps) -> Option<ImageSize> {
    let [width, height] = [sps.display_width(), sps.display_height()].map(u32::try_from);
    Some(ImageSize { width: width.ok()?, height: height.ok()? })
        .filter(|size| size.width > 0 && size.height > 0)
}

fn refused(e: DecodeError) -> ItemError {
    match e {
        DecodeError::Unsupported(what) => {
            ItemError::Unsupported(format!("the video is H.264 with {what}, which is not decoded; {READ}"))
        }
        e => ItemError::Corrupt(format!("the video is H.264 that does not decode: {e}")),
    }
}

/// The parameter sets of a configuration record: of the sequence, then of frames.
fn parameter_sets(config: &[u8]) -> Option<Vec<&[u8]>> {
    let mut sets = Vec::new();
    let mut rest = config.get(5..)?;
    for count_bits in [31, 255] {
        let (count, behind) = rest.split_first()?;
        rest = behind;
        for _ in 0..count & count_bits {
            let (set, behind) = prefixed(rest, 2)?;
            sets.push(set);
            rest = behind;
        }
    }
    Some(sets)
}

/// The units of a packet.
fn units(packet: &[u8], length_bytes: usize) -> Option<Vec<&[u8]>> {
    let mut units = Vec::new();
    let mut rest = packet;
    while !rest.is_empty() {
        let (unit, behind) = prefixed(rest, length_bytes)?;
        units.push(unit);
        rest = behind;
    }
    Some(units)
}

/// Bytes behind their length, and what follows them.
fn prefixed(bytes: &[u8], length_bytes: usize) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_at_checked(length_bytes)?;
    rest.split_at_checked(length.iter().fold(0, |n, byte| n << 8 | usize::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_read_by_their_lengths() {
        assert_eq!(units(&[0, 1, 9, 0, 0, 0, 2, 8, 7], 2), Some(vec![&[9][..], &[], &[8, 7]]));
        assert_eq!(units(&[0, 2, 9], 2), None);
        assert_eq!(units(&[0xff; 5], 4), None);
        let sets = parameter_sets(&[1, 66, 0, 30, 0xff, 0xe1, 0, 2, 7, 1, 1, 0, 1, 8]);
        assert_eq!(sets, Some(vec![&[7, 1][..], &[8]]));
        assert_eq!(parameter_sets(&[1, 66, 0, 30, 0xff, 0xe1, 0, 2, 7, 1]), None);
    }

    #[test]
    fn frames_are_shown_by_their_order_and_only_those_wanted() {
        let size = ImageSize { width: 2, height: 2 };
        let frame = |luma: u8| YuvFrame { size, luma: vec![luma; 4], chroma: [vec![128], vec![128]] };
        let mut seen = Vec::new();
        let mut sink = |frame: &YuvFrame| {
            seen.push(frame.luma[0]);
            Ok(())
        };
        let mut shown = Shown { n_shown: 0, wanted: &[1, 2], sink: &mut sink };
        let mut waiting = vec![(4, frame(235)), (0, frame(16)), (2, frame(60))];
        shown.earliest(&mut waiting).unwrap();
        shown.all(&mut waiting).unwrap();
        assert!(shown.wanted.is_empty());
        assert_eq!(seen, [60, 235]);
    }
}
