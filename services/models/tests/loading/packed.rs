//! Packed weights from one start to the next.

use super::{CASE, STORED, Tensors, open, tensors, without_weights, write};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use tempfile::TempDir;
use triptych_core::{DType, Extent, Modality};
use triptych_kernels::cpu::Precision;
use triptych_models::compute::{Compute, ComputeConfig};
use triptych_models::preprocess::{EncoderInput, Features};
use triptych_models::{Model, ModelSource, PackedFolder};

/// A model directory and a folder that does not exist yet.
struct Start {
    model: TempDir,
    folder: PackedFolder,
    // Holds the folder.
    _parent: TempDir,
}

impl Start {
    fn new() -> Self {
        let model = without_weights(CASE);
        let parent = tempfile::tempdir().expect("a folder");
        write(model.path(), "model.safetensors", &tensors());
        let folder = PackedFolder { dir: parent.path().join("a/b"), min_bytes: 0, max_bytes: 1 << 30 };
        Self { model, folder, _parent: parent }
    }

    /// Loads both stages and encodes an audio item.
    fn rows(&self, precision: Precision) -> Vec<f32> {
        let model = open_packed(self.model.path(), Some(self.folder.clone()));
        rows(&model, precision)
    }

    /// Files of the folder, in the order of their names.
    fn files(&self) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(&self.folder.dir) else { return Vec::new() };
        let mut files: Vec<PathBuf> = entries.map(|e| e.expect("an entry").path()).collect();
        files.sort();
        files
    }
}

fn open_packed(dir: &Path, packed: Option<PackedFolder>) -> Model {
    Model::open(&ModelSource { dir: dir.to_owned(), name: None, format: STORED, packed }).expect("a model")
}

fn rows(model: &Model, precision: Precision) -> Vec<f32> {
    let compute =
        Compute::new(ComputeConfig { threads: 2, precision, ..ComputeConfig::default() }).expect("a cpu");
    let mut encoder = compute.load_encoder(model, Modality::Audio).expect("encoder weights");
    compute.load_decoder(model).expect("decoder weights");
    let features = Features::Mel(vec![0.5; 80 * 100]);
    let extent = Extent::windows(1, 1000);
    let rows = encoder.encode(&[&EncoderInput { extent, n_tokens: 50, features }]).expect("rows");
    rows.into_iter().next().expect("one item").into_iter().collect()
}

/// Long before now: a file that is used again gets a newer time.
fn long_ago() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000)
}

fn modified(path: &Path) -> SystemTime {
    path.metadata().and_then(|m| m.modified()).expect("a time")
}

fn age(path: &Path) {
    File::options().write(true).open(path).and_then(|f| f.set_modified(long_ago())).expect("an older file");
}

#[test]
fn a_second_start_takes_what_the_first_packed() {
    for precision in [Precision::Int8, Precision::Int4] {
        let start = Start::new();
        let plain = rows(&open(start.model.path(), STORED), precision);
        assert_eq!(start.rows(precision), plain);
        let files = start.files();
        let names: Vec<_> = files.iter().filter_map(|f| f.file_name()?.to_str()?.split_once('-')).collect();
        assert_eq!(names.iter().map(|n| n.0).collect::<Vec<_>>(), ["audio", "decoder"]);
        files.iter().for_each(|f| age(f));
        assert_eq!(start.rows(precision), plain);
        assert_eq!(start.files(), files);
        assert!(files.iter().all(|f| modified(f) > long_ago()), "both were used");
    }
}

#[test]
fn weights_that_pack_as_fast_as_they_are_read_are_not_kept() {
    for precision in [Precision::F32, Precision::Bf16] {
        let start = Start::new();
        assert_eq!(start.rows(precision), rows(&open(start.model.path(), STORED), precision));
        assert_eq!(start.files(), Vec::<PathBuf>::new());
    }
}

#[test]
fn other_weights_have_packed_weights_of_their_own() {
    let start = Start::new();
    let before = start.rows(Precision::Int8);
    let doubled = |(name, (shape, data)): (String, (Vec<usize>, Vec<u8>))| {
        let twice = data.as_chunks().0.iter().flat_map(|v| (2.0 * f32::from_le_bytes(*v)).to_le_bytes());
        let data = if name.ends_with("conv1.weight") { twice.collect() } else { data };
        (name, (shape, data))
    };
    write(start.model.path(), "model.safetensors", &tensors().into_iter().map(doubled).collect::<Tensors>());
    let after = start.rows(Precision::Int8);
    assert_ne!(after, before);
    assert_eq!(after, rows(&open(start.model.path(), STORED), Precision::Int8));
    assert_eq!(start.files().len(), 4);
}

#[test]
fn a_damaged_file_is_replaced() {
    let start = Start::new();
    let plain = start.rows(Precision::Int8);
    let files = start.files();
    let whole: Vec<Vec<u8>> = files.iter().map(|f| std::fs::read(f).expect("a file")).collect();
    // A byte of a record: seen while loading, and packed anew at the start after. The end: seen at once.
    let mut damaged = whole[0].clone();
    damaged[100] ^= 1;
    for (bytes, n_starts) in [(damaged.as_slice(), 2), (&whole[0][..whole[0].len() - 1], 1)] {
        std::fs::write(&files[0], bytes).expect("a damaged file");
        for _ in 0..n_starts {
            assert_eq!(start.rows(Precision::Int8), plain);
        }
        assert_eq!(std::fs::read(&files[0]).expect("a file"), whole[0]);
    }
}

#[test]
fn a_folder_holds_no_more_than_it_may() {
    let mut start = Start::new();
    start.rows(Precision::Int8);
    let total = |files: &[PathBuf]| files.iter().map(|f| f.metadata().expect("a file").len()).sum::<u64>();
    let of_int8 = start.files();
    of_int8.iter().for_each(|f| age(f));
    // Room for these and a little: what was longest not used goes.
    start.folder.max_bytes = total(&of_int8) + 1000;
    start.rows(Precision::Int4);
    let left = start.files();
    assert!(total(&left) <= start.folder.max_bytes && !left.is_empty());
    assert!(of_int8.iter().any(|f| !left.contains(f)));
    assert!(left.iter().any(|f| !of_int8.contains(f)), "the newest stays");
    // Less than one file.
    for (min_bytes, max_bytes) in [(0, 1000), (1 << 30, 1 << 30)] {
        let mut start = Start::new();
        (start.folder.min_bytes, start.folder.max_bytes) = (min_bytes, max_bytes);
        start.rows(Precision::Int8);
        assert_eq!(start.files(), Vec::<PathBuf>::new());
    }
}

#[test]
fn abandoned_files_are_removed_after_a_day() {
    let start = Start::new();
    std::fs::create_dir_all(&start.folder.dir).expect("a folder");
    let [old, new] = ["old", "new"].map(|name| start.folder.dir.join(format!(".packing-{name}")));
    for path in [&old, &new] {
        std::fs::write(path, "half").expect("a file");
    }
    age(&old);
    start.rows(Precision::Int8);
    assert!(!old.exists() && new.exists());
}

#[test]
fn a_fingerprint_is_found_again_and_is_that_of_the_files() {
    let start = Start::new();
    let find = |packed| {
        let model = open_packed(start.model.path(), packed);
        model.fingerprint(Modality::Audio, DType::F32).expect("weights")
    };
    let plain = find(None);
    let first = find(Some(start.folder.clone()));
    let files = start.files();
    assert_eq!((files.len(), first), (1, plain));
    age(&files[0]);
    assert_eq!(find(Some(start.folder.clone())), plain);
    assert!(modified(&files[0]) > long_ago(), "it was used");
    let whole = std::fs::read(&files[0]).expect("hashes");
    for at in (0..whole.len()).step_by(191) {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        for bytes in [damaged.as_slice(), &whole[..at]] {
            std::fs::write(&files[0], bytes).expect("a damaged file");
            assert_eq!(find(Some(start.folder.clone())), plain);
        }
    }
    assert_eq!(std::fs::read(&files[0]).expect("hashes"), whole);
    // Other weights, other hashes.
    let mut tensors = tensors();
    tensors.values_mut().for_each(|(_, data)| data[0] ^= 1);
    write(start.model.path(), "model.safetensors", &tensors);
    assert_ne!(find(Some(start.folder.clone())), plain);
    assert_eq!(find(Some(start.folder.clone())), find(None));
}

#[test]
fn a_folder_that_cannot_be_made_stops_nobody() {
    let mut start = Start::new();
    // A file is in the way.
    start.folder.dir = start.model.path().join("config.json/packed");
    assert_eq!(start.rows(Precision::Int8), rows(&open(start.model.path(), STORED), Precision::Int8));
}
