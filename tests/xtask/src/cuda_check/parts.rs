//! The parts: tests on the device, tests under a tool, the sample models through a cluster, and times.

use super::child::{Ended, Running};
use super::libtest::{self, Tests};
use super::scene::{Outcome, Ran, Scene, last_line};
use super::timing::{self, Work};
use crate::shell::has;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

/// Set to the number of a device that tests shall run on, as `kernels/tests/standin` reads it.
const DEVICE: &str = "TRIPTYCH_TEST_CUDA_DEVICE";

/// Exit status of a program in which `compute-sanitizer` found an error.
const TOOL_FOUND: &str = "97";

/// Tests that failed are run again alone, so many at most.
const MOST_AGAIN: usize = 8;

/// Questions to each sample model.
const QUESTIONS: usize = 12;

/// A part of the check.
pub struct Part {
    /// The name on the command line.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// Most time that it may take.
    pub limit: Duration,
    kind: Kind,
}

enum Kind {
    Tests(TestRun),
    Samples,
    Times(Work),
}

/// A test binary on the device.
struct TestRun {
    binary: &'static str,
    /// Names contain one of these; all tests if there are none.
    filters: &'static [&'static str],
    /// The same in a smoke run.
    smoke: &'static [&'static str],
    /// Tool of `compute-sanitizer` that it runs under.
    tool: Option<&'static str>,
}

const fn part(name: &'static str, about: &'static str, seconds: u64, kind: Kind) -> Part {
    Part { name, about, limit: Duration::from_secs(seconds), kind }
}

const fn tests(
    binary: &'static str,
    filters: &'static [&'static str],
    smoke: &'static [&'static str],
    tool: Option<&'static str>,
) -> Kind {
    Kind::Tests(TestRun { binary, filters, smoke, tool })
}

/// All parts, in the order in which a mistake is best understood.
pub const PARTS: [Part; 9] = [
    part("conformance", "every op beside its oracle", 50, tests("conformance", &[], &["linear_is"], None)),
    part(
        "kernels",
        "every kernel, and the back end's runtime",
        40,
        tests("cuda", &[], &["cache::", "order::", "backend::"], None),
    ),
    part(
        "goldens",
        "golden models, eager and as graphs",
        60,
        tests("golden_models", &["cuda", "graphs::"], &["whisper::cuda_matches"], None),
    ),
    part("samples", "the sample models through `triptych up --device cuda`", 40, Kind::Samples),
    part(
        "memcheck",
        "conformance under compute-sanitizer's memcheck",
        60,
        tests("conformance", &[], &["linear_is"], Some("memcheck")),
    ),
    part(
        "racecheck",
        "conformance under compute-sanitizer's racecheck",
        60,
        tests("conformance", &[], &["linear_is"], Some("racecheck")),
    ),
    part("ops", "products and attention, beside torch", 50, Kind::Times(Work::Ops)),
    part("whisper", "Whisper-large-v3's shape, beside torch", 90, Kind::Times(Work::Whisper)),
    part("qwen", "Qwen2.5-VL-7B's shape, beside torch", 200, Kind::Times(Work::Qwen)),
];

impl Part {
    /// Runs the part, until its time is over.
    ///
    /// # Errors
    /// If a program cannot be started.
    pub fn run(&self, scene: &mut Scene, until: Instant) -> Result<Ran> {
        match &self.kind {
            Kind::Tests(tests) => tests.run(scene, until),
            Kind::Samples => samples(scene, until),
            Kind::Times(_) if !scene.is_timed => {
                Ok(Ran::of(Outcome::NotThere("nvidia-smi, to name the device that times are of".to_owned())))
            }
            Kind::Times(work) => timing::run(*work, scene, until),
        }
    }
}

impl TestRun {
    fn run(&self, scene: &mut Scene, until: Instant) -> Result<Ran> {
        let mut command = match self.tool {
            None => scene.packed(self.binary),
            Some(tool) => {
                let places = ["compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"];
                let Some(sanitizer) =
                    places.into_iter().find(|place| has(place) || Path::new(place).is_file())
                else {
                    return Ok(Ran::of(Outcome::NotThere("compute-sanitizer".to_owned())));
                };
                let mut command = scene.command(sanitizer);
                command.args(["--tool", tool, "--error-exitcode", TOOL_FOUND, "--print-limit", "20"]);
                // The back end looks at each call's error itself.
                command.args(
                    (tool == "memcheck").then_some(["--report-api-errors", "no"]).into_iter().flatten(),
                );
                command.arg(scene.packed(self.binary).get_program());
                command
            }
        };
        // With several threads a test has its line at once, and uncaptured its panic: both are there if the time ends.
        command.env(DEVICE, "0").args(["--test-threads", "4", "--nocapture"]);
        command.args(if scene.smoke { self.smoke } else { self.filters });
        let ended = scene.run(&mut command, until)?;
        let tests = libtest::parse(&ended.text);
        let mut notes = notes(&tests);
        if self.tool.is_none() {
            for (name, _) in tests.failed.iter().take(MOST_AGAIN) {
                let mut alone = scene.packed(self.binary);
                let again = scene.run(alone.env(DEVICE, "0").args(["--exact", name]), until)?;
                if again.status.is_some_and(|status| status.success()) {
                    notes.push(format!("`{name}` passes alone: another test took the device from it"));
                }
            }
        }
        Ok(Ran { notes, ..Ran::of(outcome(&tests, &ended)) })
    }
}

/// The outcome of a test binary that ended, or was ended.
fn outcome(tests: &Tests, ended: &Ended) -> Outcome {
    let n_passed = tests.n_passed;
    let summaries = ended.text.lines().filter_map(|line| line.split_once("SUMMARY: "));
    let found: Vec<_> = summaries.map(|(_, found)| found).filter(|found| !found.starts_with("0 ")).collect();
    if ended.text.contains("Device not supported") {
        return Outcome::NotThere("compute-sanitizer for this device".to_owned());
    }
    if !found.is_empty() || !tests.failed.is_empty() {
        let found = found.iter().map(|found| format!("; {found}"));
        return Outcome::Failed(format!("{} tests{}", tests.failed.len(), found.collect::<String>()));
    }
    match ended.status {
        None => Outcome::OutOfTime(format!("{n_passed} tests had passed")),
        Some(_) if !tests.is_whole => {
            Outcome::Failed(format!("it broke off after {n_passed} tests, see the log"))
        }
        Some(_) if n_passed == 0 => Outcome::Failed("no test ran".to_owned()),
        // Tests that left themselves out make the binary fail; under a tool that is no error of the tool's.
        Some(status) if tests.left_out.is_empty() && !status.success() => {
            Outcome::Failed(format!("{status}"))
        }
        Some(_) => Outcome::Passed,
    }
}

/// Numbers of tests, and names.
fn notes(tests: &Tests) -> Vec<String> {
    let names =
        |names: &[String]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let mut notes = vec![format!("{} tests passed", tests.n_passed)];
    notes.extend(tests.failed.iter().map(|(name, message)| format!("`{name}` failed: {message}")));
    if !tests.left_out.is_empty() {
        notes.push(format!(
            "{} need the stand-in and did not run: {}",
            tests.left_out.len(),
            names(&tests.left_out)
        ));
    }
    notes
}

/// Asks both sample models through a cluster of real processes.
fn samples(scene: &mut Scene, until: Instant) -> Result<Ran> {
    let [http, grpc] = [free_address()?, free_address()?];
    let mut up = scene.packed("triptych");
    up.args(["up", "--device", "cuda", "--precision", "bf16", "--http", &http, "--grpc", &grpc]);
    let mut up = Running::start(&mut up)?;
    let ready = up.wait_for("Triptych is ready", until)?;
    let asked = if ready { ask(scene, &grpc, until) } else { Ok((0, Vec::new())) };
    up.signal("INT");
    // A cluster that does not end is ended when it is dropped.
    let drained = up.wait(until.max(Instant::now() + Duration::from_secs(3)))?;
    scene.keep("triptych up", &drained.text);
    ensure!(ready, "the cluster was not ready: {}", last_line(&drained.text));
    ensure!(drained.text.contains("computing on CUDA"), "the cluster did not compute on the device");
    let (n_right, wrong) = asked?;
    let outcome = match wrong.len() {
        0 if Instant::now() >= until => Outcome::OutOfTime(format!("{n_right} answers were as expected")),
        0 => Outcome::Passed,
        n_wrong => Outcome::Failed(format!("{n_wrong} answers of {}", n_right + n_wrong)),
    };
    Ok(Ran { notes: [vec![format!("{n_right} answers as expected")], wrong].concat(), ..Ran::of(outcome) })
}

/// Number of answers that are as expected, and a line for each that is not.
fn ask(scene: &mut Scene, grpc: &str, until: Instant) -> Result<(usize, Vec<String>)> {
    let (mut n_right, mut wrong) = (0, Vec::new());
    let folder = scene.here.join("tests/models/heldout");
    for (list, flag, answer) in [("scenes.jsonl", "--image", "answer"), ("digits.jsonl", "--audio", "text")] {
        let text = fs::read_to_string(folder.join(list)).with_context(|| list.to_owned())?;
        for line in text.lines().take(if scene.smoke { 1 } else { QUESTIONS }) {
            if Instant::now() >= until {
                break;
            }
            let sample: Value = serde_json::from_str(line)?;
            let word = |key: &str| sample[key].as_str().unwrap_or_default().to_owned();
            let mut command = scene.packed("triptych");
            command.args(["ask", "--grpc", grpc, flag]).arg(folder.join(word("file")));
            command.args(sample["question"].as_str());
            let ended = scene.run(&mut command, until)?;
            if ended.status.is_none() {
                break;
            }
            let said = ended.text.lines().next().unwrap_or_default().trim();
            match said == word(answer) {
                true => n_right += 1,
                false => wrong.push(format!("{}: {said:?}, not {:?}", word("file"), word(answer))),
            }
        }
    }
    Ok((n_right, wrong))
}

fn free_address() -> Result<String> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    #[test]
    fn all_limits_together_are_less_than_eleven_minutes_and_names_differ() {
        let all: Duration = PARTS.iter().map(|part| part.limit).sum();
        assert!(all < Duration::from_secs(660), "{all:?}");
        let mut names = PARTS.map(|part| part.name);
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[track_caller]
    fn check(text: &str, status: Option<i32>, expect: Outcome) {
        let status = status.map(|code| ExitStatus::from_raw(code << 8));
        let ended = Ended { text: text.to_owned(), status };
        assert_eq!(outcome(&libtest::parse(text), &ended), expect, "{text}");
    }

    #[test]
    fn a_part_passes_only_if_all_of_it_ran_and_nothing_was_found() {
        let whole = "test a ... ok\n\ntest result: ok. 1 passed\n";
        check(whole, Some(0), Outcome::Passed);
        check(whole, Some(97), Outcome::Failed("exit status: 97".to_owned()));
        check(&format!("{whole}========= ERROR SUMMARY: 0 errors\n"), Some(0), Outcome::Passed);
        let found = format!("{whole}========= ERROR SUMMARY: 3 errors\n");
        check(&found, Some(97), Outcome::Failed("0 tests; 3 errors".to_owned()));
        check("\ntest result: ok. 0 passed\n", Some(0), Outcome::Failed("no test ran".to_owned()));
        check("test a ... ok\n", None, Outcome::OutOfTime("1 tests had passed".to_owned()));
        let broken = Outcome::Failed("it broke off after 1 tests, see the log".to_owned());
        check("test a ... ok\n", Some(134), broken);
    }

    #[test]
    fn a_device_that_the_tool_does_not_take_is_not_there() {
        let said = "========= Error: Device not supported\n\ntest result: FAILED\n";
        check(said, Some(97), Outcome::NotThere("compute-sanitizer for this device".to_owned()));
    }
}
