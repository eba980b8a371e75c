//! The rule, event by event, with times given by the test.

use super::*;

const MS: Duration = Duration::from_millis(1);

/// An engine and an encoder at one arbiter, and the order of events: `s` a step, a number a chunk of so many tokens.
struct Scene {
    turns: ArbiterState,
    engine: ComputeId,
    /// Told with each step that decodes.
    slack: Duration,
    events: String,
}

impl Scene {
    fn new(budget: EncoderBudget) -> Self {
        let mut turns = ArbiterState::new(budget);
        let engine = turns.new_id();
        Self { turns, engine, slack: Duration::ZERO, events: String::new() }
    }

    fn step(&mut self, decodes: bool) -> bool {
        if !self.turns.steps.contains(&self.engine) {
            self.turns.ask_step(self.engine);
        }
        let goes = self.turns.take_step(self.engine);
        if goes {
            self.turns.end_step(self.engine, decodes.then_some(self.slack), 10 * MS);
            self.events += "s ";
        }
        goes
    }

    fn part(&mut self, forward: ComputeId, tokens: u64) -> bool {
        if !self.turns.parts.iter().any(|(id, _)| *id == forward) {
            self.turns.ask_part(forward, tokens);
        }
        let goes = self.turns.take_part(forward);
        if goes {
            self.turns.end_part(forward, tokens, tokens as u32 * MS);
            self.events += &format!("{tokens} ");
        }
        goes
    }

    /// An engine that always has a step, beside a forward of `n_parts` equal chunks.
    fn race(&mut self, n_parts: usize, tokens: u64, decodes: bool) -> &str {
        let forward = self.turns.new_id();
        let mut left = n_parts;
        self.turns.ask_part(forward, tokens);
        while left > 0 {
            if !self.step(decodes) {
                assert!(self.part(forward, tokens), "one of the two always runs");
                left -= 1;
                if left > 0 {
                    self.turns.ask_part(forward, tokens);
                }
            }
        }
        self.turns.end_forward(forward);
        self.step(decodes);
        self.events.trim_end()
    }
}

#[test]
fn between_two_steps_of_a_decoding_engine_no_more_than_the_budget_is_encoded() {
    let cases = [
        (EncoderBudget::Tokens(4), 2, "s 2 2 s 2 2 s 2 s"),
        (EncoderBudget::Tokens(5), 2, "s 2 2 s 2 2 s 2 s"),
        // A chunk cannot be divided: one runs however small the budget is.
        (EncoderBudget::Tokens(1), 2, "s 2 s 2 s 2 s 2 s 2 s"),
        (EncoderBudget::Unlimited, 2, "s 2 2 2 2 2 s"),
    ];
    for (budget, tokens, expect) in cases {
        let mut scene = Scene::new(budget);
        scene.step(true);
        assert_eq!(scene.race(5, tokens, true), expect, "{budget}");
    }
}

#[test]
fn a_forward_without_budget_waits_for_a_step_that_is_not_requested_yet() {
    let mut scene = Scene::new(EncoderBudget::Tokens(2));
    scene.step(true);
    let forward = scene.turns.new_id();
    assert!(scene.part(forward, 2));
    assert!(!scene.part(forward, 2), "the engine decodes and will request a step");
    scene.step(true);
    assert!(scene.part(forward, 2));
    scene.step(false);
    assert!(scene.part(forward, 2) && scene.part(forward, 2), "nothing decodes any more");
}

#[test]
fn an_idle_or_removed_engine_is_not_waited_for() {
    for leaves in [ArbiterState::rest, ArbiterState::leave] {
        let mut scene = Scene::new(EncoderBudget::Tokens(2));
        scene.step(true);
        let forward = scene.turns.new_id();
        assert!(scene.part(forward, 2) && !scene.part(forward, 2));
        leaves(&mut scene.turns, scene.engine);
        assert!(scene.part(forward, 2));
    }
}

#[test]
fn steps_alternate_with_chunks_while_nothing_decodes_and_with_whole_forwards_without_a_budget() {
    let cases = [
        (EncoderBudget::Automatic, "s 2 s 2 s 2 s"),
        (EncoderBudget::Tokens(1), "s 2 s 2 s 2 s"),
        (EncoderBudget::Unlimited, "s 2 2 2 s"),
    ];
    for (budget, expect) in cases {
        let mut scene = Scene::new(budget);
        scene.step(false);
        assert_eq!(scene.race(3, 2, false), expect, "{budget}");
        let [first, second] = [scene.turns.new_id(), scene.turns.new_id()];
        scene.turns.ask_step(scene.engine);
        assert!(scene.part(first, 2));
        scene.turns.end_forward(first);
        assert!(!scene.part(second, 2), "a step waits, and has waited for one chunk already");
        assert!(scene.step(false) && scene.part(second, 2));
    }
}

#[test]
fn only_one_forward_or_step_runs_at_a_time() {
    let mut turns = ArbiterState::new(EncoderBudget::Unlimited);
    let [first, second, engine] = [turns.new_id(), turns.new_id(), turns.new_id()];
    turns.ask_part(first, 1);
    turns.ask_part(second, 1);
    assert!(!turns.take_part(second) && turns.take_part(first));
    turns.ask_step(engine);
    assert!(!turns.take_step(engine) && !turns.take_part(second), "one at a time");
    turns.end_part(first, 1, MS);
    assert!(turns.take_part(second), "a forward without a request does not block the next");
    turns.end_part(second, 1, MS);
}

#[test]
fn an_automatic_budget_takes_as_long_as_a_step() {
    let mut scene = Scene::new(EncoderBudget::Automatic);
    assert_eq!(scene.turns.usage().budget, Some(INITIAL_BUDGET));
    scene.step(true);
    let forward = scene.turns.new_id();
    // A token takes 1 ms, a step 10.
    assert!(scene.part(forward, 4));
    assert_eq!(scene.turns.usage().budget, Some(10));
    for (step, expect) in [(MS, 5), (900 * MS, 25)] {
        let mut scene = Scene::new(EncoderBudget::Automatic);
        scene.turns.end_step(scene.engine, Some(Duration::ZERO), step);
        assert!(scene.part(forward, 4));
        assert_eq!(scene.turns.usage().budget, Some(expect), "{step:?}");
    }
}

#[test]
fn usage_counts_only_while_sequences_decode() {
    let mut scene = Scene::new(EncoderBudget::Tokens(4));
    let forward = scene.turns.new_id();
    assert!(scene.part(forward, 50));
    scene.step(true);
    assert!(scene.part(forward, 2) && scene.part(forward, 2));
    scene.step(true);
    let expect = BudgetUsage {
        steps: 2,
        steps_after_encode: 1,
        tokens: 4,
        tokens_in_slack: 0,
        most: 4,
        budget: Some(4),
    };
    assert_eq!(scene.turns.usage(), expect);
}

#[test]
fn budgets_print_as_they_parse() {
    for text in ["auto", "none", "64"] {
        assert_eq!(text.parse::<EncoderBudget>().unwrap().to_string(), text);
    }
    assert_eq!("0".parse(), Ok(EncoderBudget::Unlimited));
    assert!("many".parse::<EncoderBudget>().unwrap_err().contains("auto"));
}

#[test]
fn an_automatic_budget_gives_steps_as_much_time_as_chunks() {
    let mut turns = ArbiterState::new(EncoderBudget::Automatic);
    let (engine, forward) = (turns.new_id(), turns.new_id());
    let step = |turns: &mut ArbiterState, decodes: bool| {
        turns.ask_step(engine);
        let goes = turns.take_step(engine);
        if goes {
            turns.end_step(engine, decodes.then_some(Duration::ZERO), MS);
        }
        goes
    };
    assert!(step(&mut turns, true));
    turns.ask_part(forward, 9);
    for _ in 0..3 {
        assert!(turns.take_part(forward), "at least one chunk runs");
        turns.end_part(forward, 9, 4 * MS);
        turns.ask_part(forward, 9999);
        for n in 0..4 {
            assert!(!turns.take_part(forward), "{n} of four steps");
            assert!(step(&mut turns, true));
        }
    }
    assert!(turns.take_part(forward));
    turns.end_part(forward, 9, 4 * MS);
    turns.ask_part(forward, 9);
    assert!(step(&mut turns, false));
    assert!(turns.take_part(forward), "an engine that does not decode has no time in return");
}

#[test]
fn chunks_go_before_decodes_that_may_wait() {
    // A chunk takes 8 ms, a step 10.
    let cases = [
        (EncoderBudget::Automatic, 0, "s 8 s 8 s 8 s 8 s 8 s", 0),
        (EncoderBudget::Automatic, 7, "s 8 s 8 s 8 s 8 s 8 s", 0),
        (EncoderBudget::Automatic, 16, "s 8 8 s 8 8 s 8 s", 40),
        (EncoderBudget::Automatic, 23, "s 8 8 s 8 8 s 8 s", 40),
        (EncoderBudget::Automatic, 100, "s 8 8 8 8 8 s", 40),
        (EncoderBudget::Tokens(8), 100, "s 8 s 8 s 8 s 8 s 8 s", 0),
    ];
    for (budget, slack, expect, in_slack) in cases {
        let mut scene = Scene::new(budget);
        // What a chunk takes is known from one that ran before.
        let forward = scene.turns.new_id();
        assert!(scene.part(forward, 8));
        scene.turns.end_forward(forward);
        scene.events.clear();
        scene.slack = slack * MS;
        scene.step(true);
        assert_eq!(scene.race(5, 8, true), expect, "{budget} {slack}");
        assert_eq!(scene.turns.usage().tokens_in_slack, in_slack, "{budget} {slack}");
    }
}

#[test]
fn the_engine_that_may_wait_least_decides_and_steps_of_others_take_of_its_time() {
    let mut turns = ArbiterState::new(EncoderBudget::Automatic);
    let [patient, other, forward] = [turns.new_id(), turns.new_id(), turns.new_id()];
    turns.ask_part(forward, 4);
    assert!(turns.take_part(forward));
    turns.end_part(forward, 4, 4 * MS);
    let step = |turns: &mut ArbiterState, engine, slack| {
        turns.ask_step(engine);
        assert!(turns.take_step(engine));
        turns.end_step(engine, Some(slack), 3 * MS);
    };
    step(&mut turns, patient, 14 * MS);
    step(&mut turns, other, 9 * MS);
    assert!(turns.covers(9) && !turns.covers(10));
    step(&mut turns, other, 50 * MS);
    assert!(turns.covers(8) && !turns.covers(9), "two steps of another engine took 6 of 14 ms");
    turns.rest(patient);
    assert!(turns.covers(50));
    turns.leave(other);
    assert!(!turns.covers(1), "nothing decodes: there is no bound to be beyond");
}
