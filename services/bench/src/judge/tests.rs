//! Hand-made outcomes for every rule: each table has a run that one rule alone refuses.

use super::*;
use crate::outcome::ItemCounts;
use proptest::prelude::*;

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn slo() -> Slo {
    "ttft=500ms,tpot=50ms".parse().expect("an SLO")
}

const WINDOW: JudgedWindow = JudgedWindow { from: Duration::from_secs(10), to: Duration::from_secs(110) };

/// Due at, first token after, each further token after, so many tokens.
fn whole_one(due: Duration, ttft: u64, tpot: u64, n: u64) -> Outcome {
    let tokens: Vec<_> = (0..n).map(|i| due + ms(ttft + i * tpot)).collect();
    Outcome {
        index: 0,
        due,
        sent: due,
        ended: *tokens.last().unwrap_or(&due),
        tokens,
        end: End::Whole,
        items: ItemCounts::default(),
        slo: None,
    }
}

/// Ten requests a second from 0 to 120 s, by a function of their number.
fn run(outcome: impl Fn(u64, Duration) -> Outcome) -> Vec<Outcome> {
    (0..1200).map(|i| Outcome { index: i, ..outcome(i, ms(i * 100)) }).collect()
}

fn good(due: Duration) -> Outcome {
    whole_one(due, 200, 20, 11)
}

fn refused_rules(outcomes: &[Outcome]) -> Vec<String> {
    let verdict = judge(outcomes, WINDOW, &slo(), &Rule::default());
    assert_eq!(verdict.passed, verdict.findings.iter().all(|f| f.passed));
    verdict.findings.into_iter().filter(|f| !f.passed).map(|f| f.rule).collect()
}

#[test]
fn a_run_that_meets_the_slo_passes() {
    let outcomes = run(|_, due| good(due));
    let verdict = judge(&outcomes, WINDOW, &slo(), &Rule::default());
    assert!(verdict.passed, "{verdict:#?}");
    assert_eq!((verdict.n_offered, verdict.n_good, verdict.ends.whole), (1000, 1000, 1000));
    assert_eq!(
        (verdict.ttft_ms.p99, verdict.tpot_ms.p50, verdict.e2el_ms.p90),
        (Some(200.0), Some(20.0), Some(400.0))
    );
}

#[test]
fn each_rule_refuses_a_run_that_no_other_does() {
    let check = |name: &str, outcomes: Vec<Outcome>, expect: &[&str]| {
        assert_eq!(refused_rules(&outcomes), expect, "{name}");
    };
    // 0.8 % miss one limit and 0.8 % the other: each percentile holds, the joint share does not.
    check(
        "joint attainment",
        run(|i, due| match i % 125 {
            0 => whole_one(due, 600, 20, 11),
            1 => whole_one(due, 200, 60, 11),
            _ => good(due),
        }),
        &["attainment"],
    );
    check(
        "first tokens too late in two of a hundred",
        run(|i, due| if i % 50 == 0 { whole_one(due, 501, 20, 11) } else { good(due) }),
        &["attainment", "p99 TTFT"],
    );
    check(
        "further tokens too slow in two of a hundred",
        run(|i, due| if i % 50 == 0 { whole_one(due, 200, 51, 11) } else { good(due) }),
        &["attainment", "p99 TPOT"],
    );
    // Every judged request is good, but one in twenty never leaves.
    check(
        "served",
        run(|i, due| if i % 20 == 0 { Outcome { ended: due + ms(200_000), ..good(due) } } else { good(due) })
            .into_iter()
            .filter(|o| o.due >= ms(10_000))
            .collect(),
        &["served", "concurrency does not rise"],
    );
    check(
        "time to first token creeps up within its limit",
        run(|i, due| Outcome { ended: due + ms(700), ..whole_one(due, 100 + i / 4, 20, 11) }),
        &["TTFT does not rise"],
    );
    check(
        "concurrency rises while latencies are within the limits",
        run(|i, due| {
            let n = 11 + i / 20;
            whole_one(due, 200, 20, n)
        }),
        &["concurrency does not rise"],
    );
}

#[test]
fn served_alone_refuses_what_never_ended_in_the_window() {
    // Long answers from the start on, so that concurrency is level and every limit is met; but of those due in
    // the window only a part ends there, and nothing ends that was due before it.
    let outcomes: Vec<_> =
        run(|_, due| whole_one(due, 200, 40, 201)).into_iter().filter(|o| o.due >= ms(10_000)).collect();
    let refused = refused_rules(&outcomes);
    assert_eq!(refused.first().map(String::as_str), Some("served"), "{refused:?}");
}

#[test]
fn what_chance_leaves_under_way_at_the_end_of_a_short_window_is_no_backlog() {
    // One request a second; the last `n` of the window end after it, all others after four seconds.
    let serves = |n: u64| {
        let outcomes: Vec<_> = (0..60)
            .map(|i| {
                let late = i < 50 && i + n >= 50;
                let due = ms(i * 1000);
                Outcome { ended: if late { ms(59_000) } else { due + ms(4000) }, ..good(due) }
            })
            .collect();
        let window = JudgedWindow { from: ms(10_000), to: ms(50_000) };
        let verdict = judge(&outcomes, window, &slo(), &Rule::default());
        (verdict.n_served, verdict.serves(&Rule::default()))
    };
    assert_eq!(serves(4), (40, true));
    assert_eq!(serves(7), (37, true), "three of forty are a matter of chance");
    assert_eq!(serves(20), (24, false), "sixteen are not");
}

#[test]
fn nothing_that_was_offered_is_dropped() {
    let check = |name: &str, bad: fn(Duration) -> Outcome| {
        let outcomes = run(|i, due| if i % 40 == 0 { bad(due) } else { good(due) });
        let verdict = judge(&outcomes, WINDOW, &slo(), &Rule::default());
        assert_eq!((verdict.n_offered, verdict.n_good), (1000, 975), "{name}");
        assert_eq!(verdict.ttft_ms.p99, None, "{name}: one in forty has no first token in any time");
        assert!(!verdict.passed && !verdict.percentiles_passed, "{name}");
    };
    check("refused", |due| Outcome { end: End::Refused, tokens: vec![], ..good(due) });
    check("failed in its midst", |due| Outcome { end: End::Failed("reset".into()), ..good(due) });
    check("short", |due| Outcome { end: End::Short, ..whole_one(due, 200, 20, 1) });
    check("empty", |due| Outcome { end: End::Whole, tokens: vec![], ..good(due) });
    check("never ended", |due| Outcome { end: End::Unended, ..good(due) });
}

#[test]
fn one_token_that_was_asked_for_is_judged_by_its_time_alone() {
    assert!(whole_one(ms(0), 400, 0, 1).meets(&slo()));
    assert!(!whole_one(ms(0), 501, 0, 1).meets(&slo()));
    assert!(!Outcome { end: End::Short, ..whole_one(ms(0), 400, 0, 1) }.meets(&slo()));
    let verdict = judge(&run(|_, due| whole_one(due, 300, 0, 1)), WINDOW, &slo(), &Rule::default());
    assert!(verdict.passed && verdict.tpot_ms == Percentiles::default(), "{verdict:#?}");
}

#[test]
fn latencies_count_from_when_a_request_was_due() {
    let late = Outcome { sent: ms(400), ..whole_one(ms(0), 600, 20, 11) };
    assert_eq!(late.ttft(), Some(ms(600)));
    assert!(!late.meets(&slo()));
    assert_eq!(whole_one(ms(50), 200, 20, 11).tpot(), Some(ms(20)));
}

#[test]
fn warm_up_and_drain_are_not_judged() {
    let outcomes = run(|_, due| {
        if WINDOW.has(due) { good(due) } else { Outcome { end: End::Refused, tokens: vec![], ..good(due) } }
    });
    let verdict = judge(&outcomes, WINDOW, &slo(), &Rule::default());
    assert!(verdict.passed, "{verdict:#?}");
    assert_eq!(verdict.n_offered, 1000);
}

#[test]
fn a_window_without_requests_does_not_pass() {
    let verdict = judge(&[], WINDOW, &slo(), &Rule::default());
    assert!(!verdict.passed && !verdict.percentiles_passed && !verdict.only_rises());
    assert_eq!(verdict.attainment(), 0.0);
}

#[test]
fn seeds_are_judged_together_and_a_rise_is_one_of_all() {
    let level = run(|_, due| good(due));
    let rising = run(|i, due| whole_one(due, 100 + i / 4, 20, 11));
    let of_three = |outcomes: [&[Outcome]; 3]| {
        judge_runs(&outcomes.map(|outcomes| Run { outcomes, window: WINDOW }), &slo(), &Rule::default())
    };
    let verdict = of_three([&level, &rising, &level]);
    assert!(verdict.passed && verdict.n_offered == 3000, "{:?}", verdict.findings);
    let verdict = of_three([&rising, &rising, &rising]);
    assert!(!verdict.passed && verdict.ttft_trend.is_some_and(|t| t.rises));
    assert!(verdict.only_rises(), "{:?}", verdict.findings);
    let late = run(|i, due| whole_one(due, 100 + i, 20, 11));
    assert!(!judge(&late, WINDOW, &slo(), &Rule::default()).only_rises(), "limits are missed too");
    assert!(!judge(&level, WINDOW, &slo(), &Rule::default()).only_rises(), "nothing is");
}

proptest! {
    #[test]
    fn any_outcomes_are_judged_without_a_panic(
        raw in prop::collection::vec((0u64..200_000, 0u64..5000, 0u64..5, 0u8..5), 0..60),
        from in 0u64..100_000, length in 0u64..100_000,
    ) {
        let outcomes: Vec<_> = raw.iter().map(|(due, ttft, n, end)| Outcome {
            end: [End::Whole, End::Short, End::Refused, End::Failed(String::new()), End::Unended][*end as usize].clone(),
            ..whole_one(ms(*due), *ttft, 10, *n)
        }).collect();
        let window = JudgedWindow { from: ms(from), to: ms(from + length) };
        let verdict = judge(&outcomes, window, &slo(), &Rule::default());
        let ends = verdict.ends;
        prop_assert_eq!(ends.whole + ends.short + ends.refused + ends.failed + ends.unended, verdict.n_offered);
        prop_assert!(verdict.n_good <= ends.whole);
    }
}

#[test]
fn requests_with_limits_of_their_own_are_judged_by_those() {
    let own: Slo = "ttft=2s,tpot=50ms".parse().unwrap();
    // Every second request is slow by the run's limits, and may be.
    let both = |own: Option<Slo>| {
        run(|i, due| match i % 2 {
            0 => whole_one(due, 100, 20, 11),
            _ => Outcome { slo: own, ..whole_one(due, 1500, 20, 11) },
        })
    };
    let verdict = judge(&both(Some(own)), WINDOW, &slo(), &Rule::default());
    assert!(verdict.passed, "{:?}", verdict.findings);
    let ttft: Vec<_> = verdict.findings.iter().filter(|finding| finding.rule == "p99 TTFT").collect();
    assert_eq!(ttft.len(), 2, "{ttft:?}");
    assert!(!judge(&both(None), WINDOW, &slo(), &Rule::default()).passed);
    let short = Some(Slo { ttft: Some(ms(1000)), ..own });
    let verdict = judge(&both(short), WINDOW, &slo(), &Rule::default());
    assert_eq!(verdict.n_good * 2, verdict.n_offered);
    assert_eq!(verdict.n_tpot_good, verdict.n_offered);
}
