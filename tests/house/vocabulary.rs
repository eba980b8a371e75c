//! Words that were retired for the field's own: they appear nowhere, in code, comments, documents, settings or metrics.
//!
//! A line is read as a row of words in lower case: an identifier gives one for each of its parts, so that `join_flight`,
//! `JoinFlights` and "join the flight" are found alike.

use crate::words::written;

/// A retired word or phrase, with its plural where it has one.
struct Retired {
    /// The forms, each a word or several.
    forms: &'static [&'static str],
    /// Words before it that make it the field's own term.
    after: &'static [&'static str],
    /// The replacement.
    instead: &'static str,
}

const fn retired(forms: &'static [&'static str], instead: &'static str) -> Retired {
    Retired { forms, after: &[], instead }
}

const RETIRED: [Retired; 33] = [
    Retired {
        forms: &["flight", "flights"],
        after: &["in", "single", "of"],
        instead: "single-flight, in-flight encode",
    },
    retired(&["rung", "rungs", "ladder", "ladders"], "attempt, retry and hedge policy; tiers; variants"),
    retired(&["outrun", "outran"], "lost lease"),
    retired(&["climb", "climbs", "climbed"], "retry, next attempt"),
    retired(&["homeless"], "unplaced"),
    retired(&["errand", "errands"], "encode task"),
    retired(&["teller", "tellers"], "usage counter"),
    retired(&["turnstile", "turnstiles"], "compute arbiter"),
    retired(&["shelf", "shelves"], "cache tier"),
    retired(&["obey", "obeys", "obeyed"], "apply, follow"),
    retired(&["hire", "hires", "hired"], "spawn"),
    retired(&["in the house"], "colocated"),
    retired(&["second cache"], "L2 cache"),
    retired(&["nineteen of twenty"], "p95"),
    retired(&["whole number", "whole numbers"], "integer"),
    retired(&["singles", "quarters"], "f32 (F32Lanes), int8 (Int8Quads)"),
    retired(&["roof", "roofs"], "peak, roofline"),
    retired(&["front door", "front doors"], "frontend, HTTP or gRPC API"),
    retired(&["what is told"], "what is reported"),
    retired(
        &["keeps a promise", "the promise", "promises held", "latency promise", "latency promises"],
        "SLO",
    ),
    retired(&["crew", "crews"], "thread pool"),
    retired(&["tally", "tallies", "tallied"], "count, total"),
    retired(&["agenda", "agendas"], "schedule, queue"),
    retired(&["wishes"], "options"),
    retired(
        &["guess at tokens", "guessed token", "guessed tokens", "guesses of tokens"],
        "draft, speculation",
    ),
    retired(&["keep the books", "keeps the books", "the books"], "accounting, block accounting"),
    retired(&["waits in line", "wait in line", "place in line", "stands in line"], "queue"),
    retired(&["in one place"], "colocated"),
    Retired {
        forms: &["picture", "pictures"],
        // The prompt of a sample model.
        after: &["this", "these"],
        instead: "image",
    },
    retired(&["a sound", "the sound", "sounds", "sound of"], "audio, audio clip"),
    retired(&["guess", "guesses", "guessing"], "draft, speculation; estimate"),
    retired(&["promise", "promises", "promised"], "SLO"),
    retired(&["sounds and pictures", "pictures and sounds"], "images and audio"),
];

/// Texts that are data, that tell history, or that name the words.
const EXCEPT: [&str; 8] = [
    "tests/house/vocabulary.rs",
    "benches/wer.py",
    ".github/CHANGELOG.md",
    "tests/golden/",
    "tests/models/",
    "services/models/tests/",
    "benches/models/",
    "benches/results/",
];

/// The words of a line: identifiers in parts, all in lower case.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut previous = ' ';
    for c in line.chars() {
        let is_letter = c.is_alphabetic();
        let starts = c.is_uppercase() && previous.is_lowercase();
        if (!is_letter || starts) && words.last().is_some_and(|word| !word.is_empty()) {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| is_letter) {
            word.extend(c.to_lowercase());
        }
        previous = c;
    }
    words.retain(|word| !word.is_empty());
    words
}

/// The first retired word of a line, with what it is to be.
fn first_retired(line: &str) -> Option<(&'static str, &'static str)> {
    let words = words(line);
    let stands = |retired: &Retired, form: &str| {
        let form: Vec<_> = form.split(' ').collect();
        let before = |i: usize| i.checked_sub(1).and_then(|i| words.get(i));
        words.windows(form.len()).enumerate().any(|(i, there)| {
            there == form && !before(i).is_some_and(|word| retired.after.contains(&word.as_str()))
        })
    };
    RETIRED.iter().find_map(|retired| {
        let form = retired.forms.iter().find(|form| stands(retired, form))?;
        Some((*form, retired.instead))
    })
}

#[test]
fn retired_words_appear_nowhere() {
    let mut found = Vec::new();
    for (name, text) in written().filter(|(name, _)| !EXCEPT.iter().any(|except| name.starts_with(except))) {
        if let Some((word, instead)) = first_retired(&name) {
            found.push(format!("{name}: its name has \"{word}\"; say {instead}"));
        }
        for (i, line) in text.lines().enumerate() {
            if let Some((word, instead)) = first_retired(line) {
                found.push(format!("{name}:{}: \"{word}\"; say {instead}", i + 1));
            }
        }
    }
    assert!(found.is_empty(), "{} retired words: {found:#?}", found.len());
}

#[test]
fn words_are_found_in_identifiers_and_prose() {
    let check = |line: &str, expected: Option<&str>| {
        assert_eq!(first_retired(line).map(|(word, _)| word), expected, "{line:?}");
    };
    check("let seat = self.join_flight(key);", Some("flight"));
    check("struct OpenFlights;", Some("flights"));
    check("fn single_flight() -> SingleFlight { in_flight + inflight }", None);
    check("requests in flight, an in-flight encode", None);
    check("the second\u{a0}cache", Some("second cache"));
    check("fn second_cache()", Some("second cache"));
    check("a second request for the cache", None);
    check("a roofline", None);
}
