//! Sliding windows: what blocks are given back changes no token.

use crate::bench::{Bench, cpu, cuda, reference, roomy};
use crate::case::{Case, Request, cases};
use std::collections::BTreeMap;
use triptych_core::EncodedRows;
use triptych_core::sampling::SamplingParams;
use triptych_engine::{EngineConfig, KvBudget};
use triptych_models::ModelError;
use triptych_models::compute::Compute;
use triptych_models::decoder::{Decoder, DecoderInfo, StepInput};
use triptych_models::sampling::Choices;

/// Tokens of a completion: several windows.
const N_GENERATED: u32 = 100;

/// A decoder that does not report its window, so that every block of a sequence stays.
struct Unreported(Box<dyn Decoder>);

impl Decoder for Unreported {
    fn info(&self) -> DecoderInfo {
        let info = self.0.info();
        DecoderInfo { kv_groups: info.kv_groups.without_windows(), ..info }
    }
    fn allocate_kv(&mut self, self_blocks: usize, cross_blocks: usize) -> Result<(), ModelError> {
        self.0.allocate_kv(self_blocks, cross_blocks)
    }
    fn allocate_host(&mut self, n_blocks: usize) -> Result<(), ModelError> {
        self.0.allocate_host(n_blocks)
    }
    fn project_cross(&mut self, rows: &[EncodedRows<'_>], slots: &[u32]) -> Result<(), ModelError> {
        self.0.project_cross(rows, slots)
    }
    fn forward(&mut self, step: &StepInput<'_>) -> Result<Choices, ModelError> {
        self.0.forward(step)
    }
    fn copy_blocks(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        self.0.copy_blocks(pairs)
    }
    fn swap_out(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        self.0.swap_out(pairs)
    }
    fn swap_in(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        self.0.swap_in(pairs)
    }
}

/// Tokens of all requests at once, and the most blocks in use once all of them decode.
fn run(mut bench: Bench<'_>, case: &Case) -> (BTreeMap<u64, Vec<u32>>, usize) {
    let long = |request: &Request| SamplingParams {
        max_tokens: Some(N_GENERATED),
        ignore_eos: true,
        ..request.greedy()
    };
    let n_requests = case.requests.len();
    for (id, request) in case.numbered() {
        bench.add(case.arrival(request, id, long(request)));
    }
    let mut most_used = 0;
    bench.settle_with(|stats| {
        if stats.decoding == n_requests {
            most_used = most_used.max(stats.self_used);
        }
    });
    (bench.seen.iter().map(|(id, seen)| (*id, seen.tokens())).collect(), most_used)
}

/// Fails unless `case` writes the same on `compute` with and without blocks that are given back.
fn assert_same(case: &Case, compute: &Compute, config: EngineConfig) {
    let decoder = compute.load_decoder(&case.model).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    let kept = run(Bench::of(Box::new(Unreported(decoder)), case, roomy()), case);
    let given_back = run(Bench::on(compute, case, config), case);
    assert!(given_back.0.values().all(|tokens| tokens.len() == N_GENERATED as usize));
    assert_eq!(given_back.0, kept.0, "{}", case.name);
    // A group without a window keeps its blocks.
    let groups = case.model.spec().decoder.kv_groups().groups;
    let share = if groups.windows().iter().all(Option::is_some) { 2 } else { 1 };
    assert!(share * given_back.1 < kept.1, "{}: {} of {} blocks", case.name, given_back.1, kept.1);
}

#[test]
fn blocks_that_no_layer_sees_are_given_back_and_no_token_changes() {
    let windowed = |case: &Case| case.model.spec().decoder.kv_groups().groups.has_windows();
    let cases: Vec<Case> = cases().into_iter().filter(windowed).collect();
    let is_mixed = |case: &&Case| case.model.spec().decoder.kv_groups().groups.n_groups() > 1;
    assert!(cases.iter().any(|case| is_mixed(&case)) && !cases.iter().all(|case| is_mixed(&case)));
    // The stand-in takes a hundred times as long as a device, the reference ten times as long as the CPU: one case of each kind.
    for is_wanted in [true, false] {
        let case = cases.iter().find(|case| is_mixed(case) == is_wanted).expect("a case of each kind");
        for compute in [cuda(), reference()] {
            assert_same(case, &compute, roomy());
        }
    }
    for case in &cases {
        assert_same(case, &cpu(), roomy());
        // Sequences take the blocks that others gave back, and are preempted for want of them.
        let n_groups = case.model.spec().decoder.kv_groups().groups.n_groups();
        let n_blocks = 4 * case.requests.len() * n_groups;
        let kv = KvBudget::Blocks { self_attention: n_blocks, cross_attention: 0, host: n_blocks };
        assert_same(case, &cpu(), EngineConfig { kv, ..roomy() });
    }
}
