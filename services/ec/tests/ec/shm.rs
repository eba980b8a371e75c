//! The shared slab: the conformance suite, and what happens between processes, some of which are killed.
//!
//! The other processes are this test binary again: [`as_another_process`] is what they run.

use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use triptych_core::ContentKey;
use triptych_core::limits::Limits;
use triptych_ec::conformance::{self, sample_variant};
use triptych_ec::error::chain;
use triptych_ec::object::{decode, encode};
use triptych_ec::store::lease::Acquired;
use triptych_ec::store::shm::{ShmSetting, ShmStore};
use triptych_ec::{EcError, EcStore, PutOutcome};

use crate::{LIMIT, key};

const MIB: u64 = 1 << 20;
const HOUR: Duration = Duration::from_secs(3600);

/// Environment variable for the other process: role, path, MiB, number.
const ROLE: &str = "TRIPTYCH_TEST_SHM_ROLE";

fn setting(dir: &Path, mib: u64) -> ShmSetting {
    ShmSetting { path: dir.join("slab"), size_bytes: mib * MIB }
}

async fn open(dir: &Path, mib: u64) -> ShmStore {
    ShmStore::open(&setting(dir, mib), &Limits::default()).await.unwrap()
}

/// Another process with a role; killed with this guard.
struct Other {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Other {
    fn start(role: &str, dir: &Path, mib: u64, n: u64) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["shm::as_another_process", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{role} {mib} {n} {}", dir.display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdout }
    }

    /// The rest of the next line that begins with `word`.
    fn hears(&mut self, word: &str) -> String {
        let mut line = String::new();
        while self.stdout.read_line(&mut line).unwrap() > 0 {
            // The harness writes the test's name before the first line.
            if let Some((_, rest)) = line.split_once(&format!("{word}:")) {
                return rest.trim().to_owned();
            }
            line.clear();
        }
        panic!("the other process ended without saying {word:?}");
    }

    /// SIGKILL.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn ends_well(mut self) {
        assert!(self.child.wait().unwrap().success(), "the other process failed");
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(word: &str, text: impl std::fmt::Display) {
    let mut out = std::io::stdout();
    writeln!(out, "{word}:{text}").unwrap();
    out.flush().unwrap();
}

/// No test by itself: with the variable it is another process of one.
#[tokio::test(flavor = "multi_thread")]
async fn as_another_process() {
    let Ok(told) = std::env::var(ROLE) else { return };
    let mut words = told.splitn(4, ' ');
    let role = words.next().unwrap();
    let mut number = || words.next().unwrap().parse::<u64>().unwrap();
    let (mib, n) = (number(), number());
    let dir = words.next().unwrap();
    let store = open(Path::new(dir), mib).await;
    match role {
        "writes" => writes(&store, n).await,
        "works" => works(&store, n).await,
        "races" => races(&store, n).await,
        "leases" => leases(&store).await,
        _ => panic!("{role} is no role"),
    }
}

/// Writes large objects until it is killed.
async fn writes(store: &ShmStore, n: u64) {
    say("ready", "");
    for i in 0_u64.. {
        let key = ContentKey::from_bytes([(i % 4) as u8; 32]);
        let object = encode(&sample_variant(key, store.capacity() / 3, n));
        store.put_if_absent(&key, object).await.unwrap();
        store.delete(&key).await.unwrap();
    }
}

/// Puts and gets objects of a few keys, with other rows than any other process, and verifies what it gets.
async fn works(store: &ShmStore, n: u64) {
    say("ready", "");
    let mut rng = SmallRng::seed_from_u64(n);
    let (mut n_read, mut n_stored) = (0, 0);
    for _ in 0..300 {
        let key = ContentKey::from_bytes([rng.random_range(0..24); 32]);
        if let Some(object) = store.get(&key).await.unwrap() {
            decode(object, &key, &Limits::default()).expect("a reader sees a whole object of its key");
            n_read += 1;
        }
        if rng.random_range(0..8) == 0 {
            store.delete(&key).await.unwrap();
        }
        let len = *[100, 40_000, 300_000, 700_000, 1_400_000].choose(&mut rng).unwrap();
        let object = encode(&sample_variant(key, len, n));
        n_stored += u64::from(store.put_if_absent(&key, object).await.unwrap() == PutOutcome::Stored);
        assert!(store.used_bytes() <= store.capacity());
    }
    say("done", format!("{n_read} {n_stored}"));
}

/// Puts the same keys as all the others.
async fn races(store: &ShmStore, n: u64) {
    let mut outcomes = String::new();
    for i in 0..20 {
        let object = encode(&sample_variant(key(i), 200_000, n));
        outcomes.push(match store.put_if_absent(&key(i), object).await.unwrap() {
            PutOutcome::Stored => 'S',
            PutOutcome::AlreadyThere => '-',
        });
    }
    say("outcomes", outcomes);
}

/// Takes the lease of a key for an hour, and stays.
async fn leases(store: &ShmStore) {
    match store.acquire(&key(1), HOUR).await.unwrap() {
        Acquired::Granted(lease) => say("token", lease.token),
        Acquired::Held { .. } => panic!("nobody else asked"),
    }
    tokio::time::sleep(HOUR).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shm_conforms() {
    let dir = TempDir::new().unwrap();
    let store = ShmStore::open(&setting(dir.path(), 80), &conformance::limits()).await.unwrap();
    conformance::run(Arc::new(store)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_of_one_process_see_each_other_and_the_first_decides_the_size() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open(dir.path(), 4).await, open(dir.path(), 16).await);
    assert_eq!(a.capacity(), b.capacity());
    let object = encode(&sample_variant(key(1), 1000, 0));
    assert_eq!(a.put_if_absent(&key(1), object.clone()).await.unwrap(), PutOutcome::Stored);
    assert_eq!(b.put_if_absent(&key(1), object.clone()).await.unwrap(), PutOutcome::AlreadyThere);
    assert_eq!(b.get(&key(1)).await.unwrap(), Some(object));
    let mode = fs::metadata(dir.path().join("slab")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "nobody else's to read");
    let listed = a.list(None, 10).await.unwrap();
    assert_eq!((listed.len(), listed[0].key), (1, key(1)));
    assert!(listed[0].stored.unwrap().elapsed().unwrap() < LIMIT);
    assert!(a.list(Some(&key(1)), 10).await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_over_the_capacity_is_refused_and_one_of_its_size_evicts_the_rest() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path(), 2).await;
    let limit = store.capacity();
    let e = store.put_if_absent(&key(1), vec![0; limit + 1].into()).await.unwrap_err();
    assert!(matches!(e, EcError::TooLarge { limit: l, .. } if l == limit), "{e:?}");
    for n in 2..40 {
        store.put_if_absent(&key(n), vec![n; 100_000].into()).await.unwrap();
        assert_eq!(store.get(&key(n)).await.unwrap(), Some(vec![n; 100_000].into()));
    }
    assert!(store.n_evicted() > 15);
    assert_eq!(store.put_if_absent(&key(1), vec![1; limit].into()).await.unwrap(), PutOutcome::Stored);
    assert_eq!(store.list(None, 100).await.unwrap().len(), 1);
    assert_eq!(store.used_bytes(), limit);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_writers_in_several_processes_one_stores() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path(), 16).await;
    let others: Vec<_> = (0..4).map(|n| Other::start("races", dir.path(), 16, n)).collect();
    let outcomes: Vec<_> = others.into_iter().map(|mut other| other.hears("outcomes")).collect();
    for i in 0..20_u8 {
        let winners: Vec<_> = (0..4).filter(|n| outcomes[*n].as_bytes()[usize::from(i)] == b'S').collect();
        assert_eq!(winners.len(), 1, "{outcomes:?}");
        let object = store.get(&key(i)).await.unwrap();
        assert_eq!(object, Some(encode(&sample_variant(key(i), 200_000, winners[0] as u64))));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_that_work_on_a_full_slab_read_whole_objects_though_some_of_them_are_killed() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path(), 4).await;
    let mut others: Vec<_> = (0..5).map(|n| Other::start("works", dir.path(), 4, n)).collect();
    for (n, other) in others.iter_mut().enumerate().take(2) {
        other.hears("ready");
        tokio::time::sleep(Duration::from_millis(30 * n as u64)).await;
        other.kill();
    }
    let mut sums = [0, 0];
    for mut other in others.drain(2..) {
        let done = other.hears("done");
        let numbers = done.split(' ').map(|n| n.parse::<u32>().unwrap());
        sums.iter_mut().zip(numbers).for_each(|(sum, n)| *sum += n);
        other.ends_well();
    }
    assert!(sums.iter().all(|n| *n > 0), "they read and stored: {sums:?}");
    assert!(store.n_evicted() > 0, "it was full");
    let whole = vec![1; store.capacity()];
    assert_eq!(store.put_if_absent(&key(200), whole.into()).await.unwrap(), PutOutcome::Stored);
}

#[tokio::test(flavor = "multi_thread")]
async fn slots_of_a_killed_writer_are_freed() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path(), 24).await;
    for n in 0..8 {
        let mut other = Other::start("writes", dir.path(), 24, n);
        other.hears("ready");
        // Copying takes most of its time, so most of the kills fall into a put; the outcome is the same if not.
        tokio::time::sleep(Duration::from_millis(7 * n)).await;
        other.kill();
        for listed in store.list(None, 100).await.unwrap() {
            let object = store.get(&listed.key).await.unwrap().expect("nobody else is here");
            decode(object, &listed.key, &Limits::default()).expect("it is whole");
        }
        let whole = vec![1; store.capacity()];
        assert_eq!(store.put_if_absent(&key(200), whole.into()).await.unwrap(), PutOutcome::Stored);
        store.delete(&key(200)).await.unwrap();
        assert_eq!(store.used_bytes(), 0, "everything is free after kill {n}");
    }
    let left = fs::read_dir(dir.path().join("slab.owners")).unwrap().count();
    drop(store);
    drop(open(dir.path(), 24).await);
    assert!(left > 1 && fs::read_dir(dir.path().join("slab.owners")).unwrap().count() == 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_ends_with_the_process_that_holds_it() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path(), 2).await;
    let mut other = Other::start("leases", dir.path(), 2, 0);
    let token: u64 = other.hears("token").parse().unwrap();
    assert!(matches!(store.acquire(&key(1), HOUR).await.unwrap(), Acquired::Held { .. }));
    assert!(matches!(store.acquire(&key(2), HOUR).await.unwrap(), Acquired::Granted(_)));
    let one = key(1);
    let waiting = tokio::time::timeout(LIMIT, store.wait(&one, HOUR));
    let (waited, ()) = tokio::join!(waiting, async { other.kill() });
    assert_eq!(waited.expect("it does not wait for the dead").unwrap(), None);
    let Acquired::Granted(lease) = store.acquire(&key(1), HOUR).await.unwrap() else { panic!("still held") };
    assert!(lease.token > token);
    assert!(store.renew(&lease, HOUR).await.unwrap() && store.release(&lease).await.unwrap());
    assert!(!store.release(&lease).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_gets_the_object_when_another_process_stores_it() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open(dir.path(), 2).await, open(dir.path(), 2).await);
    assert!(matches!(a.acquire(&key(1), HOUR).await.unwrap(), Acquired::Granted(_)));
    let one = key(1);
    let output = sample_variant(one, 1000, 0);
    let waiting = tokio::time::timeout(LIMIT, b.wait(&one, HOUR));
    let (waited, stored) = tokio::join!(waiting, a.put_if_absent(&one, encode(&output)));
    assert_eq!(stored.unwrap(), PutOutcome::Stored);
    assert_eq!(waited.unwrap().unwrap().as_ref(), Some(output.item()));
    let before = Instant::now();
    assert_eq!(b.wait(&key(2), HOUR).await.unwrap(), None, "nobody is making it");
    assert!(before.elapsed() < LIMIT);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_no_slab_is_named_and_not_touched() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("slab");
    drop(open(dir.path(), 1).await);
    let whole = fs::read(&path).unwrap();
    let noise: Vec<u8> = (0..whole.len()).map(|i| (i * i / 7) as u8).collect();
    let mut other_counts = whole.clone();
    other_counts[16..24].copy_from_slice(&(1_u64 << 60).to_le_bytes());
    for bytes in
        [&b""[..], b"x", b"TRIPTYCH", &noise, &whole[..whole.len() - 8], &whole[..4096], &other_counts]
    {
        fs::write(&path, bytes).unwrap();
        let e = ShmStore::open(&setting(dir.path(), 1), &Limits::default()).await.unwrap_err();
        assert!(matches!(e, EcError::Config { .. }), "{e:?}");
        assert!(chain(&e).contains("slab") && chain(&e).contains("remove this one"), "{e}");
        assert!(fs::read(&path).unwrap() == bytes);
    }
    fs::write(&path, &whole).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o622)).unwrap();
    let e = ShmStore::open(&setting(dir.path(), 1), &Limits::default()).await.unwrap_err();
    assert!(chain(&e).contains("others may write it"), "{e}");
    let nowhere = ShmSetting { path: dir.path().join("no").join("where"), size_bytes: MIB };
    let e = ShmStore::open(&nowhere, &Limits::default()).await.unwrap_err();
    assert!(chain(&e).contains("no/where"), "{e}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slab_full_of_garbage_under_a_good_header_loses_its_objects_and_works_again() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("slab");
    let store = open(dir.path(), 1).await;
    let noise: Vec<u8> = (0..60_000_u64).map(|i| ((i * i * 2_654_435_761) >> 11) as u8).collect();
    // Past the counts that never change: counters, slots, index, leases.
    let mut file = OpenOptions::new().write(true).open(&path).unwrap();
    std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(64)).unwrap();
    file.write_all(&noise).unwrap();
    for n in 0..50 {
        let object = encode(&sample_variant(key(n), 40_000, 0));
        store.put_if_absent(&key(n), object.clone()).await.unwrap();
        assert_eq!(store.get(&key(n)).await.unwrap(), Some(object), "{n}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slab_that_was_shortened_or_replaced_is_not_available() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("slab");
    let store = open(dir.path(), 2).await;
    store.put_if_absent(&key(1), vec![1; 500_000].into()).await.unwrap();
    fs::rename(&path, dir.path().join("aside")).unwrap();
    assert!(matches!(store.ping().await, Err(EcError::Unavailable { .. })));
    drop(open(dir.path(), 2).await);
    assert!(chain(&store.ping().await.unwrap_err()).contains("taken its place"));
    File::options().write(true).open(dir.path().join("aside")).unwrap().set_len(64 << 10).unwrap();
    let e = store.get(&key(1)).await.unwrap_err();
    assert!(chain(&e).contains("shortened"), "{e}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unfinished_slab_is_removed_at_the_next_start() {
    let dir = TempDir::new().unwrap();
    let (old, new) = (dir.path().join("slab.new-1"), dir.path().join("slab.new-2"));
    let past = std::time::SystemTime::now() - HOUR;
    File::create(&old).unwrap().set_modified(past).unwrap();
    File::create(&new).unwrap();
    drop(open(dir.path(), 1).await);
    assert!(!old.exists() && new.exists(), "a live process may be making the other");
}
