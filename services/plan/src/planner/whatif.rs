//! What becomes of the plan if the demand is another.

use super::answer::{Answer, WhatIf};
use super::bound::Means;
use super::candidate::Shape;
use super::demand::{Demand, Reused};
use super::search::{Found, run};
use super::{Budget, PlanError, Question, explore};

/// Of items, when pictures come again.
const REUSED: f64 = 0.5;

/// The rate doubles; half of the items were there before.
pub fn all(question: &Question<'_>, answer: &Answer) -> Result<Vec<WhatIf>, PlanError> {
    let best = &answer.best;
    if best.goodput.mean == 0.0 || !question.effort.what_if {
        return Ok(Vec::new());
    }
    let twice = best.goodput.mean * 2.0;
    let overloaded = run(question, &best.found.candidate, (twice, 1, question.effort.requests))?;
    let kept = overloaded.verdict.attainment();
    let doubled = winner(&question.with(question.demand, question.budget.times(2)))?;
    let mut answers = vec![WhatIf {
        question: "the rate doubles".to_owned(),
        answer: match &doubled {
            Some(found) => format!(
                "at {twice:.2} requests/s this cluster keeps its promises to {:.0} % of requests; twice the budget \
                 serves {:.2} requests/s as {}",
                kept * 1e2,
                found.rate,
                found.candidate.name()
            ),
            None => {
                format!("at {twice:.2} requests/s this cluster keeps its promises to {:.0} %", kept * 1e2)
            }
        },
        goodput: doubled.as_ref().map_or(0.0, |found| found.rate),
        shape: doubled.map(|found| found.candidate.shape),
    }];
    if answer.means.items > 0.0 {
        let reused = Reused { demand: question.demand, share: REUSED };
        let found = winner(&question.with(&reused, question.budget))?;
        answers.push(WhatIf {
            question: "half of the items were seen before".to_owned(),
            answer: match &found {
                Some(found) if found.candidate.shape == best.shape => {
                    format!("the same cluster is best and serves {:.2} requests/s", found.rate)
                }
                Some(found) => {
                    format!("{} is best and serves {:.2} requests/s", found.candidate.name(), found.rate)
                }
                None => "no cluster keeps the promises".to_owned(),
            },
            goodput: found.as_ref().map_or(0.0, |found| found.rate),
            shape: found.map(|found| found.candidate.shape),
        });
    }
    Ok(answers)
}

/// The best by the coarse search.
fn winner(question: &Question<'_>) -> Result<Option<Found>, PlanError> {
    let Some(means) = Means::of(question.demand, &question.curves[0]) else { return Ok(None) };
    let (ranked, _) = explore(question, &means, &|_, _, _| {})?;
    Ok(ranked.into_iter().next().filter(|found| found.rate > 0.0))
}

impl Question<'_> {
    fn with<'a>(&self, demand: &'a dyn Demand, budget: Budget) -> Question<'a> {
        Question { demand, budget, curves: self.curves.clone(), ..*self }
    }
}

/// Encoders for each PD worker, where they are apart.
pub fn ratio(shape: Shape) -> Option<f64> {
    match shape {
        Shape::Split { encoders, pds } => Some(encoders as f64 / pds as f64),
        Shape::Replicated { .. } | Shape::Colocated => None,
    }
}
