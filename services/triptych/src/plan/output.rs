//! Output of the planning commands.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::time::Duration;
use triptych_bench::error::MeasureError;

/// An indented JSON document.
///
/// # Errors
/// [`MeasureError::Failed`] if the value has no JSON.
pub fn to_json(value: &impl serde::Serialize) -> Result<String, MeasureError> {
    let text = serde_json::to_string_pretty(value);
    text.map(|text| text + "\n").map_err(|e| MeasureError::failed("cannot write JSON", &e))
}

/// Prints a page on stdout.
///
/// # Errors
/// [`MeasureError::Failed`] if stdout is closed.
pub fn print<E: From<MeasureError>>(page: &str) -> Result<(), E> {
    let written = std::io::stdout().lock().write_all(page.as_bytes());
    Ok(written.map_err(|e| MeasureError::failed("cannot write the answer", &e))?)
}

/// A progress bar on a terminal.
pub fn bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} {elapsed} {msg}");
    let bar = ProgressBar::new(1).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Shows the progress of a plan on a bar.
pub fn progress_on(bar: &ProgressBar) -> impl Fn(usize, usize, &str) {
    |done: usize, of: usize, what: &str| {
        bar.set_length(of as u64);
        bar.set_position(done as u64);
        bar.set_message(what.to_owned());
    }
}
