//! Sharing between sequences: cross-attention blocks of one input, and blocks of one prefix.

use crate::bench::{Bench, roomy};
use crate::case::{Case, Request, cases};
use triptych_engine::{EngineConfig, PrefixCache};

/// Tokens of a prompt that is found again: more than a block.
const PREFIX: usize = 40;

/// A request whose prompt holds a full block, and what the model goes on with.
fn with_prefix(case: &Case, request: &Request) -> (Request, Vec<u32>) {
    let mut bench = Bench::new(case, roomy());
    let params = request.long(&bench.info);
    let tokens = bench.alone(case.arrival(request, 0, params));
    let (before, after) = tokens.split_at(PREFIX.min(tokens.len() / 2 + 1));
    (request.continued(before), after.to_vec())
}

#[test]
fn a_prefix_that_is_found_again_changes_no_completion() {
    let (all, mut n_found) = (cases(), 0);
    for case in &all {
        let plain: Vec<&Request> = case.requests.iter().filter(|r| r.is_plain()).collect();
        assert!(!plain.is_empty(), "{} has no request without forced tokens", case.name);
        let mut bench = Bench::new(case, EngineConfig { prefix_cache: PrefixCache::On, ..roomy() });
        for (i, request) in (0..).zip(plain.into_iter().take(3)) {
            let (request, expected) = with_prefix(case, request);
            let mut params = request.long(&bench.info);
            params.max_tokens = Some(expected.len() as u32);
            for turn in 0..3 {
                let id = 10 * i + turn;
                let tokens = bench.alone(case.arrival(&request, id, params.clone()));
                assert_eq!(tokens, expected, "{} turn {turn}", case.name);
                let n_cached = bench.seen[&id].finished().n_cached;
                // A short context may have no room for a block of prompt and as much behind it.
                let is_found = n_cached >= 32 || request.prompt.len() <= 32;
                assert!(turn == 0 || is_found, "{} turn {turn}: {n_cached} cached", case.name);
                n_found += usize::from(n_cached >= 32);
            }
        }
    }
    assert!(n_found > 2 * all.len(), "{n_found} times in {} cases", all.len());
}

#[test]
fn a_prefix_over_another_input_is_not_found() {
    for case in &cases() {
        let plain = case.requests.iter().find(|r| r.is_plain() && r.rows.is_some());
        let Some(request) = plain else {
            assert!(!Bench::new(case, roomy()).info.cross_attention, "{} has no such request", case.name);
            continue;
        };
        let (request, _) = with_prefix(case, request);
        // Outputs of another tower have rows of another width.
        let width = |r: usize| case.outputs[r].item().hidden;
        let is_alike = |r: &usize| request.rows.is_some_and(|own| own != *r && width(own) == width(*r));
        let rows = (0..case.outputs.len()).find(is_alike);
        let other = Request { rows, ..request.clone() };
        let mut bench = Bench::new(case, EngineConfig { prefix_cache: PrefixCache::On, ..roomy() });
        let params = request.long(&bench.info);
        bench.alone(case.arrival(&request, 0, params.clone()));
        let tokens = bench.alone(case.arrival(&other, 1, params.clone()));
        let mut fresh = Bench::new(case, roomy());
        assert_eq!(tokens, fresh.alone(case.arrival(&other, 1, params)), "{}", case.name);
        assert_eq!(bench.seen[&1].finished().n_cached, 0, "{}", case.name);
    }
}

#[test]
fn requests_and_beams_over_one_input_hold_its_projection_once() {
    let mut n_cases = 0;
    for case in &cases() {
        let Some(rows) = case.requests.iter().find_map(|r| r.rows) else { continue };
        let mut bench = Bench::new(case, roomy());
        let over_it: Vec<_> = case.numbered().filter(|(_, r)| r.rows == Some(rows)).collect();
        for copy in 0..4 {
            for (id, request) in &over_it {
                bench.add(case.arrival(request, 1000 * copy + 10 * id, request.greedy()));
                bench.add(case.arrival(request, 1000 * copy + 10 * id + 5, request.beams()));
            }
        }
        bench.settle();
        for (id, request) in &over_it {
            (0..4).for_each(|copy| bench.assert_golden(1000 * copy + 10 * id, request));
        }
        let needed = (case.outputs[rows].item().n_tokens as usize).div_ceil(32);
        assert_eq!(bench.most_cross_used, needed, "{}", case.name);
        n_cases += 1;
    }
    assert!(n_cases > 0, "no case cross-attends");
}
