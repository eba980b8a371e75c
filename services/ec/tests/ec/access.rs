//! Stores that are opened to be read, or only if they are there: a look makes nothing and changes nothing.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;
use triptych_ec::conformance::sample_output;
use triptych_ec::object::encode;
use triptych_ec::store::{Op, Tidy};
use triptych_ec::{Access, EcError, EcSetting, EcStore, OpenOptions, open_with};

use crate::key;

async fn open(setting: &str, access: Access) -> Result<Arc<dyn EcStore>, EcError> {
    let setting: EcSetting = setting.parse().unwrap();
    open_with(&setting, &OpenOptions { access, ..OpenOptions::default() }).await
}

/// Each kind of store that may be made when it is opened, in a folder.
fn settings(dir: &Path) -> [(PathBuf, String); 3] {
    let [disk, budget, slab] = ["disk", "budget", "slab"].map(|name| dir.join(name));
    [
        (disk.clone(), format!("disk:{}", disk.display())),
        (budget.clone(), format!("disk:{}?mib=1", budget.display())),
        (slab.clone(), format!("shm:{}?mib=4", slab.display())),
    ]
}

/// A file as it is: bytes, times and mode.
#[derive(Debug, PartialEq)]
struct Seen {
    bytes: Vec<u8>,
    modified_ns: (i64, i64),
    mode: u32,
}

/// Everything below a folder.
fn seen(dir: &Path) -> BTreeMap<PathBuf, Option<Seen>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let meta = fs::metadata(&path).unwrap();
        if meta.is_dir() {
            all.extend(seen(&path));
            all.insert(path, None);
        } else {
            let modified_ns = (meta.mtime(), meta.mtime_nsec());
            let bytes = fs::read(&path).unwrap();
            all.insert(path, Some(Seen { bytes, modified_ns, mode: meta.mode() }));
        }
    }
    all
}

#[tokio::test]
async fn a_store_that_is_not_there_is_named_and_not_made() {
    for (path, setting) in settings(TempDir::new().unwrap().path()) {
        for access in [Access::ReadOnly, Access::Existing] {
            let refused = open(&setting, access).await.err();
            let is_named = |e: &EcError| matches!(e, EcError::NoStore { place, .. } if *place == path.display().to_string());
            assert!(refused.as_ref().is_some_and(is_named), "{setting} {access:?}: {refused:?}");
            assert!(!path.exists(), "{setting} {access:?}");
        }
        open(&setting, Access::Create).await.unwrap();
        assert!(path.exists(), "{setting}");
    }
}

#[tokio::test]
async fn a_store_that_is_read_stays_as_it_is() {
    let dir = TempDir::new().unwrap();
    for (path, setting) in settings(dir.path()) {
        let written = open(&setting, Access::Create).await.unwrap();
        for n in 1..=3 {
            let object = encode(&sample_output(key(n), 64_000));
            written.put_if_absent(&key(n), object).await.unwrap();
        }
        drop(written);
        if path.is_dir() {
            fs::write(path.join("tmp/unfinished"), b"left").unwrap();
            fs::File::open(path.join("tmp/unfinished"))
                .and_then(|file| file.set_modified(SystemTime::UNIX_EPOCH))
                .unwrap();
        }
        let before = seen(dir.path());
        let store = open(&setting, Access::ReadOnly).await.unwrap();
        assert_eq!(store.list(None, 10).await.unwrap().len(), 3, "{setting}");
        assert!(store.heads(&[key(1), key(9)]).await.unwrap()[0].is_some());
        assert!(store.get(&key(2)).await.unwrap().is_some());
        assert_eq!(store.wait(&key(9), Duration::ZERO).await.unwrap(), None);
        store.ping().await.unwrap();
        let left = store.leftovers(Tidy::Count).await.unwrap();
        assert_eq!(left.unfinished, usize::from(path.is_dir()), "{setting}");
        let object = encode(&sample_output(key(4), 64));
        let is_refused = |answer: Result<(), EcError>, expect: Op| {
            assert!(
                matches!(answer, Err(EcError::ReadOnly { op, .. }) if op == expect),
                "{setting}: {answer:?}"
            );
        };
        is_refused(store.put_if_absent(&key(4), object).await.map(drop), Op::Put);
        is_refused(store.delete(&key(1)).await.map(drop), Op::Delete);
        is_refused(store.quarantine(&key(1)).await.map(drop), Op::Quarantine);
        is_refused(store.acquire(&key(1), Duration::from_secs(1)).await.map(drop), Op::Lease);
        is_refused(store.leftovers(Tidy::Remove).await.map(drop), Op::Delete);
        drop(store);
        assert_eq!(seen(dir.path()), before, "{setting}");

        let store = open(&setting, Access::Existing).await.unwrap();
        assert!(store.delete(&key(1)).await.unwrap(), "{setting}");
    }
}

#[tokio::test]
async fn a_look_at_an_object_is_no_use_of_it() {
    let dir = TempDir::new().unwrap();
    let setting = format!("disk:{}", dir.path().display());
    let written = open(&setting, Access::Create).await.unwrap();
    written.put_if_absent(&key(1), encode(&sample_output(key(1), 64))).await.unwrap();
    let hex = key(1).to_string();
    let path = dir.path().join(&hex[..2]).join(format!("{hex}.safetensors"));
    // The access time is the eviction priority, which is ahead of the clock: the file system leaves it alone.
    let accessed = || fs::metadata(&path).and_then(|meta| meta.accessed()).unwrap();
    let used = accessed();
    let looking = open(&setting, Access::ReadOnly).await.unwrap();
    assert!(looking.get(&key(1)).await.unwrap().is_some());
    assert_eq!(accessed(), used);
    assert!(written.get(&key(1)).await.unwrap().is_some());
    assert!(accessed() > used, "a read of the cluster is one");
}
