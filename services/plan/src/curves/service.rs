//! Factors from the times of a profile to those of the same work in a cluster.
//!
//! A profile repeats one thing at a time. In a cluster, caches hold what other threads read and wrote, threads sleep and are
//! woken for each token, forwards follow pauses, and threads of one forward wait for each other: the same work takes longer.

use super::CostCurves;
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;

/// Time of work in service over that by the curves.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceFactors {
    /// Of preprocessing and forwards of encoders.
    pub encode: f64,
    /// Of engine steps, those with prompt tokens left out if `prefill` is known.
    pub step: f64,
    /// Time between two steps in microseconds, in the place of that of the curves; `None`: that of the curves, by `step`. No factor:
    /// a profile may have next to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub between_us: Option<f64>,
    /// Of engine steps with prompt tokens; `None`: as `step`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<f64>,
    /// Of client, proxy and network, items left out if `item` is known.
    pub front: f64,
    /// Of an item and its bytes in client, proxy and network; `None`: as `front`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub item: Option<f64>,
    /// Time of the measurement in seconds after 1970; `None`: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_s: Option<u64>,
}

/// Factors of forwards and steps that are allowed.
const ALLOWED: RangeInclusive<f64> = 0.01..=100.0;
/// Those of client, proxy and network. Their work may be too little to be measured.
const ALLOWED_FRONT: RangeInclusive<f64> = 0.0..=100.0;
/// Microseconds between two steps that are allowed.
const ALLOWED_BETWEEN_US: RangeInclusive<f64> = 0.0..=1e5;
/// Factors of forwards and steps that an idle machine has; beyond them something else was measured.
const USUAL: RangeInclusive<f64> = 0.5..=3.0;
/// Microseconds between two steps on an idle machine: 40 to 60 on one core, 5 to 20 on two.
const USUAL_BETWEEN_US: RangeInclusive<f64> = 0.0..=300.0;
/// Those of client, proxy and network. A profile sends one thing again and again, with all of it in caches, and its client has no
/// images to make.
const USUAL_FRONT: RangeInclusive<f64> = 0.3..=10.0;

impl ServiceFactors {
    /// True if an idle machine may have them.
    pub fn are_usual(&self) -> bool {
        [self.encode, self.step, self.prefill_steps()].iter().all(|factor| USUAL.contains(factor))
            && self.between_us.is_none_or(|us| USUAL_BETWEEN_US.contains(&us))
            && [self.front, self.items()].iter().all(|factor| USUAL_FRONT.contains(factor))
    }

    /// Of engine steps with prompt tokens.
    pub fn prefill_steps(&self) -> f64 {
        self.prefill.unwrap_or(self.step)
    }

    /// Of items and their bytes in client, proxy and network.
    pub fn items(&self) -> f64 {
        self.item.unwrap_or(self.front)
    }

    /// Each within what is allowed. One that goes to its limit could not be told, and is not usual.
    #[must_use]
    pub fn bounded(self) -> Self {
        let within = |value: f64, allowed: RangeInclusive<f64>| value.clamp(*allowed.start(), *allowed.end());
        Self {
            encode: within(self.encode, ALLOWED),
            step: within(self.step, ALLOWED),
            between_us: self.between_us.map(|us| within(us, ALLOWED_BETWEEN_US)),
            prefill: self.prefill.map(|factor| within(factor, ALLOWED)),
            front: within(self.front, ALLOWED_FRONT),
            item: self.item.map(|factor| within(factor, ALLOWED_FRONT)),
            at_s: self.at_s,
        }
    }

    /// Adds what cannot be.
    pub(super) fn mistakes(&self, found: &mut Vec<String>) {
        for (name, value, allowed) in [
            ("encode", self.encode, ALLOWED),
            ("step", self.step, ALLOWED),
            ("prefill", self.prefill_steps(), ALLOWED),
            ("between_us", self.between_us.unwrap_or(0.0), ALLOWED_BETWEEN_US),
            ("front", self.front, ALLOWED_FRONT),
            ("item", self.items(), ALLOWED_FRONT),
        ] {
            if !allowed.contains(&value) {
                let (least, most) = (allowed.start(), allowed.end());
                found.push(format!("in_service.{name} is {value}, allowed is {least} to {most}"));
            }
        }
    }
}

impl CostCurves {
    /// The curves of workers in service: scaled, and marked as such.
    pub fn in_service(&self, factors: ServiceFactors) -> Self {
        let mut scaled = self.clone();
        scaled.scale_encoding(factors.encode);
        scaled.scale_steps(factors.step, factors.prefill_steps());
        scaled.between_steps_us = factors.between_us.unwrap_or(self.between_steps_us * factors.step);
        let front = &mut scaled.front;
        for us in [&mut front.request_us, &mut front.wake_us, &mut front.write_us, &mut front.message_us] {
            *us *= factors.front;
        }
        for us in [&mut front.item_us, &mut front.item_byte_us] {
            *us *= factors.items();
        }
        scaled.in_service = Some(factors);
        scaled
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::{curves, two_towers};
    use super::*;

    #[test]
    fn each_stage_has_its_own_factor() {
        let (base, factors) = (
            two_towers(),
            ServiceFactors {
                encode: 1.5,
                step: 2.0,
                between_us: Some(50.0),
                prefill: Some(2.5),
                front: 3.0,
                item: Some(4.0),
                at_s: Some(7),
            },
        );
        let scaled = base.in_service(factors);
        assert_eq!(scaled.encode[0].p50_us, base.encode[0].p50_us * 1.5);
        assert_eq!(scaled.preprocess[0].p95_us, base.preprocess[0].p95_us * 1.5);
        assert_eq!(scaled.more_towers[0].encode[0].p50_us, base.more_towers[0].encode[0].p50_us * 1.5);
        for (scaled, base) in scaled.step.iter().zip(&base.step) {
            let factor = if base.prefill_tokens > 0 { 2.5 } else { 2.0 };
            assert_eq!(scaled.p95_us, base.p95_us * factor);
        }
        assert!(
            base.step.iter().any(|p| p.prefill_tokens > 0) && base.step.iter().any(|p| p.prefill_tokens == 0)
        );
        assert_eq!(scaled.between_steps_us, 50.0);
        let base = CostCurves { between_steps_us: 100.0, ..base };
        assert_eq!(base.in_service(ServiceFactors { between_us: None, ..factors }).between_steps_us, 200.0);
        assert_eq!(scaled.front.wake_us, base.front.wake_us * 3.0);
        assert_eq!(scaled.front.item_us, base.front.item_us * 4.0);
        assert_eq!(scaled.front.misplaced, base.front.misplaced);
        assert_eq!((&scaled.load, &scaled.publish), (&base.load, &base.publish));
        assert_eq!(scaled.in_service, Some(factors));
    }

    #[test]
    fn factors_that_cannot_be_are_named() {
        let scaled = curves().in_service(ServiceFactors {
            encode: f64::NAN,
            step: 0.0,
            between_us: None,
            prefill: None,
            front: 0.0,
            item: None,
            at_s: None,
        });
        let mistakes = scaled.mistakes().join("; ");
        assert!(mistakes.contains("in_service.step is 0, allowed is 0.01 to 100"), "{mistakes}");
        assert!(mistakes.contains("in_service.encode is NaN"), "{mistakes}");
        assert!(!mistakes.contains("in_service.front"), "{mistakes}");
        let found = ServiceFactors { step: 1e-4, between_us: Some(1e9), item: Some(400.0), ..usual() };
        let bounded = found.bounded();
        assert_eq!((bounded.step, bounded.between_us, bounded.item), (0.01, Some(1e5), Some(100.0)));
        assert!(curves().in_service(bounded).mistakes().is_empty() && !bounded.are_usual());
        assert_eq!(usual().bounded(), usual());
        assert!(usual().are_usual() && !ServiceFactors { step: 4.0, ..usual() }.are_usual());
        assert!(!ServiceFactors { item: Some(20.0), ..usual() }.are_usual());
    }

    fn usual() -> ServiceFactors {
        ServiceFactors {
            encode: 1.1,
            step: 1.3,
            between_us: None,
            prefill: None,
            front: 1.5,
            item: Some(4.0),
            at_s: None,
        }
    }

    #[test]
    fn a_file_keeps_the_factors() {
        let scaled = curves().in_service(ServiceFactors {
            encode: 2.0,
            step: 4.0,
            between_us: Some(25.0),
            prefill: Some(8.0),
            front: 0.5,
            item: Some(0.25),
            at_s: Some(7),
        });
        let text = serde_json::to_string(&scaled).unwrap();
        assert_eq!(CostCurves::read(&text).unwrap(), scaled);
    }
}
