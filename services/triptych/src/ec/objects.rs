//! Shared parts of the commands: lists of objects, key prefixes, concurrent work, lines and progress.

use crate::error::{CliError, chain};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::time::{Duration, SystemTime};
use tokio::task::JoinSet;
use triptych_core::ContentKey;
use triptych_ec::store::Listed;
use triptych_ec::{EcError, EcStore};

/// Objects asked for at once.
const PAGE: usize = 256;
/// Digits of a key or a fingerprint in lists.
pub const SHORT_DIGITS: usize = 12;
/// Fewer digits of a key are a slip of the hand.
const LEAST_DIGITS: usize = 4;

/// The objects of a store, a page at a time.
pub struct Pages<'a> {
    store: &'a dyn EcStore,
    after: Option<ContentKey>,
}

impl<'a> Pages<'a> {
    /// From the first one on.
    pub fn of(store: &'a dyn EcStore) -> Self {
        Self { store, after: None }
    }

    /// The next page; `None` after the last.
    ///
    /// # Errors
    /// The store's.
    pub async fn next(&mut self) -> Result<Option<Vec<Listed>>, CliError> {
        let page = self.store.list(self.after.as_ref(), PAGE).await.map_err(|e| failed(&e))?;
        self.after = page.last().map(|listed| listed.key);
        Ok((!page.is_empty()).then_some(page))
    }
}

/// Every object of a store.
///
/// # Errors
/// The store's.
pub async fn all(store: &dyn EcStore) -> Result<Vec<Listed>, CliError> {
    let mut pages = Pages::of(store);
    let mut all = Vec::new();
    while let Some(page) = pages.next().await? {
        all.extend(page);
    }
    Ok(all)
}

/// The key that somebody typed: all of its digits, or the first of them if only one object has these.
///
/// # Errors
/// [`CliError::Failed`] if no object or several begin so, [`CliError::Setting`] for what is no key.
pub async fn find(store: &dyn EcStore, text: &str) -> Result<ContentKey, CliError> {
    if let Some(key) = ContentKey::from_hex(text) {
        return Ok(key);
    }
    let digits = text.to_ascii_lowercase();
    let is_start = digits.len() < 64 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    if !is_start || digits.len() < LEAST_DIGITS {
        return Err(CliError::Setting(format!(
            "{text:?} is no key; a key has 64 hex digits, and the first {LEAST_DIGITS} or more will do"
        )));
    }
    let mut found = None;
    let mut pages = Pages { store, after: before(&digits) };
    'pages: while let Some(page) = pages.next().await? {
        for key in page.into_iter().map(|listed| listed.key) {
            match key.to_string() {
                hex if hex.starts_with(&digits) => {
                    if let Some(first) = found.replace(key) {
                        let text =
                            format!("several keys begin with {digits}: {first}, {key}; give more digits");
                        return Err(CliError::Failed(text));
                    }
                }
                hex if hex > digits => break 'pages,
                _ => {}
            }
        }
    }
    found.ok_or_else(|| CliError::Failed(format!("no object's key begins with {digits}")))
}

/// The last key before all that begin with the digits; `None`: these are the first.
pub fn before(digits: &str) -> Option<ContentKey> {
    let first = ContentKey::from_hex(&format!("{digits:0<64}"))?;
    let mut bytes = *first.as_bytes();
    for byte in bytes.iter_mut().rev() {
        let (less, borrows) = byte.overflowing_sub(1);
        *byte = less;
        if !borrows {
            return Some(ContentKey::from_bytes(bytes));
        }
    }
    // They are all zero: nothing comes before.
    None
}

/// Tasks, so many at once.
pub struct ConcurrentTasks<R> {
    tasks: JoinSet<R>,
    jobs: usize,
}

impl<R: Send + 'static> ConcurrentTasks<R> {
    /// Runs at most `jobs` at once.
    pub fn of(jobs: usize) -> Self {
        Self { tasks: JoinSet::new(), jobs: jobs.max(1) }
    }

    /// Starts a task; waits for another to end first if they are too many, and gives its result.
    ///
    /// # Errors
    /// If that task panicked.
    pub async fn start(
        &mut self,
        task: impl Future<Output = R> + Send + 'static,
    ) -> Result<Option<R>, CliError> {
        let ended = if self.tasks.len() < self.jobs { None } else { self.end().await? };
        self.tasks.spawn(task);
        Ok(ended)
    }

    /// The result of a task that ends; `None` when none is left.
    ///
    /// # Errors
    /// If that task panicked.
    pub async fn end(&mut self) -> Result<Option<R>, CliError> {
        let ended = self.tasks.join_next().await;
        ended.transpose().map_err(|e| CliError::failed("a task of this command ended early", &e))
    }
}

/// A bar on stderr where that is a terminal.
pub fn progress(n: usize, what: &'static str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg} [{bar:30}] {pos}/{len}, {eta} left");
    let bar = ProgressBar::new(n as u64).with_message(what);
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Writes a line on stdout, above the bar.
///
/// # Errors
/// If stdout is closed.
pub fn line(bar: &ProgressBar, text: &str) -> Result<(), CliError> {
    let written = bar.suspend(|| writeln!(std::io::stdout().lock(), "{text}"));
    written.map_err(|e| CliError::failed("cannot write the answer", &e))
}

/// Writes a line of the command's own on stderr, so that stdout has nothing but what was asked for.
pub fn note(bar: &ProgressBar, text: &str) {
    // Nobody may be reading it.
    let _ = bar.suspend(|| writeln!(std::io::stderr(), "{text}"));
}

/// Age of an object.
pub fn age(stored: Option<SystemTime>) -> Option<Duration> {
    stored.map(|time| time.elapsed().unwrap_or_default())
}

/// A store that does not do what it is asked.
pub fn failed(e: &EcError) -> CliError {
    CliError::Failed(chain(e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_before_those_that_begin_with_digits_is_just_before_the_first() {
        let text = |digits: &str| before(digits).map(|key| key.to_string());
        assert_eq!(text("ab12"), Some(format!("ab11{}", "f".repeat(60))));
        assert_eq!(text("abc"), Some(format!("abb{}", "f".repeat(61))));
        assert_eq!(text("0000"), None);
        assert_eq!(text(&"f".repeat(64)), Some(format!("{}e", "f".repeat(63))));
    }
}
