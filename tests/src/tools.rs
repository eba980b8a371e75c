//! External programs that check `deploy/`, as `cargo xtask servers` installs them: `docker-compose`, `hadolint`,
//! `promtool`, `prometheus`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The root of the repository.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// A tool by its name.
///
/// # Panics
/// If it is missing: a test that did not run is not green.
pub fn tool(name: &str) -> Command {
    let path = root().join(".cache/tools").join(name);
    assert!(path.is_file(), "{} is missing: run `cargo xtask servers`", path.display());
    let mut command = Command::new(path);
    command.current_dir(root());
    command
}

/// Runs a command; its stdout, or a panic with all its output.
///
/// # Panics
/// If it does not end with 0.
pub fn passed(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} ended with {}:\n{stdout}{stderr}", output.status);
    stdout.into_owned()
}
