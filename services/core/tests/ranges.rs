//! The ranges of settings that clients read are those that requests are held to.

use triptych_core::sampling::{COUNTS, NUMBERS};

#[test]
fn the_documented_ranges_are_those_of_the_table() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../proxy/API.md");
    let text = std::fs::read_to_string(path).expect("API.md is in the repository");
    let numbers = NUMBERS.iter().map(|setting| (setting.field, setting.allowed));
    let counts = COUNTS.iter().map(|setting| (setting.field, setting.allowed));
    for (field, allowed) in numbers.chain(counts) {
        let row = format!("| `{field}` | {allowed} |");
        assert!(text.contains(&row), "API.md has no row {row:?}");
    }
}
