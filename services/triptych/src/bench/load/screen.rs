//! Progress of a sweep on stderr: a line for each judged rate, and a bar for the run on a terminal.

use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::Mutex;
use std::io::{IsTerminal, Write};
use triptych_bench::result::RateResult;
use triptych_bench::sweep::SweepEvent;

/// Lines and the progress bar.
pub struct Screen {
    bar: ProgressBar,
    /// Label of the run under way.
    run: Mutex<String>,
}

impl Screen {
    /// Makes a bar if stderr is a terminal.
    pub fn new() -> Self {
        let bar = if std::io::stderr().is_terminal() { ProgressBar::new(100) } else { ProgressBar::hidden() };
        // The template is a constant, and a bar without it works too.
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {msg}") {
            bar.set_style(style);
        }
        Self { bar, run: Mutex::default() }
    }

    /// A line that stays.
    pub fn line(&self, text: &str) {
        // A closed stderr does not fail the command.
        self.bar.suspend(|| {
            let _ = writeln!(std::io::stderr(), "{text}");
        });
    }

    /// Shows an event of the sweep.
    pub fn show(&self, event: SweepEvent<'_>) {
        match event {
            SweepEvent::Plan(plan) => self.line(plan),
            SweepEvent::Run { rate, seed } => self.set_run(format!("{rate} requests/s, seed {seed}")),
            SweepEvent::Progress(progress) => {
                let part = progress.elapsed.as_secs_f64() / progress.window_end.as_secs_f64().max(1e-9);
                self.bar.set_position((part * 100.0).min(100.0) as u64);
                let run = self.run.lock().clone();
                self.bar.set_message(format!(
                    "{run}: {} of {} ended, {:.0} s",
                    progress.n_ended,
                    progress.n_sent,
                    progress.elapsed.as_secs_f64()
                ));
            }
            SweepEvent::Rate(rate) => self.line(&line(rate)),
        }
    }

    /// Removes the bar.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }

    fn set_run(&self, text: String) {
        self.bar.set_position(0);
        self.bar.set_message(text.clone());
        *self.run.lock() = text;
    }
}

/// A judged rate as a line, with the broken rules if it fails.
fn line(rate: &RateResult) -> String {
    let verdict = &rate.verdict;
    let ms = |t: Option<f64>| t.map_or_else(|| "infinite".to_owned(), |t| format!("{t:.0} ms"));
    let numbers = format!(
        "{:>19} · {:.2} % meet the SLO · p99 TTFT {} · p99 TPOT {}",
        rate.rate_text(),
        verdict.attainment() * 100.0,
        ms(verdict.ttft_ms.p99),
        ms(verdict.tpot_ms.p99),
    );
    if verdict.passed {
        return format!("{numbers} · passes");
    }
    let broken = verdict.findings.iter().filter(|f| !f.passed).map(|f| format!("{} ({})", f.rule, f.found));
    format!("{numbers} · fails: {}", broken.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use triptych_bench::judge::{JudgedWindow, Rule, judge};

    #[test]
    fn a_rate_that_fails_says_by_which_rules() {
        let window = JudgedWindow { from: Duration::ZERO, to: Duration::from_secs(1) };
        let slo = "ttft=1s".parse().expect("an SLO");
        let verdict = judge(&[], window, &slo, &Rule::default());
        let rate = RateResult { rate: 2.5, offered_per_s: Some(2.25), verdict, runs: Vec::new() };
        let text = line(&rate);
        assert!(text.contains("2.25 requests/s (2.5 asked for)"), "{text}");
        assert!(text.contains("fails: attainment (0 of 0"), "{text}");
    }
}
