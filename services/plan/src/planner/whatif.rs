//! Plans for other demands.

use super::answer::{Recommendation, WhatIf};
use super::demand::Reused;
use super::explore::explore;
use super::means::Means;
use super::progress::{Phase, Progress, Step};
use super::question::{PlanError, Question};
use super::search::{RunSpec, SearchedCandidate, run};

/// Share of repeated items.
const REUSED: f64 = 0.5;

/// Plans for twice the rate, and for half of the items repeated; goodput is that of a first search.
pub fn all(
    question: &Question<'_>,
    answer: &Recommendation,
    progress: Progress<'_>,
) -> Result<Vec<WhatIf>, PlanError> {
    let best = &answer.best;
    if best.goodput.mean == 0.0 || !question.effort.what_if {
        return Ok(Vec::new());
    }
    let twice = best.goodput.mean * 2.0;
    let spec = RunSpec { rate: twice, seed: 1, n_requests: question.effort.requests };
    let step = |step: Step<'_>, what: &str| {
        progress(Step { phase: Phase::WhatIf, what: &format!("{what}: {}", step.what), ..step });
    };
    let overloaded = run(question, &best.found.candidate, spec)?;
    let attainment = overloaded.verdict.attainment();
    let doubled =
        winner(&question.with(question.demand, question.budget.times(2)), &|s| step(s, "twice the budget"))?;
    let mut answers = vec![WhatIf {
        question: "the rate doubles".to_owned(),
        answer: match &doubled {
            Some(found) => format!(
                "at {twice:.2} requests/s this cluster meets the SLO of {:.0} % of requests; twice the budget \
                 serves {:.2} requests/s as {}, by a first search",
                attainment * 1e2,
                found.rate,
                found.candidate.name()
            ),
            None => {
                format!("at {twice:.2} requests/s this cluster meets the SLO of {:.0} %", attainment * 1e2)
            }
        },
        goodput: doubled.as_ref().map_or(0.0, |found| found.rate),
        shape: doubled.map(|found| found.candidate.shape),
    }];
    if answer.means.items > 0.0 {
        let reused = Reused { demand: question.demand, share: REUSED };
        let found = winner(&question.with(&reused, question.budget), &|s| step(s, "items repeated"))?;
        answers.push(WhatIf {
            question: "half of the items are repeated".to_owned(),
            answer: match &found {
                Some(found) if found.candidate.shape == best.shape => {
                    format!(
                        "the same cluster is best and serves {:.2} requests/s, by a first search",
                        found.rate
                    )
                }
                Some(found) => {
                    let name = found.candidate.name();
                    format!("{name} is best and serves {:.2} requests/s, by a first search", found.rate)
                }
                None => "no cluster meets the SLO".to_owned(),
            },
            goodput: found.as_ref().map_or(0.0, |found| found.rate),
            shape: found.map(|found| found.candidate.shape),
        });
    }
    Ok(answers)
}

/// The best cluster by the coarse search.
fn winner(question: &Question<'_>, progress: Progress<'_>) -> Result<Option<SearchedCandidate>, PlanError> {
    let Some(means) = Means::of(question.demand, &question.curves[0]) else { return Ok(None) };
    let (ranked, _) = explore(question, &means, progress)?;
    Ok(ranked.into_iter().next().filter(|found| found.rate > 0.0))
}
