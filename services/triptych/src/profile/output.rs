//! The file of curves, the summary on stdout, and progress on a terminal.

use crate::error::CliError;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::path::Path;
use triptych_plan::curves::CostCurves;
use triptych_plan::profile::{Busy, markdown};

/// Refuses a folder that is not there before minutes of measuring.
///
/// # Errors
/// [`CliError::Setting`] that names the folder.
pub fn check(output: &Path) -> Result<(), CliError> {
    let dir = output.parent().filter(|dir| !dir.as_os_str().is_empty());
    match dir.filter(|dir| !dir.is_dir()) {
        Some(dir) => Err(CliError::Setting(format!("--output: there is no directory {}", dir.display()))),
        None => Ok(()),
    }
}

/// Writes the file, and prints the summary.
///
/// # Errors
/// [`CliError`] for curves that cannot be used, and a file that cannot be written.
pub fn write_curves(output: &Path, curves: &CostCurves, busy: Option<Busy>) -> Result<(), CliError> {
    curves.check().map_err(|e| CliError::failed("the measured curves cannot be used", &e))?;
    let text = serde_json::to_string_pretty(curves);
    let text = text.map_err(|e| CliError::failed("cannot write the curves as JSON", &e))?;
    std::fs::write(output, text + "\n")
        .map_err(|e| CliError::setting(format!("cannot write --output {}", output.display()), &e))?;
    let mut page = markdown::page(curves);
    if let Some(busy) = busy.filter(|busy| busy.total() > Busy::DOUBTFUL) {
        page.push_str(&markdown::warning(busy));
    }
    let written = std::io::stdout().lock().write_all(page.as_bytes());
    written.map_err(|e| CliError::failed("cannot write the summary", &e))
}

/// Progress on a terminal.
pub fn bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg:>10} {wide_bar} {pos}/{len} {elapsed}");
    ProgressBar::new(1).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Shows the progress of a part of the measurement.
pub fn progress_on(bar: &ProgressBar) -> impl Fn(&'static str, usize, usize) {
    |part: &'static str, done: usize, of: usize| {
        bar.set_message(part);
        bar.set_length(of as u64);
        bar.set_position(done as u64);
    }
}
