//! The inputs of a plan, and why it cannot be made.

use super::budget::Budget;
use super::demand::Demand;
use super::effort::Effort;
use super::model_error::ModelError;
use crate::curves::CostCurves;
use crate::simulator::SpecError;
use crate::simulator::spec::{FrontCores, PromptSpec};
use std::sync::Arc;
use thiserror::Error;
use triptych_bench::judge::Rule;
use triptych_bench::slo::Slo;

/// The inputs of a plan.
pub struct Question<'a> {
    /// Offered requests.
    pub demand: &'a dyn Demand,
    /// Latency limits.
    pub slo: Slo,
    /// Rule by which a run passes.
    pub rule: Rule,
    /// Cost curves of a worker, one for each number of threads that it may have.
    pub curves: Vec<Arc<CostCurves>>,
    /// Cores or workers.
    pub budget: Budget,
    /// Cores of proxy, store and clients.
    pub front: FrontCores,
    /// True if the workers of a host lend each other their cores, as `triptych up` has it.
    pub shares_cores: bool,
    /// Layout of the model's prompts.
    pub prompt: PromptSpec,
    /// Size of the search.
    pub effort: Effort,
    /// The model's own error.
    pub error: ModelError,
}

/// A plan that cannot be made.
#[derive(Debug, Error)]
pub enum PlanError {
    /// No worker fits the budget.
    #[error(
        "a budget of {budget} has no room for a worker of {threads} threads, the fewest that were measured"
    )]
    Budget {
        /// The budget.
        budget: Budget,
        /// Threads of the smallest worker.
        threads: usize,
    },
    /// Curves are missing.
    #[error("no curves are given; measure them with `triptych profile`")]
    NoCurves,
    /// Curves are of two models.
    #[error("curves of {first} and of {second}; a plan is for one model")]
    Models {
        /// Model of the first file.
        first: String,
        /// Model of another file.
        second: String,
    },
    /// The demand offers nothing.
    #[error("the workload offers no request")]
    Empty,
    /// The simulator refuses a cluster.
    #[error("cannot simulate {name}: {source}")]
    Spec {
        /// The candidate.
        name: String,
        /// The reason.
        source: SpecError,
    },
}

impl Question<'_> {
    /// Refuses questions without an answer.
    ///
    /// # Errors
    /// [`PlanError`].
    pub(super) fn check(&self) -> Result<(), PlanError> {
        let first = self.curves.first().ok_or(PlanError::NoCurves)?;
        if let Some(other) = self.curves.iter().find(|c| c.model != first.model) {
            return Err(PlanError::Models { first: first.model.clone(), second: other.model.clone() });
        }
        let threads = self.curves.iter().map(|c| c.threads).min().unwrap_or(1);
        if self.curves.iter().all(|c| self.budget.workers(c.threads) < c.least_workers()) {
            return Err(PlanError::Budget { budget: self.budget, threads });
        }
        Ok(())
    }

    /// Curves of a worker that all cores of the host are lent to: the most that were measured, if they are more than its own.
    pub(super) fn lent_to(&self, own: &Arc<CostCurves>) -> Option<Arc<CostCurves>> {
        let most = self.curves.iter().max_by_key(|curves| curves.threads)?;
        (self.shares_cores && most.threads > own.threads).then(|| Arc::clone(most))
    }

    /// The question for another demand and budget.
    pub(super) fn with<'a>(&self, demand: &'a dyn Demand, budget: Budget) -> Question<'a> {
        Question { demand, budget, curves: self.curves.clone(), ..*self }
    }
}
