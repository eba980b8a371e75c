//! `triptych bench report`: stored results as a page.

use crate::error::CliError;
use clap::Args;
use std::fs;
use std::path::{Path, PathBuf};
use triptych_bench::report::Report;
use triptych_bench::result::SweepResult;

/// Flags of `bench report`.
#[derive(Args, Debug)]
pub struct ReportArgs {
    /// Results as JSON, or folders of them; those of one workload are compared
    #[arg(required = true, value_name = "RESULT.json")]
    pub results: Vec<PathBuf>,
    /// The page: HTML, or Markdown if it ends with `.md`
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    pub out: PathBuf,
    /// Its heading
    #[arg(long, value_name = "TEXT", default_value = "Goodput")]
    pub title: String,
}

/// Makes the page.
///
/// # Errors
/// [`CliError`] that names the file at fault.
pub fn run(args: &ReportArgs) -> Result<(), CliError> {
    let sweeps = read_all(&args.results)?;
    write(&args.out, &Report::of_sweeps(&args.title, &sweeps))?;
    println!("{}", args.out.display());
    Ok(())
}

/// Writes a page in the form that the file's name asks for.
///
/// # Errors
/// [`CliError::Failed`] if it cannot be written.
pub fn write(out: &Path, report: &Report) -> Result<(), CliError> {
    let is_markdown = out.extension().is_some_and(|e| e == "md");
    let text = if is_markdown { report.to_markdown() } else { report.to_html() };
    fs::write(out, text).map_err(|e| CliError::failed(format!("cannot write {}", out.display()), &e))
}

/// Results of files, and of folders of them.
///
/// # Errors
/// [`CliError::Setting`] that names what is no result, and for none at all.
pub fn read_all(paths: &[PathBuf]) -> Result<Vec<SweepResult>, CliError> {
    let mut sweeps = Vec::new();
    for path in paths {
        let unreadable = |e: std::io::Error| CliError::setting(format!("cannot read {}", path.display()), &e);
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
        true => Err(CliError::Setting("there is no result in what was named".into())),
        false => Ok(sweeps),
    }
}

fn read(path: &Path) -> Result<SweepResult, CliError> {
    let text = fs::read_to_string(path)
        .map_err(|e| CliError::setting(format!("cannot read {}", path.display()), &e))?;
    SweepResult::read(&text).map_err(|e| CliError::setting(path.display(), &e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_result_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.json");
        let args = |results| ReportArgs { results, out: dir.path().join("r.html"), title: "T".into() };
        let error = run(&args(vec![file.clone()])).unwrap_err().to_string();
        assert!(error.contains("a.json"), "{error}");
        fs::write(&file, "{\"version\": 99}").unwrap();
        let error = run(&args(vec![dir.path().to_owned()])).unwrap_err().to_string();
        assert!(error.contains("version 99"), "{error}");
        fs::remove_file(&file).unwrap();
        let error = run(&args(vec![dir.path().to_owned()])).unwrap_err().to_string();
        assert!(error.contains("no result"), "{error}");
        assert!(!dir.path().join("r.html").exists());
    }
}
