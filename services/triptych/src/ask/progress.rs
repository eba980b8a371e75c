//! Progress of a question: a line with a spinner on a terminal, and words for the error when the time is over.

use indicatif::{ProgressBar, ProgressStyle};
use std::fmt;
use std::io::IsTerminal;
use std::time::Duration;

/// Part of a request's way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Until the cluster has admitted the request.
    Sent {
        /// Address of the cluster.
        address: String,
    },
    /// Until the first token: items are encoded, the prompt is prefilled.
    Admitted {
        /// Name of the model.
        model: String,
    },
    /// Until the end.
    Answering {
        /// Pieces of text so far.
        n_pieces: usize,
    },
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sent { address } => write!(f, "waiting for {address} to admit the request"),
            Self::Admitted { model } => {
                write!(f, "{model} has the request; waiting for its first token (encode, prefill)")
            }
            Self::Answering { n_pieces } => {
                write!(f, "waiting for the rest of the answer, after {n_pieces} pieces of it")
            }
        }
    }
}

/// The spinner and the stage that it shows.
pub struct Waiting {
    spinner: ProgressBar,
    stage: Stage,
    /// The answer is printed as it comes, so that it shows the progress itself.
    is_echoed: bool,
}

impl Waiting {
    /// Begins to wait; shown if stderr is a terminal.
    pub fn start(address: &str, is_echoed: bool) -> Self {
        let spinner = match std::io::stderr().is_terminal() {
            true => ProgressBar::new_spinner(),
            false => ProgressBar::hidden(),
        };
        let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
        let spinner = spinner.with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        spinner.enable_steady_tick(Duration::from_millis(100));
        let waiting = Self { spinner, stage: Stage::Sent { address: address.to_owned() }, is_echoed };
        waiting.show();
        waiting
    }

    /// The cluster admitted the request.
    pub fn admitted(&mut self, model: &str) {
        self.stage = Stage::Admitted { model: model.to_owned() };
        self.show();
    }

    /// A piece of the answer came.
    pub fn piece(&mut self) {
        let before = if let Stage::Answering { n_pieces } = self.stage { n_pieces } else { 0 };
        self.stage = Stage::Answering { n_pieces: before + 1 };
        if self.is_echoed {
            self.end();
        } else {
            self.show();
        }
    }

    /// True if the answer is printed as it comes.
    pub fn is_echoed(&self) -> bool {
        self.is_echoed
    }

    /// The current stage.
    pub fn stage(&self) -> &Stage {
        &self.stage
    }

    /// Removes the spinner.
    pub fn end(&self) {
        self.spinner.finish_and_clear();
    }

    fn show(&self) {
        self.spinner.set_message(self.stage.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_spinner_says_what_is_waited_for_until_the_answer_shows_itself() {
        let said = |is_echoed: bool| {
            let mut waiting = Waiting::start("here:1", is_echoed);
            let mut said = vec![waiting.spinner.message()];
            waiting.admitted("eyes");
            said.push(waiting.spinner.message());
            waiting.piece();
            waiting.piece();
            assert_eq!(waiting.spinner.is_finished(), is_echoed);
            said.push(waiting.stage().to_string());
            said
        };
        for said in [said(true), said(false)] {
            let parts = ["here:1 to admit", "eyes has the request", "after 2 pieces"];
            assert!(said.iter().zip(parts).all(|(said, part)| said.contains(part)), "{said:?}");
        }
    }
}
