//! All tests of the workspace in two lanes: the suites of clusters, which wait for processes most of their time, beside the
//! binaries of the crates, which compute. When there is no suite left, both take binaries.
//!
//! Cargo runs one test binary after another, and leaves a core idle whenever one waits. The binaries are the ones that
//! `cargo test --workspace` builds; each runs as cargo would run it, and its output is shown when it ends.

use crate::shell::{cargo, run, show};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::time::Instant;

/// The package with the suites of clusters.
const CLUSTERS: &str = "triptych-tests";

/// A test binary.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TestBinary {
    /// The folder of its package, in which it runs.
    dir: PathBuf,
    /// Its target, such as `e2e`.
    name: String,
    path: PathBuf,
    /// True if it starts clusters.
    is_cluster: bool,
}

impl TestBinary {
    /// The folder of its package in the repository.
    fn folder(&self) -> &Path {
        self.dir.strip_prefix(crate::shell::root()).unwrap_or(&self.dir)
    }
}

/// Runs every test, and those of the documentation. Goes on behind a binary that fails. `prepare` sets what each is told.
///
/// # Errors
/// If the tests do not build, or one of them fails.
pub fn run_all(prepare: fn(&mut Command)) -> Result<()> {
    let (clusters, crates): (Vec<_>, Vec<_>) = binaries()?.into_iter().partition(|binary| binary.is_cluster);
    let failed = Mutex::new(Vec::new());
    in_two_lanes(crates, clusters, |binary| run_one(&binary, prepare, &failed))?;
    let failed = failed.into_inner().unwrap_or_default();
    let docs = run(&mut cargo(&["test", "--workspace", "--doc"]));
    ensure!(failed.is_empty(), "tests failed: {}", failed.join(", "));
    docs
}

/// Runs what is in two queues at the same time, one of each; who is through with the second takes of the first. A lane ends with
/// its first error.
///
/// # Errors
/// That of a lane.
pub fn in_two_lanes<T: Send>(
    first: Vec<T>,
    second: Vec<T>,
    run: impl Fn(T) -> Result<()> + Sync,
) -> Result<()> {
    let [first, second] = [first, second].map(|queue| Mutex::new(queue.into_iter()));
    let next = |queue: &Mutex<std::vec::IntoIter<T>>| {
        queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).next()
    };
    std::thread::scope(|scope| {
        let beside = scope.spawn(|| {
            while let Some(item) = next(&second).or_else(|| next(&first)) {
                run(item)?;
            }
            Ok(())
        });
        let own = std::iter::from_fn(|| next(&first)).try_for_each(&run);
        own.and(beside.join().unwrap_or_else(|_| bail!("a lane panicked")))
    })
}

/// Runs a binary, and notes its name if it fails.
fn run_one(binary: &TestBinary, prepare: fn(&mut Command), failed: &Mutex<Vec<String>>) -> Result<()> {
    let start = Instant::now();
    let mut tests = Command::new(&binary.path);
    tests.current_dir(&binary.dir).env("CARGO_MANIFEST_DIR", &binary.dir).stdin(Stdio::null());
    prepare(&mut tests);
    println!("▶ {} of {}", binary.name, binary.folder().display());
    let output = tests.output().with_context(|| format!("cannot start {}", binary.path.display()))?;
    // Held while it prints, so that no other lane does.
    let mut failed = failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    print(binary, &output, start);
    if !output.status.success() {
        failed.push(format!("{} ({})", binary.name, output.status));
    }
    Ok(())
}

/// Prints what a binary wrote. Of one that passed its names of tests are left out.
fn print(binary: &TestBinary, Output { status, stdout, stderr }: &Output, start: Instant) {
    println!("── {} of {}: {} s", binary.name, binary.folder().display(), start.elapsed().as_secs());
    let text = String::from_utf8_lossy(stdout);
    let is_shown =
        |line: &&str| !(status.success() && line.starts_with("test ") && line.ends_with(" ... ok"));
    text.lines().filter(is_shown).filter(|line| !line.is_empty()).for_each(|line| println!("{line}"));
    if !status.success() {
        println!("{}", String::from_utf8_lossy(stderr));
    }
}

/// The test binaries of the workspace, as cargo tells where they are.
fn binaries() -> Result<Vec<TestBinary>> {
    let mut build =
        cargo(&["test", "--workspace", "--no-run", "--message-format", "json-render-diagnostics"]);
    println!("$ {}", show(&build));
    let output = build.stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "the tests do not build");
    let found = executables(&String::from_utf8_lossy(&output.stdout));
    ensure!(!found.is_empty(), "cargo names no test binary");
    Ok(found)
}

/// Test binaries in cargo's messages.
fn executables(messages: &str) -> Vec<TestBinary> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let binary = |message: Value| {
        let is_test = message["profile"]["test"] == true;
        let path = message["executable"].as_str().filter(|_| is_test)?;
        let manifest = Path::new(message["manifest_path"].as_str()?);
        Some(TestBinary {
            dir: manifest.parent()?.to_owned(),
            name: message["target"]["name"].as_str()?.to_owned(),
            path: path.into(),
            is_cluster: message["package_id"].as_str()?.contains(CLUSTERS),
        })
    };
    messages.filter_map(binary).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shell::command;

    /// An executable file of this text.
    fn script(name: &str, text: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("lanes-{}-{name}", std::process::id()));
        std::fs::write(&path, text).expect("a file");
        run(command("chmod", &["+x"]).arg(&path)).expect("chmod");
        path
    }

    #[test]
    fn test_binaries_are_found_in_cargos_messages() {
        let message = |package: &str, name: &str, is_test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","package_id":"path+file:///r/{package}#{package}@0.1.0",
                "manifest_path":"/r/{package}/Cargo.toml","target":{{"name":"{name}"}},"profile":{{"test":{is_test}}},"executable":{executable}}}"#
            )
            .replace('\n', "")
        };
        let messages = [
            message("engine", "engine", false, "null"),
            message("engine", "matrix", true, "\"/t/matrix-1\""),
            message("triptych-tests", "e2e", true, "\"/t/e2e-2\""),
            message("triptych", "triptych", false, "\"/t/triptych\""),
        ];
        let found = executables(&messages.join("\n"));
        let names: Vec<_> = found.iter().map(|binary| (&*binary.name, binary.is_cluster)).collect();
        assert_eq!(names, [("matrix", false), ("e2e", true)]);
        assert_eq!((found[0].dir.clone(), found[0].path.clone()), ("/r/engine".into(), "/t/matrix-1".into()));
    }

    #[test]
    fn a_binary_that_fails_is_named_and_the_next_ones_of_all_queues_run() {
        let failed = Mutex::new(Vec::new());
        let files: Vec<PathBuf> = [("worse", "exit 4"), ("good", "exit 0"), ("bad", "echo no; exit 3")]
            .into_iter()
            .map(|(name, text)| script(name, &format!("#!/bin/sh\n{text}\n")))
            .collect();
        let binary = |name: &str, path: &PathBuf| TestBinary {
            dir: crate::shell::root(),
            name: name.into(),
            path: path.clone(),
            is_cluster: false,
        };
        let first = vec![binary("worse", &files[0]), binary("good", &files[1])];
        let second = vec![binary("bad", &files[2])];
        in_two_lanes(first, second, |binary| run_one(&binary, |_| {}, &failed)).expect("they start");
        files.iter().for_each(|file| std::fs::remove_file(file).expect("its file"));
        let mut failed = failed.into_inner().expect("no panic");
        failed.sort();
        assert_eq!(failed, ["bad (exit status: 3)", "worse (exit status: 4)"]);
    }
}
