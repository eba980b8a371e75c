//! Forwards of the encoder: one item of each size, and several of a size in a batch.

use super::error::ProfileError;
use super::items::Sample;
use super::progress::Progress;
use super::settings::{Extent, ProfileSettings};
use crate::curves::{EncodePoint, Spread};
use triptych_models::ModelError;
use triptych_models::encoder::Encoder;

/// Output tokens of a batch; a worker takes no more by default.
const MOST_TOKENS: u64 = 8192;

struct EncodeCase<'a> {
    sample: &'a Sample,
    items: u32,
}

impl EncodeCase<'_> {
    fn tokens(&self) -> u64 {
        u64::from(self.items) * u64::from(self.sample.input.n_tokens)
    }
}

/// Measures them.
pub fn points(
    encoder: &mut dyn Encoder,
    samples: &[Sample],
    settings: &ProfileSettings,
    progress: Progress<'_>,
) -> Result<Vec<EncodePoint>, ProfileError> {
    let cases = cases(samples, settings.extent);
    let run = |case: &EncodeCase<'_>| {
        let batch = vec![&case.sample.input; case.items as usize];
        encoder.encode(&batch).map(drop)
    };
    let spreads = settings.rounds.measure::<_, ModelError>(&cases, ("encode", progress), run)?;
    let point = |(case, spread): (&EncodeCase<'_>, Spread)| {
        let each = u64::from(case.sample.input.n_tokens);
        EncodePoint {
            items: case.items,
            tokens: case.tokens(),
            squares: u64::from(case.items) * each * each,
            p50_us: spread.p50_us,
            p95_us: spread.p95_us,
        }
    };
    Ok(cases.iter().zip(spreads).map(point).collect())
}

fn cases(samples: &[Sample], extent: Extent) -> Vec<EncodeCase<'_>> {
    let batches: &[u32] = match extent {
        Extent::Quick => &[1, 2],
        Extent::Full => &[1, 2, 4, 8],
    };
    let mut cases: Vec<EncodeCase<'_>> = Vec::new();
    for sample in samples {
        // Sizes that become the same number of tokens are one case.
        if cases.iter().any(|p| p.sample.input.n_tokens == sample.input.n_tokens) {
            continue;
        }
        let all = batches.iter().map(|&items| EncodeCase { sample, items });
        cases.extend(all.filter(|p| p.items == 1 || p.tokens() <= MOST_TOKENS / 2));
    }
    cases
}

/// Parts of the forward of one item.
pub fn n_parts(encoder: &mut dyn Encoder, samples: &[Sample]) -> Result<usize, ProfileError> {
    let Some(sample) = samples.first() else { return Ok(1) };
    let mut n_parts = 0;
    encoder.encode_in_parts(&[&sample.input], &mut |_| n_parts += 1)?;
    Ok(n_parts.max(1))
}
