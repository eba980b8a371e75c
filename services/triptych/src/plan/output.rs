//! Output of the planning commands.

use indicatif::{ProgressBar, ProgressStyle};
use std::cell::Cell;
use std::io::{IsTerminal, Write};
use std::time::Duration;
use triptych_bench::error::MeasureError;
use triptych_plan::planner::{Phase, Step};

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

/// Progress of a plan on stderr: a bar on a terminal, and a line for each phase elsewhere.
pub struct PlanScreen {
    bar: ProgressBar,
    /// The phase whose line was written.
    said: Cell<Option<Phase>>,
}

impl PlanScreen {
    /// A screen without progress.
    pub fn new() -> Self {
        let bar = match std::io::stderr().is_terminal() {
            true => ProgressBar::new(1),
            false => ProgressBar::hidden(),
        };
        let style = ProgressStyle::with_template("{prefix} {bar:30} {pos}/{len} {elapsed} {wide_msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.enable_steady_tick(Duration::from_millis(200));
        Self { bar, said: Cell::new(None) }
    }

    /// Shows the next step.
    pub fn show(&self, step: Step<'_>) {
        let phase = step.phase;
        let prefix = format!("{}/{} {}", phase.number(), Phase::ALL.len(), phase.as_str());
        if self.bar.is_hidden() && self.said.replace(Some(phase)) != Some(phase) {
            // Nobody may be reading it.
            let _ = writeln!(std::io::stderr(), "simulating {prefix}: {} steps", step.of);
        }
        self.bar.set_prefix(prefix);
        self.bar.set_length(step.of as u64);
        self.bar.set_position(step.done as u64);
        self.bar.set_message(step.what.to_owned());
    }

    /// Removes the bar.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}
