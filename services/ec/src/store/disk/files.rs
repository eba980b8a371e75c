//! The files of a disk store: names, links, leftovers. Blocking; knows no async.

use crate::object::{self, MAX_HEAD_BYTES, ObjectError};
use crate::store::{PutOutcome, nonce};
use bytes::Bytes;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem};

/// No writer needs longer for one file; an older one belongs to nobody.
const TMP_MAX_AGE: Duration = Duration::from_secs(15 * 60);
/// How long an operator may look at a quarantined object.
const QUARANTINE_MAX_AGE: Duration = Duration::from_secs(24 * 3600);

#[derive(Debug)]
pub(super) struct Files {
    dir: PathBuf,
    tmp: PathBuf,
    quarantine: PathBuf,
}

impl Files {
    pub(super) fn open(dir: PathBuf) -> io::Result<Self> {
        let files = Self { tmp: dir.join("tmp"), quarantine: dir.join("quarantine"), dir };
        fs::create_dir_all(&files.tmp)?;
        fs::create_dir_all(&files.quarantine)?;
        files.check_writable()?;
        remove_older(&files.tmp, TMP_MAX_AGE)?;
        remove_older(&files.quarantine, QUARANTINE_MAX_AGE)?;
        Ok(files)
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn path_of(&self, key: &ContentKey) -> PathBuf {
        let hex = key.to_string();
        self.dir.join(&hex[..2]).join(format!("{hex}.safetensors"))
    }

    pub(super) fn check_writable(&self) -> io::Result<()> {
        TmpFile::create(&self.tmp).map(drop)
    }

    pub(super) fn put(&self, key: &ContentKey, object: &[u8]) -> io::Result<PutOutcome> {
        let path = self.path_of(key);
        if path.try_exists()? {
            return Ok(PutOutcome::AlreadyThere);
        }
        let mut tmp = TmpFile::create(&self.tmp)?;
        tmp.file.write_all(object)?;
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        match fs::hard_link(&tmp.path, &path) {
            Ok(()) => Ok(PutOutcome::Stored),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(PutOutcome::AlreadyThere),
            // Some network file systems have no hard links. A rename is atomic too, but lets the last writer of a
            // race win, and both are told that they stored: harmless, since either object verifies by itself.
            Err(e) if matches!(e.kind(), ErrorKind::Unsupported | ErrorKind::PermissionDenied) => {
                fs::rename(&tmp.path, &path).map(|()| PutOutcome::Stored)
            }
            Err(e) => Err(e),
        }
    }

    /// The whole file, if its length is believable.
    pub(super) fn read(
        &self,
        key: &ContentKey,
        limits: &Limits,
    ) -> io::Result<Result<Option<Bytes>, ObjectError>> {
        let Some((file, len)) = open_if_there(&self.path_of(key))? else { return Ok(Ok(None)) };
        let limit = limits.max_object_bytes;
        if len > limit as u64 {
            let actual = usize::try_from(len).unwrap_or(usize::MAX);
            return Ok(Err(ObjectError::TooLarge { limit, actual }));
        }
        let mut object = Vec::with_capacity(len as usize);
        file.take(len).read_to_end(&mut object)?;
        Ok(Ok(Some(object.into())))
    }

    pub(super) fn head(&self, key: &ContentKey, limits: &Limits) -> io::Result<Option<EncodedItem>> {
        let Some((file, len)) = open_if_there(&self.path_of(key))? else { return Ok(None) };
        let Ok(len) = usize::try_from(len) else { return Ok(None) };
        let mut first_bytes = Vec::with_capacity(len.min(MAX_HEAD_BYTES));
        file.take(MAX_HEAD_BYTES as u64).read_to_end(&mut first_bytes)?;
        Ok(object::probe(&first_bytes, len, key, limits).ok())
    }

    pub(super) fn delete(&self, key: &ContentKey) -> io::Result<bool> {
        found(fs::remove_file(self.path_of(key)))
    }

    pub(super) fn quarantine(&self, key: &ContentKey) -> io::Result<bool> {
        found(fs::rename(self.path_of(key), self.quarantine.join(format!("{key}.safetensors"))))
    }
}

/// A file under `tmp` that is gone when this is dropped; a link to it stays.
struct TmpFile {
    path: PathBuf,
    file: File,
}

impl TmpFile {
    fn create(dir: &Path) -> io::Result<Self> {
        let path = dir.join(format!("{:032x}", nonce()));
        let file = File::create_new(&path)
            .map_err(|e| io::Error::new(e.kind(), format!("cannot write in {}: {e}", dir.display())))?;
        Ok(Self { path, file })
    }
}

impl Drop for TmpFile {
    fn drop(&mut self) {
        // Already renamed away, or left for the cleaner of the next start: both are fine.
        let _ = fs::remove_file(&self.path);
    }
}

fn open_if_there(path: &Path) -> io::Result<Option<(File, u64)>> {
    match File::open(path) {
        Ok(file) => {
            let len = file.metadata()?.len();
            Ok(Some((file, len)))
        }
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

fn found(result: io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

/// Removes the files of `dir` that are older than `age`. Another process may be doing the same.
fn remove_older(dir: &Path, age: Duration) -> io::Result<()> {
    let now = SystemTime::now();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let Ok(modified) = entry.metadata().and_then(|m| m.modified()) else { continue };
        if now.duration_since(modified).is_ok_and(|d| d > age) {
            tracing::info!(path = %entry.path().display(), "removed a leftover of the EC store");
            found(fs::remove_file(entry.path()))?;
        }
    }
    Ok(())
}
