//! Packed weights on disk: what one load made of stored weights, for the next load of the same.
//!
//! A load packs the same weights in the same order each time, so a file holds *records* in that order, and a load takes
//! them one after another. Each has a [`Key`] of how it was packed and of what: dtypes, shapes, factors, and samples of
//! the stored bytes. Whose files those are is the caller's to know, who names this file by it; keys distinguish what a
//! changed loader packs of the same files. The first record with another key is the last that is taken: the rest is
//! packed, and [`finish`](PackedWeights::finish) says that the file is of no use.
//!
//! Records are read, not mapped: what a step passes over should lie in large pages, which maps of files rarely do, and a
//! file that is cut short under its map ends the process. They are checked in pieces, so that no thread waits for the disk
//! to have them: a file that lost some when power failed is as one of other weights.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use blake3::{Hash, Hasher};
use parking_lot::{Mutex, MutexGuard};

use super::pool::Pool;
use crate::ops::{LinearPart, WeightView};

mod file;

use file::{Entry, Unfinished};

/// Bytes of one sample of a stored weight.
const SAMPLE: usize = 64;

/// Samples of each, the first at its beginning and the last at its end.
const SAMPLES: usize = 4;

/// Packed weights of an earlier load, or those of this one on their way to disk.
#[derive(Debug)]
pub struct PackedWeights {
    state: Mutex<State>,
}

/// Outcome of a load for its file of packed weights.
#[derive(Debug)]
pub enum Packing {
    /// Everything was in the file.
    Restored,
    /// The file is of other weights or of another loader, or damaged; it should be removed.
    Stale,
    /// Everything was packed and is in the file now: its size in bytes.
    Kept(u64),
    /// Everything was packed, and the file could not be written.
    NotKept(io::Error),
}

#[derive(Debug)]
enum State {
    Restoring { file: Arc<File>, entries: std::vec::IntoIter<Entry>, is_stale: bool },
    Keeping(Result<Unfinished, io::Error>),
    Finished,
}

impl PackedWeights {
    /// Opens what an earlier load kept.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if there is nothing, [`io::ErrorKind::InvalidData`] for a file that is of another kind
    /// or not whole.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let entries = file::contents(&file)?.into_iter();
        let state = State::Restoring { file: Arc::new(file), entries, is_stale: false };
        Ok(Self { state: Mutex::new(state) })
    }

    /// Begins to keep what a load packs, `max_bytes` at most. Nothing is at `path` before [`finish`](Self::finish).
    ///
    /// # Errors
    /// Errors of creating a file beside it.
    pub fn create(path: &Path, max_bytes: u64) -> io::Result<Self> {
        let unfinished = Unfinished::create(path, max_bytes)?;
        Ok(Self { state: Mutex::new(State::Keeping(Ok(unfinished))) })
    }

    /// Ends the load. What was kept is at its path from now on, and what is packed later is only packed.
    pub fn finish(&self) -> Packing {
        match std::mem::replace(&mut *self.state(), State::Finished) {
            State::Restoring { entries, is_stale, .. } if is_stale || entries.len() > 0 => Packing::Stale,
            State::Restoring { .. } | State::Finished => Packing::Restored,
            State::Keeping(unfinished) => match unfinished.and_then(Unfinished::finish) {
                Ok(n_bytes) => Packing::Kept(n_bytes),
                Err(e) => Packing::NotKept(e),
            },
        }
    }

    /// Fills the records of a weight from an earlier load. Returns `false` if the file has none; the records then hold anything.
    pub(super) fn restore(&self, pool: &Pool, key: Key, records: Vec<&mut [u8]>) -> bool {
        records.into_iter().enumerate().all(|(number, record)| {
            let Some((file, entry)) = self.next(key.of_record(number), record.len()) else { return false };
            let is_whole = file::read(pool, &file, &entry, record);
            if !is_whole && let State::Restoring { is_stale, .. } = &mut *self.state() {
                *is_stale = true;
            }
            is_whole
        })
    }

    /// Keeps the records of a weight that was packed, where that is what this load does.
    pub(super) fn keep(&self, key: Key, records: Vec<&mut [u8]>) {
        let mut state = self.state();
        let State::Keeping(keeping) = &mut *state else { return };
        for (number, record) in records.into_iter().enumerate() {
            let Ok(unfinished) = keeping else { return };
            if let Err(e) = unfinished.append(key.of_record(number), record) {
                *keeping = Err(e);
            }
        }
    }

    /// The next record, if it is the one that is asked for.
    fn next(&self, key: Hash, len: usize) -> Option<(Arc<File>, Entry)> {
        let mut state = self.state();
        let State::Restoring { file, entries, is_stale } = &mut *state else { return None };
        let entry = entries.next().filter(|e| !*is_stale && e.key == key && e.len == len as u64);
        *is_stale = entry.is_none();
        entry.map(|entry| (file.clone(), entry))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// Identity of a packed weight: the stored bytes and the way they were packed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key(Hash);

impl Key {
    /// The key of stored weights that are packed in the way of that name.
    pub(super) fn new<'a>(way: &[&str], parts: impl IntoIterator<Item = &'a LinearPart<'a>>) -> Self {
        let mut hasher = Hasher::new();
        let number = |n: usize| (n as u64).to_le_bytes();
        for name in way {
            hasher.update(&number(name.len())).update(name.as_bytes());
        }
        // Cells lie in a file as they lie in memory.
        hasher.update(&1_u16.to_ne_bytes());
        for LinearPart { weight, scale, .. } in parts {
            let WeightView { dtype, shape, data } = *weight;
            hasher
                .update(dtype.as_str().as_bytes())
                .update(&scale.to_le_bytes())
                .update(&number(shape.len()));
            shape.iter().for_each(|dim| _ = hasher.update(&number(*dim)));
            let last = data.len().saturating_sub(SAMPLE);
            for i in 0..SAMPLES {
                let from = last / (SAMPLES - 1) * i;
                hasher.update(&data[from..data.len().min(from + SAMPLE)]);
            }
        }
        Self(hasher.finalize())
    }

    /// The key of one of the records that a weight is kept in.
    fn of_record(self, number: usize) -> Hash {
        blake3::keyed_hash(self.0.as_bytes(), &(number as u64).to_le_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use triptych_core::DType;

    use super::*;
    use crate::ops::{Activation, Backend, StageBuilder};
    use crate::{CpuBackend, CpuConfig, Precision};

    /// More outputs than a panel, fewer than two; inputs that fill no last word.
    const SHAPE: [usize; 2] = [45, 203];

    /// Bytes of weights that differ in their middle values only.
    fn weight(middle: f32) -> Vec<u8> {
        let n = SHAPE[0] * SHAPE[1];
        let value = |i: usize| if i == n / 2 { middle } else { (i % 89) as f32 / 40.0 - 1.0 };
        (0..n).flat_map(|i| value(i).to_le_bytes()).collect()
    }

    fn part(data: &[u8], scale: f32) -> LinearPart<'_> {
        let weight = WeightView { dtype: DType::F32, shape: &SHAPE, data };
        LinearPart { weight, bias: None, scale }
    }

    fn backend(precision: Precision) -> CpuBackend {
        CpuBackend::new(CpuConfig { threads: 2, precision, ..CpuConfig::default() }).unwrap()
    }

    /// The product of a row and of what a back end packs of `data`, and a row of it as a table.
    fn load(backend: &CpuBackend, data: &[u8], scale: f32) -> [Vec<f32>; 2] {
        let linear = backend.load_linear(&[part(data, scale)]).unwrap();
        let table = backend.load_table(part(data, 1.0).weight, 1.0).unwrap();
        let x = (0..SHAPE[1]).map(|i| i as f32 / 100.0 - 1.0).collect();
        let x = backend.upload(x, 1, SHAPE[1]).unwrap();
        let product = backend.linear(&x, &linear, Activation::None, None).unwrap();
        let mut builder = StageBuilder::new();
        let row = builder.indices(&[44]).unwrap();
        let step = backend.stage(builder).unwrap();
        [product, backend.embed(&step, &table, row).unwrap()].map(|x| backend.take_values(x).unwrap())
    }

    /// The same with packed weights at `path`, which are kept if there are none.
    fn load_at(path: &Path, precision: Precision, data: &[u8], scale: f32) -> ([Vec<f32>; 2], Packing) {
        let packed = PackedWeights::open(path).or_else(|_| PackedWeights::create(path, 1 << 30)).unwrap();
        let packed = Arc::new(packed);
        let values = load(&backend(precision).with_packed(packed.clone()), data, scale);
        (values, packed.finish())
    }

    fn place() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        (dir, path)
    }

    #[test]
    fn what_was_kept_computes_the_same() {
        for precision in [Precision::F32, Precision::Bf16, Precision::Int8, Precision::Int4] {
            let (_dir, path) = place();
            let data = weight(0.5);
            let plain = load(&backend(precision), &data, 1.0);
            let (first, packing) = load_at(&path, precision, &data, 1.0);
            assert!(matches!(packing, Packing::Kept(n) if n == fs::metadata(&path).unwrap().len()));
            // Samples do not see the middle, so the result shows where weights came from.
            let (again, packing) = load_at(&path, precision, &weight(0.75), 1.0);
            assert!(matches!(packing, Packing::Restored), "{packing:?}");
            assert_eq!([&first, &again], [&plain, &plain], "{precision:?}");
        }
    }

    #[test]
    fn what_is_packed_otherwise_is_not_taken() {
        let (_dir, path) = place();
        let data = weight(0.5);
        load_at(&path, Precision::Int8, &data, 1.0);
        let mut changed = data.clone();
        changed[0] ^= 1;
        for (precision, data, scale) in
            [(Precision::Int4, &data, 1.0), (Precision::Int8, &data, 2.0), (Precision::Int8, &changed, 1.0)]
        {
            let (values, packing) = load_at(&path, precision, data, scale);
            assert!(matches!(packing, Packing::Stale));
            assert_eq!(values, load(&backend(precision), data, scale));
        }
    }

    #[test]
    fn a_file_with_more_or_less_in_it_is_stale() {
        let (_dir, path) = place();
        let data = weight(0.5);
        load_at(&path, Precision::Bf16, &data, 1.0);
        let packed = Arc::new(PackedWeights::open(&path).unwrap());
        backend(Precision::Bf16).with_packed(packed.clone()).load_linear(&[part(&data, 1.0)]).unwrap();
        assert!(matches!(packed.finish(), Packing::Stale), "a record is left");
        let packed = Arc::new(PackedWeights::open(&path).unwrap());
        let more = backend(Precision::Bf16).with_packed(packed.clone());
        load(&more, &data, 1.0);
        assert_eq!(load(&more, &data, 1.0), load(&backend(Precision::Bf16), &data, 1.0));
        assert!(matches!(packed.finish(), Packing::Stale), "one was asked for that is not there");
    }

    #[test]
    fn no_byte_can_change_unseen() {
        let (_dir, path) = place();
        let data = weight(0.5);
        let (plain, _) = load_at(&path, Precision::Int8, &data, 1.0);
        let kept = fs::read(&path).unwrap();
        // All of the table of contents and the footer, and here and there in the records.
        let ends = (0..kept.len() - 400).step_by(997).chain(kept.len() - 400..kept.len());
        for at in ends {
            let mut damaged = kept.clone();
            damaged[at] ^= 0x10;
            fs::write(&path, &damaged).unwrap();
            let Ok(packed) = PackedWeights::open(&path).map(Arc::new) else { continue };
            assert_eq!(load(&backend(Precision::Int8).with_packed(packed.clone()), &data, 1.0), plain);
            assert!(matches!(packed.finish(), Packing::Stale), "byte {at}");
        }
        for len in [0, 1, 7, 8, 50, kept.len() / 2, kept.len() - 1] {
            fs::write(&path, &kept[..len]).unwrap();
            let e = PackedWeights::open(&path).unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::InvalidData, "{len} bytes");
        }
    }

    #[test]
    fn what_does_not_fit_or_does_not_end_leaves_nothing() {
        let (dir, path) = place();
        let data = weight(0.5);
        let packed = Arc::new(PackedWeights::create(&path, 1000).unwrap());
        let values = load(&backend(Precision::F32).with_packed(packed.clone()), &data, 1.0);
        assert_eq!(values, load(&backend(Precision::F32), &data, 1.0));
        assert!(matches!(packed.finish(), Packing::NotKept(e) if e.kind() == io::ErrorKind::FileTooLarge));
        let packed = Arc::new(PackedWeights::create(&path, 1 << 30).unwrap());
        load(&backend(Precision::F32).with_packed(packed.clone()), &data, 1.0);
        drop(packed);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert_eq!(PackedWeights::open(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
