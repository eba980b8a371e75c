//! Cores of a PD worker that decodes, lent to the encodes of other workers of its host.
//!
//! A step of few sequences reads all weights as one of many does. While others encode on the same cores, a decode step waits for
//! as long as every answer is ahead of its TPOT SLO and far from its deadline: they have the cores, and fewer steps decode more
//! sequences each. Steps of other workers are not waited for: of workers that only decode one would stand still at a time.

use std::time::Duration;

/// Shortest time worth a wait.
const LEAST: Duration = Duration::from_millis(2);
/// Time from one look at whether others encode to the next.
const LOOK: Duration = Duration::from_millis(5);

/// Time to wait before the next decode step, after which to ask again. `None`: no wait. `spare_slack`: that of
/// [`Engine::spare_decode_slack`](triptych_engine::Engine::spare_decode_slack).
pub fn wait(spare_slack: Duration, others_encode: impl FnOnce() -> bool) -> Option<Duration> {
    (spare_slack >= LEAST && others_encode()).then(|| spare_slack.min(LOOK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_waits_for_encodes_alone_and_as_long_as_its_slack_is() {
        let ms = Duration::from_millis;
        let waits = |slack, others| wait(ms(slack), || others);
        assert_eq!(
            [0, 1, 2, 3, 900].map(|slack| waits(slack, true)),
            [None, None, Some(ms(2)), Some(ms(3)), Some(LOOK)]
        );
        assert_eq!(waits(900, false), None);
    }
}
