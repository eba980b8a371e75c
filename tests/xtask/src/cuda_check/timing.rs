//! Times of a work: our bench and torch's side in turn, over the same shapes, and one table of both.

use super::child::Ended;
use super::device::Peak;
use super::scene::{FOLDER, Outcome, Ran, Scene, last_line};
use anyhow::Result;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Instant;

/// Share of a part's time that is ours, which makes random weights on the host; torch has the rest, and what we leave.
const OURS: f64 = 0.7;

/// Work that is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Products and attention.
    Ops,
    /// Whisper-large-v3.
    Whisper,
    /// Qwen2.5-VL-7B.
    Qwen,
}

/// Cases of `ops`: products of both models at several batches, a large one, logits; attention of both encoders (whole images
/// and windows), of a prompt, and of decode steps.
const CASES: &str = "linear:8192x8192x8192 linear:12000x1280x5120 linear:12000x5120x1280 linear:8192x1280x6840 \
    linear:2048x3584x37888 linear:1x3584x37888 linear:8x3584x37888 linear:32x3584x37888 linear:128x3584x37888 \
    logits:1x1280x51866 logits:32x1280x51866 attention:8x1500x20x20x64 attention:2x4096x16x16x80 \
    attention:128x64x16x16x80 causal:1x2048x28x4x128 decode:1x1024x28x4x128 decode:32x1024x28x4x128 \
    decode:128x1024x28x4x128 decode:32x1500x20x20x64";

/// The same in a smoke run.
const SMOKE_CASES: &str =
    "linear:5x64x48 logits:2x64x90 attention:2x9x2x2x32 causal:1x9x4x2x32 decode:2x20x4x2x32";

/// Arguments of a model's bench, after its directory. Images are of 896×896 pixels, 4096 patches and 1024 tokens.
const WHISPER: &str =
    "--item 0 --encode-batches 1,8,32,128 --batches 1,8,32,128 --new-tokens 64 --text-tokens 0";
const QWEN: &str = "--item 896 --encode-batches 1,8,32 --batches 1,8,32,128 --new-tokens 64 --text-tokens 20";
const SMOKE: &str = "--item 112 --encode-batches 1,2 --batches 1,2 --new-tokens 4 --text-tokens 2";

/// Arguments of our bench alone.
const OUR_MODEL: &str = "--load-format dummy --device cuda --precision bf16 --modes eager,graphs \
    --from-first-token --repeats 2";

impl Work {
    /// The directory whose shape is timed.
    fn model(self, smoke: bool) -> String {
        match (self, smoke) {
            (Self::Qwen, true) => "tests/golden/qwen2_5_vl_window112/model".to_owned(),
            (_, true) => "tests/golden/whisper_en_odd_heads/model".to_owned(),
            (Self::Qwen, false) => format!("{FOLDER}/files/models/qwen2.5-vl-7b"),
            (_, false) => format!("{FOLDER}/files/models/whisper-large-v3"),
        }
    }

    /// Our program with its arguments, and those of `torch_side.py`.
    fn commands(self, smoke: bool) -> [Vec<String>; 2] {
        let model = self.model(smoke);
        let (ours, torch) = match (self, smoke) {
            (Self::Ops, false) => (format!("ops {CASES}"), format!("ops {CASES}")),
            (Self::Ops, true) => (format!("ops --ms 1 {SMOKE_CASES}"), format!("ops {SMOKE_CASES}")),
            (of_model, smoke) => {
                let common = match of_model {
                    _ if smoke => SMOKE,
                    Self::Qwen => QWEN,
                    _ => WHISPER,
                };
                (format!("throughput {model} {common} {OUR_MODEL}"), format!("model {model} {common}"))
            }
        };
        [ours, torch].map(|words| words.split_whitespace().map(str::to_owned).collect())
    }
}

/// Times a work, ours first.
///
/// # Errors
/// If our program cannot be started.
pub fn run(work: Work, scene: &mut Scene, until: Instant) -> Result<Ran> {
    let start = Instant::now();
    let [ours, torch] = work.commands(scene.smoke);
    let ours_until = start + until.saturating_duration_since(start).mul_f64(OURS);
    let ended = scene.run(scene.packed(&ours[0]).args(&ours[1..]), ours_until)?;
    let of_torch = {
        let mut command = scene.command("python3");
        scene.run(command.arg("benches/device/torch_side.py").args(&torch), until)?
    };
    let times = [&ended, &of_torch].map(|side| last_json(&side.text));
    if scene.peak.is_none() {
        scene.peak = Peak::measured(&times[1]["peak"]);
    }
    let notes = match &of_torch {
        side if side.text.contains("No module named 'torch'") => vec!["torch is not there".to_owned()],
        side if times[1]["torch"].is_null() => vec![format!("torch: {}", last_line(&side.text))],
        Ended { status: None, .. } => vec!["torch's time was over before all was timed".to_owned()],
        _ => vec![format!("torch {}", times[1]["torch"].as_str().unwrap_or_default())],
    };
    let n_timed = timed(&times).iter().filter(|row| row.best_of_ours().is_some()).count();
    let outcome = match ended.status {
        None => Outcome::OutOfTime(format!("{n_timed} works had been timed")),
        Some(status) if !status.success() => Outcome::Failed(last_line(&ended.text).to_owned()),
        Some(_) => Outcome::Passed,
    };
    Ok(Ran { outcome, notes, times: Some(times), peak: scene.peak.clone() })
}

/// The last line that is a JSON object: a program that was ended has printed what it had.
fn last_json(text: &str) -> Value {
    let objects = text.lines().rev().filter(|line| line.starts_with('{'));
    objects.filter_map(|line| serde_json::from_str(line).ok()).next().unwrap_or(Value::Null)
}

/// A work with its times in milliseconds, by the way of submitting it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timed {
    pub op: String,
    pub batch: Option<u64>,
    pub ours: BTreeMap<String, f64>,
    pub torch: BTreeMap<String, f64>,
    /// Operations, and fewest bytes.
    pub cost: Option<[f64; 2]>,
}

impl Timed {
    fn ours_mut(&mut self) -> &mut BTreeMap<String, f64> {
        &mut self.ours
    }

    fn torch_mut(&mut self) -> &mut BTreeMap<String, f64> {
        &mut self.torch
    }

    pub fn best_of_ours(&self) -> Option<f64> {
        self.ours.values().copied().min_by(f64::total_cmp)
    }

    pub fn best_of_torch(&self) -> Option<f64> {
        self.torch.values().copied().min_by(f64::total_cmp)
    }
}

/// The times of one side.
type TimesOf = fn(&mut Timed) -> &mut BTreeMap<String, f64>;

/// Works in the order in which they were timed, of both sides' JSON.
pub fn timed([ours, torch]: &[Value; 2]) -> Vec<Timed> {
    let mut rows = Vec::new();
    for (told, times_of) in [(ours, Timed::ours_mut as TimesOf), (torch, Timed::torch_mut)] {
        for list in ["ops", "encode", "decode"] {
            for entry in told[list].as_array().into_iter().flatten() {
                let (op, batch) = (entry["op"].as_str().unwrap_or(list), entry["batch"].as_u64());
                let rate = entry["tokens_per_s"].as_f64().map(|rate| batch.unwrap_or(1) as f64 * 1e3 / rate);
                if let (Some(ms), Some(mode)) = (entry["ms"].as_f64().or(rate), entry["mode"].as_str()) {
                    times_of(row(&mut rows, op, batch)).insert(mode.to_owned(), ms);
                }
            }
        }
    }
    for cost in torch["costs"].as_array().into_iter().flatten() {
        let is_of = |row: &&mut Timed| cost["op"] == row.op.as_str() && cost["batch"].as_u64() == row.batch;
        if let Some(row) = rows.iter_mut().find(is_of) {
            row.cost = cost["flops"].as_f64().zip(cost["bytes"].as_f64()).map(<[f64; 2]>::from);
        }
    }
    rows
}

/// The row of a work, made if it is the first of it.
fn row<'a>(rows: &'a mut Vec<Timed>, op: &str, batch: Option<u64>) -> &'a mut Timed {
    let index = rows.iter().position(|row| row.op == op && row.batch == batch).unwrap_or(rows.len());
    if index == rows.len() {
        rows.push(Timed { op: op.to_owned(), batch, ..Timed::default() });
    }
    &mut rows[index]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn both_sides_of_a_work_are_one_row() {
        let ours = json!({
            "encode": [{"batch": 8, "mode": "eager", "ms": 4.0}, {"batch": 8, "mode": "graphs", "ms": 3.0}],
            "decode": [{"batch": 32, "mode": "eager", "tokens_per_s": 16e3}],
        });
        let torch = json!({
            "costs": [{"op": "encode", "batch": 8, "flops": 1e12, "bytes": 2e9}],
            "encode": [{"batch": 8, "mode": "compiled", "ms": 5.0}],
        });
        let rows = timed(&[ours, torch]);
        let of = |mode: &str, ms: f64| BTreeMap::from([(mode.to_owned(), ms)]);
        let encode = Timed {
            op: "encode".to_owned(),
            batch: Some(8),
            ours: [of("eager", 4.0), of("graphs", 3.0)].into_iter().flatten().collect(),
            torch: of("compiled", 5.0),
            cost: Some([1e12, 2e9]),
        };
        let decode =
            Timed { op: "decode".to_owned(), batch: Some(32), ours: of("eager", 2.0), ..Timed::default() };
        assert_eq!(rows, [encode, decode]);
        assert_eq!(timed(&[Value::Null, Value::Null]), []);
    }

    #[test]
    fn the_last_line_of_json_counts_whatever_follows_it() {
        let text = "a word\n{\"ops\": []}\n{\"ops\": [1]}\n{\"ops\": [1, 2\n";
        assert_eq!(last_json(text), json!({"ops": [1]}));
        assert_eq!(last_json("nothing"), Value::Null);
    }

    #[test]
    fn both_sides_get_the_same_shapes() {
        for smoke in [false, true] {
            for work in [Work::Ops, Work::Whisper, Work::Qwen] {
                let [ours, torch] = work.commands(smoke);
                let has = |word: &&String| word.contains(':') || word.starts_with("--batches");
                assert!(ours.iter().filter(has).eq(torch.iter().filter(has)), "{ours:?} {torch:?}");
            }
        }
    }
}
