//! Polling for changed files: keys and certificates are replaced under a running process.
//!
//! Polling, not inotify: a mounted secret changes by a symbolic link to another folder, which a watch on the file
//! misses.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// Modification time, length and inode of a file; `None` if it does not exist.
type Stamp = Option<(SystemTime, u64, u64)>;

/// Files, and their state at the last check.
#[derive(Debug)]
pub struct WatchedFiles {
    paths: Vec<PathBuf>,
    known: Vec<Stamp>,
}

impl WatchedFiles {
    /// Notes the current state. Create it before the files are read, so that no change is missed.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        let known = stamps(&paths);
        Self { paths, known }
    }

    /// Calls `changed` after each change of a file, checked at the interval `every`. Never returns; cancel by dropping.
    pub async fn on_change(mut self, every: Duration, changed: impl Fn()) {
        loop {
            tokio::time::sleep(every).await;
            let now = stamps(&self.paths);
            // A missing file is being replaced.
            if now != self.known && now.iter().all(Option::is_some) {
                self.known = now;
                changed();
            }
        }
    }
}

fn stamps(files: &[PathBuf]) -> Vec<Stamp> {
    files.iter().map(|path| stamp(path)).collect()
}

fn stamp(path: &std::path::Path) -> Stamp {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.modified().ok()?, metadata.len(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[tokio::test(start_paused = true)]
    async fn a_replaced_file_is_reported_once_and_a_missing_one_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        std::fs::write(&path, "a").unwrap();
        let n_changes = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&n_changes);
        let watching = WatchedFiles::new(vec![path.clone()]).on_change(Duration::from_secs(1), move || {
            counter.fetch_add(1, Ordering::SeqCst);
        });
        let watching = tokio::spawn(watching);
        let pass = async || tokio::time::sleep(Duration::from_secs(3)).await;
        pass().await;
        assert_eq!(n_changes.load(Ordering::SeqCst), 0);
        std::fs::remove_file(&path).unwrap();
        pass().await;
        assert_eq!(n_changes.load(Ordering::SeqCst), 0);
        std::fs::write(&path, "longer").unwrap();
        pass().await;
        assert_eq!(n_changes.load(Ordering::SeqCst), 1);
        watching.abort();
    }
}
