//! The bytes of an item that is rows of an encoder output, computed by a client: a file of the rows and one of their grid.
//!
//! It knows nothing of the files themselves; `triptych-models` reads them.

/// Two files as one item: the length of the first as a little-endian `u64`, the first, the second.
pub fn join(rows: &[u8], grid: &[u8]) -> Vec<u8> {
    [&(rows.len() as u64).to_le_bytes()[..], rows, grid].concat()
}

/// The two files of an item; the second may be empty. `None` for an item that is cut.
pub fn split(item: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, files) = item.split_first_chunk::<8>()?;
    files.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_taken_apart_as_they_were_joined() {
        for (rows, grid) in [(&b"rows"[..], &b"grid"[..]), (b"rows", b""), (b"", b"grid")] {
            assert_eq!(split(&join(rows, grid)), Some((rows, grid)));
        }
        for cut in [&b""[..], &[0; 7], &[1, 0, 0, 0, 0, 0, 0, 0], &[255; 9]] {
            assert_eq!(split(cut), None);
        }
    }
}
