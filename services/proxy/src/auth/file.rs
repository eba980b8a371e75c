//! Credential files are read whole, up to a limit.

use super::error::AuthError;
use std::io::Read;
use std::path::Path;

/// The text of a file of at most `limit` bytes.
pub(super) fn read_text(path: &Path, limit: u64) -> Result<String, AuthError> {
    let failed = |source| AuthError::Read { path: path.to_owned(), source };
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(limit + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > limit {
        let reason = format!("more than {limit} bytes, the limit");
        return Err(AuthError::Content { path: path.to_owned(), line: None, reason });
    }
    Ok(text)
}
