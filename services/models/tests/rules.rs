//! Logit rules against the masks of transformers' processors.

#[path = "support/golden.rs"]
mod golden;

use golden::Tensors;
use triptych_models::rules::LogitRules;
use triptych_models::speech::timestamps::TimestampRule;

#[test]
fn masks_are_the_references() {
    let tensors = Tensors::read("whisper_multilingual/expected.safetensors");
    let expected = golden::json("whisper_multilingual/expected.json");
    let config = golden::json("whisper_multilingual/model/generation_config.json");
    let id = |key: &str| config[key].as_u64().unwrap() as u32;
    let rule = TimestampRule {
        first: id("no_timestamps_token_id") + 1,
        no_timestamps: id("no_timestamps_token_id"),
        end: id("eos_token_id"),
        max_initial: Some(id("max_initial_timestamp_index")),
    };
    let suppress = LogitRules {
        suppress: golden::ids(&config["suppress_tokens"]).into(),
        begin_suppress: golden::ids(&config["begin_suppress_tokens"]).into(),
        ..LogitRules::default()
    };
    let only = |rule: TimestampRule| LogitRules { timestamps: Some(rule), ..LogitRules::default() };
    let rules = [
        ("timestamps", only(rule)),
        ("timestamps_no_initial_cap", only(TimestampRule { max_initial: None, ..rule })),
        ("suppress", suppress.clone()),
        ("all", LogitRules { timestamps: Some(rule), ..suppress }),
    ];
    let begin = expected["rule"]["begin_index"].as_u64().unwrap() as usize;
    let prefixes = expected["rule"]["prefixes"].as_array().unwrap();
    let (shape, logits) = tensors.f32("rule_logits");
    assert_eq!(shape[0], prefixes.len());
    assert!(prefixes.len() >= 30);
    for (name, rules) in &rules {
        let (_, masks) = tensors.u8(&format!("rule_mask.{name}"));
        for (k, prefix) in prefixes.iter().enumerate() {
            let row = k * shape[1]..(k + 1) * shape[1];
            let mut got = logits[row.clone()].to_vec();
            rules.apply(&golden::ids(prefix)[begin..], &mut got);
            for (i, ((g, was), mask)) in got.iter().zip(&logits[row.clone()]).zip(&masks[row]).enumerate() {
                assert_eq!(g.is_infinite(), *mask == 1, "{name}, prefix {k} {prefix}, token {i}");
                assert!(g.is_infinite() || g == was, "what is allowed keeps its logit");
            }
        }
    }
}
