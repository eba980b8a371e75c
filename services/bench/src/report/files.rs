//! Stored results, read for a report, and the report's file.

use super::Report;
use crate::error::MeasureError;
use crate::result::SweepResult;
use std::fs;
use std::path::{Path, PathBuf};

/// Writes a report in the form that the file's name asks for: Markdown for `.md`, else HTML.
///
/// # Errors
/// [`MeasureError::Failed`] if it cannot be written.
pub fn write(out: &Path, report: &Report) -> Result<(), MeasureError> {
    let is_markdown = out.extension().is_some_and(|e| e == "md");
    let text = if is_markdown { report.to_markdown() } else { report.to_html() };
    fs::write(out, text).map_err(|e| MeasureError::failed(format!("cannot write {}", out.display()), &e))
}

/// Reads the results of files, and of folders of them.
///
/// # Errors
/// [`MeasureError::Setting`] that names a file that is no result, and if there is no result at all.
pub fn read_all(paths: &[PathBuf]) -> Result<Vec<SweepResult>, MeasureError> {
    let mut sweeps = Vec::new();
    for path in paths {
        let unreadable =
            |e: std::io::Error| MeasureError::setting(format!("cannot read {}", path.display()), &e);
        if !path.is_dir() {
            sweeps.push(read(path)?);
            continue;
        }
        let entries =
            fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(unreadable)?;
        let mut files: Vec<_> = entries.into_iter().map(|e| e.path()).collect();
        files.retain(|file| file.extension().is_some_and(|e| e == "json"));
        files.sort();
        for file in files {
            sweeps.push(read(&file)?);
        }
    }
    match sweeps.is_empty() {
        true => Err(MeasureError::Setting("no results in the named files and folders".into())),
        false => Ok(sweeps),
    }
}

fn read(path: &Path) -> Result<SweepResult, MeasureError> {
    let text = fs::read_to_string(path)
        .map_err(|e| MeasureError::setting(format!("cannot read {}", path.display()), &e))?;
    SweepResult::read(&text).map_err(|e| MeasureError::setting(path.display(), &e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_no_results_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.json");
        let error = read_all(std::slice::from_ref(&file)).unwrap_err().to_string();
        assert!(error.contains("a.json"), "{error}");
        fs::write(&file, "{\"version\": 99}").unwrap();
        let error = read_all(&[dir.path().to_owned()]).unwrap_err().to_string();
        assert!(error.contains("version 99"), "{error}");
        fs::remove_file(&file).unwrap();
        let error = read_all(&[dir.path().to_owned()]).unwrap_err().to_string();
        assert!(error.contains("no results"), "{error}");
    }
}
