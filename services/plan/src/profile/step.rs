//! Forwards of the decoder for chosen steps.

use super::grid::{Arrays, Grid, Place};
use super::{ProfileError, ProfileSettings, Progress};
use crate::curves::StepPoint;
use triptych_models::ModelError;
use triptych_models::decoder::Decoder;

/// Measures each place of the grid. The decoder's caches are as large as the grid needs afterwards.
pub fn forwards(
    decoder: &mut dyn Decoder,
    grid: &Grid,
    settings: &ProfileSettings,
    progress: Progress<'_>,
) -> Result<Vec<StepPoint>, ProfileError> {
    decoder.allocate_kv(grid.self_blocks, grid.cross_blocks)?;
    let info = decoder.info();
    let rows = vec![0.01; grid.cross_rows as usize * info.encoder_hidden];
    let run = |place: &Place| {
        let arrays = Arrays::new(place, grid.cross_rows);
        if place.projected > 0 {
            let projected = &rows[..place.projected as usize * info.encoder_hidden];
            decoder.project_cross(projected.to_vec(), &arrays.projected_slots)?;
        }
        decoder.forward(&arrays.input(&info)).map(drop)
    };
    let spreads = settings.rounds.measure::<_, ModelError>(&grid.places, ("steps", progress), run)?;
    let point = |(place, spread): (&Place, super::Spread)| StepPoint {
        prefill_tokens: place.prefill,
        prefill_context: prefill_context(place, grid.cross_rows),
        decodes: place.decodes,
        decode_context: u64::from(place.decodes) * u64::from(place.context + grid.cross_rows),
        projected_rows: place.projected,
        p50_us: spread.p50_us,
        p95_us: spread.p95_us,
    };
    Ok(grid.places.iter().zip(spreads).map(point).collect())
}

/// Keys that the prompt's tokens attend to, summed over the tokens.
fn prefill_context(place: &Place, cross_rows: u32) -> u64 {
    let (n, before) = (u64::from(place.prefill), u64::from(place.before) + u64::from(cross_rows));
    n * before + n * (n + 1) / 2
}
