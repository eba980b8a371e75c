//! What a sweep shows while it runs, on stderr: a line for each judged rate, and on a terminal how far a run is.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use triptych_bench::result::RateResult;
use triptych_bench::sweep::News;

/// Where lines go.
pub struct Screen {
    bar: ProgressBar,
    /// The run that is under way, in words.
    run: Mutex<String>,
}

impl Screen {
    /// Looks at stderr.
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
        // A terminal that is gone is no reason to fail.
        self.bar.suspend(|| {
            let _ = writeln!(std::io::stderr(), "{text}");
        });
    }

    /// What a sweep tells.
    pub fn hear(&self, news: News<'_>) {
        match news {
            News::Plan(plan) => self.line(plan),
            News::Run { rate, seed } => self.set_run(format!("{rate} requests/s, seed {seed}")),
            News::Progress(progress) => {
                let part = progress.elapsed.as_secs_f64() / progress.window_end.as_secs_f64().max(1e-9);
                self.bar.set_position((part * 100.0).min(100.0) as u64);
                let (sent, ended) = (progress.n_sent, progress.n_ended);
                let run = self.run.lock().map(|run| run.clone()).unwrap_or_default();
                self.bar.set_message(format!(
                    "{run}: {ended} of {sent} ended, {:.0} s",
                    progress.elapsed.as_secs_f64()
                ));
            }
            News::Rate(rate) => self.line(&line(rate)),
        }
    }

    /// Nothing moves any more.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }

    fn set_run(&self, text: String) {
        self.bar.set_position(0);
        self.bar.set_message(text.clone());
        if let Ok(mut run) = self.run.lock() {
            *run = text;
        }
    }
}

/// A rate in a line: whether it passes, and if not, which rules it breaks.
fn line(rate: &RateResult) -> String {
    let verdict = &rate.verdict;
    let ms = |t: Option<f64>| t.map_or_else(|| "no end".to_owned(), |t| format!("{t:.0} ms"));
    let numbers = format!(
        "{:>8} requests/s · {:.2} % kept their promises · p99 TTFT {} · p99 TPOT {}",
        rate.rate,
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
    use triptych_bench::judge::{Rule, Window, judge};

    #[test]
    fn a_rate_that_fails_says_by_which_rules() {
        let window = Window { from: Duration::ZERO, to: Duration::from_secs(1) };
        let slo = "ttft=1s".parse().expect("an SLO");
        let verdict = judge(&[], window, &slo, &Rule::default());
        let text = line(&RateResult { rate: 2.5, verdict, runs: Vec::new() });
        assert!(text.contains("2.5 requests/s") && text.contains("fails: attainment (0 of 0"), "{text}");
    }
}
