//! Errors of a measurement through an API.

use thiserror::Error;
use triptych_bench::outcome::End;

/// A measurement that failed.
#[derive(Debug, Error)]
pub enum ApiProfileError {
    /// A request was not answered.
    #[error("the server did not answer {what}: {end:?}")]
    Unanswered {
        /// The request.
        what: String,
        /// Its end.
        end: End,
    },
    /// No case had all of its streams decoding at once.
    #[error(
        "no two tokens of a stream came one after the other: the server does not stream, or serves one request at a time"
    )]
    NoStream,
    /// It could not be asked about itself.
    #[error("the server does not describe itself")]
    Info(#[from] reqwest::Error),
}
