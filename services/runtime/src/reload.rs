//! Files that are read again when they change: keys and certificates are replaced under a running process.
//!
//! They are looked at by time rather than watched: a mounted secret changes by a link that turns elsewhere, which
//! watchers of a file miss.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// What tells a file from what it was: when it was written, how long it is, and which file it is.
type Stamp = Option<(SystemTime, u64, u64)>;

/// Files as they were at a moment.
#[derive(Debug)]
pub struct Files {
    paths: Vec<PathBuf>,
    known: Vec<Stamp>,
}

impl Files {
    /// As they are. To be made before they are read: what changes afterwards is seen.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        let known = stamps(&paths);
        Self { paths, known }
    }

    /// Calls `changed` whenever one of them is another than it was. Never ends.
    pub async fn on_change(mut self, every: Duration, changed: impl Fn()) {
        loop {
            tokio::time::sleep(every).await;
            let now = stamps(&self.paths);
            // A file that is gone is on its way of being replaced.
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
    async fn a_file_that_is_replaced_is_told_once_and_one_that_is_gone_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        std::fs::write(&path, "a").unwrap();
        let told = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&told);
        let watching = Files::new(vec![path.clone()]).on_change(Duration::from_secs(1), move || {
            counter.fetch_add(1, Ordering::SeqCst);
        });
        let watching = tokio::spawn(watching);
        let pass = async || tokio::time::sleep(Duration::from_secs(3)).await;
        pass().await;
        assert_eq!(told.load(Ordering::SeqCst), 0);
        std::fs::remove_file(&path).unwrap();
        pass().await;
        assert_eq!(told.load(Ordering::SeqCst), 0);
        std::fs::write(&path, "longer").unwrap();
        pass().await;
        assert_eq!(told.load(Ordering::SeqCst), 1);
        watching.abort();
    }
}
