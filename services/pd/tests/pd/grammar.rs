//! Grammars that kill, hang or cost too much: each is its own request's failure, and nobody else's.
//!
//! The trials of these tests run in this test's own binary, started again.

use crate::support::{Pd, TRIAL_ROLE, sampled, start, start_changed, trial, words};
use std::fs;
use std::path::Path;
use tonic::{Code, Status};
use triptych_core::sampling::Constraint;
use triptych_pd::PdConfig;
use triptych_pd::grammar::run_trial;
use triptych_proto::v1;

/// The other process; in the suite itself it has no role and does nothing.
#[test]
fn as_the_process_of_a_trial() {
    let Ok(role) = std::env::var(TRIAL_ROLE) else { return };
    match role.split_once(' ').unwrap_or((&role, "")) {
        ("compile", "") => {}
        ("compile", file) => {
            let mut file = fs::OpenOptions::new().append(true).open(file).unwrap();
            std::io::Write::write_all(&mut file, b"x").unwrap();
        }
        ("hang", _) => loop {
            std::thread::park();
        },
        ("abort", _) => std::process::abort(),
        (other, _) => panic!("no role {other:?}"),
    }
    let _ = run_trial();
    // Before the harness has anything to say.
    std::process::exit(0);
}

fn asked(constraint: Constraint) -> v1::PdGenerateRequest {
    sampled(words("Say", 200), |s| s.constraint = Some(constraint.into()))
}

async fn refusal(pd: &Pd, what: &str, constraint: Constraint) -> Status {
    let refused = pd.generate(asked(constraint)).await.expect_err(what);
    assert_eq!(refused.code(), Code::InvalidArgument, "{what}: {refused:?}");
    refused
}

fn chain(n: usize, link: impl Fn(String) -> String) -> Constraint {
    let next = |i: usize| format!(r##"{{"$ref": "#/$defs/d{}"}}"##, i + 1);
    let defs: Vec<String> = (0..n).map(|i| format!(r#""d{i}": {}"#, link(next(i)))).collect();
    let defs = defs.join(",");
    Constraint::JsonSchema(format!(
        r##"{{"$ref": "#/$defs/d0", "$defs": {{{defs}, "d{n}": {{"type": "string"}}}}}}"##
    ))
}

fn schema(text: impl Into<String>) -> Constraint {
    Constraint::JsonSchema(text.into())
}

/// Constraints that took a worker down or held it, and ten times their sizes.
fn attacks(times: usize) -> Vec<(&'static str, Constraint)> {
    let (prime, other) = (9973 * times, 9967 * times);
    let names: Vec<String> = (0..500 * times).map(|i| format!(r#""p{i}""#)).collect();
    let patterns: Vec<String> =
        (0..36 * times).map(|i| format!(r#"{{"pattern": "(a|b{i})*c.{{{i}}}(x|y)"}}"#)).collect();
    let rules: String = (0..500 * times).map(|i| format!("r{i}: \"a\" r{}\n", i + 1)).collect();
    let terminals: String = (0..500 * times).map(|i| format!("T{i}: \"a\" T{}\n", i + 1)).collect();
    vec![
        ("allOf of one $ref", chain(500 * times, |next| format!(r#"{{"allOf": [{next}]}}"#))),
        (
            "anyOf of one $ref",
            chain(500 * times, |next| format!(r#"{{"anyOf": [{next}, {{"type": "null"}}]}}"#)),
        ),
        ("items of one $ref", chain(500 * times, |next| format!(r#"{{"type": "array", "items": {next}}}"#))),
        (
            "a property of one $ref",
            chain(500 * times, |next| format!(r#"{{"properties": {{"a": {next}}}}}"#)),
        ),
        ("a $ref of a $ref", chain(500 * times, |next| next)),
        (
            "a $ref beside a type",
            chain(500 * times, |next| format!(r#"{{"type": "string", "allOf": [{next}, {next}]}}"#)),
        ),
        (
            "two multipleOf",
            schema(format!(r#"{{"allOf": [{{"multipleOf": {prime}}}, {{"multipleOf": {other}}}]}}"#)),
        ),
        (
            "a long required list",
            schema(format!(r#"{{"type": "object", "required": [{}]}}"#, names.join(","))),
        ),
        ("overlapping patterns", schema(format!(r#"{{"allOf": [{}]}}"#, patterns.join(",")))),
        ("a chain of rules", Constraint::Grammar(format!("start: r0\n{rules}r{}: \"b\"\n", 500 * times))),
        (
            "a chain of terminals",
            Constraint::Grammar(format!("start: T0\n{terminals}T{}: \"b\"\n", 500 * times)),
        ),
        (
            "brackets",
            Constraint::Grammar(format!("start: {}\"a\"{}", "(".repeat(50 * times), ")".repeat(50 * times))),
        ),
        (
            "repeats of repeats",
            Constraint::Regex(format!("((a{{1,{0}}}b?){{1,{0}}}c?){{1,{0}}}", 90 * times)),
        ),
        (
            "a string of many lengths",
            schema(format!(r#"{{"type": "string", "minLength": 9, "maxLength": {}}}"#, 1_000_000 * times)),
        ),
        (
            "an array of many lengths",
            schema(format!(
                r#"{{"type": "array", "minItems": {0}, "items": {{"type": "array", "minItems": {0}}}}}"#,
                1_000_000 * times
            )),
        ),
    ]
}

#[tokio::test]
async fn a_costly_grammar_is_its_own_requests_failure() {
    let pd = start().await;
    for times in [1, 10] {
        for (what, constraint) in attacks(times) {
            let outcome = pd.generate(asked(constraint)).await;
            let code = outcome.err().map(|status| status.code());
            // Overloaded: a trial has a limit on wall time too, which a busy machine reaches first.
            let is_its_own = matches!(code, None | Some(Code::InvalidArgument | Code::ResourceExhausted));
            assert!(is_its_own, "{what} times {times}: {code:?}");
        }
    }
    assert_eq!(pd.generate(words("x", 4)).await.unwrap().tokens[0].len(), 4);
    pd.until_idle("vl").await;
}

#[tokio::test]
async fn a_limit_on_the_text_is_named_with_its_value() {
    let pd = start().await;
    let chained = chain(500, |next| format!(r#"{{"allOf": [{next}]}}"#));
    let message = refusal(&pd, "chain", chained).await.message().to_owned();
    assert!(message.contains("levels of nesting") && message.contains("the limit is"), "{message}");
    let multiples = schema(r#"{"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}"#);
    let message = refusal(&pd, "multiples", multiples).await.message().to_owned();
    assert!(message.contains("99400891") && message.contains("the limit is 10000"), "{message}");
}

#[tokio::test]
async fn a_trial_that_dies_is_a_refusal_and_the_worker_goes_on() {
    let pd = start_changed(|config| PdConfig { grammar_trial: trial("abort"), ..config }).await;
    let refused = refusal(&pd, "abort", Constraint::JsonObject).await;
    assert!(refused.message().contains("the grammar library fails on it"), "{refused:?}");
    assert_eq!(pd.generate(words("x", 4)).await.unwrap().tokens[0].len(), 4);
}

#[tokio::test]
async fn grammars_that_hang_hold_up_nobody_else_and_their_number_is_bounded() {
    let pd = start_changed(|config| PdConfig { grammar_trial: trial("hang"), ..config }).await;
    let mut hanging = tokio::task::JoinSet::new();
    for i in 0..33 {
        let mut client = pd.client();
        hanging
            .spawn(async move { client.generate(asked(Constraint::Regex(format!("a{i}")))).await.map(drop) });
    }
    // All places are taken: the first to be answered is the one that has none.
    let first = hanging.join_next().await.expect("33 requests").expect("no panic");
    assert_eq!(first.expect_err("no place").code(), Code::ResourceExhausted);
    assert_eq!(pd.generate(words("x", 4)).await.unwrap().tokens[0].len(), 4);
    assert!(hanging.try_join_next().is_none(), "the others still wait");
}

#[tokio::test]
async fn equal_grammars_are_compiled_once_for_each_tenant_and_refusals_are_cached() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("grammar-trials");
    fs::write(&file, b"").unwrap();
    let role = format!("compile {}", file.display());
    let pd = start_changed(|config| PdConfig { grammar_trial: trial(&role), ..config }).await;
    let n_trials = || fs::read(&file).unwrap().len();
    let equal = || asked(Constraint::Regex("[0-9]{3}".into()));
    let (one, other) = tokio::join!(pd.generate(equal()), pd.generate(equal()));
    assert_eq!(one.unwrap().tokens, other.unwrap().tokens);
    pd.generate(equal()).await.unwrap();
    assert_eq!(n_trials(), 1);
    let of_another = v1::PdGenerateRequest { tenant: vec![1; 32].into(), ..equal() };
    pd.generate(of_another).await.unwrap();
    assert_eq!(n_trials(), 2);
    for _ in 0..2 {
        refusal(&pd, "no expression", Constraint::Regex("(a".into())).await;
        assert_eq!(n_trials(), 3);
    }
}
