//! The lengths of a run: its judged window and its warm-up.

use crate::arrivals::Arrivals;
use crate::offered::Offered;
use crate::slo::Slo;
use crate::workload::Workload;
use std::time::Duration;

/// Least warm-up, in times of a request that is alone: a loaded server takes a few times as long, and until then more requests
/// begin than end, which is no backlog.
const WARM_UP_ANSWERS: f64 = 4.0;
/// Longest warm-up that follows from the SLO, in the same: an SLO can be so loose that nothing comes near it.
const SLO_ANSWERS: f64 = 10.0;
/// Longest warm-up that follows from answers, in seconds.
const MAX_WARM_UP_S: f64 = 600.0;

/// Requests of a workload whose lengths say how long an answer within the SLO takes.
const N_LENGTHS: usize = 256;

/// Mean times of an answer in seconds, which a warm-up outlasts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AnswerTimes {
    /// Of a request that is alone.
    pub alone_s: f64,
    /// Of a request that just meets the SLO; `None` if the SLO has no limit to its time.
    pub within_slo_s: Option<f64>,
}

impl AnswerTimes {
    /// Those of a workload, of whose requests one that is alone takes `alone_s` seconds.
    pub fn of(workload: &Workload, slo: &Slo, alone_s: f64) -> Self {
        let requests = workload.requests(1.0, Arrivals::Constant, 0).take(N_LENGTHS);
        let times: Option<Vec<f64>> = requests.map(|r| longest_s(&r, &r.slo.unwrap_or(*slo))).collect();
        let times = times.filter(|times| !times.is_empty());
        let within_slo_s = times.map(|times| times.iter().sum::<f64>() / times.len() as f64);
        Self { alone_s, within_slo_s }
    }
}

/// The time of an answer that just meets the SLO, in seconds; `None` if the SLO does not limit it.
fn longest_s(request: &Offered, slo: &Slo) -> Option<f64> {
    let n_further = request.output_tokens.saturating_sub(1);
    let further = match (n_further, slo.tpot) {
        (0, _) => Some(Duration::ZERO),
        (n, tpot) => tpot.map(|tpot| tpot.saturating_mul(n)),
    };
    let by_token = slo.ttft.zip(further).map(|(ttft, further)| ttft.saturating_add(further));
    let limits = [slo.e2el, by_token];
    limits.into_iter().flatten().min().map(|limit| limit.as_secs_f64())
}

/// The judged window of a run at a rate, in which as many requests are due as are to be judged; `longest` at most.
pub(super) fn window(n_requests: u64, longest: Duration, rate: f64) -> Duration {
    Duration::try_from_secs_f64(n_requests as f64 / rate).map_or(longest, |all| all.min(longest))
}

/// The warm-up before such a window. At a rate that passes, an answer takes no longer than the SLO allows, so what began before
/// the warm-up's end has ended by one such time later.
pub(super) fn warm_up(window: Duration, answers: &AnswerTimes) -> Duration {
    let of_window = (window.as_secs_f64() / 10.0).clamp(5.0, 30.0);
    let of_slo = answers.within_slo_s.unwrap_or(0.0).min(SLO_ANSWERS * answers.alone_s);
    let of_answers = of_slo.max(WARM_UP_ANSWERS * answers.alone_s).min(MAX_WARM_UP_S);
    Duration::from_secs_f64(of_window.max(of_answers))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warm_up_s(window_s: u64, alone_s: f64, within_slo_s: Option<f64>) -> f64 {
        warm_up(Duration::from_secs(window_s), &AnswerTimes { alone_s, within_slo_s }).as_secs_f64()
    }

    #[test]
    fn a_warm_up_is_a_part_of_the_window_and_outlasts_answers() {
        let of = |window, alone_s| warm_up_s(window, alone_s, None);
        assert_eq!([of(20, 0.1), of(100, 0.1), of(600, 0.1)], [5.0, 10.0, 30.0]);
        assert_eq!([of(20, 3.0), of(600, 3.0), of(600, 20.0)], [12.0, 30.0, 80.0]);
        assert_eq!(of(20, 1e6), 600.0);
    }

    #[test]
    fn a_warm_up_outlasts_an_answer_that_just_meets_the_slo() {
        let of = |alone_s, within_slo_s| warm_up_s(40, alone_s, Some(within_slo_s));
        assert_eq!([of(3.0, 25.0), of(3.0, 9.0), of(0.1, 0.9)], [25.0, 12.0, 5.0]);
        // An SLO that nothing comes near.
        assert_eq!([of(3.0, 1e3), of(0.1, 1e3), of(100.0, 1e9)], [30.0, 5.0, 600.0]);
    }

    #[test]
    fn the_longest_answer_within_an_slo_is_by_its_limits() {
        let of = |workload: &str, slo: &str| {
            let workload = Workload::parse(workload).expect("a workload");
            let answers = AnswerTimes::of(&workload, &slo.parse().expect("an SLO"), 1.0);
            answers.within_slo_s.map(|seconds| (seconds * 1e3).round() / 1e3)
        };
        assert_eq!(of("text:text=20,output=150", "ttft=10s,tpot=100ms"), Some(24.9));
        assert_eq!(of("text:text=20,output=150", "ttft=10s,tpot=100ms,e2el=20s"), Some(20.0));
        assert_eq!(of("text:text=20,output=150", "e2el=20s"), Some(20.0));
        assert_eq!(of("text:text=20,output=1", "ttft=10s"), Some(10.0));
        assert_eq!(
            [of("text:text=20,output=150", "ttft=10s"), of("text:text=20,output=150", "tpot=1s")],
            [None; 2]
        );
    }
}
