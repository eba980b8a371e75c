//! Steps one after another, each with its time: the table stands at the end, whether they passed or not.

use anyhow::{Result, bail};
use std::fmt;
use std::time::{Duration, Instant};

/// A step that runs to its end, or says why it could not run.
pub type Step<'a> = (&'a str, Box<dyn FnOnce() -> Result<Ran> + 'a>);

/// The end of a step that did not fail.
#[derive(Debug, PartialEq, Eq)]
pub enum Ran {
    /// All of it ran.
    Whole,
    /// Some of it could not run on this machine, with the reasons.
    Partly(String),
}

enum Outcome {
    Passed,
    Partly(String),
    Failed,
    NotReached,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => f.write_str("passed"),
            Self::Partly(why) => write!(f, "not all of it ran: {why}"),
            Self::Failed => f.write_str("FAILED"),
            Self::NotReached => f.write_str("not reached"),
        }
    }
}

/// Runs the steps up to the first that fails, and prints what each took.
///
/// # Errors
/// If a step failed, or if one could not run as a whole: a test that did not run is not green.
pub fn run(steps: Vec<Step<'_>>) -> Result<()> {
    let start = Instant::now();
    let n_steps = steps.len();
    let mut rows = Vec::new();
    let mut failure = None;
    for (i, (name, step)) in steps.into_iter().enumerate() {
        if failure.is_some() {
            rows.push((name, Duration::ZERO, Outcome::NotReached));
            continue;
        }
        println!("\n━━ {}/{n_steps} {name}", i + 1);
        let start = Instant::now();
        let outcome = match step() {
            Ok(Ran::Whole) => Outcome::Passed,
            Ok(Ran::Partly(why)) => Outcome::Partly(why),
            Err(error) => {
                failure = Some(error);
                Outcome::Failed
            }
        };
        rows.push((name, start.elapsed(), outcome));
    }
    println!("\n{}", table(&rows, start.elapsed()));
    if let Some(error) = failure {
        return Err(error);
    }
    if rows.iter().any(|(_, _, outcome)| matches!(outcome, Outcome::Partly(_))) {
        bail!("what ran passed, and not everything could run here; see the table");
    }
    Ok(())
}

fn table(rows: &[(&str, Duration, Outcome)], total: Duration) -> String {
    let mut lines = vec!["| step | time | |".to_owned(), "|---|---|---|".to_owned()];
    lines.extend(
        rows.iter().map(|(name, time, outcome)| format!("| {name} | {} | {outcome} |", minutes(*time))),
    );
    lines.push(format!("| all | {} | |", minutes(total)));
    lines.join("\n")
}

fn minutes(time: Duration) -> String {
    match time.as_secs() {
        s @ 0..60 => format!("{s} s"),
        s => format!("{} min {:02} s", s / 60, s % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(name: &str, result: Result<Ran>) -> Step<'_> {
        (name, Box::new(move || result))
    }

    #[test]
    fn what_could_not_run_is_not_green() {
        assert!(run(vec![step("a", Ok(Ran::Whole)), step("b", Ok(Ran::Whole))]).is_ok());
        assert!(run(vec![step("a", Ok(Ran::Partly("no root".into()))), step("b", Ok(Ran::Whole))]).is_err());
    }

    #[test]
    fn steps_after_a_failure_do_not_run() {
        let never: Step<'_> = ("b", Box::new(|| panic!("this step runs")));
        assert!(run(vec![step("a", Err(anyhow::anyhow!("broken"))), never]).is_err());
    }

    #[test]
    fn table_has_a_row_for_each_step_and_one_for_all() {
        let rows = [
            ("format", Duration::from_secs(2), Outcome::Passed),
            ("tests", Duration::ZERO, Outcome::NotReached),
        ];
        let expected = "| step | time | |\n|---|---|---|\n| format | 2 s | passed |\n\
                        | tests | 0 s | not reached |\n| all | 1 min 05 s | |";
        assert_eq!(table(&rows, Duration::from_secs(65)), expected);
    }
}
