//! Measures [`CostCurves`](crate::curves::CostCurves) of a running server of another engine, through its OpenAI-compatible API
//! alone.
//!
//! A fresh prompt with one output token takes what a prefill takes and what a request takes beside its steps; streams that decode
//! together show the time of a step between two of their tokens; an image takes longer than a text of as many tokens by what it is
//! encoded for. Prompts are random from their first token, so that no prefix cache has any of them. As in a measurement of our
//! workers, all points of a curve take turns, the first round does not count, and medians are kept. What an API does not show is
//! named in the curves ([`Unmeasured`](crate::curves::Unmeasured)).

mod assemble;
mod cases;
mod decodes;
mod error;
mod images;
mod info;
mod prober;
mod prompts;
mod server;

pub use error::ApiProfileError;
pub use info::ServerInfo;
pub use server::{ApiServer, ApiSettings};

use super::progress::Progress;
use crate::curves::{ApiEncoders, CostCurves};
use assemble::Samples;
use cases::Cases;
use prober::{Ask, Prober};

/// Measures a server.
///
/// # Errors
/// [`ApiProfileError`] if it does not answer prompts of text.
pub async fn measure(
    server: &ApiServer,
    settings: &ApiSettings,
    progress: Progress<'_>,
) -> Result<CostCurves, ApiProfileError> {
    let mut prober = Prober::learn(&server.chat, settings.salt).await;
    // A server without completions is asked by chats, whose template may be in its prefix cache.
    let text = match prober.one(&server.text, &Ask::text(16, 1)).await {
        Ok(_) => &server.text,
        Err(_) => &server.chat,
    };
    let cases = Cases::new(settings.extent, &server.info);
    let prefills = prompts::measure(&mut prober, text, (&cases.prefills, settings.rounds), progress).await?;
    let decoded = decodes::measure(&mut prober, text, (&cases.decodes, settings.rounds), progress).await?;
    let images = images::measure(&mut prober, server, (&cases.images, settings.rounds), progress).await?;
    let encoders = if server.encoder.is_some() { ApiEncoders::Apart } else { ApiEncoders::Colocated };
    let samples = Samples { prefills, decoded, images, encoders };
    Ok(assemble::curves(server, settings, &samples))
}

#[cfg(test)]
mod tests;
