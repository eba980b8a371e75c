//! A part of some cores for one process: a CPU quota of a cgroup, version 2 or 1, that is made for it and removed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The kernel gives out time once in so many microseconds.
const PERIOD_US: u64 = 20_000;
const ROOT: &str = "/sys/fs/cgroup";

/// A cgroup of one process. Dropping it removes it, which works once the process has ended.
#[derive(Debug)]
pub struct Quota(PathBuf);

/// Version of the cgroup interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// Parent of groups with a cpu controller.
fn parent(root: &Path) -> Option<(Version, PathBuf)> {
    let has_cpu = |file: &str| {
        fs::read_to_string(root.join(file)).is_ok_and(|all| all.split_whitespace().any(|c| c == "cpu"))
    };
    if has_cpu("cgroup.controllers") {
        if !has_cpu("cgroup.subtree_control")
            && fs::write(root.join("cgroup.subtree_control"), "+cpu").is_err()
        {
            return None;
        }
        return Some((Version::Two, root.to_owned()));
    }
    let cpu = root.join("cpu");
    cpu.join("cpu.cfs_quota_us").exists().then_some((Version::One, cpu))
}

/// True if this process can set CPU quotas.
pub fn available() -> bool {
    Quota::new(Path::new(ROOT), "probe", 1.0).is_ok()
}

impl Quota {
    /// A group that may use so many cores' time.
    ///
    /// # Errors
    /// I/O errors if there is no cpu controller, or this process may not make groups.
    pub fn of(name: &str, n_cores: f64) -> io::Result<Self> {
        Self::new(Path::new(ROOT), name, n_cores)
    }

    fn new(root: &Path, name: &str, n_cores: f64) -> io::Result<Self> {
        let none = || io::Error::new(io::ErrorKind::Unsupported, "no cgroup with a cpu controller");
        let (version, parent) = parent(root).ok_or_else(none)?;
        let group = Self(parent.join(format!("triptych-{}-{name}", std::process::id())));
        fs::create_dir(&group.0)?;
        let quota_us = (PERIOD_US as f64 * n_cores).round().max(1000.0) as u64;
        match version {
            Version::Two => group.write("cpu.max", &format!("{quota_us} {PERIOD_US}"))?,
            Version::One => {
                group.write("cpu.cfs_period_us", &PERIOD_US.to_string())?;
                group.write("cpu.cfs_quota_us", &quota_us.to_string())?;
            }
        }
        Ok(group)
    }

    /// Puts a process under it, with all its threads.
    ///
    /// # Errors
    /// The kernel's.
    pub fn hold(&self, pid: u32) -> io::Result<()> {
        self.write("cgroup.procs", &pid.to_string())
    }

    fn write(&self, file: &str, text: &str) -> io::Result<()> {
        fs::write(self.0.join(file), text)
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        // A group whose process still ends stays behind, empty and harmless.
        let _ = fs::remove_dir(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_of_either_version_says_what_it_allows() {
        let v2 = tempfile::tempdir().unwrap();
        for file in ["cgroup.controllers", "cgroup.subtree_control"] {
            fs::write(v2.path().join(file), "cpuset cpu memory\n").unwrap();
        }
        let group = Quota::new(v2.path(), "a", 0.5).unwrap();
        group.hold(7).unwrap();
        let read = |file: &str| fs::read_to_string(group.0.join(file)).unwrap();
        assert_eq!((read("cpu.max"), read("cgroup.procs")), ("10000 20000".into(), "7".into()));

        let v1 = tempfile::tempdir().unwrap();
        fs::create_dir(v1.path().join("cpu")).unwrap();
        fs::write(v1.path().join("cpu/cpu.cfs_quota_us"), "-1").unwrap();
        let group = Quota::new(v1.path(), "a", 1.5).unwrap();
        assert_eq!(fs::read_to_string(group.0.join("cpu.cfs_quota_us")).unwrap(), "30000");
    }

    #[test]
    fn without_a_cpu_controller_there_is_none() {
        let none = tempfile::tempdir().unwrap();
        fs::write(none.path().join("cgroup.controllers"), "memory\n").unwrap();
        assert!(Quota::new(none.path(), "a", 1.0).is_err());
    }
}
