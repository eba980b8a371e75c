//! Times of encodes: those of requests with fresh images, without those of texts of as many tokens, round by round.
//!
//! Where another instance only encodes, its answer ends with the encode, and a short text there takes what a request takes
//! otherwise.

use super::cases::ImageCase;
use super::error::ApiProfileError;
use super::prober::{Answer, Ask, Prober};
use super::server::ApiServer;
use crate::curves::costs::Spread;
use crate::curves::{EncodePoint, ItemPoint};
use crate::profile::progress::{Progress, micros};

/// Tokens of the text beside images.
const TEXT: u32 = 8;
/// Least time of an encode, in microseconds: where noise makes an image as fast as a text.
const LEAST_US: f64 = 1.0;

/// Measured images.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Images {
    /// Encodes.
    pub(super) encodes: Vec<EncodePoint>,
    /// Sizes.
    pub(super) items: Vec<ItemPoint>,
    /// Tokens that the template adds to a chat.
    pub(super) template: u32,
}

/// One case with what it was found to be.
struct Sample {
    case: ImageCase,
    /// Tokens of all its images.
    tokens: u32,
    times: Vec<f64>,
}

/// Measures each case; those that the server refuses are left out. `None`: it takes no chats, or no image.
///
/// # Errors
/// [`ApiProfileError`] if it stops to answer.
pub(super) async fn measure(
    prober: &mut Prober,
    server: &ApiServer,
    (cases, rounds): (&[ImageCase], u32),
    progress: Progress<'_>,
) -> Result<Option<Images>, ApiProfileError> {
    let Ok(chat) = prober.one(&server.chat, &Ask::text(TEXT, 1)).await else { return Ok(None) };
    let template = chat.prompt_tokens.saturating_sub(TEXT);
    let mut samples = samples(prober, server, (cases, template)).await;
    if samples.is_empty() {
        return Ok(None);
    }
    let of = samples.len() * rounds as usize;
    let n = samples.len();
    for round in 0..rounds as usize {
        for (i, sample) in samples.iter_mut().enumerate() {
            progress("images", round * n + i, of);
            let time = difference(prober, server, sample).await?;
            sample.times.push(time.max(LEAST_US));
        }
    }
    progress("images", of, of);
    let items = samples.iter().filter(|s| s.case.n == 1);
    let items = items.map(|s| ItemPoint {
        size: f64::from(s.case.side) * f64::from(s.case.side),
        tokens: s.tokens,
        bytes: prober.image_bytes(s.case.side),
    });
    let items = items.collect();
    Ok(Some(Images { items, template, encodes: samples.into_iter().map(point).collect() }))
}

/// Sends each case once: the server warms up, and counts the tokens of the images. It may refuse large ones, and several in a request.
async fn samples(
    prober: &mut Prober,
    server: &ApiServer,
    (cases, template): (&[ImageCase], u32),
) -> Vec<Sample> {
    let mut samples = Vec::new();
    for &case in cases {
        let answer = prober.one(&server.chat, &Ask::images(TEXT, (case.side, case.n))).await;
        let tokens = answer.map_or(0, |answer| answer.prompt_tokens.saturating_sub(template + TEXT));
        if tokens > 0 {
            samples.push(Sample { case, tokens, times: Vec::new() });
        }
    }
    samples
}

/// Time of the images of a request, in microseconds.
async fn difference(
    prober: &mut Prober,
    server: &ApiServer,
    sample: &Sample,
) -> Result<f64, ApiProfileError> {
    let ask = Ask::images(TEXT, (sample.case.side, sample.case.n));
    let (target, text) = match &server.encoder {
        Some(encoder) => (encoder, TEXT),
        None => (&server.chat, TEXT + sample.tokens),
    };
    let time = |answer: &Answer| if server.encoder.is_some() { answer.ended } else { answer.first() };
    let with = prober.one(target, &ask).await?;
    let without = prober.one(target, &Ask::text(text, 1)).await?;
    Ok(micros(time(&with)) - micros(time(&without)))
}

fn point(sample: Sample) -> EncodePoint {
    let each = u64::from(sample.tokens) / u64::from(sample.case.n.max(1));
    let Spread { p50_us, p95_us } = Spread::of(sample.times);
    let tokens = u64::from(sample.tokens);
    EncodePoint { items: sample.case.n, tokens, squares: tokens * each, p50_us, p95_us }
}
