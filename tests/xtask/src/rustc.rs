//! This program in the place of rustc, as cargo's `RUSTC_WRAPPER`: some crates get flags that the others do not.
//!
//! Flags of all crates (`RUSTFLAGS`) would compile every dependency again. Crates that get flags of their own are kept apart
//! by a setting of their profile that changes nothing else ([`apart`]).

use anyhow::{Context, Result};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Set: this program is called as a rustc, for this form of the build.
const AS_RUSTC: &str = "TRIPTYCH_XTASK_AS_RUSTC";

/// Coverage counters of libFuzzer, of the stable toolchain.
pub const COVERAGE: [&str; 6] = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

/// A form of the build in which some crates have flags of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The binary of the product, linked statically.
    Static,
    /// Crates that read outside bytes, with coverage counters.
    Fuzzed,
}

impl Form {
    const ALL: [Self; 2] = [Self::Static, Self::Fuzzed];

    fn name(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Fuzzed => "fuzzed",
        }
    }

    /// Packages that get the flags. `triptych-core` is none of the fuzzed: kernels depend on it, and would be compiled again.
    fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Static => &["triptych"],
            Self::Fuzzed => {
                &["triptych-ec", "triptych-models", "triptych-proto", "triptych-proxy", "triptych-runtime"]
            }
        }
    }

    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Static => &["-Ctarget-feature=+crt-static"],
            Self::Fuzzed => &COVERAGE,
        }
    }

    /// `true` for a crate that gets the flags, by rustc's own arguments.
    fn is_flagged(self, args: &[OsString]) -> bool {
        let value = |flag: &str| args.windows(2).find(|pair| pair[0] == flag).map(|pair| &pair[1]);
        let is_bin = value("--crate-type").is_some_and(|kind| kind == "bin");
        let name = value("--crate-name").and_then(|name| name.to_str()).unwrap_or_default();
        let is_named = self.packages().iter().any(|package| package.replace('-', "_") == name);
        is_named && is_bin == (self == Self::Static)
    }
}

/// Makes a cargo command build this form, and keep it beside the usual one.
///
/// # Errors
/// If this program does not know its own path.
pub fn apart(build: &mut Command, form: Form) -> Result<()> {
    let me = std::env::current_exe().context("this program's own path")?;
    for package in form.packages() {
        build.arg("--config").arg(format!("profile.dev.package.{package}.codegen-units=64"));
    }
    build.env("RUSTC_WRAPPER", me).env(AS_RUSTC, form.name());
    Ok(())
}

/// Becomes the rustc that cargo meant to call, if cargo called.
///
/// # Errors
/// If there is no such rustc.
pub fn become_if_called() -> Result<()> {
    let Some(name) = std::env::var_os(AS_RUSTC) else { return Ok(()) };
    let mut words: Vec<OsString> = std::env::args_os().skip(1).collect();
    if let Some(form) = Form::ALL.into_iter().find(|form| name == form.name() && form.is_flagged(&words)) {
        words.extend(form.flags().iter().map(OsString::from));
    }
    let (program, args) = words.split_first().context("cargo names its rustc")?;
    Err(Command::new(program).args(args).exec().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(name: &str, kind: &str) -> Vec<OsString> {
        ["rustc", "--crate-name", name, "--crate-type", kind].map(OsString::from).to_vec()
    }

    #[test]
    fn only_named_crates_get_flags() {
        assert!(Form::Static.is_flagged(&args("triptych", "bin")));
        assert!(!Form::Static.is_flagged(&args("triptych", "lib")));
        assert!(!Form::Static.is_flagged(&args("tokio", "lib")));
        assert!(Form::Fuzzed.is_flagged(&args("triptych_models", "lib")));
        assert!(!Form::Fuzzed.is_flagged(&args("triptych_kernels", "lib")));
        assert!(!Form::Fuzzed.is_flagged(&args("fuzz_image", "bin")));
    }
}
