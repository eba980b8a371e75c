//! Rows of trace files, a line each: bounds on the file, its lines and its rows, and every bad row by its line.

use crate::text::TextError;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};

/// The largest file.
const MAX_BYTES: u64 = 1 << 30;
/// The longest line, in bytes.
const MAX_LINE: u64 = 1 << 22;
/// Most rows.
const MAX_ROWS: usize = 4_000_000;
/// Bad rows that a message names.
const MAX_NAMED: usize = 20;

/// Reads a file.
///
/// # Errors
/// [`TextError::Trace`] if it cannot be read or is too large, and the mistakes of `parse`.
pub(super) fn read<T>(
    file: &str,
    parse: impl FnOnce(BufReader<File>) -> Result<T, String>,
) -> Result<T, TextError> {
    let fails = |reason: String| TextError::Trace { file: file.to_owned(), reason };
    let opened = File::open(file).map_err(|e| fails(e.to_string()))?;
    let size = opened.metadata().map_err(|e| fails(e.to_string()))?.len();
    if size > MAX_BYTES {
        return Err(fails(format!("has {size} bytes, {MAX_BYTES} are allowed")));
    }
    parse(BufReader::new(opened)).map_err(fails)
}

/// Rows of a text, behind its header if it has one. Empty lines and those that begin with `#` are skipped.
///
/// # Errors
/// Another header, and the mistakes of `row` with their lines.
pub(super) fn rows<T>(
    mut input: impl BufRead,
    mut header: Option<&str>,
    mut row: impl FnMut(&str) -> Result<T, String>,
) -> Result<Vec<T>, String> {
    let (mut rows, mut wrong, mut n_wrong) = (Vec::new(), Vec::new(), 0_usize);
    let mut bytes = Vec::new();
    for number in 1_u64.. {
        bytes.clear();
        let n_read = input.by_ref().take(MAX_LINE + 1).read_until(b'\n', &mut bytes);
        if n_read.map_err(|e| format!("line {number}: {e}"))? == 0 {
            break;
        }
        if bytes.len() as u64 > MAX_LINE {
            return Err(format!("line {number} has more than {MAX_LINE} bytes"));
        }
        let line = std::str::from_utf8(&bytes).map_err(|_| format!("line {number} is not UTF-8"))?.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(header) = header.take() {
            if line != header {
                return Err(format!("the first line is {header:?}, not {line:?}"));
            }
            continue;
        }
        match row(line) {
            Ok(_) if rows.len() == MAX_ROWS => return Err(format!("has more than {MAX_ROWS} rows")),
            Ok(row) => rows.push(row),
            Err(reason) => {
                n_wrong += 1;
                if n_wrong <= MAX_NAMED {
                    wrong.push(format!("line {number}: {reason}"));
                }
            }
        }
    }
    match n_wrong.saturating_sub(MAX_NAMED) {
        _ if header.is_some() => {
            Err(format!("the first line is {:?}, and there is none", header.unwrap_or("")))
        }
        _ if wrong.is_empty() => Ok(rows),
        0 => Err(wrong.join("; ")),
        more => Err(format!("{}; and {more} more", wrong.join("; "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(text: &[u8]) -> Result<Vec<u32>, String> {
        rows(text, None, |line| line.parse().map_err(|_| format!("{line:?} is no number")))
    }

    #[test]
    fn rows_are_lines_and_every_mistake_is_named_until_there_are_too_many() {
        assert_eq!(numbers(b"1\n\n# 2\n 3 \n4"), Ok(vec![1, 3, 4]));
        let error = numbers(b"1\nx\n2\ny\n").unwrap_err();
        assert!(error.contains("line 2: \"x\"") && error.contains("line 4: \"y\""), "{error}");
        let error = numbers(&b"x\n".repeat(30)).unwrap_err();
        assert!(error.contains("line 20") && error.ends_with("; and 10 more"), "{error}");
        assert!(numbers(b"1\n\xff\n").unwrap_err().contains("line 2 is not UTF-8"));
    }

    #[test]
    fn a_line_without_an_end_is_not_read_into_memory() {
        let endless = std::io::repeat(b'1');
        let error = rows(BufReader::new(endless), None, |_| Ok::<_, String>(())).unwrap_err();
        assert!(error.contains("line 1 has more than"), "{error}");
    }
}
