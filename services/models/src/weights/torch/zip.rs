//! The central directory of a ZIP file whose entries are stored, not compressed: where the bytes of each entry lie.
//!
//! It reads no entry and decompresses nothing. With 64-bit extensions, which torch always writes
//! (<https://pkware.cachefly.net/webdocs/APPNOTE/APPNOTE-6.3.10.TXT>, 4.3 and 4.5.3). The crate `zip` reads and
//! writes every kind of entry; what is needed are four structures of fixed layout.

use std::collections::BTreeMap;
use std::ops::Range;

/// Signature of the header before an entry's data: the first bytes of a ZIP file.
pub(super) const LOCAL_HEADER: &[u8] = b"PK\x03\x04";
const CENTRAL_HEADER: &[u8] = b"PK\x01\x02";
const END: &[u8] = b"PK\x05\x06";
const END_64: &[u8] = b"PK\x06\x06";
const END_64_LOCATOR: &[u8] = b"PK\x06\x07";

/// Bytes of each structure without its variable parts.
const LOCAL_HEADER_LEN: usize = 30;
const CENTRAL_HEADER_LEN: usize = 46;
const END_LEN: usize = 22;
const END_64_LEN: usize = 56;
const END_64_LOCATOR_LEN: usize = 20;

/// Most bytes of a comment behind the end record.
const MAX_COMMENT: usize = 0xffff;
/// Most entries that are read.
const MAX_ENTRIES: u64 = 1 << 18;
/// Bit of an entry's flags that marks it as encrypted.
const ENCRYPTED: u16 = 1;
/// Id of the extra field with 64-bit sizes and offset.
const EXTRA_64: u16 = 1;
/// A 32-bit field whose value is in the extra field.
const IN_EXTRA: u64 = 0xffff_ffff;

/// The central directory, as the end record places it.
struct Directory {
    n_entries: u64,
    range: Range<usize>,
}

/// Entries by name, each with the range of its bytes in the file.
///
/// # Errors
/// The defect: a structure that is cut or out of the file, an entry that is compressed, encrypted or there twice.
pub(super) fn stored_entries(bytes: &[u8]) -> Result<BTreeMap<&str, Range<usize>>, String> {
    let directory = directory(bytes)?;
    if directory.n_entries > MAX_ENTRIES {
        return Err(format!("{} ZIP entries, at most {MAX_ENTRIES} are read", directory.n_entries));
    }
    let mut entries = BTreeMap::new();
    let mut rest = bytes.get(directory.range.clone()).ok_or("the ZIP directory is out of the file")?;
    for _ in 0..directory.n_entries {
        let (entry, behind) = central_entry(rest)?;
        rest = behind;
        let data = entry.data(bytes, directory.range.start)?;
        if entries.insert(entry.name, data).is_some() {
            return Err(format!("the ZIP entry {} is there twice", entry.name));
        }
    }
    Ok(entries)
}

/// Finds the central directory by the end record, or by that with 64-bit fields where there is one.
fn directory(bytes: &[u8]) -> Result<Directory, String> {
    let earliest = bytes.len().saturating_sub(END_LEN + MAX_COMMENT);
    let is_end = |at: &usize| {
        let comment = u16_at(bytes, at + 20).map(usize::from);
        bytes[*at..].starts_with(END) && comment == bytes.len().checked_sub(at + END_LEN)
    };
    let latest = bytes.len().checked_sub(END_LEN).ok_or("too short for a ZIP file")?;
    let end = (earliest..=latest).rev().find(is_end).ok_or("no ZIP end record: the file is cut or no ZIP")?;
    let locator = end.checked_sub(END_64_LOCATOR_LEN).filter(|at| bytes[*at..].starts_with(END_64_LOCATOR));
    let Some(locator) = locator else {
        let cut = "the ZIP end record is cut";
        return Ok(Directory {
            n_entries: u16_at(bytes, end + 10).ok_or(cut)?.into(),
            range: range(u32_at(bytes, end + 16).ok_or(cut)?, u32_at(bytes, end + 12).ok_or(cut)?, end)?,
        });
    };
    let cut = "the 64-bit ZIP end record is not where its locator says";
    let at = usize::try_from(u64_at(bytes, locator + 8).ok_or(cut)?).map_err(|_| cut)?;
    if at.checked_add(END_64_LEN).is_none_or(|end| end > locator) || !bytes[at..].starts_with(END_64) {
        return Err(cut.into());
    }
    Ok(Directory {
        n_entries: u64_at(bytes, at + 32).ok_or(cut)?,
        range: range(u64_at(bytes, at + 48).ok_or(cut)?, u64_at(bytes, at + 40).ok_or(cut)?, at)?,
    })
}

/// An entry of the central directory.
struct CentralEntry<'a> {
    name: &'a str,
    n_bytes: u64,
    local_header: u64,
}

/// The first entry of `directory`, and what follows it.
fn central_entry(directory: &[u8]) -> Result<(CentralEntry<'_>, &[u8]), String> {
    const CUT: &str = "the ZIP directory is cut";
    let header = directory.get(..CENTRAL_HEADER_LEN).ok_or(CUT)?;
    if !header.starts_with(CENTRAL_HEADER) {
        return Err("the ZIP directory has something else than an entry".into());
    }
    let len = |at| u16_at(header, at).map(usize::from).ok_or(CUT);
    let behind_name = CENTRAL_HEADER_LEN + len(28)?;
    let behind_extra = behind_name + len(30)?;
    let end = behind_extra + len(32)?;
    let name = directory.get(CENTRAL_HEADER_LEN..behind_name).ok_or(CUT)?;
    let name = std::str::from_utf8(name).map_err(|_| "the name of a ZIP entry is not UTF-8")?;
    if u16_at(header, 8).ok_or(CUT)? & ENCRYPTED != 0 {
        return Err(format!("the ZIP entry {name} is encrypted"));
    }
    if u16_at(header, 10).ok_or(CUT)? != 0 {
        return Err(format!("the ZIP entry {name} is compressed; torch.save stores its entries as they are"));
    }
    let mut wide = wide_fields(directory.get(behind_name..behind_extra).ok_or(CUT)?);
    let mut field = |at| match u32_at(header, at).ok_or(CUT)? {
        IN_EXTRA => wide.next().ok_or(CUT),
        value => Ok(value),
    };
    // In the order in which the extra field has them.
    let original = field(24)?;
    let n_bytes = field(20)?;
    let local_header = field(42)?;
    if original != n_bytes {
        return Err(format!("the ZIP entry {name} is stored, and of {n_bytes} bytes and {original}"));
    }
    Ok((CentralEntry { name, n_bytes, local_header }, directory.get(end..).ok_or(CUT)?))
}

impl CentralEntry<'_> {
    /// Range of the entry's bytes, behind its local header and before the central directory at `limit`.
    fn data(&self, bytes: &[u8], limit: usize) -> Result<Range<usize>, String> {
        let wrong = || format!("the ZIP entry {} is not where the directory says", self.name);
        let at = usize::try_from(self.local_header).map_err(|_| wrong())?;
        let header = bytes.get(at..).and_then(|rest| rest.get(..LOCAL_HEADER_LEN)).ok_or_else(wrong)?;
        let name_len = u16_at(header, 26).ok_or_else(wrong)?;
        let extra_len = u16_at(header, 28).ok_or_else(wrong)?;
        let name_at = at + LOCAL_HEADER_LEN;
        let name = bytes.get(name_at..name_at + usize::from(name_len)).ok_or_else(wrong)?;
        if !header.starts_with(LOCAL_HEADER) || name != self.name.as_bytes() {
            return Err(wrong());
        }
        let start = name_at + usize::from(name_len) + usize::from(extra_len);
        range(start as u64, self.n_bytes, limit).map_err(|_| wrong())
    }
}

/// The 64-bit fields of an entry's extra fields, in their order.
fn wide_fields(mut extra: &[u8]) -> impl Iterator<Item = u64> {
    let mut fields: &[u8] = &[];
    while let Some(id) = u16_at(extra, 0)
        && let Some(len) = u16_at(extra, 2)
        && let Some(field) = extra.get(4..4 + usize::from(len))
    {
        if id == EXTRA_64 {
            fields = field;
            break;
        }
        extra = &extra[4 + usize::from(len)..];
    }
    fields.as_chunks().0.iter().map(|field| u64::from_le_bytes(*field))
}

/// `n_bytes` from `start`, which must end at `limit` or before.
fn range(start: u64, n_bytes: u64, limit: usize) -> Result<Range<usize>, String> {
    let end = start.checked_add(n_bytes).filter(|end| *end <= limit as u64);
    let end = end.and_then(|end| usize::try_from(end).ok());
    let end = end.ok_or("a part of the ZIP file is out of it")?;
    Ok(usize::try_from(start).unwrap_or(end)..end)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|field| u16::from_le_bytes(*field))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|field| u32::from_le_bytes(*field).into())
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|field| u64::from_le_bytes(*field))
}
