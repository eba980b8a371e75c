//! Output of `up`: its own lines, the children's lines with their names, progress, and the banner.
//!
//! On a terminal there is colour and a spinner; otherwise plain lines; with `--log-json` one object a line.
//! A terminal that is gone is no reason to fail, so nothing here does.

use crate::args::LogArgs;
use crate::error::{CliError, chain};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::time::Duration;
use triptych_runtime::telemetry::{self, TelemetryGuard};

/// The supervisor's own name in the log.
const SELF: &str = "up";
/// Width of the longest usual name, `encoder-0`.
const NAME_WIDTH: usize = 9;

/// The log on stderr. Cheap to clone.
#[derive(Clone)]
pub struct Screen {
    own: &'static str,
    spinner: ProgressBar,
    style: Style,
}

#[derive(Clone)]
enum Style {
    Plain,
    Colour,
    /// Own lines go through tracing, which the guard keeps alive.
    Json(#[allow(dead_code, reason = "held for its drop")] Arc<TelemetryGuard>),
}

impl Screen {
    /// Looks at stderr and the flags.
    ///
    /// # Errors
    /// [`CliError::Setting`] for a wrong log filter, which would stop every child.
    pub fn new(log: &LogArgs) -> Result<Self, CliError> {
        Self::of(SELF, log)
    }

    /// The log of another command, under its own name.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub fn of(own: &'static str, log: &LogArgs) -> Result<Self, CliError> {
        let is_terminal = std::io::stderr().is_terminal();
        let style = if log.log_json {
            let guard = telemetry::init(&log.telemetry(own)).map_err(|e| CliError::Setting(chain(&e)))?;
            Style::Json(Arc::new(guard))
        } else if is_terminal && std::env::var_os("NO_COLOR").is_none() {
            Style::Colour
        } else {
            Style::Plain
        };
        let spins = is_terminal && !log.log_json;
        Ok(Self { own, spinner: if spins { spinner() } else { ProgressBar::hidden() }, style })
    }

    /// Lines as they are, without colour and without anything that moves.
    #[cfg(test)]
    pub fn silent() -> Self {
        Self { own: SELF, spinner: ProgressBar::hidden(), style: Style::Plain }
    }

    /// True if children may colour their lines.
    pub const fn is_coloured(&self) -> bool {
        matches!(self.style, Style::Colour)
    }

    /// A line of the supervisor.
    pub fn say(&self, text: &str) {
        match &self.style {
            Style::Json(_) => tracing::info!(process = self.own, "{text}"),
            _ => self.line(&self.prefixed(self.own, text)),
        }
    }

    /// A line of the supervisor that somebody should look at.
    pub fn warn(&self, text: &str) {
        match &self.style {
            Style::Json(_) => tracing::warn!(process = self.own, "{text}"),
            Style::Colour => self.line(&self.prefixed(self.own, &format!("\x1b[33m{text}\x1b[0m"))),
            Style::Plain => self.line(&self.prefixed(self.own, text)),
        }
    }

    /// A line of a child.
    pub fn relay(&self, name: &str, line: &str) {
        match (&self.style, line.strip_prefix('{')) {
            (Style::Json(_), Some(rest)) => self.line(&format!("{{\"process\":\"{name}\",{rest}")),
            (Style::Json(_), None) => tracing::info!(process = name, "{line}"),
            _ => self.line(&self.prefixed(name, line)),
        }
    }

    /// Shows progress beside the spinner, or as a line.
    pub fn progress(&self, what: &str) {
        if self.spinner.is_hidden() {
            return self.say(what);
        }
        self.spinner.set_message(what.to_owned());
        self.spinner.enable_steady_tick(Duration::from_millis(80));
    }

    /// Removes the spinner.
    pub fn end_progress(&self) {
        self.spinner.finish_and_clear();
    }

    /// Text for the user, on stdout; ends the wait.
    pub fn show(&self, text: &str) {
        self.end_progress();
        let mut out = std::io::stdout();
        let _ = out.write_all(text.as_bytes());
        let _ = out.flush();
    }

    fn line(&self, text: &str) {
        self.spinner.suspend(|| {
            let _ = writeln!(std::io::stderr(), "{text}");
        });
    }

    fn prefixed(&self, name: &str, text: &str) -> String {
        match self.style {
            Style::Colour => format!("\x1b[{}m{name:NAME_WIDTH$} │\x1b[0m {text}", colour(name)),
            _ => format!("{name:NAME_WIDTH$} │ {text}"),
        }
    }
}

fn spinner() -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    // A template that does not parse leaves the default look.
    if let Ok(style) = ProgressStyle::with_template("{spinner:.cyan} {wide_msg} {elapsed:.dim}") {
        bar.set_style(style);
    }
    bar
}

/// SGR code of a role's colour.
fn colour(name: &str) -> &'static str {
    match name.split('-').next() {
        Some("proxy") => "36",
        Some("encoder") => "32",
        Some("pd") => "35",
        Some("store") => "34",
        _ => "1",
    }
}
