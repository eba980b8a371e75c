//! Encoder and engine in one process, at once, on the same threads: how much longer each takes.

use super::error::ProfileError;
use super::grid::{Arrays, Grid};
use super::items::Sample;
use super::progress::micros;
use super::settings::{Extent, ProfileSettings};
use crate::curves::ColocationSlowdown;
use crate::curves::costs::Spread;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use triptych_models::ModelError;
use triptych_models::decoder::Decoder;
use triptych_models::encoder::Encoder;

/// Fewest forwards of each that count.
const FEWEST: usize = 5;

/// A forward.
type Work<'a> = &'a mut (dyn FnMut() -> Result<(), ModelError> + Send);

/// Measures a middling item and a decode step alone, then both at once.
pub fn measure(
    encoder: &mut dyn Encoder,
    decoder: &mut dyn Decoder,
    samples: &[Sample],
    grid: &Grid,
    settings: &ProfileSettings,
) -> Result<ColocationSlowdown, ProfileError> {
    let case = grid.cases.iter().filter(|p| p.prefill == 0).max_by_key(|p| p.decodes.min(8));
    let (Some(case), Some(sample)) = (case, samples.get(samples.len() / 2)) else {
        return Ok(ColocationSlowdown::default());
    };
    let info = decoder.info();
    let arrays = Arrays::new(&info, case, grid.cross_rows);
    let groups = arrays.groups();
    let least = match settings.extent {
        Extent::Quick => Duration::from_millis(50),
        Extent::Full => Duration::from_secs(2),
    };
    let mut encode = || encoder.encode(&[&sample.input]).map(drop);
    let mut step = || decoder.forward(&arrays.input(&info, &groups)).map(drop);
    let encode_alone = alone(least, &mut encode)?;
    let step_alone = alone(least, &mut step)?;
    // Each goes on until the other has enough, so that neither is measured beside an idle machine.
    let encoder_done = AtomicBool::new(false);
    let decoder_done = AtomicBool::new(false);
    let (encode_beside, step_beside) = thread::scope(|scope| {
        let other = scope.spawn(|| beside(least, &mut encode, (&encoder_done, &decoder_done)));
        let step = beside(least, &mut step, (&decoder_done, &encoder_done));
        let encode = other.join().map_err(|_| ProfileError::Panicked)?;
        Ok::<_, ProfileError>((encode?, step?))
    })?;
    let ratio = |beside: f64, alone: f64| (beside / alone.max(1e-3)).max(1.0);
    Ok(ColocationSlowdown {
        encode: ratio(encode_beside, encode_alone),
        step: ratio(step_beside, step_alone),
    })
}

fn alone(least: Duration, work: Work<'_>) -> Result<f64, ModelError> {
    let nobody = AtomicBool::new(true);
    beside(least, work, (&AtomicBool::new(false), &nobody))
}

/// Median time of a piece of work, in microseconds, repeated until it has run long enough and the other is done too.
fn beside(
    least: Duration,
    work: Work<'_>,
    (done, other): (&AtomicBool, &AtomicBool),
) -> Result<f64, ModelError> {
    let began = Instant::now();
    let mut times = Vec::new();
    let result = loop {
        let enough = times.len() >= FEWEST && began.elapsed() >= least;
        if enough {
            done.store(true, Ordering::Release);
            if other.load(Ordering::Acquire) {
                break Ok(Spread::of(times).p50_us);
            }
        }
        let start = Instant::now();
        if let Err(e) = work() {
            break Err(e);
        }
        // What runs after the other has ended runs alone.
        if !enough {
            times.push(micros(start.elapsed()));
        }
    };
    // An error ends the other one too.
    done.store(true, Ordering::Release);
    result
}
