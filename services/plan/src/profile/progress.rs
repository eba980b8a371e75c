//! Progress of a measurement, and its unit of time.

use std::time::Duration;

/// Called with a part of the measurement, its measured points, and the number of its points.
pub type Progress<'a> = &'a dyn Fn(&'static str, usize, usize);

/// A time in microseconds.
pub fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
