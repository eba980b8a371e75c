//! A directory in shared memory, for what a process and its children share.
//!
//! It is removed with the process that made it. A process that is killed cannot do so: the next one of the same kind
//! removes what such processes left. Which of them live is told by locks, which the kernel releases however a process
//! ends; process ids do not tell it where containers share the mount.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// File whose lock the owner of a directory holds.
const LOCK: &str = "lock";
/// Only this user may see what is in it, and put something there.
const MODE: u32 = 0o700;

/// A directory of this process, removed when dropped.
#[derive(Debug)]
pub struct SharedDir {
    dir: TempDir,
    /// Its lock is held until the drop.
    _lock: File,
}

impl SharedDir {
    /// Makes a directory whose name begins with `prefix`, and removes those of the prefix whose processes are gone.
    ///
    /// # Errors
    /// If it cannot be made or locked.
    pub fn new(prefix: &str) -> io::Result<Self> {
        Self::within(&root(), prefix)
    }

    fn within(root: &Path, prefix: &str) -> io::Result<Self> {
        sweep(root, prefix);
        let dir = tempfile::Builder::new()
            .prefix(prefix)
            .permissions(fs::Permissions::from_mode(MODE))
            .tempdir_in(root)?;
        // It has its name when it is locked, so nobody finds it unlocked.
        let (unnamed, named) = (dir.path().join("lock.new"), dir.path().join(LOCK));
        let lock = File::create(&unnamed)?;
        lock.try_lock().map_err(io::Error::from)?;
        fs::rename(unnamed, named)?;
        Ok(Self { dir, _lock: lock })
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// Directory of what processes of this machine share: `/dev/shm`, or where there is none that of temporary files.
pub fn root() -> PathBuf {
    let shared = Path::new("/dev/shm");
    if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() }
}

/// Removes directories of this user whose owners are gone. One that cannot be removed is left.
fn sweep(root: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(root) else { return };
    for entry in entries.flatten() {
        let is_ours = entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes())
            && fs::symlink_metadata(entry.path())
                .is_ok_and(|meta| meta.is_dir() && meta.uid() == rustix::process::geteuid().as_raw());
        // Without the file it is being made.
        let Some(lock) = is_ours.then(|| File::open(entry.path().join(LOCK)).ok()).flatten() else {
            continue;
        };
        if lock.try_lock().is_ok() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_goes_with_its_process_or_by_the_next_one() {
        let root = tempfile::tempdir().unwrap();
        let made = |prefix| SharedDir::within(root.path(), prefix).unwrap();
        let (alive, other) = (made("a-"), made("b-"));
        let killed = {
            let SharedDir { dir, _lock } = made("a-");
            dir.keep()
        };
        fs::write(killed.join("slab"), [1; 100]).unwrap();
        let of_none = root.path().join("a-being-made");
        fs::create_dir(&of_none).unwrap();
        fs::write(root.path().join("a-file"), "").unwrap();

        assert!(killed.exists());
        assert_eq!(fs::metadata(&killed).unwrap().mode() & 0o777, MODE);
        let next = made("a-");
        assert!(!killed.exists(), "its process is gone");
        assert!(alive.path().exists() && other.path().exists() && of_none.exists());
        let path = next.path().to_owned();
        drop(next);
        assert!(!path.exists());
    }

    #[test]
    fn a_link_to_a_directory_is_not_followed() {
        let (root, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(elsewhere.path().join(LOCK), "").unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), root.path().join("a-link")).unwrap();
        SharedDir::within(root.path(), "a-").unwrap();
        assert!(elsewhere.path().join(LOCK).exists());
    }
}
