//! A file of packed weights: the bytes of its records, the table of contents, and a footer of fixed length.
//!
//! All numbers are u64, little-endian. An entry of the table is key, offset, length and the hashes of the record's
//! pieces; the footer is the length of the table, its hash and [`MAGIC`].

use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use blake3::{Hash, OUT_LEN};
use tempfile::NamedTempFile;

use crate::cpu::pool::{Pool, Shared};

/// Ends a file. Another layout of panels, or another way to quantize, is another number here.
const MAGIC: &[u8; 8] = b"TRIPACK1";

/// Bytes that are read and checked at a time.
const PIECE: usize = 1 << 20;

/// Bytes of the hash of a piece: enough against chance.
const PIECE_HASH: usize = 8;

/// Bytes that a thread reads and checks in a nanosecond, for the cost of a task.
const BYTES_PER_NS: usize = 2;

/// Bytes of a number.
const NUMBER: usize = size_of::<u64>();

/// Bytes of an entry without hashes.
const ENTRY: usize = OUT_LEN + 2 * NUMBER;

/// Bytes behind the table of contents.
const FOOTER: usize = NUMBER + OUT_LEN + MAGIC.len();

/// A record, as the table of contents has it.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) key: Hash,
    pub(super) len: u64,
    offset: u64,
    hashes: Vec<[u8; PIECE_HASH]>,
}

/// A file that records are written to, and that is nowhere until it is whole.
#[derive(Debug)]
pub(super) struct Unfinished {
    path: PathBuf,
    file: BufWriter<NamedTempFile>,
    len: u64,
    max_bytes: u64,
    contents: Vec<u8>,
}

impl Unfinished {
    /// An empty file beside `path`, for at most `max_bytes` of records.
    pub(super) fn create(path: &Path, max_bytes: u64) -> io::Result<Self> {
        let dir = path.parent().ok_or(ErrorKind::InvalidFilename)?;
        let file = tempfile::Builder::new().prefix(".packing-").tempfile_in(dir)?;
        let file = BufWriter::with_capacity(PIECE, file);
        Ok(Self { path: path.to_owned(), file, len: 0, max_bytes, contents: Vec::new() })
    }

    /// Writes a record behind the others.
    pub(super) fn append(&mut self, key: Hash, record: &[u8]) -> io::Result<()> {
        let (offset, len) = (self.len, record.len() as u64);
        self.len += len;
        if self.len > self.max_bytes {
            return Err(ErrorKind::FileTooLarge.into());
        }
        self.contents.extend_from_slice(key.as_bytes());
        self.contents.extend_from_slice(&offset.to_le_bytes());
        self.contents.extend_from_slice(&len.to_le_bytes());
        record.chunks(PIECE).for_each(|piece| self.contents.extend_from_slice(&piece_hash(piece)));
        self.file.write_all(record)
    }

    /// Puts the whole file in its place; its length.
    pub(super) fn finish(mut self) -> io::Result<u64> {
        let Self { contents, file, .. } = &mut self;
        file.write_all(contents)?;
        file.write_all(&(contents.len() as u64).to_le_bytes())?;
        file.write_all(blake3::hash(contents).as_bytes())?;
        file.write_all(MAGIC)?;
        let len = self.len + (self.contents.len() + FOOTER) as u64;
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.persist(&self.path)?;
        Ok(len)
    }
}

/// The table of contents of a file, every entry inside it.
pub(super) fn contents(file: &File) -> io::Result<Vec<Entry>> {
    let broken = || io::Error::from(ErrorKind::InvalidData);
    let in_front_of = |end: u64, n: u64| end.checked_sub(n).ok_or_else(broken);
    let footer_at = in_front_of(file.metadata()?.len(), FOOTER as u64)?;
    let mut footer = [0; FOOTER];
    file.read_exact_at(&mut footer, footer_at)?;
    let (len, hash, magic) = (&footer[..NUMBER], &footer[NUMBER..][..OUT_LEN], &footer[NUMBER + OUT_LEN..]);
    if magic != MAGIC {
        return Err(broken());
    }
    let len = number(len);
    // What a number says is believed only after it was found to lie in the file.
    let contents_at = in_front_of(footer_at, len)?;
    let mut contents = vec![0; usize::try_from(len).map_err(|_| broken())?];
    file.read_exact_at(&mut contents, contents_at)?;
    if blake3::hash(&contents).as_bytes() != hash {
        return Err(broken());
    }
    let (mut entries, mut rest) = (Vec::new(), contents.as_slice());
    while !rest.is_empty() {
        let (entry, behind) = entry(rest).ok_or_else(broken)?;
        if entry.offset.checked_add(entry.len).is_none_or(|end| end > contents_at) {
            return Err(broken());
        }
        entries.push(entry);
        rest = behind;
    }
    Ok(entries)
}

/// The first entry of a table, and what is behind it.
fn entry(table: &[u8]) -> Option<(Entry, &[u8])> {
    let (fixed, rest) = table.split_at_checked(ENTRY)?;
    let (key, numbers) = fixed.split_at(OUT_LEN);
    let (offset, len) = numbers.split_at(NUMBER);
    let (offset, len) = (number(offset), number(len));
    let n_pieces = usize::try_from(len.div_ceil(PIECE as u64)).ok()?;
    let (hashes, rest) = rest.split_at_checked(n_pieces.checked_mul(PIECE_HASH)?)?;
    let entry =
        Entry { key: Hash::from_slice(key).ok()?, len, offset, hashes: hashes.as_chunks().0.to_vec() };
    Some((entry, rest))
}

/// Eight bytes as a number.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte))
}

/// Reads a record; whether it is what was written.
pub(super) fn read(pool: &Pool, file: &File, entry: &Entry, record: &mut [u8]) -> bool {
    let is_whole = AtomicBool::new(true);
    let len = record.len();
    let record = Shared::new(record);
    pool.run(entry.hashes.len(), len / BYTES_PER_NS, |i| {
        let piece = i * PIECE..len.min((i + 1) * PIECE);
        let offset = entry.offset + piece.start as u64;
        // SAFETY: pieces do not overlap, and each is one task.
        let piece = unsafe { record.slice(piece) };
        if file.read_exact_at(piece, offset).is_err() || piece_hash(piece) != entry.hashes[i] {
            is_whole.store(false, Ordering::Relaxed);
        }
    });
    is_whole.into_inner()
}

fn piece_hash(piece: &[u8]) -> [u8; PIECE_HASH] {
    let mut kept = [0; PIECE_HASH];
    kept.copy_from_slice(&blake3::hash(piece).as_bytes()[..PIECE_HASH]);
    kept
}
