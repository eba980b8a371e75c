//! Simulated cost of a request in fleets of growing size, disaggregated and colocated.

use super::answer::RecommendedCluster;
use super::budget::Budget;
use super::effort::Effort;
use super::explore::explore;
use super::means::Means;
use super::progress::{Progress, Step};
use super::question::{PlanError, Question};
use super::search;
use serde::Serialize;
use triptych_bench::report::{Axis, Cell, Chart, LineChart, Report, Scale, Section, Series, Stroke, Table};

/// Requests of a run for each worker, so that a large fleet is loaded.
const REQUESTS_PER_WORKER: usize = 25;

/// The best clusters of one size.
#[derive(Clone, Debug, Serialize)]
pub struct Fleet {
    /// Workers of all kinds.
    pub workers: usize,
    /// The best disaggregated cluster.
    #[serde(rename = "disaggregated")]
    pub split: Option<RecommendedCluster>,
    /// The best colocated cluster.
    #[serde(rename = "colocated")]
    pub both: Option<RecommendedCluster>,
}

/// Plans one fleet of each size.
///
/// # Errors
/// [`PlanError`].
pub fn fleets(
    question: &Question<'_>,
    sizes: &[usize],
    progress: Progress<'_>,
) -> Result<Vec<Fleet>, PlanError> {
    let mut fleets = Vec::new();
    for &workers in sizes {
        let effort = question.effort;
        let effort =
            Effort { requests: effort.requests.max(REQUESTS_PER_WORKER * workers), tunes: false, ..effort };
        let question = Question {
            budget: Budget::Workers(workers),
            effort,
            curves: question.curves.clone(),
            ..*question
        };
        question.check()?;
        let means = Means::of(question.demand, &question.curves[0]).ok_or(PlanError::Empty)?;
        let report = |step: Step<'_>| {
            progress(Step { what: &format!("{workers} workers: {}", step.what), ..step });
        };
        let (ranked, _) = explore(&question, &means, &report)?;
        let best = |split: bool| {
            let first = ranked.iter().find(|f| f.candidate.shape.is_split() == split && f.rate > 0.0);
            let settled = first.map(|found| search::settle(&question, found.clone())).transpose()?;
            Ok::<_, PlanError>(settled.map(|found| RecommendedCluster::new(&question, found)))
        };
        fleets.push(Fleet { workers, split: best(true)?, both: best(false)? });
    }
    Ok(fleets)
}

impl RecommendedCluster {
    /// Cost in core-seconds of a request.
    pub fn cost(&self) -> f64 {
        1.0 / self.goodput_per_core.max(f64::MIN_POSITIVE)
    }
}

/// The page.
pub fn report(question: &Question<'_>, fleets: &[Fleet]) -> Report {
    let curves = &question.curves[0];
    let measured = &curves.measured;
    let mut report = Report {
        title: format!("Cost of a request in fleets of {}", curves.model),
        lead: "Simulated with the scheduler and the router that serve, and costs that were measured on one worker. Cost is \
               core-seconds of a request at goodput: less is better, and a level line is a fleet that grows without loss."
            .to_owned(),
        facts: vec![
            ("workload".into(), question.demand.name()),
            ("SLO".into(), question.slo.to_string()),
            ("curves".into(), format!("{}, commit {}", measured.host, measured.commit)),
            ("cores of a worker".into(), curves.threads.to_string()),
        ],
        ..Report::default()
    };
    let line = |name: &str, place, pick: fn(&Fleet) -> Option<&RecommendedCluster>| {
        let chosen = || fleets.iter().filter_map(|f| Some((f.workers as f64, pick(f)?)));
        Series {
            name: name.to_owned(),
            place,
            stroke: Stroke::Marked,
            points: chosen().map(|(n, choice)| (n, choice.cost())).collect(),
            bands: Vec::new(),
        }
    };
    let axis = |label: &str, scale| Axis { label: label.to_owned(), scale };
    let chart = Chart::Lines(LineChart {
        title: "Core-seconds of a request at goodput".to_owned(),
        x: axis("workers", Scale::Log),
        y: axis("core-seconds of a request", Scale::Linear),
        series: vec![
            line("disaggregated", 0, |f| f.split.as_ref()),
            line("colocated", 1, |f| f.both.as_ref()),
        ],
        limits: Vec::new(),
    });
    report.sections.push(Section {
        heading: "Cost of a request".to_owned(),
        text: "The best ratio of each size, and the best settings of colocated workers.".to_owned(),
        tables: vec![table(fleets)],
        charts: vec![chart],
    });
    report
}

fn table(fleets: &[Fleet]) -> Table {
    let columns = [
        "workers",
        "best disaggregated",
        "requests/s",
        "core-seconds",
        "colocated: requests/s",
        "core-seconds",
    ];
    let row = |fleet: &Fleet| {
        let goodput = |c: &RecommendedCluster| {
            format!("{:.2} ({:.2} to {:.2})", c.goodput.mean, c.goodput.low, c.goodput.high)
        };
        let of = |choice: &Option<RecommendedCluster>, what: &dyn Fn(&RecommendedCluster) -> String| {
            Cell::from(choice.as_ref().map_or_else(|| "none".to_owned(), what))
        };
        let cost = |c: &RecommendedCluster| format!("{:.3}", c.cost());
        vec![
            Cell::from(fleet.workers.to_string()),
            of(&fleet.split, &|c| c.topology.clone()),
            of(&fleet.split, &goodput),
            of(&fleet.split, &cost),
            of(&fleet.both, &goodput),
            of(&fleet.both, &cost),
        ]
    };
    Table {
        caption: "Goodput and cost by size".to_owned(),
        columns: columns.map(str::to_owned).to_vec(),
        rows: fleets.iter().map(row).collect(),
    }
}
