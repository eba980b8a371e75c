//! The file of a timeline: a JSON list that is whole after every write. Processes share it, and rotate it by size.
//!
//! A write locks the file, goes back before the end of the list, and ends it again. Whoever finds the file too large
//! renames it to `FILE.1`, what was there to `FILE.2` and so on; others notice that the path leads to another file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// End of the list.
const END: &[u8] = b"\n]\n";
/// Between two events.
pub(super) const SEPARATOR: &[u8] = b",\n";
/// Longest broken end that is looked through for its last whole line.
const MAX_BROKEN: u64 = 1 << 20;
/// Attempts to lock the file that the path leads to, while others rotate it.
const MAX_ATTEMPTS: usize = 16;

/// Size and number of the files of a timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotation {
    /// Bytes above which a file is rotated; 0: never. Default 128 MiB.
    pub max_bytes: u64,
    /// Rotated files that are kept, `FILE.1` the youngest. Default 4.
    pub keep: usize,
}

impl Default for Rotation {
    fn default() -> Self {
        Self { max_bytes: 128 << 20, keep: 4 }
    }
}

/// An open timeline.
#[derive(Debug)]
pub(super) struct TimelineFile {
    path: PathBuf,
    file: File,
    rotation: Rotation,
    /// True if this process has not named itself in it.
    is_new: bool,
}

impl TimelineFile {
    /// Opens a file, or creates it.
    ///
    /// # Errors
    /// If it cannot be written, or holds something else.
    pub(super) fn open(path: &Path, rotation: Rotation) -> io::Result<Self> {
        let mut file = open(path)?;
        let mut first = [0];
        if file.metadata()?.is_file() && file.read(&mut first)? == 1 && first != *b"[" {
            return Err(io::Error::new(ErrorKind::InvalidData, "the file is there and is no timeline"));
        }
        Ok(Self { path: path.to_owned(), file, rotation, is_new: true })
    }

    /// Writes events, with [`SEPARATOR`] between them; `introduction` goes before those in a file that has none of this
    /// process yet.
    ///
    /// # Errors
    /// Those of the file system.
    pub(super) fn write(&mut self, introduction: &[u8], events: &[u8]) -> io::Result<()> {
        if !self.file.metadata()?.is_file() {
            return self.file.write_all(&[events, SEPARATOR].concat());
        }
        self.lock_current()?;
        let len = self.file.metadata()?.len();
        let max = self.rotation.max_bytes;
        if max > 0 && len > 0 && len.saturating_add(events.len() as u64) > max {
            self.rotate()?;
        }
        let end = self.end_of_list()?;
        let mut text = if end == 0 { b"[\n".to_vec() } else { SEPARATOR.to_vec() };
        if std::mem::replace(&mut self.is_new, false) {
            text.extend_from_slice(introduction);
            text.extend_from_slice(SEPARATOR);
        }
        text.extend_from_slice(events);
        text.extend_from_slice(END);
        self.file.seek(SeekFrom::Start(end))?;
        self.file.write_all(&text)?;
        self.file.set_len(end + text.len() as u64)?;
        self.file.unlock()
    }

    /// Locks the file that the path leads to.
    fn lock_current(&mut self) -> io::Result<()> {
        for _ in 0..MAX_ATTEMPTS {
            self.file.lock()?;
            let own = self.file.metadata()?;
            match fs::metadata(&self.path) {
                Ok(there) if (there.dev(), there.ino()) == (own.dev(), own.ino()) => return Ok(()),
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
                _ => self.reopen()?,
            }
        }
        Err(io::Error::new(ErrorKind::ResourceBusy, "the file is replaced again and again"))
    }

    /// Opens the file that the path leads to. The lock of the one before ends.
    fn reopen(&mut self) -> io::Result<()> {
        self.file = open(&self.path)?;
        self.is_new = true;
        Ok(())
    }

    /// Renames the files and begins another. Called and left with the lock.
    fn rotate(&mut self) -> io::Result<()> {
        self.end_broken_list()?;
        if self.rotation.keep == 0 {
            self.is_new = true;
            return self.file.set_len(0);
        }
        for age in (1..self.rotation.keep).rev() {
            rename_if_there(&rotated(&self.path, age), &rotated(&self.path, age + 1))?;
        }
        rename_if_there(&self.path, &rotated(&self.path, 1))?;
        self.reopen()?;
        self.lock_current()
    }

    /// Ends a list whose writer was killed in the middle.
    fn end_broken_list(&mut self) -> io::Result<()> {
        let end = self.end_of_list()?;
        self.file.seek(SeekFrom::Start(end))?;
        self.file.write_all(END)?;
        self.file.set_len(end + END.len() as u64)
    }

    /// Position behind the last whole event; 0: there is none.
    fn end_of_list(&mut self) -> io::Result<u64> {
        let len = self.file.metadata()?.len();
        let start = len.saturating_sub(MAX_BROKEN.min(len));
        let start = if self.ends_well(len)? { len - END.len() as u64 } else { start };
        let mut tail = Vec::new();
        self.file.seek(SeekFrom::Start(start))?;
        (&self.file).take(len - start).read_to_end(&mut tail)?;
        if tail == END {
            return Ok(start);
        }
        // The line behind the last break is not whole.
        let line = tail.iter().rposition(|byte| *byte == b'\n').unwrap_or_default();
        let whole = tail[..line].strip_suffix(b",").unwrap_or(&tail[..line]);
        Ok(if whole == b"[" { 0 } else { start + whole.len() as u64 })
    }

    fn ends_well(&mut self, len: u64) -> io::Result<bool> {
        let Some(start) = len.checked_sub(END.len() as u64) else { return Ok(false) };
        let mut end = [0; END.len()];
        self.file.seek(SeekFrom::Start(start))?;
        self.file.read_exact(&mut end)?;
        Ok(end == END)
    }
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    // Truncated to nothing by nobody: others write to it.
    options.read(true).write(true).create(true).truncate(false).open(path)
}

/// `FILE.1` for the youngest.
fn rotated(path: &Path, age: usize) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{age}"));
    name.into()
}

fn rename_if_there(from: &Path, to: &Path) -> io::Result<()> {
    match fs::rename(from, to) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn events(path: &Path) -> Vec<Value> {
        let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}: {text}", path.display()))
    }

    fn event(n: usize) -> Vec<u8> {
        json!({"n": n, "pad": "x".repeat(100)}).to_string().into_bytes()
    }

    fn numbers(path: &Path) -> Vec<u64> {
        events(path).iter().filter_map(|e| e["n"].as_u64()).collect()
    }

    const NAMED: &[u8] = br#"{"named":true}"#;

    fn folder() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.json");
        (dir, path)
    }

    #[test]
    fn files_are_rotated_by_size_and_each_is_whole() {
        let (_dir, path) = folder();
        let mut file = TimelineFile::open(&path, Rotation { max_bytes: 400, keep: 2 }).unwrap();
        for n in 0..20 {
            file.write(NAMED, &event(n)).unwrap();
            assert_eq!(numbers(&path).last(), Some(&(n as u64)), "whole after every write");
        }
        let files = [rotated(&path, 2), rotated(&path, 1), path.clone()];
        assert!(!rotated(&path, 3).exists(), "two rotated files are kept");
        for file in &files {
            assert!(fs::metadata(file).unwrap().len() <= 400);
            assert_eq!(events(file).iter().filter(|e| e["named"] == true).count(), 1, "{}", file.display());
        }
        let kept: Vec<u64> = files.iter().flat_map(|file| numbers(file)).collect();
        let first = 20 - kept.len() as u64;
        assert_eq!(kept, (first..20).collect::<Vec<_>>(), "nothing is lost between files");
    }

    #[test]
    fn processes_that_share_a_file_follow_whoever_rotates_it() {
        let (_dir, path) = folder();
        let rotation = Rotation { max_bytes: 600, keep: 100 };
        let [mut one, mut other] = [(), ()].map(|()| TimelineFile::open(&path, rotation).unwrap());
        for n in 0..40 {
            let file = if n % 3 == 0 { &mut one } else { &mut other };
            file.write(NAMED, &event(n)).unwrap();
        }
        let rotated = (1..).map(|age| rotated(&path, age)).take_while(|file| file.exists());
        let mut all: Vec<_> = rotated.chain([path.clone()]).flat_map(|file| numbers(&file)).collect();
        all.sort_unstable();
        assert_eq!(all, (0..40).collect::<Vec<_>>());
    }

    #[test]
    fn a_file_whose_writer_was_killed_goes_on_behind_its_last_whole_line() {
        for broken in [
            "[\n{\"n\":1},\n{\"n\":",
            "[\n{\"n\":1},\n",
            "[\n{\"n\":1}\n]",
            "[\n{\"n\":1},\n{\"n\":2}\n]\n",
            "[\n",
            "[",
        ] {
            let (_dir, path) = folder();
            fs::write(&path, broken).unwrap();
            let mut file = TimelineFile::open(&path, Rotation::default()).unwrap();
            file.write(NAMED, &event(7)).unwrap();
            let whole: Vec<u64> = if broken.len() < 3 { vec![7] } else { vec![1, 7] };
            let found: Vec<_> = numbers(&path).into_iter().filter(|n| *n != 2).collect();
            assert_eq!(found, whole, "{broken:?}");
        }
    }

    #[test]
    fn a_size_of_zero_never_rotates_and_none_kept_starts_over() {
        let (_dir, path) = folder();
        let mut file = TimelineFile::open(&path, Rotation { max_bytes: 0, keep: 1 }).unwrap();
        (0..50).for_each(|n| file.write(NAMED, &event(n)).unwrap());
        assert_eq!(numbers(&path).len(), 50);
        let mut file = TimelineFile::open(&path, Rotation { max_bytes: 400, keep: 0 }).unwrap();
        (50..60).for_each(|n| file.write(NAMED, &event(n)).unwrap());
        assert!(fs::metadata(&path).unwrap().len() <= 400 && !rotated(&path, 1).exists());
    }

    #[test]
    fn a_file_of_something_else_is_refused_and_left_as_it_is() {
        let (_dir, path) = folder();
        fs::write(&path, "a letter").unwrap();
        assert!(TimelineFile::open(&path, Rotation::default()).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "a letter");
    }
}
