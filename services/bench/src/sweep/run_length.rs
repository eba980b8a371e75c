//! The lengths of a run: its judged window and its warm-up.

use std::time::Duration;

/// Least warm-up, in times of a request that is alone: a loaded server takes a few times as long, and until then more requests
/// begin than end, which is no backlog.
const WARM_UP_ANSWERS: f64 = 4.0;
/// Longest warm-up that follows from that, in seconds.
const MAX_WARM_UP_S: f64 = 600.0;

/// The judged window of a run at a rate, in which as many requests are due as are to be judged; `longest` at most.
pub(super) fn window(n_requests: u64, longest: Duration, rate: f64) -> Duration {
    Duration::try_from_secs_f64(n_requests as f64 / rate).map_or(longest, |all| all.min(longest))
}

/// The warm-up before such a window; `alone_s` is the time of a request that is alone, in seconds.
pub(super) fn warm_up(window: Duration, alone_s: f64) -> Duration {
    let of_window = (window.as_secs_f64() / 10.0).clamp(5.0, 30.0);
    Duration::from_secs_f64(of_window.max(WARM_UP_ANSWERS * alone_s).min(MAX_WARM_UP_S))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warm_up_is_a_part_of_the_window_and_outlasts_answers() {
        let of = |window, alone_s| warm_up(Duration::from_secs(window), alone_s).as_secs_f64();
        assert_eq!([of(20, 0.1), of(100, 0.1), of(600, 0.1)], [5.0, 10.0, 30.0]);
        assert_eq!([of(20, 3.0), of(600, 3.0), of(600, 20.0)], [12.0, 30.0, 80.0]);
        assert_eq!(of(20, 1e6), 600.0);
    }
}
