//! Blocking work of the planning commands.

use crate::error::CliError;

/// Runs work off the async workers: simulations compute.
///
/// # Errors
/// [`CliError`] of the work, and if it panicked.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CliError> + Send + 'static,
) -> Result<T, CliError> {
    tokio::task::spawn_blocking(work).await.map_err(|e| CliError::failed("planning ended early", &e))?
}
