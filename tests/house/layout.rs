//! The files of the top level, and the places of `unsafe`.

use crate::files::{root, rust};
use std::collections::BTreeSet;
use std::fs;

const TOP_LEVEL: [&str; 9] =
    ["Cargo.toml", "Cargo.lock", "proto", "services", "deploy", "kernels", "tests", "benches", "README.md"];

/// Crates with no `unsafe` at all, by the file that says so.
const FORBID: [&str; 19] = [
    "benches/src/throughput.rs",
    "benches/src/proxy/main.rs",
    "benches/src/transports/main.rs",
    "proto/src/lib.rs",
    "proto/codegen/src/main.rs",
    "services/core/src/lib.rs",
    "services/engine/src/lib.rs",
    "services/ec/src/lib.rs",
    "services/runtime/src/lib.rs",
    "services/proxy/src/lib.rs",
    "services/encoder/src/lib.rs",
    "services/pd/src/lib.rs",
    "services/bench/src/lib.rs",
    "services/plan/src/lib.rs",
    "services/triptych/src/main.rs",
    "tests/src/lib.rs",
    "tests/house/lib.rs",
    "tests/xtask/src/main.rs",
    "services/models/src/lib.rs",
];

/// Mapping a weight file is one of two unsafe things outside `kernels`; a change of the file under the map is what
/// makes it so.
const MAPS_WEIGHTS: &str = "services/models/src/weights";

/// Mapping the slab that processes share is the other: one view of it, as atomic words.
const MAPS_SLAB: &str = "services/ec/src/store/shm/map.rs";

/// An allocator that counts, for one test binary, is a third.
const COUNTS_BYTES: &str = "services/models/tests/memory.rs";

#[test]
fn the_top_level_shows_what_it_should_and_nothing_else() {
    let shown: BTreeSet<_> = fs::read_dir(root())
        .expect("the root can be read")
        .map(|e| e.expect("the root can be read").file_name().to_string_lossy().into_owned())
        .filter(|name| !name.starts_with('.') && name != "target")
        .collect();
    assert_eq!(shown, TOP_LEVEL.map(str::to_owned).into());
}

#[test]
fn crates_without_unsafe_forbid_it() {
    for file in FORBID {
        let text = fs::read_to_string(root().join(file)).expect(file);
        // `models` and `ec` have one exception each, so they deny and allow once.
        let word = if ["services/models/", "services/ec/"].iter().any(|dir| file.starts_with(dir)) {
            "#![deny(unsafe_code)]"
        } else {
            "#![forbid(unsafe_code)]"
        };
        assert!(text.lines().any(|l| l == word), "{file} has no `{word}`");
    }
}

#[test]
fn unsafe_stands_in_the_kernels_and_in_two_functions_that_map_files() {
    let keyword = concat!("un", "safe");
    let uses = |text: &str| {
        let code = text.lines().map(str::trim_start).filter(|l| !l.starts_with("//"));
        code.filter(|l| {
            l.match_indices(keyword).any(|(i, _)| {
                let before = l[..i].chars().next_back();
                let after = l[i + keyword.len()..].trim_start();
                !before.is_some_and(|c| c.is_alphanumeric() || "_\"`".contains(c))
                    && ["{", "fn ", "impl ", "extern ", "trait "].iter().any(|a| after.starts_with(a))
            })
        })
        .count()
    };
    let mut elsewhere = Vec::new();
    let (mut maps, mut slab_maps) = (0, 0);
    for (name, text) in rust() {
        match uses(&text) {
            0 => {}
            _ if name.starts_with("kernels/") || name == COUNTS_BYTES => {}
            n if name.starts_with(MAPS_WEIGHTS) => maps += n,
            n if name == MAPS_SLAB => slab_maps += n,
            _ => elsewhere.push(name),
        }
    }
    assert!(elsewhere.is_empty(), "{keyword} in {elsewhere:?}");
    assert!(maps <= 1, "{maps} unsafe places under {MAPS_WEIGHTS}*, one is agreed");
    assert!(slab_maps <= 1, "{slab_maps} unsafe places in {MAPS_SLAB}, one is agreed");
}
