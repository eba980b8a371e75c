//! Results of a suite, one file for each workload and topology, so that a suite that was interrupted can go on.

use super::runs::StoredRuns;
use crate::result::SweepResult;
use crate::topology::Topology;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Folder with the results of a suite.
#[derive(Clone, Debug)]
pub struct Results {
    dir: PathBuf,
}

impl Results {
    /// Opens the folder, and makes it if there is none.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn in_dir(dir: &Path) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// The runs that the results are of.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn runs(&self) -> io::Result<StoredRuns> {
        StoredRuns::in_dir(&self.dir.join("runs"))
    }

    /// Removes a result and its runs.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn forget(&self, workload: &str, topology: &Topology) -> io::Result<()> {
        match fs::remove_file(self.path(workload, topology)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        self.runs()?.forget(workload, &topology.to_string())
    }

    /// File of a result.
    pub fn path(&self, workload: &str, topology: &Topology) -> PathBuf {
        let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '.') { c } else { '_' };
        let name: String = format!("{workload}__{topology}").chars().map(plain).collect();
        self.dir.join(format!("{name}.json"))
    }

    /// A stored result that is complete and `is_same` as the one that would be measured.
    pub fn read(
        &self,
        workload: &str,
        topology: &Topology,
        is_same: impl Fn(&SweepResult) -> bool,
    ) -> Option<SweepResult> {
        let text = fs::read_to_string(self.path(workload, topology)).ok()?;
        SweepResult::read(&text).ok().filter(is_same)
    }

    /// Writes a result atomically.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn write(&self, workload: &str, topology: &Topology, result: &SweepResult) -> io::Result<()> {
        let path = self.path(workload, topology);
        let beside = path.with_extension("part");
        fs::write(&beside, result.to_json())?;
        fs::rename(beside, path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests_support::sweep;

    #[test]
    fn a_complete_result_is_found_again_and_a_truncated_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let results = Results::in_dir(&dir.path().join("new")).unwrap();
        let workload = "epd-short:images=1";
        let topology = "colocated:budget=64".parse().unwrap();
        assert!(results.read(workload, &topology, |_| true).is_none());
        let result = sweep("colocated:budget=64", workload, 4.0);
        results.write(workload, &topology, &result).unwrap();
        assert_eq!(results.read(workload, &topology, |_| true).unwrap().setup, result.setup);
        assert!(
            results.read(workload, &topology, |found| found.setup.n_requests == 7).is_none(),
            "measured otherwise"
        );
        fs::write(results.path(workload, &topology), "{\"version\": 1").unwrap();
        assert!(results.read(workload, &topology, |_| true).is_none());
        assert_ne!(results.path(workload, &topology), results.path(workload, &"dp2".parse().unwrap()));
    }
}
