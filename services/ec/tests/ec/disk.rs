//! The disk store: the conformance suite, and what only a directory can do wrong.

mod processes;

use std::fs::{self, File};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;
use triptych_core::limits::Limits;
use triptych_ec::conformance::{self, sample_output};
use triptych_ec::error::chain;
use triptych_ec::object::{decode, encode};
use triptych_ec::store::disk::{DiskSetting, DiskStore};
use triptych_ec::store::lease::Acquired;
use triptych_ec::store::{Leftovers, Tidy};
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

fn budget_in(dir: &TempDir, kib: u64) -> DiskSetting {
    DiskSetting { dir: dir.path().into(), budget_bytes: Some(kib << 10) }
}

async fn used(store: &DiskStore) -> u64 {
    store.list(None, usize::MAX).await.unwrap().iter().map(|l| l.len).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_with_a_budget_conforms() {
    let dir = TempDir::new().unwrap();
    let store = DiskStore::with_budget(&budget_in(&dir, 64 << 10), &conformance::limits()).await.unwrap();
    conformance::run(Arc::new(store)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_stores_on_one_directory_share_the_budget_and_keep_used_objects() {
    let dir = TempDir::new().unwrap();
    let setting = budget_in(&dir, 400);
    let a = Arc::new(DiskStore::with_budget(&setting, &Limits::default()).await.unwrap());
    let b = Arc::new(DiskStore::with_budget(&setting, &Limits::default()).await.unwrap());
    let favourite = vec![1; 20_000];
    a.put_if_absent(&key(1), favourite.clone().into()).await.unwrap();
    for _ in 0..3 {
        assert_eq!(b.get(&key(1)).await.unwrap(), Some(favourite.clone().into()));
    }
    let fill = |store: Arc<DiskStore>, n: u8| async move {
        let object = vec![n; 30_000];
        assert_eq!(store.put_if_absent(&key(n), object.clone().into()).await.unwrap(), PutOutcome::Stored);
        assert_eq!(store.get(&key(n)).await.unwrap(), Some(object.into()), "what is new is there");
    };
    for n in 10..50 {
        tokio::join!(fill(a.clone(), n), fill(b.clone(), n + 90));
        // Between the rounds: a walk through the directories beside a writer can see what went and what came.
        assert!(used(&a).await <= 400 << 10);
    }
    assert!(a.get(&key(1)).await.unwrap().is_some(), "it was used more than all the others");
    for n in 200..220 {
        a.put_if_absent(&key(n), vec![n; 30_000].into()).await.unwrap();
        assert!(b.get(&key(n)).await.unwrap().is_some(), "what is new is there");
    }
    let e = a.put_if_absent(&key(2), vec![0; 500 << 10].into()).await.unwrap_err();
    assert!(matches!(e, EcError::TooLarge { limit, .. } if limit == 400 << 10), "{e:?}");
}

#[tokio::test]
async fn opening_evicts_down_to_the_budget_and_corrects_a_wrong_count() {
    let dir = TempDir::new().unwrap();
    let store = open_in(&dir).await;
    for n in 0..10 {
        store.put_if_absent(&key(n), vec![n; 30_000].into()).await.unwrap();
    }
    drop(store);
    let store = DiskStore::with_budget(&budget_in(&dir, 100), &Limits::default()).await.unwrap();
    assert!(used(&store).await <= 100 << 10 && used(&store).await >= 60_000);
    for wrong in ["", "what?", "99999999999999999999999", "90000"] {
        fs::write(dir.path().join("used"), wrong).unwrap();
        store.delete(&key(50)).await.unwrap();
        store.put_if_absent(&key(50), vec![5; 30_000].into()).await.unwrap();
        let told: u64 = fs::read_to_string(dir.path().join("used")).unwrap().parse().unwrap();
        assert_eq!(told, used(&store).await, "counted anew after {wrong:?}");
    }
}

#[tokio::test]
async fn lists_are_pages_in_the_order_of_the_keys() {
    let dir = TempDir::new().unwrap();
    let store = open_in(&dir).await;
    for n in [200, 3, 0, 255, 4] {
        store.put_if_absent(&key(n), vec![n; usize::from(n)].into()).await.unwrap();
    }
    fs::write(dir.path().join("04").join("not an object"), b"x").unwrap();
    let first = store.list(None, 3).await.unwrap();
    assert_eq!(first.iter().map(|l| l.key).collect::<Vec<_>>(), [key(0), key(3), key(4)]);
    assert!(first[1].len == 3 && first[1].stored.unwrap().elapsed().unwrap() < crate::LIMIT);
    let rest = store.list(Some(&key(4)), 3).await.unwrap();
    assert_eq!(rest.iter().map(|l| l.key).collect::<Vec<_>>(), [key(200), key(255)]);
    assert!(store.list(Some(&key(255)), 3).await.unwrap().is_empty());
}

#[tokio::test]
async fn leases_are_one_holders_among_processes_and_tokens_grow() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (open_in(&dir).await, open_in(&dir).await);
    let hour = Duration::from_secs(3600);
    let Acquired::Granted(first) = a.acquire(&key(1), hour).await.unwrap() else { panic!("it is free") };
    assert!(matches!(b.acquire(&key(1), hour).await.unwrap(), Acquired::Held { .. }));
    assert!(a.renew(&first, Duration::ZERO).await.unwrap(), "ends now");
    let Acquired::Granted(second) = b.acquire(&key(1), hour).await.unwrap() else { panic!("it ended") };
    assert!(second.token > first.token);
    assert!(!a.renew(&first, hour).await.unwrap() && !a.release(&first).await.unwrap());
    fs::write(dir.path().join("leases").join(key(2).to_string()), b"torn").unwrap();
    assert!(matches!(a.acquire(&key(2), hour).await.unwrap(), Acquired::Granted(_)));
    let one = key(1);
    let waiting = tokio::time::timeout(crate::LIMIT, a.wait(&one, hour));
    let (waited, released) = tokio::join!(waiting, b.release(&second));
    assert!(released.unwrap());
    assert_eq!(waited.expect("nobody holds it any more").unwrap(), None);
}

#[tokio::test]
async fn quarantine_is_bounded_counted_and_removed_on_demand() {
    let dir = TempDir::new().unwrap();
    let store = open_in(&dir).await;
    for n in 0..80 {
        store.put_if_absent(&key(n), vec![n; 10].into()).await.unwrap();
        assert!(store.quarantine(&key(n)).await.unwrap());
    }
    let expect = Leftovers { quarantined: 64, unfinished: 0, bytes: 640 };
    assert_eq!(store.leftovers(Tidy::Count).await.unwrap(), expect);
    assert_eq!(store.leftovers(Tidy::Remove).await.unwrap(), expect);
    assert_eq!(store.leftovers(Tidy::Count).await.unwrap(), Leftovers::default());
}

#[tokio::test]
async fn a_file_that_a_living_writer_holds_stays_however_old_it_is() {
    let dir = TempDir::new().unwrap();
    let store = open_in(&dir).await;
    let path = dir.path().join("tmp").join("slow");
    let file = File::create(&path).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(7200)).unwrap();
    file.lock().unwrap();
    assert_eq!(store.leftovers(Tidy::Remove).await.unwrap().unfinished, 0);
    drop(file);
    assert_eq!(store.leftovers(Tidy::Remove).await.unwrap().unfinished, 1);
    assert!(!path.exists());
}
