//! The report: the table of parts, and one of each work's times, as Markdown for `benches/results/`, and as JSON.

use super::device::{Device, Peak};
use super::scene::{Outcome, Ran};
use super::timing::{Timed, timed};
use anyhow::Result;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// The commit that was packed.
const PACKED: &str = ".cuda-check/files/packed.txt";

/// Ways of submitting work, in the order of the columns: ours, then torch's.
const OURS: [&str; 2] = ["eager", "graphs"];
const TORCH: [&str; 3] = ["eager", "graphs", "compiled"];

/// A part that ran.
pub struct Row {
    pub name: &'static str,
    pub took: Duration,
    pub ran: Ran,
}

/// Writes the Markdown and the JSON of what has run so far.
///
/// # Errors
/// If a file cannot be written.
pub fn write(out: &Path, device: &Device, rows: &[Row]) -> Result<()> {
    let slug = device.slug();
    fs::write(out.join(format!("{slug}.md")), markdown(device, rows))?;
    let part = |row: &Row| {
        let Ran { outcome, notes, times, peak } = &row.ran;
        let peak = peak.as_ref().map(ToString::to_string);
        let [ours, torch] = times.clone().unwrap_or_default();
        let seconds = row.took.as_secs_f64();
        json!({"part": row.name, "outcome": outcome.to_string(), "seconds": seconds, "notes": notes,
            "ours": ours, "torch": torch, "peak": peak})
    };
    let all: Vec<Value> = rows.iter().map(part).collect();
    let text = serde_json::to_string_pretty(&json!({"device": device.to_string(), "parts": all}))?;
    Ok(fs::write(out.join(format!("{slug}.json")), text + "\n")?)
}

/// The report.
pub fn markdown(device: &Device, rows: &[Row]) -> String {
    let packed = fs::read_to_string(PACKED).unwrap_or_default();
    let mut text =
        format!("# The CUDA back end on {device}\n\n`cargo xtask cuda-check`, {}\n\n", packed.trim());
    text += "| part | time | |\n|---|---|---|\n";
    for Row { name, took, ran } in rows {
        text +=
            &format!("| {name} | {} s | {} |\n", took.as_secs(), ran.outcome.to_string().replace('|', "\\|"));
    }
    for Row { name, ran, .. } in rows.iter().filter(|row| row.ran.outcome != Outcome::NotReached) {
        text += &format!("\n## {name}\n\n");
        text.extend(ran.notes.iter().map(|note| format!("- {note}\n")));
        if let Some(times) = &ran.times {
            text += &times_table(&timed(times), ran.peak.as_ref());
        }
    }
    text
}

/// Times of works beside each other. A ratio above 1: ours is faster, each side in its fastest way.
fn times_table(rows: &[Timed], peak: Option<&Peak>) -> String {
    let columns = OURS
        .map(|mode| format!("ours {mode}, ms"))
        .into_iter()
        .chain(TORCH.map(|mode| format!("torch {mode}")));
    let columns: Vec<_> = columns.collect();
    let mut text = peak.map_or_else(String::new, |peak| format!("- shares are of {peak}\n"));
    text += &format!(
        "\n| | {} | ratio | share of peak |\n|---|{}---:|---:|\n",
        columns.join(" | "),
        "---:|".repeat(columns.len())
    );
    for row in rows {
        let cell = |times: &std::collections::BTreeMap<String, f64>, mode: &str| {
            times.get(mode).map_or_else(|| "–".to_owned(), |ms| number(*ms))
        };
        let ours = OURS.map(|mode| cell(&row.ours, mode));
        let torch = TORCH.map(|mode| cell(&row.torch, mode));
        let best = row.best_of_ours();
        let ratio = best.zip(row.best_of_torch()).map(|(ours, torch)| format!("{:.2}", torch / ours));
        let share = peak.zip(row.cost).zip(best).map(|((peak, cost), ms)| {
            let (share, is_arithmetic) = peak.share(cost, ms);
            format!("{:.0} % of {}", share * 100.0, if is_arithmetic { "FLOP/s" } else { "bytes/s" })
        });
        let name = row.batch.map_or_else(|| row.op.clone(), |batch| format!("{}, batch {batch}", row.op));
        let [ratio, share] = [ratio, share].map(|cell| cell.unwrap_or_else(|| "–".to_owned()));
        text += &format!("| {name} | {} | {} | {ratio} | {share} |\n", ours.join(" | "), torch.join(" | "));
    }
    text
}

/// Milliseconds with three digits.
fn number(ms: f64) -> String {
    let n_digits = if ms < 1.0 { 4 } else { 2 * usize::from(ms < 100.0) };
    format!("{ms:.n_digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn h200() -> Device {
        Device(Some("NVIDIA H200, 580.1, 143771 MiB".to_owned()))
    }

    fn row() -> Timed {
        let of = |mode: &str, ms: f64| BTreeMap::from([(mode.to_owned(), ms)]);
        Timed {
            op: "decode".to_owned(),
            batch: Some(8),
            ours: of("eager", 4.0),
            torch: of("graphs", 2.0),
            cost: Some([788e9, 8.6e9]),
        }
    }

    #[test]
    fn a_work_has_its_ratio_and_its_share_of_the_rate_that_bounds_it() {
        let text = times_table(&[row()], h200().peak().as_ref());
        assert!(
            text.contains(
                "- shares are of 788 TFLOP/s in bf16 and 4.3 TB/s, the practical peaks of an H200\n"
            ),
            "{text}"
        );
        assert!(
            text.contains("| decode, batch 8 | 4.00 | – | – | 2.00 | – | 0.50 | 50 % of bytes/s |\n"),
            "{text}"
        );
    }

    #[test]
    fn a_device_without_known_peaks_has_shares_of_measured_ones_or_none() {
        let other = Device(Some("NVIDIA L4, 580.1, 23034 MiB".to_owned()));
        assert_eq!((other.peak(), other.slug()), (None, "l4".to_owned()));
        assert!(times_table(&[row()], None).ends_with("| 0.50 | – |\n"));
        let measured = Peak::measured(&json!({"flops_per_s": 1e15, "bytes_per_s": 8.6e12}));
        assert!(times_table(&[row()], measured.as_ref()).ends_with("| 25 % of bytes/s |\n"));
        assert_eq!((Peak::measured(&Value::Null), Device(None).slug()), (None, "device".to_owned()));
    }

    #[test]
    fn every_part_has_a_line_and_those_that_ran_have_notes() {
        let passed = Ran { notes: vec!["3 tests passed".to_owned()], ..Ran::of(Outcome::Passed) };
        let missing = Ran::of(Outcome::NotThere("compute-sanitizer".to_owned()));
        let rows = [("a", passed), ("b", missing), ("c", Ran::of(Outcome::NotReached))]
            .map(|(name, ran)| Row { name, took: Duration::from_secs(2), ran });
        let text = markdown(&h200(), &rows);
        let table =
            "| a | 2 s | passed |\n| b | 2 s | not there: compute-sanitizer |\n| c | 2 s | not reached |\n";
        assert!(
            text.starts_with("# The CUDA back end on NVIDIA H200, 580.1, 143771 MiB\n")
                && text.contains(table),
            "{text}"
        );
        assert!(text.contains("## a\n\n- 3 tests passed\n") && !text.contains("## c"), "{text}");
    }
}
