//! Checks of measured curves; each mistake names its field.

use super::{CostCurves, OLDEST_VERSION, Point, Unmeasured, VERSION};

impl CostCurves {
    /// All mistakes; empty for valid curves.
    pub fn mistakes(&self) -> Vec<String> {
        let mut found = Vec::new();
        if !(OLDEST_VERSION..=VERSION).contains(&self.version) {
            found.push(format!("version is {}, allowed is {OLDEST_VERSION} to {VERSION}", self.version));
        }
        at_least_one(&mut found, "threads", self.threads);
        at_least_one(&mut found, "row_bytes", self.row_bytes);
        at_least_one(&mut found, "kv.token_bytes", self.kv.token_bytes);
        at_least_one(&mut found, "kv.max_context", self.kv.max_context);
        self.check_points(&mut found);
        self.check_items(&mut found);
        let proxy = self.proxy;
        let front = self.front;
        for (name, value) in [
            ("proxy.request_us", proxy.request_us),
            ("proxy.item_us", proxy.item_us),
            ("proxy.item_byte_us", proxy.item_byte_us),
            ("proxy.token_us", proxy.token_us),
            ("frontend.request_us", front.request_us),
            ("frontend.item_us", front.item_us),
            ("frontend.item_byte_us", front.item_byte_us),
            ("frontend.step_us", front.step_us),
            ("frontend.token_us", front.token_us),
            ("between_steps_us", self.between_steps_us),
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
            interference.mistakes(&mut found);
        }
        found
    }

    fn check_points(&self, found: &mut Vec<String>) {
        for (name, curve) in
            [("preprocess", &self.preprocess), ("publish", &self.publish), ("load", &self.load)]
        {
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
        for (i, p) in self.encode.iter().enumerate() {
            check_times(found, &format!("encode[{i}]"), (p.p50_us, p.p95_us));
            if p.items == 0 || p.tokens == 0 {
                found.push(format!("encode[{i}] has {} items of {} tokens", p.items, p.tokens));
            }
        }
    }

    fn check_items(&self, found: &mut Vec<String>) {
        if self.items.is_empty() != self.encode.is_empty() {
            found.push("items and encode: one has points and the other none".to_owned());
        }
        let is_within_encodes =
            self.api.as_ref().is_some_and(|api| api.unmeasured.contains(&Unmeasured::Preprocess));
        if !is_within_encodes && self.preprocess.is_empty() != self.encode.is_empty() {
            found.push("preprocess and encode: one has points and the other none".to_owned());
        }
        for (i, p) in self.items.iter().enumerate() {
            if !(p.size.is_finite() && p.size > 0.0) || p.tokens == 0 {
                found.push(format!(
                    "items[{i}]: size {} and {} tokens, both must be positive",
                    p.size, p.tokens
                ));
            }
        }
        for (i, pair) in self.items.windows(2).enumerate() {
            if pair[0].size >= pair[1].size || pair[0].tokens > pair[1].tokens {
                found.push(format!("items[{}]: sizes must ascend, and tokens not fall", i + 1));
            }
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
