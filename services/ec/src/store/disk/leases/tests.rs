//! Leases of two hosts on one directory whose clocks differ; both are moved by hand.

use super::*;
use parking_lot::Mutex;
use tempfile::TempDir;

const TTL: Duration = Duration::from_secs(10);
const HOUR: i64 = 3600;
/// Differences of the hosts' clocks in seconds.
const SKEWS: [i64; 7] = [-HOUR, -15, -1, 0, 1, 15, HOUR];

/// Time since the start of the test, the same for every host.
#[derive(Clone, Debug, Default)]
struct Time(Arc<Mutex<Duration>>);

impl Time {
    fn advance(&self, by: Duration) {
        *self.0.lock() += by;
    }
}

/// A host whose time of day, and so the one that it stamps files with and compares them to, is ahead.
#[derive(Debug)]
struct Host {
    time: Time,
    booted: Instant,
    day: SystemTime,
}

impl HostClock for Host {
    fn monotonic(&self) -> Instant {
        self.booted + *self.time.0.lock()
    }

    fn of_files(&self) -> SystemTime {
        self.day + *self.time.0.lock()
    }
}

/// The leases of two hosts; the second one's clock is `skew` seconds ahead.
struct Bench {
    dir: TempDir,
    time: Time,
    a: Leases,
    b: Leases,
}

impl Bench {
    fn new(skew: i64) -> Self {
        let (dir, time) = (TempDir::new().unwrap(), Time::default());
        let leases = |skew: i64| {
            let by = Duration::from_secs(skew.unsigned_abs());
            let day = if skew < 0 { SystemTime::now() - by } else { SystemTime::now() + by };
            // A monotonic clock starts anywhere.
            let booted = Instant::now() + Duration::from_secs(skew.unsigned_abs() / 2);
            let host = Host { time: time.clone(), booted, day };
            Leases::new(dir.path().into(), Arc::new(host)).unwrap()
        };
        let (a, b) = (leases(0), leases(skew));
        Self { dir, time, a, b }
    }
}

fn key() -> ContentKey {
    ContentKey::from_bytes([7; 32])
}

fn granted(acquired: Acquired) -> EncodeLease {
    match acquired {
        Acquired::Granted(lease) => lease,
        Acquired::Held { left } => panic!("held for {left:?}"),
    }
}

fn left(acquired: Acquired) -> Duration {
    match acquired {
        Acquired::Held { left } => left,
        Acquired::Granted(lease) => panic!("granted {lease:?}"),
    }
}

#[test]
fn a_lease_that_is_renewed_is_never_taken_over_however_the_clocks_differ() {
    for skew in SKEWS {
        let Bench { time, a, b, dir: _dir } = Bench::new(skew);
        let lease = granted(a.acquire(&key(), TTL).unwrap());
        for _ in 0..300 {
            assert!(b.is_held(&key()).unwrap(), "{skew} s");
            assert_eq!(left(b.acquire(&key(), TTL).unwrap()), TTL, "{skew} s");
            time.advance(TTL / 3);
            assert!(a.renew(&lease, TTL).unwrap(), "{skew} s");
        }
        assert!(a.release(&lease).unwrap());
        granted(b.acquire(&key(), TTL).unwrap());
    }
}

#[test]
fn a_lease_whose_holder_died_is_free_one_time_to_live_after_the_first_look() {
    for skew in SKEWS {
        let Bench { time, a, b, dir: _dir } = Bench::new(skew);
        let first = granted(a.acquire(&key(), TTL).unwrap());
        time.advance(TTL / 2);
        assert_eq!(left(b.acquire(&key(), TTL).unwrap()), TTL, "{skew} s");
        time.advance(TTL - Duration::from_millis(1));
        assert!(b.is_held(&key()).unwrap(), "{skew} s");
        time.advance(Duration::from_millis(1));
        assert!(!b.is_held(&key()).unwrap(), "{skew} s");
        let second = granted(b.acquire(&key(), TTL).unwrap());
        assert!(second.token > first.token, "{skew} s");
        assert!(!a.renew(&first, TTL).unwrap() && !a.release(&first).unwrap());
        assert!(b.renew(&second, TTL).unwrap(), "nothing that the first holder did touched it");
    }
}

#[test]
fn a_holder_whose_time_is_over_knows_it_before_anyone_takes_over() {
    for skew in SKEWS {
        let Bench { time, a, b, dir: _dir } = Bench::new(skew);
        let lease = granted(a.acquire(&key(), TTL).unwrap());
        left(b.acquire(&key(), TTL).unwrap());
        time.advance(TTL);
        assert!(!a.renew(&lease, TTL).unwrap(), "{skew} s");
        assert!(!a.release(&lease).unwrap(), "{skew} s");
        granted(b.acquire(&key(), TTL).unwrap());
    }
}

#[test]
fn a_lease_that_was_forgotten_for_hours_is_free_at_the_first_look() {
    let Bench { time, a, b, dir } = Bench::new(15);
    granted(a.acquire(&key(), TTL).unwrap());
    let old = SystemTime::now() - Duration::from_secs(3 * 3600);
    File::open(dir.path().join(key().to_string())).unwrap().set_modified(old).unwrap();
    assert!(!b.is_held(&key()).unwrap());
    b.sweep().unwrap();
    assert!(!dir.path().join(key().to_string()).exists());
    granted(b.acquire(&key(), TTL).unwrap());
    time.advance(TTL / 2);
    a.sweep().unwrap();
    assert!(dir.path().join(key().to_string()).exists(), "what another host holds stays");
}

#[test]
fn records_that_are_none_are_free() {
    let Bench { a, dir, .. } = Bench::new(0);
    let path = dir.path().join(key().to_string());
    for text in ["", "torn", "1 2", "1 2 3 4", "1 2 -3", "18446744073709551616 1 1", "\u{ff}"] {
        fs::write(&path, text).unwrap();
        assert!(!a.is_held(&key()).unwrap(), "{text:?}");
    }
    fs::write(&path, [0xff, 0xfe, b' ', b'1']).unwrap();
    assert!(!a.is_held(&key()).unwrap());
    fs::write(&path, "1 0 18446744073709551615").unwrap();
    assert_eq!(left(a.acquire(&key(), TTL).unwrap()), MAX_TTL, "no lease is longer");
}
