//! Ranges of the sampling settings, in one table, which requests of both APIs and models' defaults are held to.
//!
//! Within them the arithmetic of any finite logits of a model stays finite. Where vLLM or OpenAI's API has a
//! range, it is that one; a penalty that only has to be positive there has bounds here. `services/proxy/API.md`
//! shows the same ranges to clients, and `tests/ranges.rs` holds that it does.

use super::{Constraint, OutOfRange, SamplingParams};
use std::ops::RangeInclusive;

/// Most answers per request.
pub const MAX_N: u32 = 16;
/// Most beams.
pub const MAX_BEAMS: u32 = 32;
/// Most beams times log-probabilities of a token, since a search holds those of all its beams.
pub const MAX_BEAM_LOGPROBS: u32 = 256;
/// Most stop strings, and most bad words.
pub const MAX_STOPS: usize = 16;
/// Longest stop string or bad word in bytes.
pub const MAX_STOP_BYTES: usize = 256;
/// Most stop tokens.
pub const MAX_STOP_TOKENS: usize = 64;
/// Most alternatives beside a token.
pub const MAX_LOGPROBS: u32 = 20;
/// Most tokens that an answer may be held to.
pub const MAX_ALLOWED_TOKENS: usize = 1024;
/// Most tokens with a bias.
pub const MAX_LOGIT_BIAS: usize = 1024;
/// Longest constraint in bytes; for choices, their sum.
pub const MAX_CONSTRAINT_BYTES: usize = 256 << 10;
/// Most choices of a constraint.
pub const MAX_CHOICES: usize = 1024;

/// The least positive number.
const ABOVE_ZERO: f32 = f32::from_bits(1);

/// Range of a number.
pub struct NumberRange {
    /// The setting, as clients name it.
    pub field: &'static str,
    /// The range in words.
    pub allowed: &'static str,
    range: RangeInclusive<f32>,
    value: fn(&SamplingParams) -> f32,
}

/// Range of an integer, or of the length of a list.
pub struct CountRange {
    /// The setting, as clients name it.
    pub field: &'static str,
    /// The range in words.
    pub allowed: &'static str,
    range: RangeInclusive<usize>,
    value: fn(&SamplingParams) -> usize,
    /// The unit of a refused value.
    unit: &'static str,
}

/// Ranges of numbers.
pub const NUMBERS: [NumberRange; 7] = [
    NumberRange { field: "temperature", allowed: "0 to 2", range: 0.0..=2.0, value: |p| p.temperature },
    NumberRange { field: "top_p", allowed: "above 0, up to 1", range: ABOVE_ZERO..=1.0, value: |p| p.top_p },
    NumberRange { field: "min_p", allowed: "0 to 1", range: 0.0..=1.0, value: |p| p.min_p },
    NumberRange {
        field: "repetition_penalty",
        allowed: "0.01 to 10",
        range: 0.01..=10.0,
        value: |p| p.repetition_penalty,
    },
    NumberRange {
        field: "presence_penalty",
        allowed: "-2 to 2",
        range: -2.0..=2.0,
        value: |p| p.presence_penalty,
    },
    NumberRange {
        field: "frequency_penalty",
        allowed: "-2 to 2",
        range: -2.0..=2.0,
        value: |p| p.frequency_penalty,
    },
    NumberRange {
        field: "length_penalty",
        allowed: "-4 to 4",
        range: -4.0..=4.0,
        value: |p| p.beams.map_or(1.0, |beams| beams.length_penalty),
    },
];

/// Range of each value of `logit_bias`.
pub const BIASES: RangeInclusive<f32> = -100.0..=100.0;

/// Ranges of integers and lengths.
pub const COUNTS: [CountRange; 11] = [
    CountRange {
        field: "top_k",
        allowed: "1 or more",
        range: 1..=usize::MAX,
        value: |p| p.top_k.map_or(1, |k| k as usize),
        unit: "",
    },
    CountRange {
        field: "max_tokens",
        allowed: "1 or more",
        range: 1..=usize::MAX,
        value: |p| p.max_tokens.map_or(1, |n| n as usize),
        unit: "",
    },
    CountRange {
        field: "n",
        allowed: "1 to 16",
        range: 1..=MAX_N as usize,
        value: |p| p.n as usize,
        unit: "",
    },
    CountRange {
        field: "top_logprobs",
        allowed: "0 to 20",
        range: 0..=MAX_LOGPROBS as usize,
        value: |p| p.logprobs.unwrap_or(0) as usize,
        unit: "",
    },
    CountRange {
        field: "logit_bias",
        allowed: "up to 1024 tokens",
        range: 0..=MAX_LOGIT_BIAS,
        value: |p| p.logit_bias.len(),
        unit: " tokens",
    },
    CountRange {
        field: "stop",
        allowed: "up to 16 strings",
        range: 0..=MAX_STOPS,
        value: |p| p.stop.len(),
        unit: " strings",
    },
    CountRange {
        field: "bad_words",
        allowed: "up to 16 strings",
        range: 0..=MAX_STOPS,
        value: |p| p.bad_words.len(),
        unit: " strings",
    },
    CountRange {
        field: "stop_token_ids",
        allowed: "up to 64 tokens",
        range: 0..=MAX_STOP_TOKENS,
        value: |p| p.stop_token_ids.len(),
        unit: " tokens",
    },
    CountRange {
        field: "allowed_token_ids",
        allowed: "up to 1024 tokens",
        range: 0..=MAX_ALLOWED_TOKENS,
        value: |p| p.allowed_token_ids.len(),
        unit: " tokens",
    },
    CountRange {
        field: "prompt_logprobs",
        allowed: "0 to 20",
        range: 0..=MAX_LOGPROBS as usize,
        value: |p| p.prompt_logprobs.unwrap_or(0) as usize,
        unit: "",
    },
    CountRange {
        field: "num_beams",
        allowed: "n to 32",
        range: 1..=MAX_BEAMS as usize,
        value: |p| p.beams.map_or(1, |beams| beams.width as usize),
        unit: "",
    },
];

fn check(
    ok: bool,
    field: &'static str,
    value: impl ToString,
    allowed: &'static str,
) -> Result<(), OutOfRange> {
    if ok { Ok(()) } else { Err(OutOfRange { field, value: value.to_string(), allowed }) }
}

impl SamplingParams {
    /// Checks every range and every combination.
    ///
    /// # Errors
    /// [`OutOfRange`] names the first setting that is outside.
    pub fn validate(&self) -> Result<(), OutOfRange> {
        for setting in &NUMBERS {
            let value = (setting.value)(self);
            check(setting.range.contains(&value), setting.field, value, setting.allowed)?;
        }
        for setting in &COUNTS {
            let value = (setting.value)(self);
            let shown = format!("{value}{}", setting.unit);
            check(setting.range.contains(&value), setting.field, shown, setting.allowed)?;
        }
        let outside = self.logit_bias.iter().find(|(_, bias)| !BIASES.contains(bias));
        check(outside.is_none(), "logit_bias", outside.map_or(0.0, |b| b.1), "-100 to 100")?;
        let fits = self.max_tokens.is_none_or(|max| self.min_tokens <= max);
        check(fits, "min_tokens", self.min_tokens, "0 to max_tokens")?;
        self.check_words()?;
        self.check_beams()?;
        self.constraint.as_ref().map_or(Ok(()), Constraint::validate)
    }

    fn check_words(&self) -> Result<(), OutOfRange> {
        for (field, words) in [("stop", &self.stop), ("bad_words", &self.bad_words)] {
            let longest = words.iter().map(String::len).max().unwrap_or(0);
            let allowed = "strings of 1 to 256 bytes";
            check(longest <= MAX_STOP_BYTES, field, format!("a string of {longest} bytes"), allowed)?;
            check(!words.iter().any(String::is_empty), field, "an empty string", allowed)?;
        }
        Ok(())
    }

    fn check_beams(&self) -> Result<(), OutOfRange> {
        let Some(beams) = &self.beams else { return Ok(()) };
        let alone = self.prompt_logprobs.is_none();
        check(
            alone,
            "prompt_logprobs",
            self.prompt_logprobs.unwrap_or(0),
            "not set together with num_beams",
        )?;
        check(beams.width >= self.n, "num_beams", beams.width, "n to 32")?;
        let logprobs = beams.width * self.logprobs.map_or(0, |n| n + 1);
        let allowed = "0 to 20, and with num_beams up to 256 / num_beams - 1";
        check(logprobs <= MAX_BEAM_LOGPROBS, "top_logprobs", self.logprobs.unwrap_or(0), allowed)?;
        check(self.constraint.is_none(), "num_beams", beams.width, "not set together with a constraint")
    }
}

impl Constraint {
    fn validate(&self) -> Result<(), OutOfRange> {
        let n_bytes = match self {
            Self::JsonObject => 0,
            Self::JsonSchema(text) | Self::Regex(text) | Self::Grammar(text) => text.len(),
            Self::Choice(choices) => {
                let n = choices.len();
                let allowed = "1 to 1024 choices";
                check((1..=MAX_CHOICES).contains(&n), "choice", format!("{n} choices"), allowed)?;
                check(
                    !choices.iter().any(String::is_empty),
                    "choice",
                    "an empty choice",
                    "choices that are not empty",
                )?;
                choices.iter().map(String::len).sum()
            }
        };
        check(n_bytes <= MAX_CONSTRAINT_BYTES, self.field(), format!("{n_bytes} bytes"), "up to 262144 bytes")
    }
}

#[cfg(test)]
mod tests {
    use super::super::{BeamParams, EarlyStopping};
    use super::*;

    fn beams(width: u32, length_penalty: f32) -> Option<BeamParams> {
        Some(BeamParams { width, length_penalty, early_stopping: EarlyStopping::Heuristic })
    }

    /// Sets a number, or a count.
    type SetNumber = fn(&mut SamplingParams, f32);
    type SetCount = fn(&mut SamplingParams, usize);

    /// A change of the settings.
    type Set = Box<dyn Fn(&mut SamplingParams)>;

    fn check(set: impl Fn(&mut SamplingParams), expect: Option<&str>) {
        let mut params = SamplingParams::default();
        set(&mut params);
        let found = params.validate().err();
        assert_eq!(found.as_ref().map(|e| e.field), expect, "{found:?}");
    }

    #[test]
    fn numbers_outside_their_range_are_refused_and_its_ends_are_not() {
        let numbers: [(&str, SetNumber, [f32; 2]); 7] = [
            ("temperature", |p, x| p.temperature = x, [0.0, 2.0]),
            ("top_p", |p, x| p.top_p = x, [f32::from_bits(1), 1.0]),
            ("min_p", |p, x| p.min_p = x, [0.0, 1.0]),
            ("repetition_penalty", |p, x| p.repetition_penalty = x, [0.01, 10.0]),
            ("presence_penalty", |p, x| p.presence_penalty = x, [-2.0, 2.0]),
            ("frequency_penalty", |p, x| p.frequency_penalty = x, [-2.0, 2.0]),
            ("length_penalty", |p, x| p.beams = beams(2, x), [-4.0, 4.0]),
        ];
        assert_eq!(NUMBERS.each_ref().map(|n| n.field), numbers.map(|n| n.0));
        for (field, set, [least, most]) in numbers {
            check(|p| set(p, least), None);
            check(|p| set(p, most), None);
            for outside in [least.next_down(), most.next_up(), 10.0 * most + 1.0, -1e30, f32::NAN] {
                check(|p| set(p, outside), Some(field));
            }
            check(|p| set(p, f32::INFINITY), Some(field));
            check(|p| set(p, f32::NEG_INFINITY), Some(field));
        }
        check(|p| p.repetition_penalty = 1e-45, Some("repetition_penalty"));
        for bias in [100.5, -101.0, f32::NAN, f32::INFINITY] {
            check(|p| p.logit_bias = vec![(1, bias)], Some("logit_bias"));
        }
    }

    #[test]
    fn counts_are_held_at_their_limit_and_at_ten_times_it() {
        let counts: [(&str, SetCount, usize); 9] = [
            ("n", |p, n| p.n = n as u32, 16),
            ("top_logprobs", |p, n| p.logprobs = Some(n as u32), 20),
            ("logit_bias", |p, n| p.logit_bias = (0..n as u32).map(|t| (t, 1.0)).collect(), 1024),
            ("stop", |p, n| p.stop = vec!["x".into(); n], 16),
            ("bad_words", |p, n| p.bad_words = vec!["x".into(); n], 16),
            ("stop_token_ids", |p, n| p.stop_token_ids = vec![1; n], 64),
            ("allowed_token_ids", |p, n| p.allowed_token_ids = vec![1; n], 1024),
            ("prompt_logprobs", |p, n| p.prompt_logprobs = Some(n as u32), 20),
            ("num_beams", |p, n| p.beams = beams(n as u32, 1.0), 32),
        ];
        for (field, set, most) in counts {
            check(|p| set(p, most), None);
            check(|p| set(p, most + 1), Some(field));
            check(|p| set(p, 10 * most), Some(field));
        }
        check(|p| p.logit_bias = (0..1_000_000).map(|t| (t, 1.0)).collect(), Some("logit_bias"));
        check(|p| p.stop = vec!["x".repeat(256)], None);
        check(|p| p.stop = vec!["x".repeat(257)], Some("stop"));
        check(|p| p.bad_words = vec!["x".repeat(2570)], Some("bad_words"));
    }

    #[test]
    fn settings_that_do_not_go_together_are_refused_by_name() {
        let cases: Vec<(Set, Option<&str>)> = vec![
            (Box::new(|p| p.top_k = Some(0)), Some("top_k")),
            (Box::new(|p| p.max_tokens = Some(0)), Some("max_tokens")),
            (Box::new(|p| p.n = 0), Some("n")),
            (Box::new(|p| (p.min_tokens, p.max_tokens) = (5, Some(4))), Some("min_tokens")),
            (Box::new(|p| p.stop = vec![String::new()]), Some("stop")),
            (Box::new(|p| p.bad_words = vec![String::new()]), Some("bad_words")),
            (Box::new(|p| (p.n, p.beams) = (4, beams(3, 1.0))), Some("num_beams")),
            (Box::new(|p| (p.logprobs, p.beams) = (Some(20), beams(12, 1.0))), None),
            (Box::new(|p| (p.logprobs, p.beams) = (Some(20), beams(13, 1.0))), Some("top_logprobs")),
            (Box::new(|p| (p.logprobs, p.beams) = (Some(7), beams(32, 1.0))), None),
            (Box::new(|p| p.constraint = Some(Constraint::Choice(vec![]))), Some("choice")),
        ];
        for (set, expect) in cases {
            check(set, expect);
        }
    }

    #[test]
    fn a_refusal_names_setting_value_and_range() {
        let params = SamplingParams { repetition_penalty: 20.0, ..SamplingParams::default() };
        let refused = params.validate().unwrap_err().to_string();
        assert_eq!(refused, "repetition_penalty is 20, allowed is 0.01 to 10");
        let params = SamplingParams { stop: vec!["x".into(); 160], ..SamplingParams::default() };
        assert_eq!(
            params.validate().unwrap_err().to_string(),
            "stop is 160 strings, allowed is up to 16 strings"
        );
    }
}
