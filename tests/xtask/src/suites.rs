//! The suites that `cargo xtask test SUITE` knows: what each holds, and what it needs on the machine.

use crate::needs::Need;
use crate::shell::cargo;
use std::process::Command;

/// A set of tests that runs by itself.
pub struct Suite {
    /// The word on the command line.
    pub name: &'static str,
    /// One line for `--help`.
    pub about: &'static str,
    pub needs: &'static [Need],
    /// The tests, as cargo knows them.
    pub target: Target,
}

/// Tests as cargo knows them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// All tests of one crate.
    Package(&'static str),
    /// One test binary of `tests/`, against the binary of the product.
    Cluster,
    /// The fuzzers, briefly.
    Fuzzers,
    /// Tests of a crate's `golden_models` that take minutes and are not in the gate: those whose names have `before`, the
    /// filter and `after` in a row.
    Slow { package: &'static str, before: &'static str, after: &'static str },
}

const fn package(name: &'static str, package: &'static str, about: &'static str) -> Suite {
    Suite { name, about, needs: &[], target: Target::Package(package) }
}

const fn cluster(name: &'static str, needs: &'static [Need], about: &'static str) -> Suite {
    Suite { name, about, needs, target: Target::Cluster }
}

/// Every suite, the quick ones first.
pub const SUITES: [Suite; 24] = [
    package("house", "house-rules", "imports, circles, words, sizes, layout; seconds"),
    package("schema", "triptych-proto-codegen", "the checked-in Rust of the schema"),
    cluster("sim", &[], "the cluster on a simulated network, from seeds"),
    cluster(
        "e2e",
        &[Need::Redis, Need::S3, Need::Whisper],
        "clusters of real processes, from a client's side",
    ),
    cluster(
        "deploy",
        &[Need::Redis, Need::Python, Need::DeployTools, Need::StaticBinary, Need::Namespaces],
        "images, compose files, chart, dashboards, as their own tools read them",
    ),
    cluster("chaos", &[Need::Redis, Need::S3, Need::Namespaces], "a cluster under faults"),
    Suite {
        name: "fuzz",
        about: "every reader of outside bytes, 20 000 inputs or 30 seconds each",
        needs: &[Need::Cxx],
        target: Target::Fuzzers,
    },
    package("core", "triptych-core", "crate: ids, keys, shapes, clock"),
    package("proto", "triptych-proto", "crate: the wire"),
    Suite {
        name: "kernels",
        about: "crate: arithmetic against its reference; CUDA without a GPU",
        needs: &[Need::Cxx],
        target: Target::Package("triptych-kernels"),
    },
    package("models", "triptych-models", "crate: models, preprocessing, golden files"),
    Suite {
        name: "real-widths",
        about: "models at published widths beside transformers; not in the gate, gigabytes and minutes",
        needs: &[],
        target: Target::Slow { package: "triptych-models", before: "real_widths::", after: "" },
    },
    Suite {
        name: "models-cuda",
        about: "every golden model on the CUDA stand-in, where the gate takes a third; not in the gate, minutes",
        needs: &[Need::Cxx],
        target: Target::Slow {
            package: "triptych-models",
            before: "",
            after: "::every_case_matches_on_cuda",
        },
    },
    package("engine", "triptych-engine", "crate: blocks, scheduler, sampling"),
    Suite {
        name: "ec",
        about: "crate: EC stores, against real servers",
        needs: &[Need::Redis, Need::S3, Need::Azurite],
        target: Target::Package("triptych-ec"),
    },
    Suite {
        name: "runtime",
        about: "crate: what processes share",
        needs: &[Need::Redis],
        target: Target::Package("triptych-runtime"),
    },
    package("proxy", "triptych-proxy", "crate: the proxy"),
    package("encoder", "triptych-encoder", "crate: encoder workers"),
    package("pd", "triptych-pd", "crate: PD workers"),
    package("bench", "triptych-bench", "crate: the load generator"),
    package("plan", "triptych-plan", "crate: the planner and its simulator"),
    package("triptych", "triptych", "crate: the binary"),
    package("xtask", "xtask", "crate: this program"),
    package("benches", "triptych-benches", "crate: the benchmarks"),
];

/// The suite of a name.
pub fn find(name: &str) -> Option<&'static Suite> {
    SUITES.iter().find(|suite| suite.name == name)
}

/// The list of suites for `--help`.
pub fn list() -> String {
    let line = |suite: &Suite| format!("  {:<11} {}", suite.name, suite.about);
    let lines: Vec<_> = SUITES.iter().map(line).collect();
    format!("Suites:\n{}\n\nWithout a suite the whole gate runs, as in CI.", lines.join("\n"))
}

impl Suite {
    /// Cargo, for the binary that the tests start; `None` if they start none.
    pub fn binary(&self) -> Option<Command> {
        let starts = self.target == Target::Cluster && self.name != "sim";
        starts.then(|| cargo(&["build", "--workspace", "--bin", "triptych", "--test", self.name]))
    }

    /// Cargo, for this suite's tests.
    ///
    /// Suites of a cluster are built as parts of the workspace, so that they share every crate with the whole test run.
    pub fn cargo(&self) -> Command {
        match self.target {
            Target::Package(package) => cargo(&["test", "-p", package]),
            Target::Cluster => cargo(&["test", "--workspace", "--test", self.name]),
            Target::Fuzzers => cargo(&["xtask", "fuzz"]),
            Target::Slow { package, .. } => cargo(&["test", "-p", package, "--test", "golden_models"]),
        }
    }

    /// Arguments of the test binary; `filter`: a part of the names of tests.
    pub fn test_args(&self, filter: Option<&str>) -> Vec<String> {
        match self.target {
            Target::Slow { before, after, .. } => {
                let filter = format!("{before}{}{after}", filter.unwrap_or_default());
                ["--", "--ignored", "--nocapture"].map(str::to_owned).into_iter().chain([filter]).collect()
            }
            _ => filter.map(str::to_owned).into_iter().collect(),
        }
    }
}

#[test]
fn every_suite_has_a_name_of_its_own() {
    let mut names: Vec<_> = SUITES.iter().map(|suite| suite.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), SUITES.len());
}
