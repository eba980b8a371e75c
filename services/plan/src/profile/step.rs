//! Forwards of the decoder for chosen steps.

use super::error::ProfileError;
use super::grid::{Arrays, Grid, StepCase};
use super::progress::Progress;
use super::settings::ProfileSettings;
use crate::curves::{Spread, StepPoint};
use triptych_core::item::rows_from_f32;
use triptych_core::{DType, EncodedRows};
use triptych_models::ModelError;
use triptych_models::decoder::Decoder;

/// Measures each case of the grid. The decoder's caches are as large as the grid needs afterwards.
pub fn forwards(
    decoder: &mut dyn Decoder,
    grid: &Grid,
    settings: &ProfileSettings,
    progress: Progress<'_>,
) -> Result<Vec<StepPoint>, ProfileError> {
    decoder.allocate_kv(grid.self_blocks, grid.cross_blocks)?;
    let info = decoder.info();
    if info.state_slot_bytes.is_some() {
        decoder.allocate_states(grid.n_sequences())?;
    }
    let hidden = info.encoder_hidden;
    let bytes = rows_from_f32(&vec![0.01; grid.cross_rows as usize * hidden], hidden, DType::F32);
    let run = |case: &StepCase| {
        let arrays = Arrays::new(&info, case, grid.cross_rows);
        let groups = arrays.groups();
        if case.projected > 0 {
            let rows = EncodedRows::new(DType::F32, hidden, &bytes);
            let projected = rows.and_then(|rows| rows.slice(0, case.projected as usize));
            let projected = projected.expect("the grid projects at most the rows of an item");
            decoder.project_cross(&[projected], &arrays.projected_slots)?;
        }
        decoder.forward(&arrays.input(&info, &groups)).map(drop)
    };
    let spreads = settings.rounds.measure::<_, ModelError>(&grid.cases, ("steps", progress), run)?;
    let point = |(case, spread): (&StepCase, Spread)| StepPoint {
        prefill_tokens: case.prefill,
        prefill_context: prefill_context(case, grid.cross_rows),
        decodes: case.decodes,
        decode_context: u64::from(case.decodes) * u64::from(case.context + grid.cross_rows),
        projected_rows: case.projected,
        p50_us: spread.p50_us,
        p95_us: spread.p95_us,
    };
    Ok(grid.cases.iter().zip(spreads).map(point).collect())
}

/// Keys that the prompt's tokens attend to, summed over the tokens.
fn prefill_context(case: &StepCase, cross_rows: u32) -> u64 {
    let n = u64::from(case.prefill);
    let before = u64::from(case.before) + u64::from(cross_rows);
    n * before + n * (n + 1) / 2
}
