//! Division of a host's cores among the processes that compute on it at a time.
//!
//! Each process has a place in one file: it writes there how many of its threads lead a computation, and when, and
//! reads what the others wrote; encodes are told apart. Who computes has its share of the cores, who is idle lends
//! them. Nothing is locked and nobody waits: a process looks again between two ops of its work, at most once in [`PAUSE`], so for as
//! long more threads than cores may run. A process that died while it computed counts for [`STALE`].
//!
//! The core that a computation is on stands there too, and each avoids those of the others ([`Share::avoided`]): beside a
//! neighbour that computes, the system puts two threads of one user's session on one core, and leaves the other one to the
//! neighbour.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Shortest time from one look at the file to the next.
const PAUSE: Duration = Duration::from_millis(5);
/// Age at which a record that says "computing" is no longer believed.
const STALE: Duration = Duration::from_secs(5);
/// Bytes of a record.
const RECORD_BYTES: usize = 16;
/// Places in a file.
pub const MAX_PLACES: u32 = 256;

/// A process's word about itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Record {
    /// Threads that lead a computation.
    n_leaders: u16,
    /// Those of them that lead an encode.
    n_encodes: u16,
    /// Core that one of them was on.
    core: u32,
    /// Time of writing, in milliseconds since the epoch.
    at_ms: u64,
}

impl Record {
    fn to_bytes(self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..2].copy_from_slice(&self.n_leaders.to_le_bytes());
        bytes[2..4].copy_from_slice(&self.n_encodes.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.core.to_le_bytes());
        bytes[8..].copy_from_slice(&self.at_ms.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; RECORD_BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h, at @ ..] = *bytes;
        let [n_leaders, n_encodes] = [[a, b], [c, d]].map(u16::from_le_bytes);
        let core = u32::from_le_bytes([e, f, g, h]);
        Self { n_leaders, n_encodes, core, at_ms: u64::from_le_bytes(at) }
    }

    /// Leaders that compute at `now_ms`.
    fn leaders(self, now_ms: u64) -> u64 {
        if self.is_fresh(now_ms) { self.n_leaders.into() } else { 0 }
    }

    fn is_fresh(self, now_ms: u64) -> bool {
        now_ms.abs_diff(self.at_ms) < u64::try_from(STALE.as_millis()).unwrap_or(u64::MAX)
    }
}

/// Cores for each leader of the process at `place`: an equal part, at least one, and what is left over to the first.
fn cores_of(records: &[Record], place: usize, n_cores: usize, now_ms: u64) -> usize {
    let leaders = |record: &Record| usize::try_from(record.leaders(now_ms)).unwrap_or(usize::MAX);
    let total = records.iter().map(leaders).fold(0_usize, usize::saturating_add).max(1);
    let before = records.iter().take(place).map(leaders).fold(0_usize, usize::saturating_add);
    let left_over = n_cores % total;
    (n_cores / total + usize::from(before < left_over)).max(1)
}

/// Cores of other processes that the one at `place` should not be on, while there is a core for each. Of two on one core the
/// later place leaves, so that both do not.
fn avoided(records: &[Record], place: usize, n_cores: usize, now_ms: u64) -> Vec<usize> {
    let total = records.iter().map(|record| record.leaders(now_ms)).fold(0_u64, u64::saturating_add);
    let own = records.get(place).filter(|own| own.n_leaders == 1 && total <= n_cores as u64);
    let Some(own) = own else { return Vec::new() };
    let others = records.iter().enumerate().filter(|(i, record)| *i != place && record.leaders(now_ms) == 1);
    let cores = others.filter(|(i, record)| *i < place || record.core != own.core);
    cores.filter_map(|(_, record)| usize::try_from(record.core).ok()).collect()
}

/// True if a process other than the one at `place` encodes.
fn others_encode(records: &[Record], place: usize, now_ms: u64) -> bool {
    let encodes = |record: &Record| record.n_encodes > 0 && record.is_fresh(now_ms);
    records.iter().enumerate().any(|(i, record)| i != place && encodes(record))
}

/// Kind of a computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputationKind {
    /// Steps of an engine.
    Steps,
    /// Forwards of an encoder.
    Encode,
}

/// Cores for a computation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Their number.
    pub n_cores: usize,
    /// Cores that other processes compute on, which the caller should not be on until it asks again.
    pub avoided: Vec<usize>,
}

/// A process's place in the division. Clones share it.
#[derive(Clone, Debug)]
pub struct CoreShare(Arc<Place>);

#[derive(Debug)]
struct Place {
    file: File,
    place: u32,
    n_cores: usize,
    n_leaders: AtomicU16,
    n_encodes: AtomicU16,
    /// A failure of the file was logged.
    failed: AtomicBool,
}

impl CoreShare {
    /// Takes a place, from 0 to below [`MAX_PLACES`], in a file that is made if it is not there.
    ///
    /// # Errors
    /// The file cannot be opened for reading and writing, or the place is out of range.
    pub fn open(path: &Path, place: u32, n_cores: usize) -> io::Result<Self> {
        if place >= MAX_PLACES {
            let message = format!("place {place}: places are 0 to {}", MAX_PLACES - 1);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let [n_leaders, n_encodes] = [AtomicU16::new(0), AtomicU16::new(0)];
        let failed = AtomicBool::new(false);
        let share = Self(Arc::new(Place { file, place, n_cores, n_leaders, n_encodes, failed }));
        // An earlier process of this place may have died while it computed.
        share.0.write(0, now_ms())?;
        Ok(share)
    }

    /// Begins a computation that one thread leads; it ends when the result is dropped.
    pub fn begin(&self, kind: ComputationKind) -> Computing {
        self.0.n_leaders.fetch_add(1, Ordering::Relaxed);
        if kind == ComputationKind::Encode {
            self.0.n_encodes.fetch_add(1, Ordering::Relaxed);
        }
        Computing { place: Arc::clone(&self.0), kind, looked_at: None }
    }

    /// True if another process encodes.
    pub fn others_encode(&self) -> bool {
        let own = usize::try_from(self.0.place).unwrap_or(usize::MAX);
        self.0.read().is_ok_and(|records| others_encode(&records, own, now_ms()))
    }
}

/// A computation under way.
#[derive(Debug)]
pub struct Computing {
    place: Arc<Place>,
    kind: ComputationKind,
    looked_at: Option<Instant>,
}

impl Computing {
    /// Cores for this computation, whose leader is on `core`, from `now` until others are told; `None` if it was told within
    /// [`PAUSE`].
    pub fn share(&mut self, core: usize, now: Instant) -> Option<Share> {
        if self.looked_at.is_some_and(|at| now < at + PAUSE) {
            return None;
        }
        self.looked_at = Some(now);
        Some(self.look(core))
    }

    fn look(&self, core: usize) -> Share {
        let place = &*self.place;
        let now_ms = now_ms();
        let at = usize::try_from(place.place).unwrap_or(usize::MAX);
        match place.write(core, now_ms).and_then(|()| place.read()) {
            Ok(records) => Share {
                n_cores: cores_of(&records, at, place.n_cores, now_ms),
                avoided: avoided(&records, at, place.n_cores, now_ms),
            },
            Err(error) => {
                if !place.failed.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "cores are not shared with the other processes of this host");
                }
                Share { n_cores: place.n_cores, avoided: Vec::new() }
            }
        }
    }
}

impl Drop for Computing {
    fn drop(&mut self) {
        self.place.n_leaders.fetch_sub(1, Ordering::Relaxed);
        if self.kind == ComputationKind::Encode {
            self.place.n_encodes.fetch_sub(1, Ordering::Relaxed);
        }
        // The record is stale soon if this fails.
        let _ = self.place.write(0, now_ms());
    }
}

impl Place {
    fn write(&self, core: usize, at_ms: u64) -> io::Result<()> {
        let core = u32::try_from(core).unwrap_or(u32::MAX);
        let [n_leaders, n_encodes] = [&self.n_leaders, &self.n_encodes].map(|n| n.load(Ordering::Relaxed));
        let record = Record { n_leaders, n_encodes, core, at_ms };
        let at = u64::from(self.place) * RECORD_BYTES as u64;
        self.file.write_all_at(&record.to_bytes(), at)
    }

    fn read(&self) -> io::Result<Vec<Record>> {
        let mut bytes = [0; MAX_PLACES as usize * RECORD_BYTES];
        let n = self.file.read_at(&mut bytes, 0)?;
        Ok(bytes[..n].as_chunks().0.iter().map(Record::from_bytes).collect())
    }
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_000_000;

    fn cores(leaders: &[u16], place: usize, n_cores: usize) -> usize {
        let records: Vec<Record> = leaders
            .iter()
            .map(|&n_leaders| Record { n_leaders, n_encodes: 0, core: 0, at_ms: NOW })
            .collect();
        cores_of(&records, place, n_cores, NOW)
    }

    #[test]
    fn who_computes_alone_has_every_core_and_all_together_have_no_more() {
        assert_eq!(cores(&[1, 0, 0], 0, 8), 8);
        assert_eq!((cores(&[1, 1], 0, 2), cores(&[1, 1], 1, 2)), (1, 1));
        assert_eq!(
            (cores(&[1, 1], 0, 3), cores(&[1, 1], 1, 3)),
            (2, 1),
            "what is left over goes to the first"
        );
        for n_cores in 1..20 {
            for n in 1..=n_cores {
                let leaders = vec![1; n];
                let total: usize = (0..n).map(|place| cores(&leaders, place, n_cores)).sum();
                assert_eq!(total, n_cores);
            }
        }
        assert_eq!(cores(&[1, 1, 1], 2, 2), 1, "with fewer cores than processes each has one");
        assert_eq!(cores(&[3, 1], 0, 8), 2, "each leader has a part");
    }

    #[test]
    fn a_record_that_is_old_or_of_no_sense_takes_no_cores() {
        let stale = NOW - u64::try_from(STALE.as_millis()).unwrap();
        let records = |at_ms| [NOW, at_ms].map(|at_ms| Record { n_leaders: 1, n_encodes: 1, core: 0, at_ms });
        assert_eq!(cores_of(&records(stale), 0, 2, NOW), 2);
        assert_eq!(cores_of(&records(stale + 1), 0, 2, NOW), 1);
        assert_eq!(cores_of(&records(u64::MAX), 0, 2, NOW), 2);
        let many = [Record { n_leaders: u16::MAX, n_encodes: u16::MAX, core: u32::MAX, at_ms: NOW };
            MAX_PLACES as usize];
        assert_eq!(cores_of(&many, 255, 2, NOW), 1);
        assert_eq!(cores_of(&[], 3, 2, NOW), 2, "a file that was cut");
        assert!(others_encode(&records(stale + 1), 0, NOW) && !others_encode(&records(stale), 0, NOW));
        assert!(avoided(&[], 3, 2, NOW).is_empty() && avoided(&many, 255, 2, NOW).is_empty());
    }

    #[test]
    fn each_avoids_the_cores_of_the_others_and_of_two_on_one_the_later_leaves() {
        let on = |cores: &[(u16, u32)]| -> Vec<Record> {
            cores
                .iter()
                .map(|&(n_leaders, core)| Record { n_leaders, n_encodes: 0, core, at_ms: NOW })
                .collect()
        };
        let avoid = |cores: &[(u16, u32)], n_cores| -> Vec<Vec<usize>> {
            (0..cores.len()).map(|place| avoided(&on(cores), place, n_cores, NOW)).collect()
        };
        assert_eq!(avoid(&[(1, 0), (1, 1)], 2), [[1], [0]], "they stay");
        assert_eq!(avoid(&[(1, 1), (1, 1)], 2), [vec![], vec![1]], "the later one leaves");
        assert_eq!(avoid(&[(1, 1), (1, 0), (1, 1)], 3), [vec![0], vec![1, 1], vec![1, 0]]);
        assert_eq!(avoid(&[(0, 1), (1, 1)], 2), [[], []] as [[usize; 0]; 2], "the other one is idle");
        assert_eq!(
            avoid(&[(1, 1), (1, 1), (1, 0)], 2),
            [[]; 3] as [[usize; 0]; 3],
            "there is no core for each"
        );
        let several = avoid(&[(2, 1), (1, 1)], 4);
        assert_eq!(several, [[], []] as [[usize; 0]; 2], "the core of one of several leaders says little");
        let stale = Record { at_ms: 0, ..on(&[(1, 1)])[0] };
        assert!(avoided(&[stale, on(&[(1, 1)])[0]], 1, 2, NOW).is_empty());
    }

    #[test]
    fn processes_see_each_other_through_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cores");
        let open = |place| CoreShare::open(&path, place, 4).unwrap();
        let (first, second) = (open(0), open(1));
        let mut one = first.begin(ComputationKind::Steps);
        assert_eq!(one.look(0).n_cores, 4);
        let two = second.begin(ComputationKind::Encode);
        assert_eq!((two.look(0).n_cores, one.look(0).n_cores), (2, 2));
        assert!(first.others_encode() && !second.others_encode(), "steps are no encode");
        assert_eq!([one.look(1), two.look(1)].map(|share| share.avoided), [vec![0], vec![1]]);
        assert_eq!([two.look(0), one.look(1)].map(|share| share.avoided), [[1], [0]], "it has left");
        drop(two);
        assert!(!first.others_encode());
        assert_eq!(one.look(0).n_cores, 4);
        let left = second.begin(ComputationKind::Steps);
        assert_eq!(left.look(0).n_cores, 2);
        std::mem::forget(left);
        let again = open(1);
        assert_eq!(one.look(0).n_cores, 4, "a process that comes back has nothing under way");
        let both = (again.begin(ComputationKind::Steps), again.begin(ComputationKind::Encode));
        assert_eq!((both.0.look(0).n_cores, both.1.look(0).n_cores), (1, 1));
        let now = Instant::now();
        let looks = [0, 4, 5, 9, 10].map(|ms| one.share(0, now + Duration::from_millis(ms)).is_some());
        assert_eq!(looks, [true, false, true, false, true]);
        assert!(CoreShare::open(&path, MAX_PLACES, 4).unwrap_err().to_string().contains("0 to 255"));
        assert!(CoreShare::open(dir.path(), 0, 4).is_err());
    }
}
