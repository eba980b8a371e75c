//! `cargo xtask test`: the whole gate, or one suite with the servers that it needs.

use crate::fuzz;
use crate::gate::{self, Ran, Step};
use crate::lanes;
use crate::needs::Need;
use crate::servers;
use crate::shell::{self, cargo, root, show};
use crate::suites::{self, SUITES, Suite, Target};
use anyhow::{Context, Result};
use clap::Args;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::process::Command;

/// Tests of the whole cluster start this binary.
const BINARY: &str = "target/debug/triptych";

/// The benches of kernels at their smaller shapes, once each: that they run, not how fast.
const BENCHES: [&str; 7] =
    ["test", "--workspace", "--bench", "kernels", "--", "--test", "linear/.*x512x2048|attention/128"];

/// Settings of `cargo xtask test`.
#[derive(Args, Debug)]
#[command(after_help = suites::list())]
pub struct TestArgs {
    /// One suite. Default: everything that CI holds a change to
    suite: Option<String>,
    /// Tests of the suite whose names contain this
    filter: Option<String>,
}

/// The command.
///
/// # Errors
/// If a step fails, or cannot run on this machine.
pub fn run(args: &TestArgs) -> Result<()> {
    match &args.suite {
        None => run_gate(),
        Some(name) => {
            let suite = suites::find(name)
                .with_context(|| format!("there is no suite {name:?}\n\n{}", suites::list()))?;
            run_suite(suite, args.filter.as_deref())
        }
    }
}

fn run_suite(suite: &Suite, filter: Option<&str>) -> Result<()> {
    for need in suite.needs {
        match (need.ensure(), filter) {
            (Ok(()), _) => {}
            // The tests that were asked for may do without.
            (Err(error), Some(_)) => println!("{need:?} is missing: {error:#}"),
            (Err(error), None) => {
                return Err(error.context(format!("{} cannot run here: it needs {need:?}", suite.name)));
            }
        }
    }
    if suite.target == Target::Fuzzers {
        return fuzz::brief(filter);
    }
    run_built(suite, filter)
}

/// The tests of a suite, against a binary that is up to date.
fn run_built(suite: &Suite, filter: Option<&str>) -> Result<()> {
    if let Some(mut build) = suite.binary() {
        run_shown(&mut build)?;
    }
    let mut tests = suite.cargo();
    tests.args(suite.test_args(filter));
    run_shown(&mut tests)
}

/// In the order in which mistakes are cheapest to find.
fn run_gate() -> Result<()> {
    let missing = RefCell::new(BTreeMap::<Need, String>::new());
    let fuzzing = || match missing.borrow().get(&Need::Cxx) {
        Some(why) => Ok(Ran::Partly(why.clone())),
        None => whole(fuzz::brief(None)),
    };
    let find_missing = || {
        *missing.borrow_mut() = find_missing();
        Ok(Ran::Whole)
    };
    let steps: Vec<Step<'_>> = vec![
        ("servers and tools", Box::new(find_missing)),
        ("house rules", Box::new(|| cargo_shown(&["test", "-q", "-p", "house-rules"]))),
        ("format", Box::new(|| cargo_shown(&["fmt", "--all", "--check"]))),
        (
            "lints",
            Box::new(|| cargo_shown(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])),
        ),
        ("build of the tests", Box::new(|| cargo_shown(&["test", "--workspace", "--no-run"]))),
        ("static binary", Box::new(|| whole(Need::StaticBinary.ensure()))),
        ("tests", Box::new(|| run_tests(&missing.borrow()))),
        ("benches, briefly", Box::new(|| cargo_shown(&BENCHES))),
        ("fuzzing, briefly", Box::new(fuzzing)),
    ];
    gate::run(steps)
}

/// Needs that cannot be met on this machine, with the reasons.
fn find_missing() -> BTreeMap<Need, String> {
    let mut missing = BTreeMap::new();
    // The static binary is a step of its own: it is a build.
    for need in Need::ALL.into_iter().filter(|need| *need != Need::StaticBinary) {
        if let Err(error) = need.ensure() {
            println!("{need:?} is missing: {error:#}");
            missing.insert(need, format!("{error:#}"));
        }
    }
    missing
}

/// All tests, less the suites that cannot run here.
fn run_tests(missing: &BTreeMap<Need, String>) -> Result<Ran> {
    let cannot = |suite: &&Suite| suite.needs.iter().any(|need| missing.contains_key(need));
    let left_out: Vec<_> =
        SUITES.iter().filter(|suite| suite.target != Target::Fuzzers).filter(cannot).collect();
    if left_out.is_empty() {
        return whole(lanes::run_all(prepare));
    }
    let mut tests = cargo(&["test", "--workspace", "--no-fail-fast", "--exclude", "triptych-tests"]);
    for suite in &left_out {
        if let Target::Package(package) = suite.target {
            tests.args(["--exclude", package]);
        }
    }
    run_shown(&mut tests)?;
    let is_left_out = |name: &str| left_out.iter().any(|suite| suite.name == name);
    for suite in SUITES.iter().filter(|suite| suite.target == Target::Cluster && !is_left_out(suite.name)) {
        run_built(suite, None)?;
    }
    let why = |suite: &&Suite| {
        let reasons: Vec<_> = suite.needs.iter().filter_map(|need| missing.get(need)).cloned().collect();
        format!("{}: {}", suite.name, reasons.join(", "))
    };
    Ok(Ran::Partly(left_out.iter().map(why).collect::<Vec<_>>().join("; ")))
}

fn whole(result: Result<()>) -> Result<Ran> {
    result.map(|()| Ran::Whole)
}

fn cargo_shown(args: &[&str]) -> Result<Ran> {
    whole(run_shown(&mut cargo(args)))
}

fn run_shown(command: &mut Command) -> Result<()> {
    prepare(command);
    println!("$ {}", show(command));
    shell::run(command)
}

/// Tells tests where the programs are that they start, and candle the number of threads. It reads `/proc/cpuinfo` for it at each
/// product of matrices otherwise, two fifths of the time of tests of the reference back end.
fn prepare(command: &mut Command) {
    command.env("TRIPTYCH_BIN", root().join(BINARY)).env("TRIPTYCH_WEED", servers::s3_program());
    command.env("TRIPTYCH_AZURITE", servers::azurite_program());
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    command.env("RAYON_NUM_THREADS", n_threads.to_string());
}
