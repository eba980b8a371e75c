//! The scene of a run: its place, its programs and their output; and the end of a part.

use super::child::{self, Ended};
use super::device::{Device, Peak};
use crate::shell::show;
use anyhow::Result;
use serde_json::Value;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The folder of what is packed, in the checkout; git ignores it.
pub const FOLDER: &str = ".cuda-check";

/// The end of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All of it ran, and nothing was wrong.
    Passed,
    /// Something was wrong.
    Failed(String),
    /// Its time was over, and nothing was wrong until then.
    OutOfTime(String),
    /// Something that it needs is not on this machine.
    NotThere(String),
    /// The time of all parts was over before.
    NotReached,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => f.write_str("passed"),
            Self::Failed(why) => write!(f, "FAILED: {why}"),
            Self::OutOfTime(how_far) => write!(f, "OUT OF TIME: {how_far}"),
            Self::NotThere(what) => write!(f, "not there: {what}"),
            Self::NotReached => f.write_str("not reached"),
        }
    }
}

/// Result of a part.
#[derive(Clone, Debug)]
pub struct Ran {
    pub outcome: Outcome,
    /// For the report: numbers of tests, names of those that failed or were left out.
    pub notes: Vec<String>,
    /// Times of a part that has any: ours and torch's.
    pub times: Option<[Value; 2]>,
    /// Peak of the device that shares of these times are of.
    pub peak: Option<Peak>,
}

impl Ran {
    /// A part with nothing more to say.
    pub fn of(outcome: Outcome) -> Self {
        Self { outcome, notes: Vec::new(), times: None, peak: None }
    }
}

/// Place and settings of a run.
pub struct Scene {
    /// The checkout.
    pub here: PathBuf,
    pub smoke: bool,
    /// True if there is a device to tell times of.
    pub is_timed: bool,
    /// Output of all programs.
    pub log: String,
    /// Rates of the device, if they are known, or when they were measured.
    pub peak: Option<Peak>,
}

impl Scene {
    pub fn new(here: &Path, smoke: bool, device: &Device) -> Self {
        let is_timed = smoke || device.is_named();
        Self { here: here.to_owned(), smoke, is_timed, log: String::new(), peak: device.peak() }
    }

    /// A program that was packed.
    pub fn packed(&self, program: &str) -> Command {
        self.command(&self.here.join(FOLDER).join("files/bin").join(program).to_string_lossy())
    }

    /// A program in the checkout.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.here);
        command
    }

    /// Runs a program, and keeps its output.
    pub fn run(&mut self, command: &mut Command, until: Instant) -> Result<Ended> {
        let ended = child::run(command, until)?;
        self.keep(&show(command), &ended.text);
        Ok(ended)
    }

    /// Keeps the output of a program.
    pub fn keep(&mut self, command: &str, text: &str) {
        self.log.push_str(&format!("$ {command}\n{text}\n"));
    }
}

/// The last line that says something.
pub fn last_line(text: &str) -> &str {
    text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing")
}
