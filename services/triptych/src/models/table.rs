//! Facts as a page of text.

use super::facts::Facts;
use crate::units::{bytes_text, count};
use std::fmt::Write as _;
use triptych_core::Modality;
use triptych_models::model::{BytesByPrecision, Inventory, StageInventory, TowerInventory};

/// Names that are written out; the rest is counted.
const MAX_NAMES: usize = 8;

/// The page of one model.
pub fn of(facts: &Facts) -> String {
    let mut page = format!("{}  {}\n", facts.name, facts.dir.display());
    let i = &facts.inventory;
    let mut line = |name: &str, text: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(page, "  {name:<12}{text}");
    };
    let architecture = i.architecture.as_ref().map_or_else(String::new, |a| format!(", {a}"));
    line("family", format!("{}{architecture}", facts.family));
    let reads: Vec<_> = facts.modalities.iter().map(|m| m.as_str()).collect();
    line("reads", if reads.is_empty() { "its prompt alone".to_owned() } else { reads.join(", ") });
    line("prompts", facts.prompts.to_owned());
    line("tools", facts.tools.line());
    line("weights", weights(i));
    line("served at", facts.endpoints.join(", "));
    line("context", format!("{} tokens, of {}", count(facts.max_context), count(facts.vocab)));
    line("", String::new());
    line(
        "stage",
        "   tensors     parameters        stored        as f32       as bf16       as int8       as int4"
            .into(),
    );
    line("encoder", i.encoder.as_ref().map_or_else(|| "   none".to_owned(), |encoder| stage(&encoder.stage)));
    for tower in i.encoder.iter().flat_map(|encoder| &encoder.towers) {
        line(&format!("  {}", tower.name), stage(&tower.stage));
    }
    line("decoder", stage(&i.decoder));
    if let Some(e) = i.experts {
        let (n, k, layers) = (count(e.n_experts), count(e.top_k), count(e.n_layers));
        let active = count(e.n_active);
        line(
            "experts",
            format!("{n} in each of {layers} layers, {k} for a token, which meets {active} parameters"),
        );
    }
    line("shared", names(&i.shared, "nothing"));
    line("unused", names(&i.unused, "nothing"));
    line("", String::new());
    for (name, text) in memory(i, facts.modalities.contains(&Modality::Text)) {
        line(name, text);
    }
    if let Some(measured) = facts.measured {
        let grown = |bytes: Option<u64>| {
            bytes.map_or_else(
                || "cannot be measured: this system has no /proc".to_owned(),
                |n| bytes_text(usize::try_from(n).unwrap_or(usize::MAX)),
            )
        };
        line("", String::new());
        line("measured", format!("memory of this process once loaded as {}", measured.precision));
        if i.encoder.is_some() {
            line("  encoder", grown(measured.encoder));
        }
        line("  decoder", grown(measured.decoder));
    }
    // Lines without a name or text are only the indent.
    page.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// Format of the files, and what becomes of weights that are quantized.
fn weights(i: &Inventory) -> String {
    let format = i.weights.as_str();
    i.quantization.map_or_else(
        || format.to_owned(),
        |method| {
            format!("{format}, quantized by {method}; dequantized as they are loaded, held in --precision")
        },
    )
}

fn memory(i: &Inventory, is_text: bool) -> Vec<(&'static str, String)> {
    let both = |s: BytesByPrecision| format!("{} as f32, {} as bf16", bytes_text(s.f32), bytes_text(s.bf16));
    let all = |s: BytesByPrecision| format!("{}, {} as int8", both(s), bytes_text(s.int8));
    let behind = i.kv.behind_window.map_or_else(String::new, |behind| {
        format!("; {} for one behind a window of {}", all(behind.per_token), count(behind.window))
    });
    let kv = ("KV", format!("{} for a token of a sequence{behind}", all(i.kv.per_token)));
    let state = i.state_bytes.map(|bytes| {
        (
            "state",
            format!("{} for a sequence, however long, and for a checkpoint of a prefix", bytes_text(bytes)),
        )
    });
    let Some(encoder) = &i.encoder else { return std::iter::once(kv).chain(state).collect() };
    let (item, n) = (&encoder.example.item, encoder.example.n_rows);
    let of_rows = |n: usize, row: BytesByPrecision| format!("{} rows, {}", count(n), both(row.times(n)));
    let towers = encoder.towers.iter().map(|t| format!("{} from {}", of_rows(t.n_rows, t.row), t.name));
    let mut lines = match towers.collect::<Vec<_>>() {
        none if none.is_empty() => vec![
            ("row", format!("{} from the encoder to a PD worker", both(encoder.row))),
            ("item", format!("{item}: {}", of_rows(n, encoder.row))),
        ],
        towers => vec![
            ("item", format!("{item}: {}", towers.join("; "))),
            ("towers", "each a job that may go to a worker of its own (--towers)".to_owned()),
        ],
    };
    let (here, both_here) = (i.decoder.loaded, i.decoder.loaded.plus(encoder.stage.loaded));
    lines.push((
        "colocated",
        format!("{}; {} while lazy encoder weights are away", all(both_here), all(here)),
    ));
    match &encoder.towers[..] {
        [] => lines.push(("activations", format!("{} at most for {item}", all(encoder.activations)))),
        towers => {
            let of = |t: &TowerInventory| {
                ("activations", format!("{} at most for {item} in {}", all(t.activations), t.name))
            };
            lines.extend(towers.iter().map(of));
        }
    }
    lines.push(kv);
    lines.extend(state);
    if let Some(cross) = i.kv.cross_per_row {
        let what = if is_text { "text" } else { "item" };
        lines.push(("cross-KV", format!("{} for a row of the {what}", all(cross))));
        let bytes = all(cross.times(encoder.example.n_cross_rows));
        lines.push(("", format!("{bytes} for {item}, once for all that ask about it")));
    }
    lines
}

fn stage(s: &StageInventory) -> String {
    format!(
        "{:>10}{:>15}{:>14}{:>14}{:>14}{:>14}{:>14}",
        s.n_tensors,
        count(s.n_parameters),
        bytes_text(s.stored_bytes),
        bytes_text(s.loaded.f32),
        bytes_text(s.loaded.bf16),
        bytes_text(s.loaded.int8),
        bytes_text(s.loaded.int4)
    )
}

fn names(all: &[String], none: &str) -> String {
    if all.is_empty() {
        return none.to_owned();
    }
    let shown = all[..all.len().min(MAX_NAMES)].join(", ");
    let rest = all.len().saturating_sub(MAX_NAMES);
    if rest == 0 { shown } else { format!("{shown} and {rest} more") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_of_names_are_cut() {
        let many: Vec<String> = (0..10).map(|i| format!("t{i}")).collect();
        assert_eq!(names(&many, "-"), "t0, t1, t2, t3, t4, t5, t6, t7 and 2 more");
        assert_eq!(names(&[], "nothing"), "nothing");
    }
}
