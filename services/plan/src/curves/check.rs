//! Checks of measured curves; each mistake names its field.

use super::{CostCurves, EncoderCurves, OLDEST_VERSION, Point, Unmeasured, VERSION};

impl CostCurves {
    /// All mistakes; empty for valid curves.
    pub fn mistakes(&self) -> Vec<String> {
        let mut found = Vec::new();
        if !(OLDEST_VERSION..=VERSION).contains(&self.version) {
            found.push(format!("version is {}, allowed is {OLDEST_VERSION} to {VERSION}", self.version));
        }
        at_least_one(&mut found, "threads", self.threads);
        at_least_one(&mut found, "kv.token_bytes", self.kv.token_bytes);
        at_least_one(&mut found, "kv.max_context", self.kv.max_context);
        self.check_steps(&mut found);
        let is_within_encodes =
            self.api.as_ref().is_some_and(|api| api.unmeasured.contains(&Unmeasured::Preprocess));
        for (i, encoder) in self.encoders().enumerate() {
            let prefix = if i == 0 { String::new() } else { format!("more_towers[{}].", i - 1) };
            check_encoder(&mut found, &prefix, &encoder, is_within_encodes);
        }
        self.check_towers(&mut found);
        let proxy = self.proxy;
        let front = self.front;
        let saves = self.pipelining.unwrap_or_default();
        for (name, value) in [
            ("proxy.request_us", proxy.request_us),
            ("proxy.item_us", proxy.item_us),
            ("proxy.item_byte_us", proxy.item_byte_us),
            ("proxy.token_us", proxy.token_us),
            ("frontend.request_us", front.request_us),
            ("frontend.item_us", front.item_us),
            ("frontend.item_byte_us", front.item_byte_us),
            ("frontend.wake_us", front.wake_us),
            ("frontend.write_us", front.write_us),
            ("frontend.message_us", front.message_us),
            ("between_steps_us", self.between_steps_us),
            ("pipelining.fixed_us", saves.fixed_us),
            ("pipelining.each_us", saves.each_us),
        ] {
            if !(value.is_finite() && value >= 0.0) {
                found.push(format!("{name} is {value}, allowed is 0 or more"));
            }
        }
        for (name, value) in
            [("colocated.encode", self.colocated.encode), ("colocated.step", self.colocated.step)]
        {
            if !(value.is_finite() && value >= 1.0) {
                found.push(format!("{name} is {value}, allowed is 1 or more"));
            }
        }
        if !(0.0..=1.0).contains(&front.misplaced) {
            found.push(format!("frontend.misplaced is {}, allowed is 0 to 1", front.misplaced));
        }
        if let Some(interference) = &self.interference {
            interference.mistakes(self.n_towers(), &mut found);
        }
        if let Some(factors) = &self.in_service {
            factors.mistakes(&mut found);
        }
        found
    }

    fn check_steps(&self, found: &mut Vec<String>) {
        for (name, curve) in [("publish", &self.publish), ("load", &self.load)] {
            check_curve(found, name, curve);
        }
        if self.step.is_empty() {
            found.push("step has no point, at least one is needed".to_owned());
        }
        for (i, p) in self.step.iter().enumerate() {
            check_times(found, &format!("step[{i}]"), (p.p50_us, p.p95_us));
            if p.prefill_tokens == 0 && p.decodes == 0 {
                found.push(format!("step[{i}] reads no token and writes none"));
            }
        }
    }
}

/// Checks the curves of one encoder, whose fields begin with `prefix`. Preprocessing may be within its encodes.
fn check_encoder(
    found: &mut Vec<String>,
    prefix: &str,
    encoder: &EncoderCurves<'_>,
    is_within_encodes: bool,
) {
    at_least_one(found, &format!("{prefix}row_bytes"), encoder.row_bytes);
    check_curve(found, &format!("{prefix}preprocess"), encoder.preprocess);
    for (i, p) in encoder.encode.iter().enumerate() {
        let place = format!("{prefix}encode[{i}]");
        check_times(found, &place, (p.p50_us, p.p95_us));
        if p.items == 0 || p.tokens == 0 {
            found.push(format!("{place} has {} items of {} tokens", p.items, p.tokens));
        }
    }
    if encoder.items.is_empty() != encoder.encode.is_empty() {
        found.push(format!("{prefix}items and encode: one has points and the other none"));
    }
    if !is_within_encodes && encoder.preprocess.is_empty() != encoder.encode.is_empty() {
        found.push(format!("{prefix}preprocess and encode: one has points and the other none"));
    }
    for (i, p) in encoder.items.iter().enumerate() {
        if !(p.size.is_finite() && p.size > 0.0) || p.tokens == 0 {
            found.push(format!(
                "{prefix}items[{i}]: size {} and {} tokens, both must be positive",
                p.size, p.tokens
            ));
        }
    }
    for (i, pair) in encoder.items.windows(2).enumerate() {
        if pair[0].size >= pair[1].size || pair[0].tokens > pair[1].tokens {
            found.push(format!("{prefix}items[{}]: sizes must ascend, and tokens not fall", i + 1));
        }
    }
}

fn at_least_one(found: &mut Vec<String>, name: &str, value: usize) {
    if value == 0 {
        found.push(format!("{name} is 0, allowed is 1 or more"));
    }
}

fn check_times(found: &mut Vec<String>, place: &str, (p50, p95): (f64, f64)) {
    if !(p50.is_finite() && p50 > 0.0) {
        found.push(format!("{place}: p50_us is {p50}, allowed is more than 0"));
    } else if !(p95.is_finite() && p95 >= p50) {
        found.push(format!("{place}: p95_us is {p95}, less than p50_us, which is {p50}"));
    }
}

fn check_curve(found: &mut Vec<String>, name: &str, curve: &[Point]) {
    for (i, p) in curve.iter().enumerate() {
        check_times(found, &format!("{name}[{i}]"), (p.p50_us, p.p95_us));
        if !(p.of.is_finite() && p.of >= 0.0) {
            found.push(format!("{name}[{i}]: of is {}, allowed is 0 or more", p.of));
        }
    }
    for (i, pair) in curve.windows(2).enumerate() {
        if pair[0].of >= pair[1].of {
            found.push(format!("{name}[{}]: of is {}, not more than before", i + 1, pair[1].of));
        }
    }
}
