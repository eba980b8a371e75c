//! Drafts by looking a continuation up.

use crate::golden::{Golden, ids};
use std::collections::HashSet;
use triptych_engine::speculation::prompt_lookup::PromptLookup;

#[test]
fn drafts_are_those_of_the_reference_up_to_the_room_there_is() {
    for case in Golden::open().cases("lookups") {
        let number = |name: &str| case[name].as_u64().expect("a number") as usize;
        let tokens = ids(&case["tokens"]);
        let ends: HashSet<u32> = ids(&case["end"]).into_iter().collect();
        let lookup = PromptLookup { n_tokens: number("n_tokens"), max_ngram: number("max_ngram") };
        let draft = lookup.propose(&tokens, number("max_length"), &ends);
        // The reference may draft past the end; what it drafts there is thrown away later.
        let mut expected = ids(&case["draft"]);
        expected.truncate(number("max_length") - tokens.len() - 1);
        assert_eq!(draft, expected, "{case}");
    }
}
