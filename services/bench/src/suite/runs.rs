//! Runs of a suite as they end, a file for each, so that a suite that was killed goes on behind the last of them.
//!
//! A stored run counts if everything that it depends on is the same: workload, topology, settings, machine. Of each request what
//! a verdict is made of is kept: its first and last token, and how many there were.

use crate::blocks::RunKey;
use crate::judge::JudgedWindow;
use crate::outcome::{End, ItemCounts, Outcome};
use crate::result::{Host, RunResult, VERSION};
use crate::sweep::Measured;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Most tokens of an answer that are read from a file.
const MAX_TOKENS: u32 = 1 << 20;

/// Folder of runs.
#[derive(Clone, Debug)]
pub struct StoredRuns {
    dir: PathBuf,
}

/// Subject of a run.
#[derive(Clone, Debug)]
pub struct RunOf<'a> {
    /// Text of the workload.
    pub workload: &'a str,
    /// Name of the topology.
    pub topology: &'a str,
    /// Everything else that the run depends on, as text.
    pub settings: &'a str,
    /// Machine, commit and time.
    pub host: &'a Host,
}

#[derive(Serialize, Deserialize)]
struct StoredRun {
    version: u32,
    workload: String,
    topology: String,
    settings: String,
    host: Host,
    rate: f64,
    window_ns: (u64, u64),
    result: RunResult,
    outcomes: Vec<StoredOutcome>,
}

#[derive(Serialize, Deserialize)]
struct StoredOutcome {
    index: u64,
    due_ns: u64,
    sent_ns: u64,
    /// First and last token, and their number.
    tokens: Option<(u64, u64, u32)>,
    ended_ns: u64,
    end: End,
    items: (u32, u32),
    /// Latency limits of its own, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    slo: Option<String>,
}

impl StoredRuns {
    /// Opens the folder, and makes it if there is none.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn in_dir(dir: &Path) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// The stored run; `None`: there is none, of another version, with other settings, on another machine, or with a late bench.
    pub fn read(&self, of: &RunOf<'_>, key: &RunKey) -> Option<Measured> {
        let text = fs::read_to_string(self.path(of, key)).ok()?;
        let run: StoredRun = serde_json::from_str(&text).ok()?;
        let is_same = run.version == VERSION
            && (run.workload.as_str(), run.topology.as_str(), run.settings.as_str())
                == (of.workload, of.topology, of.settings)
            && (&run.host.cpu, run.host.cores) == (&of.host.cpu, of.host.cores)
            && (run.rate / key.rate - 1.0).abs() < 1e-9
            && !run.result.generator.void;
        let outcomes = run.outcomes.iter().map(outcome).collect::<Option<Vec<_>>>()?;
        let (from, to) = run.window_ns;
        let window = JudgedWindow { from: Duration::from_nanos(from), to: Duration::from_nanos(to) };
        is_same.then_some(Measured { result: run.result, outcomes, window })
    }

    /// Writes a run atomically.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn write(&self, of: &RunOf<'_>, key: &RunKey, measured: &Measured) -> io::Result<()> {
        let stored = StoredRun {
            version: VERSION,
            workload: of.workload.to_owned(),
            topology: of.topology.to_owned(),
            settings: of.settings.to_owned(),
            host: of.host.clone(),
            rate: key.rate,
            window_ns: (nanos(measured.window.from), nanos(measured.window.to)),
            result: measured.result.clone(),
            outcomes: measured.outcomes.iter().map(stored).collect(),
        };
        self.put(&self.path(of, key), &serde_json::to_string(&stored)?)
    }

    /// The first rate of a workload's searches: the stored one, or else `chosen`, which is then stored.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn first_rate(&self, of: &RunOf<'_>, chosen: f64) -> io::Result<f64> {
        let path = self.dir.join(format!("{}-first.json", file_name(&[of.workload, of.settings])));
        let stored = fs::read_to_string(&path).ok().and_then(|text| serde_json::from_str::<f64>(&text).ok());
        match stored.filter(|rate| rate.is_finite() && *rate > 0.0) {
            Some(rate) => Ok(rate),
            None => self.put(&path, &serde_json::to_string(&chosen)?).map(|()| chosen),
        }
    }

    /// Removes the runs of a workload at a topology.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn forget(&self, workload: &str, topology: &str) -> io::Result<()> {
        let prefix = format!("{}-", file_name(&[workload, topology]));
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(&prefix) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    fn path(&self, of: &RunOf<'_>, key: &RunKey) -> PathBuf {
        let RunKey { rate, seed, block } = key;
        let place = file_name(&[of.workload, of.topology]);
        self.dir.join(format!("{place}-{rate}-{seed}-{}of{}.json", block.idx, block.n))
    }

    fn put(&self, path: &Path, text: &str) -> io::Result<()> {
        let beside = path.with_extension("part");
        fs::write(&beside, text)?;
        fs::rename(beside, path)
    }
}

/// A name of letters and digits with a number that tells texts apart which differ in other characters.
fn file_name(parts: &[&str]) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    let text = parts.join("__");
    let hash = text.bytes().fold(0u64, |hash, byte| crate::seed::mix(hash ^ u64::from(byte)));
    let name: String = text.chars().take(60).map(plain).collect();
    format!("{name}-{:08x}", hash >> 32)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn stored(outcome: &Outcome) -> StoredOutcome {
    let ends = outcome.tokens.first().zip(outcome.tokens.last());
    let n_tokens = u32::try_from(outcome.tokens.len()).unwrap_or(u32::MAX);
    StoredOutcome {
        index: outcome.index,
        due_ns: nanos(outcome.due),
        sent_ns: nanos(outcome.sent),
        tokens: ends.map(|(first, last)| (nanos(*first), nanos(*last), n_tokens)),
        ended_ns: nanos(outcome.ended),
        end: outcome.end.clone(),
        items: (outcome.items.n, outcome.items.n_found),
        slo: outcome.slo.map(|slo| slo.to_string()),
    }
}

/// The outcome with its tokens evenly spaced; `None`: its numbers are impossible.
fn outcome(stored: &StoredOutcome) -> Option<Outcome> {
    let tokens = match stored.tokens {
        None => Vec::new(),
        Some((first, last, n)) if n <= MAX_TOKENS && first <= last && (n > 1 || first == last) => {
            let at = |i: u32| {
                u128::from(first) + u128::from(last - first) * u128::from(i) / u128::from(n.max(2) - 1)
            };
            (0..n).map(|i| Duration::from_nanos(u64::try_from(at(i)).unwrap_or(last))).collect()
        }
        Some(_) => return None,
    };
    Some(Outcome {
        index: stored.index,
        due: Duration::from_nanos(stored.due_ns),
        sent: Duration::from_nanos(stored.sent_ns),
        tokens,
        ended: Duration::from_nanos(stored.ended_ns),
        end: stored.end.clone(),
        items: ItemCounts { n: stored.items.0, n_found: stored.items.1 },
        slo: stored.slo.as_ref().map(|slo| slo.parse()).transpose().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::Block;
    use crate::report::tests_support::sweep;

    fn measured() -> Measured {
        let ms = |ms: &[u64]| ms.iter().map(|ms| Duration::from_millis(*ms)).collect::<Vec<_>>();
        let whole = Outcome {
            index: 3,
            due: Duration::from_millis(5),
            sent: Duration::from_millis(6),
            tokens: ms(&[100, 110, 150]),
            ended: Duration::from_millis(151),
            end: End::Whole,
            items: ItemCounts { n: 2, n_found: 1 },
            slo: Some("ttft=100ms,tpot=2.5ms".parse().expect("an SLO")),
        };
        let failed = Outcome { tokens: Vec::new(), end: End::Failed("500: broken".into()), ..whole.clone() };
        let window = JudgedWindow { from: Duration::from_secs(1), to: Duration::from_secs(7) };
        let result = sweep("dp2", "epd-short:images=1", 4.0).rates[0].runs[0].clone();
        Measured { result, outcomes: vec![whole, failed], window }
    }

    fn key(idx: u32) -> RunKey {
        RunKey { rate: 2.5, seed: 1, block: Block { idx, n: 3 } }
    }

    #[test]
    fn a_run_is_found_again_with_all_that_it_is_judged_by() {
        let dir = tempfile::tempdir().unwrap();
        let runs = StoredRuns::in_dir(&dir.path().join("runs")).unwrap();
        let host = Host { cpu: "a".into(), cores: 2, ..Host::default() };
        let of = RunOf { workload: "w:images=1", topology: "dp2", settings: "s", host: &host };
        runs.write(&of, &key(0), &measured()).unwrap();
        let found = runs.read(&of, &key(0)).unwrap();
        let first = |m: &Measured| (m.outcomes[0].ttft(), m.outcomes[0].tpot(), m.outcomes[0].e2el());
        assert_eq!(first(&found), first(&measured()));
        let counts = |m: &Measured| (m.result.seed, m.result.verdict.n_good, m.result.timeline.len());
        assert_eq!((counts(&found), found.window), (counts(&measured()), measured().window));
        assert_eq!(found.outcomes[1], measured().outcomes[1]);
        assert!(runs.read(&of, &key(1)).is_none(), "another block");
        let other = Host { cpu: "b".into(), ..host.clone() };
        for of in [
            RunOf { settings: "t", ..of.clone() },
            RunOf { topology: "dp3", ..of.clone() },
            RunOf { host: &other, ..of.clone() },
        ] {
            assert!(runs.read(&of, &key(0)).is_none(), "{of:?}");
        }
        runs.forget("w:images=2", "dp2").unwrap();
        assert!(runs.read(&of, &key(0)).is_some(), "another workload's are forgotten");
        runs.forget("w:images=1", "dp2").unwrap();
        assert!(runs.read(&of, &key(0)).is_none());
    }

    #[test]
    fn files_that_are_no_runs_are_none() {
        let dir = tempfile::tempdir().unwrap();
        let runs = StoredRuns::in_dir(dir.path()).unwrap();
        let host = Host::default();
        let of = RunOf { workload: "w", topology: "t", settings: "s", host: &host };
        runs.write(&of, &key(0), &measured()).unwrap();
        let path = runs.path(&of, &key(0));
        let text = fs::read_to_string(&path).unwrap();
        for broken in [text.replace(",3]", ",4000000000]"), text[..text.len() / 2].to_owned(), "{}".into()] {
            assert_ne!(broken, text);
            fs::write(&path, broken).unwrap();
            assert!(runs.read(&of, &key(0)).is_none());
        }
        assert_eq!(runs.first_rate(&of, 2.0).unwrap(), 2.0);
        assert_eq!(runs.first_rate(&of, 3.0).unwrap(), 2.0, "the first stands");
    }
}
