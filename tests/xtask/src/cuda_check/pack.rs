//! `cargo xtask cuda-check pack`: programs, tests and model shapes, small enough to be carried to a machine with a device.

use super::scene::FOLDER;
use crate::shell::{cargo, command, has, root, run as run_shown, show};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Programs in release, one call of cargo each: together, features of one would be the other's.
const PROGRAMS: [(&str, &[&str]); 2] =
    [("triptych", &["triptych"]), ("triptych-benches", &["throughput", "ops"])];

/// Test binaries and their packages. In release they share code with the programs, and are half as large packed.
const TEST_PACKAGES: [&str; 2] = ["triptych-kernels", "triptych-models"];
/// Checks of the back end stay on: every activation is NaN until it is written.
const CHECKS: &str = "profile.release.package.triptych-kernels.debug-assertions=true";
const TESTS: [&str; 3] = ["conformance", "cuda", "golden_models"];

/// Most bytes of what is packed: with the files of the repository, 38 MiB, it shall go through where 64 MiB do.
const MOST_BYTES: u64 = 26 << 20;

/// Settings of xz. Programs share code, so that the window is as large as all of them.
const XZ: &str = "--x86 --lzma2=preset=9,dict=192MiB";

/// Runs what is packed; see its own words.
const SCRIPT: &str = include_str!("run.sh");

/// Builds and packs.
///
/// # Errors
/// If something cannot be built, or what is packed is too large.
pub fn pack() -> Result<()> {
    for tool in ["strip", "tar", "xz", "python3"] {
        ensure!(has(tool), "packing needs {tool}");
    }
    let folder = root().join(FOLDER);
    let files = folder.join("files");
    if files.exists() {
        fs::remove_dir_all(&files)?;
    }
    let bin = files.join("bin");
    fs::create_dir_all(&bin)?;
    for program in release_programs()?.into_iter().chain(test_binaries()?).chain([std::env::current_exe()?]) {
        let name = program.file_name().context("a program has a name")?.to_string_lossy();
        // Cargo names tests with a hash.
        let name = TESTS.into_iter().find(|test| name.starts_with(&format!("{test}-"))).unwrap_or(&name);
        run_shown(command("strip", &["-o"]).arg(bin.join(name)).arg(&program))?;
    }
    run_shown(command("python3", &["benches/models/make.py", "--large"]).arg(files.join("models")))?;
    fs::write(files.join("packed.txt"), commit()?)?;
    let archive = folder.join("files.tar.xz");
    let mut tar = command("tar", &["--owner=0", "--group=0", "--sort=name", "-cJf"]);
    run_shown(tar.env("XZ_OPT", XZ).arg(&archive).arg("-C").arg(&folder).arg("files"))?;
    fs::remove_dir_all(&files)?;
    fs::write(folder.join("run.sh"), SCRIPT)?;
    let n_bytes = fs::metadata(&archive)?.len();
    println!(
        "{FOLDER}: {:.1} MiB; run `bash {FOLDER}/run.sh` where a device is",
        n_bytes as f64 / f64::from(1 << 20)
    );
    ensure!(n_bytes <= MOST_BYTES, "{n_bytes} bytes are packed, more than {MOST_BYTES}");
    Ok(())
}

/// Release programs.
fn release_programs() -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for (package, names) in PROGRAMS {
        let mut build = cargo(&["build", "--release", "-p", package]);
        for name in names {
            build.args(["--bin", name]);
        }
        run_shown(&mut build)?;
        all.extend(names.iter().map(|name| target().join("release").join(name)));
    }
    Ok(all)
}

/// Test binaries, as cargo tells where they are.
fn test_binaries() -> Result<Vec<PathBuf>> {
    let mut build = cargo(&["test", "--release", "--config", CHECKS, "--no-run"]);
    build.args(["--message-format", "json-render-diagnostics"]);
    for package in TEST_PACKAGES {
        build.args(["-p", package]);
    }
    for name in TESTS {
        build.args(["--test", name]);
    }
    println!("$ {}", show(&build));
    let output = build.stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "the tests do not build");
    let found = executables(&String::from_utf8_lossy(&output.stdout));
    ensure!(found.len() == TESTS.len(), "{} test binaries of {}", found.len(), TESTS.len());
    Ok(found)
}

/// Paths of test binaries in cargo's messages.
fn executables(messages: &str) -> Vec<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let is_ours = |message: &Value| {
        let name = message["target"]["name"].as_str();
        message["target"]["kind"][0] == "test" && name.is_some_and(|name| TESTS.contains(&name))
    };
    let path = |message: Value| Some(PathBuf::from(message["executable"].as_str()?));
    messages.filter(is_ours).filter_map(path).collect()
}

/// The folder that cargo builds into.
fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| root().join("target"), |dir| root().join(Path::new(&dir)))
}

/// The commit, and its day.
fn commit() -> Result<String> {
    let output = command("git", &["log", "-1", "--format=commit %h of %cs"]).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_binaries_are_found_in_cargos_messages() {
        let messages = r#"{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"cuda"},"executable":null}
            {"reason":"compiler-artifact","target":{"kind":["test"],"name":"cuda"},"executable":"/t/deps/cuda-12"}
            {"reason":"compiler-artifact","target":{"kind":["test"],"name":"loading"},"executable":"/t/deps/loading-3"}
            {"reason":"build-finished","success":true}"#;
        assert_eq!(executables(messages), [PathBuf::from("/t/deps/cuda-12")]);
    }

    #[test]
    fn every_part_has_its_binary_packed() {
        let packed: Vec<&str> =
            PROGRAMS.iter().flat_map(|(_, names)| *names).chain(&TESTS).copied().collect();
        for name in ["triptych", "throughput", "ops", "conformance", "cuda", "golden_models"] {
            assert!(packed.contains(&name), "{name}");
        }
        assert!(SCRIPT.contains("files.tar.xz") && SCRIPT.contains("cuda-check run"));
    }
}
