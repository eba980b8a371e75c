//! Small files that would become large: each is refused, or read, within the limits and in little time.
//!
//! The memory that they cost a process is measured from outside, in `tests/e2e/attacks.rs`.

use super::*;
use crate::images::crc32;
use flate2::Compression;
use flate2::write::ZlibEncoder;
use std::io::Write;
use std::time::{Duration, Instant};
use triptych_core::Modality;

/// Longer than any of these may take in an unoptimised build on a busy machine, and far less than a bomb would.
const TIME: Duration = Duration::from_secs(60);

/// Preprocesses, in bounded time; the error's text, if it is refused.
fn outcome(modality: Modality, bytes: &[u8], limits: &Limits) -> Result<(), String> {
    let start = Instant::now();
    let options = ItemOptions::default();
    let outcome = match modality {
        Modality::Image => {
            ImageProcessor::new(image_settings(3136, 100_352)).preprocess(modality, bytes, &options, limits)
        }
        _ => AudioProcessor::new(WHISPER).preprocess(modality, bytes, &options, limits),
    };
    assert!(start.elapsed() < TIME, "took {:?}", start.elapsed());
    match outcome {
        Ok(_) => Ok(()),
        Err(e) => Err(e.to_string()),
    }
}

fn image(bytes: &[u8]) -> Result<(), String> {
    outcome(Modality::Image, bytes, &Limits::default())
}

fn decode_audio(bytes: &[u8]) -> Result<(), String> {
    outcome(Modality::Audio, bytes, &Limits { max_audio: Duration::from_secs(60), ..Limits::default() })
}

fn refused(outcome: Result<(), String>, expect: &str) {
    let text = outcome.expect_err(expect);
    assert!(text.contains(expect), "{expect:?} is not in: {text}");
}

fn zlib_of_zeros(n: usize) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    let block = vec![0; 1 << 20];
    for _ in 0..n >> 20 {
        encoder.write_all(&block).unwrap();
    }
    encoder.write_all(&block[..n & ((1 << 20) - 1)]).unwrap();
    encoder.finish().unwrap()
}

/// A PNG of these sides, 8-bit RGB, with chunks between its header and its end.
fn png(width: u32, height: u32, chunks: &[(&[u8; 4], &[u8])]) -> Vec<u8> {
    let header = [&width.to_be_bytes()[..], &height.to_be_bytes(), &[8, 2, 0, 0, 0]].concat();
    let mut bytes = b"\x89PNG\r\n\x1a\n".to_vec();
    let all =
        [(b"IHDR", header.as_slice())].into_iter().chain(chunks.iter().copied()).chain([(b"IEND", &[][..])]);
    for (kind, data) in all {
        bytes.extend((data.len() as u32).to_be_bytes());
        let body = [kind.as_slice(), data].concat();
        bytes.extend(&body);
        bytes.extend(crc32(&body).to_be_bytes());
    }
    bytes
}

#[test]
fn png_bombs() {
    let small = zlib_of_zeros((4 * 3 + 1) * 4);
    // Pixels that inflate to far more than the header declares: what is declared is read.
    let _ = image(&png(4, 4, &[(b"IDAT", &zlib_of_zeros(64 << 20))]));
    // A profile and a text that inflate to 64 MiB beside sixteen pixels.
    let bomb = zlib_of_zeros(64 << 20);
    let profile = [b"x\0\0".as_slice(), &bomb].concat();
    let _ = image(&png(4, 4, &[(b"iCCP", &profile), (b"IDAT", &small)]));
    let text = [b"Comment\0\0".as_slice(), &bomb].concat();
    let _ = image(&png(4, 4, &[(b"zTXt", &text), (b"IDAT", &small)]));
    for (width, height) in
        [(u32::MAX, u32::MAX), (u32::MAX, 1), (1, u32::MAX), (100_000, 100_000), (0x8000_0000, 2)]
    {
        assert!(image(&png(width, height, &[(b"IDAT", &small)])).is_err(), "{width}x{height}");
    }
    assert!(image(&png(0, 7, &[(b"IDAT", &small)])).is_err());
}

/// A baseline JPEG made by our own encoder, to be bent.
fn jpeg() -> Vec<u8> {
    let mut bytes = Vec::new();
    let pixels = ::image::RgbImage::from_fn(16, 16, |x, y| ::image::Rgb([x as u8 * 16, y as u8 * 16, 9]));
    ::image::codecs::jpeg::JpegEncoder::new(&mut bytes).encode_image(&pixels).unwrap();
    bytes
}

/// Offset of a marker's segment.
fn segment(bytes: &[u8], marker: u8) -> usize {
    bytes.windows(2).position(|w| w == [0xff, marker]).unwrap()
}

#[test]
fn jpeg_bombs() {
    let whole = jpeg();
    let frame = segment(&whole, 0xc0);
    let mut huge = whole.clone();
    huge[frame + 5..frame + 9].copy_from_slice(&[0xff; 4]);
    refused(image(&huge), "65535x65535");
    // The same frame as progressive, with one empty scan after another.
    let mut scans = whole.clone();
    scans[frame + 1] = 0xc2;
    scans[frame + 5..frame + 9].copy_from_slice(&[0x10, 0x00, 0x10, 0x00]);
    let scan = [0xff, 0xda, 0, 8, 1, 1, 0, 0, 0, 0].repeat(50_000);
    let at = segment(&scans, 0xda);
    scans.splice(at.., scan);
    let _ = image(&scans);
    // A comment that is longer than the file.
    let mut comment = whole[..2].to_vec();
    comment.extend([0xff, 0xfe, 0xff, 0xff]);
    comment.extend(&whole[2..]);
    assert!(image(&comment).is_err());
}

#[test]
fn gif_and_webp_bombs() {
    let gif = |width: u16, height: u16, frames: usize| {
        let mut bytes = b"GIF89a".to_vec();
        bytes.extend(width.to_le_bytes());
        bytes.extend(height.to_le_bytes());
        bytes.extend([0x80, 0, 0, 0, 0, 0, 255, 255, 255]);
        let frame = [0x2c, 0, 0, 0, 0, 1, 0, 1, 0, 0, 2, 2, 0x44, 0x01, 0];
        bytes.extend(frame.repeat(frames));
        bytes.push(0x3b);
        bytes
    };
    // A hundred thousand frames: the first one is read.
    image(&gif(64, 64, 100_000)).unwrap();
    refused(image(&gif(u16::MAX, u16::MAX, 1)), "65535x65535");
    let mut wide = gif(64, 64, 1);
    let frame = wide.iter().position(|b| *b == 0x2c).unwrap();
    wide[frame + 5..frame + 9].copy_from_slice(&[0xff; 4]);
    let _ = image(&wide);
    // An extended WebP whose canvas is 2^24 on each side, and one of pixels that are not there.
    let webp = |chunks: &[u8]| {
        let mut bytes = b"RIFF".to_vec();
        bytes.extend((chunks.len() as u32 + 4).to_le_bytes());
        bytes.extend(b"WEBP");
        bytes.extend(chunks);
        bytes
    };
    let canvas = [b"VP8X\x0a\0\0\0\x02\0\0\0".as_slice(), &[0xff; 6]].concat();
    assert!(image(&webp(&canvas)).is_err());
    let lossless = [b"VP8L\x0a\0\0\0\x2f".as_slice(), &[0xff; 9]].concat();
    assert!(image(&webp(&lossless)).is_err());
}

fn wav_header(channels: u16, rate: u32, bits: u16, declared: u32) -> Vec<u8> {
    let mut bytes = b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0\x01\0".to_vec();
    bytes.extend(channels.to_le_bytes());
    bytes.extend(rate.to_le_bytes());
    bytes.extend(u32::MAX.to_le_bytes());
    bytes.extend(channels.wrapping_mul(bits / 8).to_le_bytes());
    bytes.extend(bits.to_le_bytes());
    bytes.extend(b"data");
    bytes.extend(declared.to_le_bytes());
    bytes.extend([0; 64]);
    bytes
}

#[test]
fn wav_headers_that_lie() {
    refused(decode_audio(&wav_header(1, 16_000, 16, u32::MAX - 15)), "the limit is 60.0 s");
    // What writers of streams say who do not know: it is read as far as it goes.
    decode_audio(&wav_header(1, 16_000, 16, u32::MAX)).unwrap();
    for (channels, rate, bits) in [
        (u16::MAX, 16_000, 16),
        (0, 16_000, 16),
        (33, 16_000, 16),
        (1, 0, 16),
        (1, u32::MAX, 16),
        (1, 1, 16),
        (1, 16_000, 0),
        (1, 16_000, 7),
        (1, 16_000, u16::MAX),
    ] {
        let outcome = decode_audio(&wav_header(channels, rate, bits, 64));
        assert!(outcome.is_err(), "{channels} channels, {rate} Hz, {bits} bits");
    }
}

fn crc(bytes: &[u8], bits: u32, polynomial: u32) -> u32 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte) << (bits - 8), |c, _| {
            let next = c << 1;
            (if c >> (bits - 1) & 1 == 1 { next ^ polynomial } else { next }) & ((1 << bits) - 1)
        })
    })
}

/// A FLAC of one channel at 16 kHz: frames of 4096 samples, each one number.
fn flac(n_frames: u8, declared: u64) -> Vec<u8> {
    let mut bytes = b"fLaC\x80\0\0\x22\x10\0\x10\0\0\0\0\0\0\0".to_vec();
    // 20 bits of rate, 3 of channels - 1, 5 of bits - 1, 36 of samples.
    let packed = 16_000_u64 << 44 | 15 << 36 | (declared & 0xf_ffff_ffff);
    bytes.extend(packed.to_be_bytes());
    bytes.extend([0; 16]);
    for i in 0..n_frames {
        let mut frame = vec![0xff, 0xf8, 0xc5, 0x08, i];
        frame.push(crc(&frame, 8, 0x07) as u8);
        frame.extend([0x00, 0x00, 0x07]);
        frame.extend((crc(&frame, 16, 0x8005) as u16).to_be_bytes());
        bytes.extend(frame);
    }
    bytes
}

#[test]
fn flac_headers_that_lie() {
    // 100 frames are 25.6 s in 1.2 kB.
    decode_audio(&flac(100, 100 * 4096)).unwrap();
    refused(decode_audio(&flac(100, 1 << 35)), "the limit is 60.0 s");
    let short = Limits { max_audio: Duration::from_secs(10), ..Limits::default() };
    for declared in [0, 1, 4096] {
        refused(outcome(Modality::Audio, &flac(100, declared), &short), "the limit is 10.0 s");
    }
}

/// An Ogg page with one packet.
fn ogg_page(kind: u8, packet: &[u8]) -> Vec<u8> {
    let mut page = b"OggS\0".to_vec();
    page.push(kind);
    page.extend([0; 8]);
    page.extend(7_u32.to_le_bytes());
    page.extend([0; 8]);
    let n = packet.len() / 255 + 1;
    page.push(n as u8);
    page.extend((0..n).map(|i| if i + 1 < n { 255 } else { (packet.len() % 255) as u8 }));
    page.extend(packet);
    let sum = page.iter().fold(0_u32, |crc, byte| {
        (0..8).fold(
            crc ^ u32::from(*byte) << 24,
            |c, _| if c >> 31 == 1 { c << 1 ^ 0x04c1_1db7 } else { c << 1 },
        )
    });
    page[22..26].copy_from_slice(&sum.to_le_bytes());
    page
}

#[test]
fn a_codec_that_packs_hours_into_nothing_is_not_read() {
    let head = b"OpusHead\x01\x02\x38\x01\x80\xbb\0\0\0\0\0";
    let mut opus = ogg_page(2, head);
    opus.extend(ogg_page(0, b"OpusTags\0\0\0\0\0\0\0\0"));
    opus.extend(ogg_page(0, &[0xfc; 200]).repeat(20_000));
    let text = decode_audio(&opus).unwrap_err();
    assert!(text.contains("not read") || text.contains("read are WAV"), "{text}");
    // Vorbis that says it has 255 channels at 4 GHz.
    let ident =
        [b"\x01vorbis\0\0\0\0\xff".as_slice(), &u32::MAX.to_le_bytes(), &[0; 12], &[0xdd, 1]].concat();
    assert!(decode_audio(&ogg_page(2, &ident)).is_err());
}

#[test]
fn lengths_of_containers_are_not_believed() {
    // MP4: tables of four billion entries, and a box of 2^63 bytes.
    let atom =
        |kind: &[u8; 4], body: &[u8]| [&(body.len() as u32 + 8).to_be_bytes()[..], kind, body].concat();
    let table = [&[0; 4][..], &u32::MAX.to_be_bytes(), &[0; 16]].concat();
    let tables = [b"stts", b"stsz", b"stsc", b"stco", b"co64"].map(|kind| atom(kind, &table)).concat();
    let moov = atom(b"moov", &atom(b"trak", &atom(b"mdia", &atom(b"minf", &atom(b"stbl", &tables)))));
    assert!(decode_audio(&[atom(b"ftyp", b"M4A \0\0\0\0M4A "), moov].concat()).is_err());
    let long = [b"\0\0\0\x01moov".as_slice(), &(1_u64 << 63).to_be_bytes(), &[0; 32]].concat();
    assert!(decode_audio(&[atom(b"ftyp", b"M4A \0\0\0\0M4A "), long].concat()).is_err());
    // Matroska: a text and a blob of 2^50 bytes, in masters as long.
    let size = |bits: u32| ((1_u64 << 56) | (1_u64 << bits)).to_be_bytes();
    let head = [b"\x1a\x45\xdf\xa3".as_slice(), &size(51), b"\x42\x82", &size(50), b"webm"].concat();
    assert!(decode_audio(&head).is_err());
    let ebml = b"\x1a\x45\xdf\xa3\x87\x42\x82\x84webm".as_slice();
    let codec = [b"\x63\xa2".as_slice(), &size(50), &[0; 32]].concat();
    let track = [b"\xae".as_slice(), &size(51), &codec].concat();
    let tracks = [b"\x16\x54\xae\x6b".as_slice(), &size(52), &track].concat();
    let segment = [ebml, b"\x18\x53\x80\x67", &size(53), &tracks].concat();
    assert!(decode_audio(&segment).is_err());
    // ID3 before an MP3: a tag of 256 MiB.
    assert!(decode_audio(b"ID3\x04\0\0\x7f\x7f\x7f\x7fTXXX\x7f\x7f\x7f\x7f\0\0").is_err());
}
