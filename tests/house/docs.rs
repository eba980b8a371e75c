//! Documentation: how a doc comment opens, and the glossary of `services/ARCHITECTURE.md`.

use crate::files::{root, rust};
use std::fs;

/// A doc comment that opens with one of these asks instead of telling.
const RIDDLES: [&str; 8] = ["What", "How", "Whether", "Who", "Which", "Where", "When", "Why"];

const ARCHITECTURE: &str = "services/ARCHITECTURE.md";
const MAX_GLOSSARY_ROWS: usize = 40;

/// The text of a doc comment's line.
fn doc(line: &str) -> Option<&str> {
    let line = line.trim_start();
    line.strip_prefix("///").or_else(|| line.strip_prefix("//!")).map(str::trim_start)
}

fn is_riddle(text: &str) -> bool {
    let first = text.split(|c: char| !c.is_alphabetic()).next().unwrap_or_default();
    RIDDLES.contains(&first)
}

#[test]
fn doc_comments_open_with_a_noun_or_a_verb() {
    let mut riddles = Vec::new();
    for (name, text) in rust() {
        let mut is_open = false;
        for (i, line) in text.lines().enumerate() {
            let doc = doc(line);
            if let Some(text) = doc.filter(|text| !is_open && is_riddle(text)) {
                riddles.push(format!("{name}:{}: {text}", i + 1));
            }
            is_open = doc.is_some();
        }
    }
    assert!(riddles.is_empty(), "{} open with a question: {riddles:#?}", riddles.len());
}

/// The cells of the glossary's rows.
fn glossary() -> Vec<Vec<String>> {
    let text = fs::read_to_string(root().join(ARCHITECTURE)).expect("the architecture is described");
    let section = text.split("\n## Glossary\n").nth(1).expect("ARCHITECTURE.md has `## Glossary`");
    let section = section.split("\n## ").next().unwrap_or(section);
    let rows = section.lines().filter(|line| line.starts_with('|'));
    let cells = |row: &str| row.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect();
    rows.skip(2).map(cells).collect()
}

#[test]
fn glossary_is_short_and_names_files_that_exist() {
    let rows = glossary();
    assert!(
        !rows.is_empty() && rows.len() <= MAX_GLOSSARY_ROWS,
        "{} rows of {MAX_GLOSSARY_ROWS}",
        rows.len()
    );
    let mut wrong = Vec::new();
    for row in rows {
        let [word, _, places] = row.as_slice() else {
            wrong.push(format!("{row:?} has not three cells"));
            continue;
        };
        for place in places.split('`').skip(1).step_by(2) {
            // A path is written from the root, or from `services/`.
            if ![root(), root().join("services")].iter().any(|top| top.join(place).exists()) {
                wrong.push(format!("{word}: {place} does not exist"));
            }
        }
    }
    assert!(wrong.is_empty(), "{ARCHITECTURE}: {wrong:#?}");
}
