//! The token of the admin API, in a file.

use std::path::Path;
use thiserror::Error;

/// Shortest token in bytes.
const MIN_TOKEN_BYTES: usize = 16;
/// Longest token in bytes.
const MAX_TOKEN_BYTES: usize = 4096;

/// A token, as its hash: comparisons take the same time whatever is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminToken(blake3::Hash);

/// A file that has no token.
#[derive(Debug, Error)]
pub enum AdminTokenError {
    /// It cannot be read.
    #[error("admin token file {path}")]
    Read {
        /// The path given.
        path: String,
        /// Cause.
        source: std::io::Error,
    },
    /// Its text is too short or too long, or has white space in it.
    #[error(
        "admin token file {path} has {len} bytes; a token is one word of {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} bytes"
    )]
    Length {
        /// The path given.
        path: String,
        /// Length of its text.
        len: usize,
    },
}

impl AdminToken {
    /// The token of this word.
    pub fn of(word: &str) -> Self {
        Self(blake3::hash(word.as_bytes()))
    }

    /// True if it is this word. Takes the same time for every word of a length.
    pub fn is(&self, word: &str) -> bool {
        blake3::hash(word.as_bytes()) == self.0
    }

    /// Reads a token file: one word.
    ///
    /// # Errors
    /// [`AdminTokenError`] for a file without a usable token.
    pub fn read(path: &Path) -> Result<Self, AdminTokenError> {
        let name = || path.display().to_string();
        let text =
            std::fs::read_to_string(path).map_err(|source| AdminTokenError::Read { path: name(), source })?;
        let word = text.trim();
        let is_word = !word.contains(char::is_whitespace);
        if !is_word || !(MIN_TOKEN_BYTES..=MAX_TOKEN_BYTES).contains(&word.len()) {
            return Err(AdminTokenError::Length { path: name(), len: word.len() });
        }
        Ok(Self::of(word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(text: &str) -> Result<AdminToken, AdminTokenError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, text).unwrap();
        AdminToken::read(&path)
    }

    #[test]
    fn a_token_is_one_long_word() {
        assert_eq!(token("0123456789abcdef\n").unwrap(), token("  0123456789abcdef").unwrap());
        for wrong in ["", "short", "0123456789 abcdef"] {
            assert!(matches!(token(wrong), Err(AdminTokenError::Length { .. })), "{wrong:?}");
        }
        assert!(AdminToken::read(Path::new("/no/such/file")).is_err());
    }
}
