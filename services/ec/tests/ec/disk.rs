//! The disk store: the conformance suite, and what only a directory can do wrong.

use std::fs::{self, File};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;
use triptych_core::limits::Limits;
use triptych_ec::conformance::{self, sample_output};
use triptych_ec::error::chain;
use triptych_ec::object::{decode, encode};
use triptych_ec::store::disk::DiskStore;
use triptych_ec::{EcError, EcSetting, EcStore, PutOutcome, open};

use crate::key;

async fn open_in(dir: &TempDir) -> DiskStore {
    DiskStore::open(dir.path(), &conformance::limits()).await.unwrap()
}

fn tmp_files(dir: &TempDir) -> usize {
    fs::read_dir(dir.path().join("tmp")).unwrap().count()
}

#[tokio::test(flavor = "multi_thread")]
async fn disk_conforms() {
    let dir = TempDir::new().unwrap();
    conformance::run(Arc::new(open_in(&dir).await)).await;
    assert_eq!(tmp_files(&dir), 0, "every writer cleaned up");
}

#[tokio::test]
async fn an_object_lies_where_it_is_documented_and_opens_as_safetensors() {
    let dir = TempDir::new().unwrap();
    let store = open_in(&dir).await;
    store.put_if_absent(&key(0xab), encode(&sample_output(key(0xab), 64))).await.unwrap();
    let path = dir.path().join("ab").join(format!("{}.safetensors", "ab".repeat(32)));
    assert_eq!(path, store.path_of(&key(0xab)));
    assert!(safetensors::SafeTensors::deserialize(&fs::read(path).unwrap()).is_ok());
}

#[tokio::test]
async fn two_stores_on_one_directory_see_each_other() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open_in(&dir).await, open_in(&dir).await);
    let object = encode(&sample_output(key(1), 64));
    assert_eq!(a.put_if_absent(&key(1), object.clone()).await.unwrap(), PutOutcome::Stored);
    assert_eq!(b.put_if_absent(&key(1), object.clone()).await.unwrap(), PutOutcome::AlreadyThere);
    assert_eq!(b.get(&key(1)).await.unwrap(), Some(object));
}

#[tokio::test]
async fn leftovers_of_crashed_writers_are_invisible_and_go_with_the_next_start() {
    let dir = TempDir::new().unwrap();
    drop(open_in(&dir).await);
    let old = dir.path().join("tmp").join("crashed");
    fs::write(&old, &encode(&sample_output(key(1), 64))[..100]).unwrap();
    let past = SystemTime::now() - Duration::from_secs(3600);
    File::options().write(true).open(&old).unwrap().set_modified(past).unwrap();
    fs::write(dir.path().join("tmp").join("being written"), b"x").unwrap();
    let store = open_in(&dir).await;
    assert_eq!(store.get(&key(1)).await.unwrap(), None);
    assert!(!old.exists());
    assert_eq!(tmp_files(&dir), 1, "a file that a live writer may hold is left alone");
}

#[tokio::test]
async fn a_truncated_file_is_no_head_does_not_decode_and_makes_room_by_quarantine() {
    let dir = TempDir::new().unwrap();
    let store = open_in(&dir).await;
    let object = encode(&sample_output(key(1), 10_000));
    store.put_if_absent(&key(1), object.clone()).await.unwrap();
    for len in [0, 7, 8, 100, object.len() as u64 - 1] {
        File::options().write(true).open(store.path_of(&key(1))).unwrap().set_len(len).unwrap();
        assert_eq!(store.heads(&[key(1)]).await.unwrap(), [None], "{len} bytes");
        let torn = store.get(&key(1)).await.unwrap().unwrap();
        assert!(decode(torn, &key(1), &Limits::default()).is_err(), "{len} bytes");
        assert!(store.quarantine(&key(1)).await.unwrap());
        assert_eq!(store.put_if_absent(&key(1), object.clone()).await.unwrap(), PutOutcome::Stored);
    }
    assert!(dir.path().join("quarantine").join(format!("{}.safetensors", key(1))).exists());
}

#[tokio::test]
async fn a_file_over_the_limit_is_corrupt_and_is_not_read() {
    let dir = TempDir::new().unwrap();
    let store = open_in(&dir).await;
    let path = store.path_of(&key(1));
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    // Sparse: reading it would allocate a terabyte.
    File::create(&path).unwrap().set_len(1 << 40).unwrap();
    assert!(matches!(store.get(&key(1)).await, Err(EcError::Corrupt { .. })));
    assert_eq!(store.heads(&[key(1)]).await.unwrap(), [None]);
}

/// A file where the directory should be stands for any directory that cannot be written: unlike permission bits
/// it also stops a test that runs as root.
#[tokio::test]
async fn a_directory_that_cannot_be_used_is_named_when_opened() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    let setting: EcSetting = format!("disk:{}/ec", file.display()).parse().unwrap();
    let e = open(&setting, &Limits::default()).await.unwrap_err();
    assert!(matches!(e, EcError::Config { .. }));
    let text = chain(&e);
    assert!(text.contains("the directory is not usable") && text.contains("file/ec"), "{text}");
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_read_only_file_system_is_named_when_opened() {
    let setting: EcSetting = "disk:/proc/triptych".parse().unwrap();
    let text = chain(&open(&setting, &Limits::default()).await.unwrap_err());
    assert!(text.contains("disk:/proc/triptych") && text.contains("the directory is not usable"), "{text}");
}
