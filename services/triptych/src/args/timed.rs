//! The flag of workers that compute nothing and take their time from curves: all that is around a forward is measured with it,
//! at the speed of a machine that is not there.

use std::path::{Path, PathBuf};
use triptych_models::compute::TimedForwards;
use triptych_plan::curves::CostCurves;
use triptych_plan::curves::timed::CurveTimes;

/// A file of curves, and the times that it gives.
#[derive(Clone, Debug)]
pub struct TimedArg {
    /// The file, for the flags of children.
    pub file: PathBuf,
    /// The times.
    pub forwards: TimedForwards,
}

impl TimedArg {
    /// Reads a file of curves.
    ///
    /// # Errors
    /// A text that names the mistake.
    pub fn read(file: &str) -> Result<Self, String> {
        let text = std::fs::read_to_string(file).map_err(|e| e.to_string())?;
        let curves = CostCurves::read(&text).map_err(|e| e.to_string())?;
        // A flag is read once for a process, and the threads that compute live as long as it.
        let times = Box::leak(Box::new(CurveTimes::new(&curves, u64::from(std::process::id()))));
        let file = std::path::absolute(Path::new(file)).map_err(|e| e.to_string())?;
        Ok(Self { file, forwards: TimedForwards(times) })
    }
}
