//! Beam search over a table of logits.

use crate::golden::{Golden, ids, processors};
use serde_json::Value;
use triptych_core::sampling::{BeamParams, EarlyStopping};
use triptych_engine::beam_search::{BeamBranch, BeamSearch, BeamStep, Hypothesis};

/// Logits of a place are a row for its token plus a row for the place.
struct Table {
    by_token: Vec<f32>,
    by_place: Vec<f32>,
    vocab: usize,
}

impl Table {
    fn log_probs(&self, tokens: &[u32]) -> Vec<f32> {
        let n_run_slots = self.by_place.len() / self.vocab;
        let (token, place) = (tokens[tokens.len() - 1] as usize, (tokens.len() - 1) % n_run_slots);
        let rows = self.by_token[token * self.vocab..].iter().zip(&self.by_place[place * self.vocab..]);
        let logits: Vec<f32> = rows.take(self.vocab).map(|(a, b)| a + b).collect();
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let norm = logits.iter().map(|l| f64::from(l - max).exp()).sum::<f64>().ln() + f64::from(max);
        logits.iter().map(|l| (f64::from(*l) - norm) as f32).collect()
    }
}

fn beam_params(setting: &Value) -> BeamParams {
    let early_stopping = match &setting["early_stopping"] {
        Value::Bool(true) => EarlyStopping::Immediately,
        Value::Bool(false) => EarlyStopping::Heuristic,
        _ => EarlyStopping::Never,
    };
    BeamParams {
        width: setting["width"].as_u64().expect("a width") as u32,
        length_penalty: setting["length_penalty"].as_f64().expect("a penalty") as f32,
        early_stopping,
    }
}

/// Plays the engine's part: each beam with processors of its own, which follow their parent's.
fn search(table: &Table, prompt: &[u32], setting: &Value, ends: &[u32]) -> Vec<Hypothesis> {
    let number = |name: &str| setting[name].as_u64().expect("a number") as usize;
    let mut search = BeamSearch::new(&beam_params(setting), ends, number("max_tokens"));
    let mut rules = vec![processors(setting, prompt, ends)];
    loop {
        let mut rows = Vec::new();
        for (beam, rules) in rules.iter_mut().enumerate() {
            let written = search.tokens(beam);
            let mut row = table.log_probs(&[prompt, written].concat());
            rules.apply(written, &mut row);
            rows.extend(row);
        }
        match search.advance(&rows, |_, _| false).expect("finite rows") {
            BeamStep::Done => return search.into_hypotheses(number("n")),
            BeamStep::Continue(branches) => {
                rules = branches.iter().map(|BeamBranch { parent, .. }| rules[*parent].clone()).collect();
            }
        }
    }
}

#[test]
fn completions_and_scores_are_those_of_the_reference() {
    let golden = Golden::open();
    let vocab = golden.json["vocab"].as_u64().expect("a size") as usize;
    let mut n_ended_early = 0;
    for case in golden.cases("beams") {
        let table = Table {
            by_token: golden.f32(&format!("beams.{}.by_token", case["table"])),
            by_place: golden.f32(&format!("beams.{}.by_place", case["table"])),
            vocab,
        };
        let prompt = ids(&case["prompt"]);
        let answers = search(&table, &prompt, &case["setting"], &golden.end_tokens());
        let expected = case["answers"].as_array().expect("answers");
        assert_eq!(answers.len(), expected.len(), "{case}");
        for (answer, expected) in answers.iter().zip(expected) {
            assert_eq!(answer.tokens, ids(&expected["tokens"]), "{case}");
            if let Some(score) = expected["score"].as_f64() {
                let error = (f64::from(answer.score) - score).abs() / score.abs().max(1.0);
                assert!(error < 1e-5, "{} for {score}, {case}", answer.score);
            }
            let max_tokens = case["setting"]["max_tokens"].as_u64().expect("a number");
            n_ended_early += usize::from((answer.tokens.len() as u64) < max_tokens);
        }
    }
    assert!(n_ended_early > 50, "{n_ended_early} answers end by themselves");
}
