//! Leases of a directory between two real processes.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};
use triptych_ec::EcStore;
use triptych_ec::conformance;
use triptych_ec::store::disk::DiskStore;
use triptych_ec::store::lease::{Acquired, EncodeLease};

use crate::{LIMIT, key};

/// Environment variable for the other process: the directory.
const DIR: &str = "TRIPTYCH_TEST_DISK_DIR";
/// Long enough that a busy machine renews in time.
const TTL: Duration = Duration::from_secs(6);

/// The process that holds the lease of a key; killed with this guard.
struct Holder {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Holder {
    fn start(dir: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["disk::processes::as_another_process", "--exact", "--nocapture", "--test-threads=1"])
            .env(DIR, dir)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdout }
    }

    /// Waits for its next renewal.
    fn renews(&mut self) {
        let mut line = String::new();
        while self.stdout.read_line(&mut line).unwrap() > 0 {
            if line.contains("renewed") {
                return;
            }
            line.clear();
        }
        panic!("the other process ended");
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn open(dir: &Path) -> DiskStore {
    DiskStore::open(dir, &conformance::limits()).await.unwrap()
}

/// No test by itself: with the variable it is the other process of one.
#[tokio::test]
async fn as_another_process() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let store = open(Path::new(&dir)).await;
    let Acquired::Granted(lease) = store.acquire(&key(1), TTL).await.unwrap() else { panic!("it is free") };
    loop {
        assert!(store.renew(&lease, TTL).await.unwrap());
        let mut out = std::io::stdout();
        writeln!(out, "renewed").unwrap();
        out.flush().unwrap();
        sleep(TTL / 6).await;
    }
}

async fn until_granted(store: &DiskStore) -> EncodeLease {
    let until = Instant::now() + LIMIT;
    loop {
        match store.acquire(&key(1), TTL).await.unwrap() {
            Acquired::Granted(lease) => return lease,
            Acquired::Held { left } => {
                assert!(left <= TTL && Instant::now() < until, "held for {left:?}");
                sleep(left).await;
            }
        }
    }
}

#[tokio::test]
async fn a_lease_is_kept_by_renewals_and_is_taken_over_when_its_process_was_killed() {
    let dir = TempDir::new().unwrap();
    let mut holder = Holder::start(dir.path());
    holder.renews();
    let store = open(dir.path()).await;
    let Acquired::Held { left } = store.acquire(&key(1), TTL).await.unwrap() else { panic!("it is held") };
    assert!(left <= TTL);
    // Longer than it lives without them.
    for _ in 0..8 {
        holder.renews();
        assert!(matches!(store.acquire(&key(1), TTL).await.unwrap(), Acquired::Held { .. }));
    }
    drop(holder);
    let lease = until_granted(&store).await;
    assert!(store.release(&lease).await.unwrap());
}
