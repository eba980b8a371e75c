//! `deploy/README.md`: every link resolves.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The folder `deploy/`.
pub fn deploy() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("the package is a folder of the repository").join("deploy")
}

/// The page's text.
pub fn page() -> String {
    fs::read_to_string(deploy().join("README.md")).expect("deploy has a page")
}

/// Anchors of the headings, as browsers derive them.
pub fn anchors(page: &str) -> BTreeSet<String> {
    let mut fenced = false;
    let headings = page.lines().filter(|line| {
        fenced ^= line.starts_with("```");
        !fenced && line.starts_with('#')
    });
    let anchor = |heading: &str| -> String {
        let text = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = text.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

/// Targets of `[text](target)` outside of code blocks.
fn links(page: &str) -> Vec<String> {
    let mut fenced = false;
    let prose = page.lines().filter(|line| {
        fenced ^= line.starts_with("```");
        !fenced
    });
    let targets = |line: &str| -> Vec<String> {
        let rest = line.split("](").skip(1);
        rest.filter_map(|rest| rest.split_once(')').map(|(target, _)| target.to_owned())).collect()
    };
    prose.flat_map(targets).collect()
}

#[test]
fn every_link_resolves_to_a_file_or_a_heading() {
    let page = page();
    let anchors = anchors(&page);
    let broken = |target: &String| match target.split_once('#') {
        _ if target.starts_with("https://") => false,
        Some(("", anchor)) => !anchors.contains(anchor),
        Some((file, _)) => !deploy().join(file).exists(),
        None => !deploy().join(target).exists(),
    };
    let broken: Vec<_> = links(&page).into_iter().filter(broken).collect();
    assert!(broken.is_empty(), "broken links: {broken:?}");
}
