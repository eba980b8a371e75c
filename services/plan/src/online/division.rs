//! Number of workers that hold encoder and decoder to leave to encodes: the present number and those near the division of the
//! work are simulated, and the present one stays unless it misses the SLO and another is better by a margin.

use super::flexible::ProxyView;
use crate::planner::bound;
use crate::planner::means::Means;
use crate::planner::search::{RunSpec, run, run_as_asked};
use crate::planner::{Candidate, PlanError, Question, Shape, WorkerSettings};
use std::collections::BTreeSet;
use std::sync::Arc;
use triptych_proxy::Roles;

/// Attainment by which another division has to be better: below it, chance decides.
const MARGIN: f64 = 0.02;

/// Workers of a cluster by what they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workers {
    /// Encoder workers.
    pub encoders: usize,
    /// PD workers without encoders.
    pub pds: usize,
    /// PD workers with encoders.
    pub flexible: usize,
    /// Those of them that are left to encodes.
    pub encoding: usize,
    /// Division of encodes where none is.
    pub roles: Roles,
}

/// The division for a load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Division {
    /// Flexible workers to leave to encodes.
    pub encoding: usize,
    /// Simulated SLO attainment of that.
    pub attainment: f64,
    /// Simulated SLO attainment of the present division.
    pub present: f64,
}

impl From<&ProxyView> for Workers {
    fn from(view: &ProxyView) -> Self {
        Self {
            encoders: view.encoders,
            pds: view.pds,
            flexible: view.n_up(),
            encoding: view.n_encoding(),
            roles: view.roles,
        }
    }
}

impl Workers {
    /// True if there is something to divide.
    pub fn are_divisible(&self) -> bool {
        self.flexible > 0 && self.flexible + self.pds > 1
    }

    /// Most flexible workers that can be left to encodes: somebody has to answer.
    fn most(&self) -> usize {
        if self.pds > 0 { self.flexible } else { self.flexible.saturating_sub(1) }
    }

    /// The cluster with so many flexible workers left to encodes.
    fn shape(&self, encoding: usize) -> Shape {
        let (encoders, pds) = (self.encoders + encoding, self.pds + self.flexible - encoding);
        match (encoders, self.roles) {
            (0, Roles::Auto) => Shape::Elastic { workers: pds },
            (0, Roles::Fixed) => Shape::Replicated { workers: pds },
            _ => Shape::Split { encoders, pds },
        }
    }
}

/// Divides for `rate` requests a second.
///
/// # Errors
/// [`PlanError`].
pub fn divide(question: &Question<'_>, rate: f64, workers: &Workers) -> Result<Division, PlanError> {
    let curves = question.curves.first().ok_or(PlanError::NoCurves)?;
    let means = Means::of(question.demand, curves).ok_or(PlanError::Empty)?;
    let candidate =
        |shape| Candidate { shape, curves: Arc::clone(curves), settings: WorkerSettings::default() };
    let spec = RunSpec { rate, seed: 0, n_requests: question.effort.requests };
    let present = workers.encoding.min(workers.most());
    let evidence = run(question, &candidate(workers.shape(present)), spec)?;
    let now = evidence.verdict.attainment();
    let mut best = Division { encoding: present, attainment: now, present: now };
    if evidence.verdict.passed {
        return Ok(best);
    }
    // In a long run of too large a load none meets the SLO; in its first requests they differ.
    let attained = |encoding: usize| {
        let evidence = run_as_asked(question, &candidate(workers.shape(encoding)), spec)?;
        Ok::<_, PlanError>(evidence.verdict.attainment())
    };
    let now = attained(present)?;
    best = Division { attainment: now, present: now, ..best };
    let one = bound::of(&candidate(Shape::Split { encoders: 1, pds: 1 }), &means);
    let share = one.encode_s / (one.encode_s + one.decode_s).max(f64::MIN_POSITIVE);
    let all = workers.encoders + workers.pds + workers.flexible;
    // A cast from a float saturates.
    let near = ((share * all as f64).round() as usize).saturating_sub(workers.encoders);
    let tries: BTreeSet<usize> =
        [0, near.saturating_sub(1), near, near + 1].map(|n| n.min(workers.most())).into();
    for encoding in tries.into_iter().filter(|n| *n != present) {
        let attainment = attained(encoding)?;
        if attainment > best.attainment.max(now + MARGIN) {
            best = Division { encoding, attainment, ..best };
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curves::sample::{Costs, curves_of};
    use crate::planner::inputs::PlanInputs;
    use crate::planner::model_error::Residuals;
    use crate::planner::{Budget, Effort, Named};
    use crate::simulator::spec::FrontCores;
    use triptych_bench::workload::Workload;

    /// The division of two workers with both, of which `encoding` encode, for a workload.
    fn divided(costs: &Costs, workload: &str, slo: &str, (rate, encoding): (f64, usize)) -> Division {
        let inputs = PlanInputs {
            curves: vec![Arc::new(curves_of(costs))],
            demand: Named {
                workload: Workload::parse(workload).unwrap(),
                arrivals: "poisson".parse().unwrap(),
            },
            slo: slo.parse().unwrap(),
            frontend: FrontCores::Own,
            shares_cores: false,
            effort: Effort { requests: 200, ..Effort::QUICK },
            residuals: Arc::new(Residuals::stored()),
        };
        let question = inputs.question(Budget::Workers(2), &inputs.demand);
        let workers = Workers { encoders: 0, pds: 0, flexible: 2, encoding, roles: Roles::Fixed };
        divide(&question, rate, &workers).unwrap()
    }

    #[test]
    fn encodes_that_stand_beside_decodes_get_a_worker_and_a_division_that_serves_stays() {
        // An image takes 200 ms of a worker and a token 2 ms: beside each other a token takes longer than the SLO allows.
        let costs = Costs { encode_fixed: 200_000.0, encode_token: 0.0, ..Costs::default() };
        let of = |slo, at| divided(&costs, "epd-short:images=1,text=20,output=32", slo, at);
        let found = of("ttft=2s,tpot=4ms", (2.0, 0));
        assert!(found.encoding == 1 && found.attainment > found.present + MARGIN, "{found:?}");
        assert_eq!(of("ttft=2s,tpot=4ms", (2.0, 1)).encoding, 1, "it serves");
        assert_eq!(of("ttft=20s,tpot=400ms", (2.0, 0)).encoding, 0, "so does this");
    }

    #[test]
    fn a_worker_that_nobody_needs_for_encodes_answers_again() {
        // Answers of more than one worker's time, and images that cost nothing.
        let costs =
            Costs { encode_fixed: 100.0, encode_token: 0.0, step_fixed: 20_000.0, ..Costs::default() };
        let of = |at| divided(&costs, "epd-short:images=1,text=400,output=64", "ttft=1s,tpot=60ms", at);
        let found = of((10.0, 1));
        assert!(found.encoding == 0 && found.attainment > found.present + 0.5, "{found:?}");
        // More than both serve.
        let found = of((24.0, 1));
        assert_eq!(found.encoding, 0, "{found:?}");
    }

    #[test]
    fn what_cannot_be_divided_is_not() {
        let of = |flexible, pds| Workers { encoders: 1, pds, flexible, encoding: 0, roles: Roles::Auto };
        assert!(!of(0, 3).are_divisible() && !of(1, 0).are_divisible());
        assert!(of(1, 1).are_divisible() && of(2, 0).are_divisible());
        assert_eq!((of(2, 0).most(), of(2, 1).most()), (1, 2));
        assert_eq!(of(2, 1).shape(1), Shape::Split { encoders: 2, pds: 2 });
        let alone = Workers { encoders: 0, ..of(3, 0) };
        assert_eq!(alone.shape(0), Shape::Elastic { workers: 3 });
        assert_eq!(alone.shape(1), Shape::Split { encoders: 1, pds: 2 });
    }
}
