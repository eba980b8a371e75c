//! The files of a disk store: names, links, lists. Blocking; knows no async.

use super::budget::{self, DirBudget};
use super::entry::{StoredFile, found};
use super::leases::Leases;
use super::leftovers::{self, TmpFile};
use crate::object::{self, MAX_HEAD_BYTES, ObjectError};
use crate::store::{Access, Leftovers, Listed, PutOutcome, Tidy};
use bytes::Bytes;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem};

const EXTENSION: &str = ".safetensors";

#[derive(Debug)]
pub(super) struct Files {
    dir: PathBuf,
    tmp: PathBuf,
    quarantine: PathBuf,
    leases: Leases,
    budget: Option<DirBudget>,
    access: Access,
}

impl Files {
    pub(super) fn open(dir: PathBuf, budget_bytes: Option<u64>, access: Access) -> io::Result<Self> {
        let (tmp, quarantine) = (dir.join("tmp"), dir.join("quarantine"));
        let budget = budget_bytes.map(|bytes| DirBudget::new(&dir, bytes));
        if access == Access::ReadOnly {
            let leases = Leases::read_only(dir.join("leases"));
            return Ok(Self { dir, tmp, quarantine, leases, budget, access });
        }
        fs::create_dir_all(&tmp)?;
        fs::create_dir_all(&quarantine)?;
        let leases = Leases::new(dir.join("leases"))?;
        let files = Self { dir, tmp, quarantine, leases, budget, access };
        files.check_writable()?;
        files.sweep()?;
        if let Some(budget) = &files.budget {
            budget.hold(|| files.stored())?;
        }
        Ok(files)
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn budget_bytes(&self) -> Option<u64> {
        self.budget.as_ref().map(DirBudget::bytes)
    }

    pub(super) fn leases(&self) -> &Leases {
        &self.leases
    }

    pub(super) fn path_of(&self, key: &ContentKey) -> PathBuf {
        let hex = key.to_string();
        self.dir.join(&hex[..2]).join(format!("{hex}{EXTENSION}"))
    }

    /// Succeeds for a directory that is only read.
    pub(super) fn check_writable(&self) -> io::Result<()> {
        if self.access == Access::ReadOnly {
            return Ok(());
        }
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
        let len = object.len() as u64;
        // Its time starts when it gets its name, not while it waits for the lock.
        let store = || budget::note_stored(&tmp.file, len).and_then(|()| link(&tmp.path, &path));
        match &self.budget {
            Some(budget) => budget.admit(len, || self.stored(), store),
            None => store(),
        }
    }

    /// The whole file, if it is within the limit.
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
        (&file).take(len).read_to_end(&mut object)?;
        if self.access != Access::ReadOnly {
            budget::note_use(&file);
        }
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
        let aside = self.quarantine.join(format!("{key}{EXTENSION}"));
        let is_found = found(fs::rename(self.path_of(key), &aside))?;
        if is_found {
            leftovers::note_quarantined(&aside);
            leftovers::bound_quarantine(&self.quarantine)?;
        }
        Ok(is_found)
    }

    /// The objects after a key, in the order of their keys.
    pub(super) fn list(&self, after: Option<&ContentKey>, limit: usize) -> io::Result<Vec<Listed>> {
        let mut listed = Vec::new();
        for first in after.map_or(0, |key| key.as_bytes()[0])..=u8::MAX {
            let of_first = listed.len();
            self.visit(first, &mut |key, file| {
                if after < Some(&key) {
                    listed.push(Listed { key, len: file.len, stored: Some(file.stored) });
                }
            })?;
            listed[of_first..].sort_unstable_by_key(|l| l.key);
            if listed.len() >= limit {
                break;
            }
        }
        listed.truncate(limit);
        Ok(listed)
    }

    /// Counts or removes files that are no objects.
    pub(super) fn leftovers(&self, tidy: Tidy) -> io::Result<Leftovers> {
        if tidy == Tidy::Remove {
            self.leases.sweep()?;
        }
        let (quarantined, aside) = leftovers::quarantined(&self.quarantine, tidy)?;
        let (unfinished, half) = leftovers::unfinished(&self.tmp, tidy)?;
        Ok(Leftovers { quarantined, unfinished, bytes: aside + half })
    }

    fn sweep(&self) -> io::Result<()> {
        self.leases.sweep()?;
        leftovers::unfinished(&self.tmp, Tidy::Remove)?;
        leftovers::bound_quarantine(&self.quarantine)
    }

    fn stored(&self) -> io::Result<Vec<StoredFile>> {
        let mut all = Vec::new();
        for first in 0..=u8::MAX {
            self.visit(first, &mut |_, file| all.push(file))?;
        }
        Ok(all)
    }

    /// Calls `see` for every object whose key begins with `first`. Objects may be removed concurrently.
    fn visit(&self, first: u8, see: &mut dyn FnMut(ContentKey, StoredFile)) -> io::Result<()> {
        let entries = match fs::read_dir(self.dir.join(format!("{first:02x}"))) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let hex = name.to_str().and_then(|name| name.strip_suffix(EXTENSION));
            let Some(key) = hex.and_then(ContentKey::from_hex) else { continue };
            let Ok(meta) = entry.metadata() else { continue };
            let stored = meta.modified()?;
            let priority = meta.accessed().unwrap_or(stored);
            see(key, StoredFile { key, path: entry.path(), len: meta.len(), stored, priority });
        }
        Ok(())
    }
}

/// Gives a written file its name, unless it is taken.
fn link(tmp: &Path, path: &Path) -> io::Result<PutOutcome> {
    match fs::hard_link(tmp, path) {
        Ok(()) => Ok(PutOutcome::Stored),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(PutOutcome::AlreadyThere),
        // Some network file systems have no hard links. A rename is atomic too, but lets the last writer of a
        // race win, and both get `Stored`: harmless, since either object verifies by itself.
        Err(e) if matches!(e.kind(), ErrorKind::Unsupported | ErrorKind::PermissionDenied) => {
            fs::rename(tmp, path).map(|()| PutOutcome::Stored)
        }
        Err(e) => Err(e),
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
