//! PNG images put together from bands of rows that were compressed once.
//!
//! A band ends with a flush, so any sequence of bands is a valid stream: a new image costs a copy and two checksums,
//! not a compression, while a decoder has to do all of the work. Rows are filtered by their left neighbour
//! only, so no band depends on the one above it.

use crate::seed::{BenchRng, Purpose, rng};
use flate2::{Compress, Compression, Crc, FlushCompress};
use parking_lot::Mutex;
use rand::RngExt;
use std::collections::HashMap;
use std::sync::Arc;

/// Rows of a band.
const BAND_ROWS: u32 = 16;
/// Bands to choose from, for each width and number of rows.
const N_BANDS: u64 = 48;
/// Most sets of bands in the cache.
const MAX_SETS: usize = 64;
/// Bytes of a file around its bands: signature, three chunks, and what is around the stream in zlib's format.
const AROUND_BANDS: usize = 8 + 25 + 12 + 11 + 12;
/// Most bytes of a stored block.
const MOST_STORED: usize = u16::MAX as usize;
/// The largest Adler-32 prime.
const ADLER: u32 = 65_521;

/// Compressed bands by width and rows.
#[derive(Clone, Debug, Default)]
pub(super) struct Bands(Arc<Mutex<Sets>>);

/// By width and rows.
type Sets = HashMap<(u32, u32), Arc<[Band]>>;

#[derive(Debug)]
struct Band {
    deflated: Vec<u8>,
    adler: (u32, u32),
    n_raw: u64,
}

impl Bands {
    /// An image with this content.
    pub(super) fn image(&self, width: u32, height: u32, content: u64) -> Vec<u8> {
        let mut choice = rng(content, Purpose::Requests, 1);
        // Bands of a small image may be drawn alike; its first rows are its own.
        let own = height.min(2);
        let first = band(width, own, &mut choice, stored);
        let mut others = Vec::new();
        let mut left = height - own;
        while left > 0 {
            let rows = left.min(BAND_ROWS);
            let bands = self.of(width, rows);
            let chosen = choice.random_range(0..bands.len());
            others.push((bands, chosen));
            left -= rows;
        }
        let bands = || std::iter::once(&first).chain(others.iter().map(|(bands, chosen)| &bands[*chosen]));
        let n_bytes: usize = bands().map(|band| band.deflated.len()).sum();
        let adler = bands().fold((1, 0), joined);
        // One allocation of the right size: memory that grows is copied, and cleared by the system.
        let mut png = Vec::with_capacity(n_bytes + AROUND_BANDS);
        png.extend_from_slice(b"\x89PNG\r\n\x1a\n");
        chunk(&mut png, *b"IHDR", |png| {
            png.extend_from_slice(&[width.to_be_bytes(), height.to_be_bytes()].concat());
            png.extend_from_slice(&[8, 2, 0, 0, 0]);
        });
        chunk(&mut png, *b"IDAT", |png| {
            // zlib: a window of 32 KiB, the default level.
            png.extend_from_slice(&[0x78, 0x9c]);
            bands().for_each(|band| png.extend_from_slice(&band.deflated));
            // An empty last block, then the checksum of the raw bytes.
            png.extend_from_slice(&[1, 0, 0, 0xff, 0xff]);
            png.extend_from_slice(&((adler.1 << 16) | adler.0).to_be_bytes());
        });
        chunk(&mut png, *b"IEND", |_| ());
        png
    }

    fn of(&self, width: u32, rows: u32) -> Arc<[Band]> {
        let sets = || self.0.lock();
        if let Some(bands) = sets().get(&(width, rows)) {
            return Arc::clone(bands);
        }
        let number = (u64::from(width) << 32) | u64::from(rows);
        let bands = (0..N_BANDS).map(|i| band(width, rows, &mut rng(i, Purpose::Text, number), deflate));
        let bands: Arc<[Band]> = bands.collect();
        let mut sets = sets();
        if sets.len() >= MAX_SETS {
            sets.clear();
        }
        Arc::clone(sets.entry((width, rows)).or_insert(bands))
    }
}

/// Rows of coloured noise, like the texture of a photograph: neighbours differ by little. `pack` makes blocks of their bytes.
fn band(width: u32, rows: u32, rng: &mut BenchRng, pack: fn(&[u8]) -> Vec<u8>) -> Band {
    let row_bytes = width as usize * 3;
    let mut raw = Vec::with_capacity((row_bytes + 1) * rows as usize);
    for _ in 0..rows {
        // Filter 1: each byte is a difference to the pixel on its left, the first to nothing.
        raw.extend([1]);
        let mut bits = 0u64;
        for i in 0..row_bytes {
            if i % 16 == 0 {
                bits = rng.random();
            }
            let nibble = (bits & 15) as u8;
            bits >>= 4;
            raw.push(if i < 3 { rng.random() } else { STEPS[nibble as usize] });
        }
    }
    Band { deflated: pack(&raw), adler: adler_of(&raw), n_raw: raw.len() as u64 }
}

/// Differences, by how often they come.
const STEPS: [u8; 16] = [0, 0, 0, 0, 0, 0, 1, 1, 255, 255, 2, 254, 3, 253, 5, 251];

/// Ends on a byte, with nothing for the next band to refer to.
fn deflate(raw: &[u8]) -> Vec<u8> {
    let mut compress = Compress::new(Compression::new(6), false);
    let mut out = Vec::with_capacity(raw.len() + raw.len() / 1000 + 256);
    loop {
        let done = compress.total_in() as usize;
        let before = compress.total_out();
        // Into memory nothing fails; a full buffer is grown.
        let status = compress.compress_vec(&raw[done.min(raw.len())..], &mut out, FlushCompress::Full);
        let room = out.capacity() - out.len();
        let all_in = compress.total_in() as usize == raw.len();
        if status.is_err() || (all_in && (room > 0 || compress.total_out() == before)) {
            return out;
        }
        out.reserve(raw.len());
    }
}

/// Blocks that are not compressed: for bytes of one image, since a compressor clears more memory than a few rows have.
fn stored(raw: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(raw.len() + 5 * (raw.len() / MOST_STORED + 1));
    for block in raw.chunks(MOST_STORED) {
        let n = block.len() as u16;
        out.push(0);
        out.extend_from_slice(&n.to_le_bytes());
        out.extend_from_slice(&(!n).to_le_bytes());
        out.extend_from_slice(block);
    }
    out
}

fn adler_of(raw: &[u8]) -> (u32, u32) {
    raw.iter().fold((1, 0), |(a, b), byte| {
        let a = (a + u32::from(*byte)) % ADLER;
        (a, (b + a) % ADLER)
    })
}

/// The checksum of what was before with this band behind it.
fn joined((a, b): (u32, u32), band: &Band) -> (u32, u32) {
    let n = (band.n_raw % u64::from(ADLER)) as u32;
    let sum = (a + band.adler.0 + ADLER - 1) % ADLER;
    // Each of the n later bytes adds what `a` was, less the 1 that every sum starts from.
    let carried = u64::from(n) * u64::from((a + ADLER - 1) % ADLER) % u64::from(ADLER);
    (sum, ((u64::from(b) + u64::from(band.adler.1) + carried) % u64::from(ADLER)) as u32)
}

fn chunk(png: &mut Vec<u8>, kind: [u8; 4], data: impl FnOnce(&mut Vec<u8>)) {
    let begin = png.len() + 4;
    png.extend_from_slice(&[0; 4]);
    png.extend_from_slice(&kind);
    data(png);
    // An image is far below 4 GiB: its sides are bounded.
    let n_bytes = (png.len() - begin - kind.len()) as u32;
    png[begin - 4..begin].copy_from_slice(&n_bytes.to_be_bytes());
    let mut crc = Crc::new();
    crc.update(&png[begin..]);
    png.extend_from_slice(&crc.sum().to_be_bytes());
}
