//! The page: published figures beside simulated ones.

use super::file::{Figure, Metric};
use super::simulated::SimulatedPaper;
use std::collections::BTreeMap;
use triptych_bench::report::{Cell, Report, Section, Table};

/// Largest ratio of simulated to published, and its inverse, that counts as agreement.
const AGREES: f64 = 1.25;

/// The page of some publications.
pub fn page(papers: &[SimulatedPaper]) -> Report {
    let mut report = Report {
        title: "Published tables, simulated".to_owned(),
        lead: "Figures that others measured on their machines, beside a simulation of the same clusters with curves from \
               published figures. Decisions are those of this scheduler and proxy, not of the servers that were measured."
            .to_owned(),
        ..Report::default()
    };
    for paper in papers {
        report.sections.extend(sections(paper));
    }
    report
}

fn sections(paper: &SimulatedPaper) -> Vec<Section> {
    let content = &paper.read.paper;
    let list = |items: &[String]| items.iter().map(|item| format!("- {item}")).collect::<Vec<_>>().join("\n");
    let hosts: Vec<String> = paper.read.curves.iter().flatten().map(|c| c.measured.host.clone()).collect();
    let mut hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
    hosts.sort_unstable();
    hosts.dedup();
    let figures = Section {
        heading: content.title.clone(),
        text: format!(
            "{}\n\nSource: <{}>. Curves: {}. Simulated with {} requests a run, all judged; goodput is the highest rate of those \
             that were tried before one fails {}.\n\nThe summary:\n\n{}",
            content.lead,
            content.source,
            hosts.join("; "),
            content.n_requests,
            content.slo,
            list(&summary(paper))
        ),
        tables: [goodput_table(paper), latency_table(paper)]
            .into_iter()
            .filter(|t| !t.rows.is_empty())
            .collect(),
        charts: Vec::new(),
    };
    let untold = Section {
        heading: "What it does not tell, and what the comparison says".to_owned(),
        text: format!("{}\n\n{}", list(&content.untold), list(&content.reading)),
        ..Section::default()
    };
    vec![figures, untold]
}

/// Figures of a paper with what was simulated, and the load of each.
fn all(paper: &SimulatedPaper) -> impl Iterator<Item = (&str, &Figure, &BTreeMap<String, f64>)> {
    let loads = paper.read.paper.workloads.iter().zip(&paper.values);
    loads.flat_map(|(load, values)| {
        load.figures.iter().zip(values).map(|(figure, values)| (load.workload.as_str(), figure, values))
    })
}

/// One line for each quantity: simulated over published, in the median and from least to most.
fn summary(paper: &SimulatedPaper) -> Vec<String> {
    let mut by_metric: Vec<(Metric, Vec<f64>)> = Vec::new();
    for (_, figure, simulated) in all(paper) {
        let ratios = figure.published.iter().filter_map(|(name, published)| {
            simulated.get(name).map(|value| value / published).filter(|ratio| ratio.is_finite())
        });
        let ratios: Vec<f64> = ratios.collect();
        match by_metric.iter_mut().find(|(metric, _)| *metric == figure.metric) {
            Some((_, all)) => all.extend(ratios),
            None => by_metric.push((figure.metric, ratios)),
        }
    }
    let line = |(metric, mut ratios): (Metric, Vec<f64>)| {
        ratios.sort_by(f64::total_cmp);
        let (least, most) = (ratios.first()?, ratios.last()?);
        let median = ratios.get(ratios.len() / 2)?;
        let near = ratios.iter().filter(|r| (1.0 / AGREES..=AGREES).contains(*r)).count();
        Some(format!(
            "{}: simulated over published {median:.2} in the median, {least:.2} to {most:.2}; {near} of {} within a quarter",
            metric.as_str(),
            ratios.len()
        ))
    };
    by_metric.into_iter().filter_map(line).collect()
}

/// Goodput of each load, with the ratio of the first cluster to the second.
fn goodput_table(paper: &SimulatedPaper) -> Table {
    let clusters: Vec<&str> = paper.read.paper.clusters.iter().map(|c| c.name.as_str()).collect();
    let mut columns = vec!["workload".to_owned()];
    for name in &clusters {
        columns.push(format!("{name}, published"));
        columns.push("simulated".to_owned());
    }
    let ratio_name = format!("{} : {}", clusters[0], clusters[1]);
    columns.extend([format!("{ratio_name}, published"), "simulated".to_owned()]);
    let row = |(load, figure, simulated): (&str, &Figure, &BTreeMap<String, f64>)| {
        let number = |value: Option<&f64>| value.map_or_else(|| "–".to_owned(), |v| format!("{v:.0}"));
        let ratio = |of: &BTreeMap<String, f64>| {
            let pair = of.get(clusters[0]).zip(of.get(clusters[1]).filter(|v| **v > 0.0));
            pair.map_or_else(|| "–".to_owned(), |(a, b)| format!("{:.2}", a / b))
        };
        let values = clusters
            .iter()
            .flat_map(|name| [number(figure.published.get(*name)), number(simulated.get(*name))]);
        let ratios = [ratio(&figure.published), ratio(simulated)];
        std::iter::once(load.to_owned()).chain(values).chain(ratios).map(Cell::from).collect()
    };
    let rows = all(paper).filter(|(_, figure, _)| figure.metric == Metric::Goodput).map(row).collect();
    Table { caption: format!("Goodput, requests/s, within {}", paper.read.paper.slo), columns, rows }
}

/// All other figures, a line each.
fn latency_table(paper: &SimulatedPaper) -> Table {
    let clusters: Vec<&str> = paper.read.paper.clusters.iter().map(|c| c.name.as_str()).collect();
    let mut columns = vec!["workload".to_owned(), "figure".to_owned(), "requests/s".to_owned()];
    columns.extend(clusters.iter().map(|name| format!("{name}: published → simulated")));
    columns.push(format!("{} : {}", clusters[0], clusters[1]));
    let number = |v: f64| if v < 10.0 { format!("{v:.2}") } else { format!("{v:.0}") };
    let shown = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), number);
    let row = |(load, figure, simulated): (&str, &Figure, &BTreeMap<String, f64>)| {
        let rate = figure.rate.map_or_else(String::new, |rate| rate.to_string());
        let values = clusters.iter().map(|name| {
            let [published, simulated] =
                [&figure.published, simulated].map(|of| shown(of.get(*name).copied()));
            format!("{published} → {simulated}")
        });
        let ratio = |of: &BTreeMap<String, f64>| Some(of.get(clusters[0])? / of.get(clusters[1])?);
        let published = match figure.ratio {
            Some([low, high]) if high > low => format!("{} to {}", number(low), number(high)),
            Some([low, _]) => number(low),
            None => shown(ratio(&figure.published)),
        };
        let ratios = format!("{published} → {}", shown(ratio(simulated)));
        let head = [load.to_owned(), figure.metric.as_str().to_owned(), rate];
        head.into_iter().chain(values).chain([ratios]).map(Cell::from).collect()
    };
    let rows = all(paper).filter(|(_, figure, _)| figure.metric != Metric::Goodput).map(row).collect();
    Table { caption: "Latencies and throughput at rates".to_owned(), columns, rows }
}
