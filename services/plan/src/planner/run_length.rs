//! The length of a simulated run, and the part of it that is judged.
//!
//! Until a request that came first has ended, more requests begin than end. A run that is judged by then has a backlog at every
//! rate: with answers of some seconds a fleet of accelerators would pass at no more than a few requests a second. So warm-up and
//! judged part are at least some times as long as a request that is alone takes.

use triptych_bench::outcome::{End, Outcome};

/// Requests that are simulated alone.
pub(super) const N_ALONE: usize = 8;
/// Requests a second at which each is alone.
pub(super) const RATE_ALONE: f64 = 0.01;
/// The first part of a run is warm-up.
const WARM_UP: f64 = 0.1;
/// Least warm-up, in times of a request that is alone: a loaded cluster takes a few times as long.
const WARM_UP_ANSWERS: f64 = 4.0;
/// Least judged part, in the same.
const JUDGED_ANSWERS: f64 = 10.0;
/// Most requests of a run.
const MOST_REQUESTS: f64 = (1 << 20) as f64;

/// The length of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RunLength {
    /// Offered requests.
    pub n_requests: usize,
    /// Share of the time that is warm-up, from 0 to 1.
    pub warm_up: f64,
}

impl RunLength {
    /// That of a run of at least so many requests, at a rate in requests a second, where one that is alone takes `answer_s`
    /// seconds.
    pub fn of(n_requests: usize, rate: f64, answer_s: f64) -> Self {
        let span_s = n_requests as f64 / rate;
        let warm_up_s = (span_s * WARM_UP).max(answer_s * WARM_UP_ANSWERS);
        let judged_s = (span_s * (1.0 - WARM_UP)).max(answer_s * JUDGED_ANSWERS);
        let whole_s = warm_up_s + judged_s;
        if answer_s * WARM_UP_ANSWERS <= span_s * WARM_UP
            && answer_s * JUDGED_ANSWERS <= span_s * (1.0 - WARM_UP)
        {
            return Self { n_requests, warm_up: WARM_UP };
        }
        // A cast from a float saturates.
        let needed = (rate * whole_s).ceil().min(MOST_REQUESTS) as usize;
        Self { n_requests: needed.max(n_requests), warm_up: warm_up_s / whole_s }
    }
}

/// Mean time of the requests that were answered whole, from when they were due, in seconds; 0 if none was.
pub(super) fn answer_s(outcomes: &[Outcome]) -> f64 {
    let whole = outcomes.iter().filter(|outcome| outcome.end == End::Whole);
    let times: Vec<f64> = whole.map(|o| o.ended.saturating_sub(o.due).as_secs_f64()).collect();
    times.iter().sum::<f64>() / (times.len().max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curves::sample::{Costs, curves_of};
    use crate::planner::inputs::PlanInputs;
    use crate::planner::search::{RunSpec, run};
    use crate::planner::{Budget, Candidate, Effort, Named, Residuals, Shape, WorkerSettings};
    use crate::simulator::spec::FrontCores;
    use std::sync::Arc;
    use triptych_bench::arrivals::Arrivals;
    use triptych_bench::workload::Workload;

    #[test]
    fn answers_of_seconds_are_no_backlog() {
        // Four workers, each of which writes 64 answers of 150 tokens in some 4 s.
        let costs = Costs { step_fixed: 20_000.0, ..Costs::default() };
        let curves = Arc::new(curves_of(&costs));
        let workload = Workload::parse("text:text=20,output=150").expect("a workload");
        let inputs = PlanInputs {
            curves: vec![Arc::clone(&curves)],
            demand: Named { workload, arrivals: Arrivals::Own },
            slo: "ttft=10s,tpot=100ms".parse().expect("an SLO"),
            frontend: FrontCores::Own,
            shares_cores: false,
            effort: Effort::QUICK,
            residuals: Arc::new(Residuals::stored()),
        };
        let question = inputs.question(Budget::Workers(4), &inputs.demand);
        let shape = Shape::Replicated { workers: 4 };
        let candidate = Candidate { shape, curves, settings: WorkerSettings::default() };
        // 200 requests are there within four seconds, and hardly one has ended.
        let spec = RunSpec { rate: 50.0, seed: 1, n_requests: 200 };
        let evidence = run(&question, &candidate, spec).expect("a run");
        assert!(evidence.verdict.passed, "{:?}", evidence.verdict);
        // What is more than they serve is a backlog.
        let evidence = run(&question, &candidate, RunSpec { rate: 100.0, ..spec }).expect("a run");
        assert!(
            !evidence.verdict.passed && !evidence.verdict.serves(&question.rule),
            "{:?}",
            evidence.verdict
        );
    }

    #[test]
    fn short_answers_leave_a_run_as_it_was_asked_for() {
        for (n, rate) in [(200, 7.0), (1200, 0.3), (999, 41.0)] {
            assert_eq!(RunLength::of(n, rate, 0.0), RunLength { n_requests: n, warm_up: 0.1 });
            let shortest = n as f64 / rate / 40.0;
            assert_eq!(RunLength::of(n, rate, shortest * 0.99).n_requests, n);
        }
    }

    #[test]
    fn long_answers_make_it_longer() {
        // 4 times 3 s of warm-up and 10 times 3 s that are judged, at 40 a second.
        let length = RunLength::of(200, 40.0, 3.0);
        assert_eq!(length.n_requests, 40 * 42);
        assert!((length.warm_up - 4.0 / 14.0).abs() < 1e-9);
        // No more than can be simulated.
        assert_eq!(RunLength::of(200, 1e6, 1e3).n_requests, 1 << 20);
    }
}
