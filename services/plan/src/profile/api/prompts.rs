//! Times to the first token of fresh prompts.

use super::error::ApiProfileError;
use super::prober::{Ask, Prober};
use crate::curves::costs::Spread;
use crate::profile::progress::{Progress, micros};
use std::sync::Arc;
use triptych_bench::client::Target;

/// A measured length of prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Prefill {
    /// Its tokens, as the server counts them.
    pub(super) tokens: u32,
    /// Time to the first token.
    pub(super) ttft: Spread,
}

/// Measures each length; those that the server refuses are left out.
///
/// # Errors
/// [`ApiProfileError`] if it refuses all, or stops to answer.
pub(super) async fn measure(
    prober: &mut Prober,
    target: &Arc<dyn Target>,
    (lengths, rounds): (&[u32], u32),
    progress: Progress<'_>,
) -> Result<Vec<Prefill>, ApiProfileError> {
    let mut found: Vec<(u32, u32, Vec<f64>)> = Vec::new();
    for &length in lengths {
        match prober.one(target, &Ask::text(length, 1)).await {
            Ok(answer) => found.push((length, answer.prompt_tokens, Vec::new())),
            // A longer one is refused too.
            Err(_) if !found.is_empty() => break,
            Err(e) => return Err(e),
        }
    }
    let of = found.len() * rounds as usize;
    for round in 0..rounds as usize {
        let n = found.len();
        for (i, (length, _, times)) in found.iter_mut().enumerate() {
            progress("prefills", round * n + i, of);
            times.push(micros(prober.one(target, &Ask::text(*length, 1)).await?.first()));
        }
    }
    progress("prefills", of, of);
    Ok(found.into_iter().map(|(_, tokens, times)| Prefill { tokens, ttft: Spread::of(times) }).collect())
}
