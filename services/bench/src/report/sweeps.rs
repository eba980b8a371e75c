//! The page of some results: those of one workload, SLO and model are compared in one section, each a line.

use super::cells;
use super::chart::{Axis, Bar, BarChart, Chart, Limit, LineChart, Scale, Series, Stroke};
use super::names::{name, short};
use super::paired_table::paired_table;
use super::table::{Cell, Table};
use super::{Report, Section};
use crate::result::{RateResult, RunResult, SweepResult};
use std::collections::BTreeMap;

/// Rates of a result that are shown as bars, of many.
const N_BAR_RATES: usize = 4;

/// Properties that comparable results share.
type Kind = (String, String, String, String);

fn kind(sweep: &SweepResult) -> Kind {
    let setup = &sweep.setup;
    (setup.model.clone(), setup.workload.clone(), setup.slo.clone(), setup.arrivals.clone())
}

impl Report {
    /// Page of results in any order.
    pub fn of_sweeps(title: &str, sweeps: &[SweepResult]) -> Self {
        let mut kinds: BTreeMap<Kind, Vec<&SweepResult>> = BTreeMap::new();
        for sweep in sweeps {
            kinds.entry(kind(sweep)).or_default().push(sweep);
        }
        let mut report = Self {
            title: title.to_owned(),
            lead: "Goodput is the highest rate at which the SLO is met, at every lower tested rate too: \
                   joint attainment, 99th percentiles, nothing dropped, nothing growing. A rate is what was offered \
                   while it was judged."
                .to_owned(),
            warnings: warnings(sweeps),
            facts: facts(sweeps),
            sections: Vec::new(),
        };
        if kinds.len() > 1 {
            report.sections.push(overview(&kinds));
        }
        report.sections.extend(kinds.values().map(|sweeps| section(sweeps)));
        report.sections.extend(cells::section(sweeps));
        report
    }
}

fn warnings(sweeps: &[SweepResult]) -> Vec<String> {
    let short: Vec<&str> = sweeps.iter().filter_map(|s| s.shorter_than_the_rule.as_deref()).collect();
    let mut warnings = Vec::new();
    let n_partial = sweeps.iter().filter(|sweep| sweep.partial).count();
    if n_partial > 0 {
        warnings.push(format!(
            "{n_partial} of {} results are partial: the bench was stopped before its end, and goodput is of the rates so far.",
            sweeps.len()
        ));
    }
    if let Some(first) = short.first() {
        let n = short.len();
        let why = first.strip_prefix("shorter than the rule: ").unwrap_or(first);
        warnings.push(format!(
            "{n} of {} results are shorter than the rule asks for (the first: {why}).",
            sweeps.len()
        ));
    }
    let runs = || sweeps.iter().flat_map(|s| s.rates.iter().flat_map(|r| &r.runs));
    let n_void = runs().filter(|run| run.generator.void).count();
    if n_void > 0 {
        warnings.push(format!(
            "In {n_void} of {} runs the load generator itself was late: they do not measure the server.",
            runs().count()
        ));
    }
    warnings
}

fn facts(sweeps: &[SweepResult]) -> Vec<(String, String)> {
    let mut facts: Vec<(String, String)> = Vec::new();
    let mut add = |name: &str, value: String| {
        if !value.is_empty() && !facts.iter().any(|(n, v)| n == name && *v == value) {
            facts.push((name.to_owned(), value));
        }
    };
    for sweep in sweeps {
        let host = &sweep.host;
        let setup = &sweep.setup;
        let memory = host.memory_mib.map_or_else(String::new, |mib| format!(", {} GiB", mib >> 10));
        add("host", format!("{}, {} cores{memory}", host.cpu, host.cores));
        add("commit", host.commit.clone().unwrap_or_default());
        add("model", setup.model.clone());
        add("SLO", setup.slo.clone());
        add("arrivals", setup.arrivals.clone());
        let rule = &setup.rule;
        add(
            "a rate passes",
            format!(
                "if {:.0} % of requests meet the SLO, p{:.0} of each latency is within its limit, {:.0} % of the offered requests are served meanwhile (less what chance leaves under way at the end), and neither concurrency nor TTFT rises over all runs together (where nothing else is broken: nor over as many runs with other seeds)",
                rule.attainment * 100.0,
                rule.percentile,
                rule.served * 100.0
            ),
        );
        add("runs", format!("{} seeds of {} requests at each rate", setup.n_seeds(), setup.n_requests));
    }
    facts
}

/// Goodput of all kinds in one table: a row for each workload, a column for each name.
fn overview(kinds: &BTreeMap<Kind, Vec<&SweepResult>>) -> Section {
    let mut names: Vec<String> = Vec::new();
    for sweep in kinds.values().flatten() {
        if !names.contains(&name(sweep)) {
            names.push(name(sweep));
        }
    }
    let models: Vec<_> = kinds.keys().map(|(model, ..)| model).collect();
    let one_model = models.windows(2).all(|pair| pair[0] == pair[1]);
    let rows = kinds.iter().map(|((model, workload, slo, _), sweeps)| {
        let what = if one_model { workload.clone() } else { format!("{model}: {workload}") };
        let of = |name: &String| sweeps.iter().find(|s| super::names::name(s) == *name);
        let best = best_rate(sweeps);
        let cells =
            names.iter().map(|name| of(name).map_or_else(|| "–".into(), |sweep| goodput_cell(sweep, best)));
        let ratio = match (names.as_slice(), best) {
            ([first, ..], Some(_)) => {
                of(first).and_then(|own| ratio_to_rivals(own, sweeps)).unwrap_or_default()
            }
            _ => String::new(),
        };
        let first = [Cell::from(what), Cell::from(slo.clone())];
        first.into_iter().chain(cells).chain([ratio.into()]).collect()
    });
    let columns = ["workload", "SLO"].map(str::to_owned).into_iter().chain(names.iter().cloned());
    let against = names.first().map(|first| format!("{first} : best other")).unwrap_or_default();
    Section {
        heading: "All workloads".into(),
        text: "Requests per second that meet the SLO, with the 95 % interval of bootstrap resamples. The best of a row is bold.".into(),
        tables: vec![Table {
            caption: "Goodput, requests/s".into(),
            columns: columns.chain([against]).collect(),
            rows: rows.collect(),
        }],
        charts: Vec::new(),
    }
}

fn best_rate(sweeps: &[&SweepResult]) -> Option<f64> {
    sweeps.iter().filter_map(|s| s.goodput.rate).max_by(f64::total_cmp)
}

fn goodput_cell(sweep: &SweepResult, best: Option<f64>) -> Cell {
    let goodput = &sweep.goodput;
    let Some(rate) = goodput.rate else { return "none passes".into() };
    let interval = goodput
        .interval
        .map_or_else(String::new, |(low, high)| format!(" [{}, {}]", short(low), short(high)));
    let more = if goodput.fails_at.is_none() { "≥ " } else { "" };
    let cell = Cell::from(format!("{more}{}{interval}", short(rate)));
    if best == Some(rate) { cell.best() } else { cell }
}

/// The ratio to the best of the others, with what the intervals allow it to be.
fn ratio_to_rivals(own: &SweepResult, sweeps: &[&SweepResult]) -> Option<String> {
    let rivals = sweeps.iter().filter(|s| !std::ptr::eq(**s, own));
    let rival =
        rivals.max_by(|a, b| a.goodput.rate.unwrap_or(0.0).total_cmp(&b.goodput.rate.unwrap_or(0.0)))?;
    let ours = own.goodput.rate?;
    let theirs = rival.goodput.rate?;
    let interval = match (own.goodput.interval, rival.goodput.interval) {
        (Some((low, high)), Some((their_low, their_high))) if their_low > 0.0 && their_high > 0.0 => {
            format!(" [{:.2}, {:.2}]", low / their_high, high / their_low)
        }
        _ => String::new(),
    };
    Some(format!("{:.2}{interval}", ours / theirs))
}

fn section(sweeps: &[&SweepResult]) -> Section {
    let setup = &sweeps[0].setup;
    let mut charts = vec![goodput_curve(sweeps)];
    charts.extend(attainment(sweeps));
    let ttft = Latency {
        name: "Time to first token",
        short: "TTFT",
        of: |run| &run.ttft_ms,
        limit: setup.slo_ttft_ms,
    };
    let tpot = Latency {
        name: "Time per further token",
        short: "TPOT",
        of: |run| &run.tpot_ms,
        limit: setup.slo_tpot_ms,
    };
    charts.extend([latency(sweeps, &ttft), latency(sweeps, &tpot)]);
    charts.extend(stages(sweeps));
    charts.extend(sweeps.iter().filter_map(|sweep| timeline(sweep)));
    Section {
        heading: format!("{} · {}", setup.workload, setup.slo),
        text: format!(
            "Model {}, arrivals {}. Bands are from the lowest to the highest of the seeds.",
            setup.model, setup.arrivals
        ),
        tables: std::iter::once(goodput_table(sweeps)).chain(paired_table(sweeps)).collect(),
        charts,
    }
}

fn goodput_table(sweeps: &[&SweepResult]) -> Table {
    let best = best_rate(sweeps);
    let rate = |rate: Option<f64>| Cell::from(rate.map_or_else(|| "–".to_owned(), short));
    let row = |sweep: &&SweepResult| {
        let goodput = &sweep.goodput;
        let ratio = match (goodput.rate, best) {
            (Some(own), Some(best)) if best > 0.0 => format!("{:.2}", own / best),
            _ => "–".to_owned(),
        };
        vec![
            name(sweep).into(),
            goodput_cell(sweep, best),
            ratio.into(),
            rate(goodput.fails_at),
            rate(goodput.rate_at_90),
            rate(goodput.vllm),
            rate(goodput.distserve),
        ]
    };
    let columns =
        ["", "goodput [95 %]", "of the best", "fails at", "at 90 %", "vLLM's rule", "DistServe's rule"];
    Table {
        caption: "Requests per second".into(),
        columns: columns.map(str::to_owned).to_vec(),
        rows: sweeps.iter().map(row).collect(),
    }
}

fn rate_axis() -> Axis {
    Axis { label: "offered rate, requests/s".into(), scale: Scale::Linear }
}

/// A line for each result.
fn per_sweep(sweeps: &[&SweepResult], value: impl Fn(&RateResult) -> Option<f64>) -> Vec<Series> {
    let line = |(place, sweep): (usize, &&SweepResult)| Series {
        name: name(sweep),
        place,
        stroke: Stroke::Marked,
        points: sweep.rates.iter().map(|rate| (rate.offered(), value(rate).unwrap_or(f64::NAN))).collect(),
        bands: Vec::new(),
    };
    sweeps.iter().enumerate().map(line).collect()
}

/// Lowest and highest of the seeds.
fn bands(sweep: &SweepResult, value: impl Fn(&RunResult) -> Option<f64>) -> Vec<(f64, f64)> {
    let of = |rate: &RateResult| {
        let values = rate.runs.iter().filter_map(&value);
        values.fold((f64::NAN, f64::NAN), |(low, high), v| (low.min(v), high.max(v)))
    };
    sweep.rates.iter().map(of).collect()
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (n, sum) = values.filter(|v| v.is_finite()).fold((0u32, 0.0), |(n, sum), v| (n + 1, sum + v));
    (n > 0).then(|| sum / f64::from(n))
}

fn goodput_curve(sweeps: &[&SweepResult]) -> Chart {
    let good = |run: &RunResult| Some(run.throughput.good_per_s);
    let mut series = per_sweep(sweeps, |rate| mean(rate.runs.iter().filter_map(good)));
    for (series, sweep) in series.iter_mut().zip(sweeps) {
        series.bands = bands(sweep, good);
    }
    let highest = sweeps.iter().flat_map(|s| s.rates.iter().map(RateResult::offered)).fold(0.0, f64::max);
    let all = Series {
        name: "all that is offered".into(),
        place: 6,
        stroke: Stroke::Plain,
        points: vec![(0.0, 0.0), (highest, highest)],
        bands: Vec::new(),
    };
    series.insert(0, all);
    Chart::Lines(LineChart {
        title: "Requests that met the SLO".into(),
        x: rate_axis(),
        y: Axis { label: "good requests/s".into(), scale: Scale::Linear },
        series,
        limits: Vec::new(),
    })
}

/// A count of a rate's requests.
type Part = fn(&RateResult) -> u64;
/// Requests that met one limit, whether they met the others or not.
const ALONE: [(&str, Part); 2] = [("TTFT", |r| r.verdict.n_ttft_good), ("TPOT", |r| r.verdict.n_tpot_good)];

/// One result with each of its limits, or several and a chart for each limit.
fn attainment(sweeps: &[&SweepResult]) -> Vec<Chart> {
    let share = |rate: &RateResult, part: Part| {
        let whole = rate.verdict.n_offered;
        (whole > 0).then(|| 100.0 * part(rate) as f64 / whole as f64)
    };
    let of = |part: Part| per_sweep(sweeps, move |rate| share(rate, part));
    let mut joint = of(|r| r.verdict.n_good);
    let title = "Attainment: share of offered requests that met the SLO".to_owned();
    if let [_] = sweeps {
        for (i, (name, part)) in ALONE.into_iter().enumerate() {
            let name = format!("{name} alone");
            let line = |line| Series { name: name.clone(), place: i + 1, stroke: Stroke::Dashed, ..line };
            joint.extend(of(part).into_iter().map(line));
        }
        return vec![shares(title, joint)];
    }
    let alone = ALONE.map(|(name, part)| shares(format!("Attainment of {name} alone"), of(part)));
    std::iter::once(shares(title, joint)).chain(alone).collect()
}

fn shares(title: String, series: Vec<Series>) -> Chart {
    let limit = |at: f64| Limit { label: format!("{at:.0} %"), at };
    Chart::Lines(LineChart {
        title,
        x: rate_axis(),
        y: Axis { label: "attainment, %".into(), scale: Scale::Between(0.0, 100.0) },
        series,
        limits: vec![limit(99.0), limit(90.0)],
    })
}

/// A latency that is drawn.
struct Latency {
    name: &'static str,
    short: &'static str,
    of: fn(&RunResult) -> &crate::result::Distribution,
    limit: Option<f64>,
}

fn latency(sweeps: &[&SweepResult], latency: &Latency) -> Chart {
    let mut series = Vec::new();
    for (name, stroke, value) in [
        ("P99", Stroke::Marked, (|s| s.p99) as fn(&crate::result::Distribution) -> Option<f64>),
        ("P50", Stroke::Dashed, |s| s.p50),
    ] {
        let of = |run: &RunResult| value((latency.of)(run));
        let lines = per_sweep(sweeps, |rate| mean(rate.runs.iter().filter_map(of)));
        series.extend(lines.into_iter().zip(sweeps).map(|(line, sweep)| Series {
            name: format!("{}, {name}", line.name),
            stroke,
            bands: if stroke == Stroke::Marked { bands(sweep, of) } else { Vec::new() },
            ..line
        }));
    }
    Chart::Lines(LineChart {
        title: format!("{} of whole answers", latency.name),
        x: rate_axis(),
        y: Axis { label: format!("{}, ms", latency.short), scale: Scale::Log },
        series,
        limits: latency.limit.map(|at| Limit { label: format!("limit: {at} ms"), at }).into_iter().collect(),
    })
}

/// Stages of each result at some of its rates up to the first that fails; none if the server does not report them.
fn stages(sweeps: &[&SweepResult]) -> Option<Chart> {
    let group = |sweep: &&SweepResult| {
        let shown = |rate: &&RateResult| sweep.goodput.fails_at.is_none_or(|fails| rate.offered() <= fails);
        let rates: Vec<_> = sweep.rates.iter().filter(shown).collect();
        let step = rates.len().div_ceil(N_BAR_RATES).max(1);
        // The last one is always among them.
        let some = rates.into_iter().rev().step_by(step).filter_map(stages_of).collect::<Vec<_>>();
        (name(sweep), some.into_iter().rev().collect::<Vec<_>>())
    };
    let groups: Vec<(String, Vec<Bar>)> =
        sweeps.iter().map(group).filter(|(_, bars)| !bars.is_empty()).collect();
    let parts = ["queue", "encode", "publish", "load", "prefill"];
    (!groups.is_empty()).then(|| {
        Chart::Bars(BarChart {
            title: "Work and waiting before the first token, by the server's clocks".into(),
            x_label: "above each bar: offered rate, requests/s".into(),
            y: Axis { label: "mean, ms (stages may overlap)".into(), scale: Scale::Linear },
            parts: parts.map(str::to_owned).to_vec(),
            groups,
            limits: Vec::new(),
        })
    })
}

fn stages_of(rate: &RateResult) -> Option<Bar> {
    let stages: Vec<_> = rate.runs.iter().filter_map(|run| run.stages).collect();
    let part = |value: fn(&crate::result::Stages) -> Option<f64>| mean(stages.iter().filter_map(value));
    let values = [
        part(|s| s.queue.mean),
        part(|s| s.encode.mean),
        part(|s| s.publish.mean),
        part(|s| s.load.mean),
        part(|s| s.prefill.mean),
    ];
    let has_some = values.iter().any(Option::is_some);
    let values = values.into_iter().map(|value| value.unwrap_or(0.0)).collect();
    has_some.then(|| Bar { name: short(rate.offered()), values })
}

/// Getter of a value of a timeline sample.
type OfSample = fn(&crate::result::TimelineSample) -> Option<f64>;

/// Queues over the time of one run: of the highest rate that passes, or of the lowest.
fn timeline(sweep: &SweepResult) -> Option<Chart> {
    let at = sweep.goodput.rate;
    let rate = sweep.rates.iter().find(|r| Some(r.offered()) == at).or_else(|| sweep.rates.first())?;
    let run = rate.runs.first().filter(|run| !run.timeline.is_empty())?;
    let lines: [(&str, OfSample); 4] = [
        ("in flight, as clients see it", |s| Some(s.in_flight as f64)),
        ("encoder jobs", |s| s.encoding),
        ("running in engines", |s| s.running),
        ("waiting for engines", |s| s.waiting),
    ];
    let series = lines.into_iter().enumerate().filter_map(|(place, (name, value))| {
        let points: Vec<_> = run.timeline.iter().filter_map(|s| Some((s.t_s, value(s)?))).collect();
        (!points.is_empty()).then(|| Series {
            name: name.into(),
            place,
            stroke: Stroke::Plain,
            points,
            bands: Vec::new(),
        })
    });
    Some(Chart::Lines(LineChart {
        title: format!(
            "Queues over time: {} at {} requests/s, seed {}",
            name(sweep),
            short(rate.offered()),
            run.seed
        ),
        x: Axis { label: "time, s".into(), scale: Scale::Linear },
        y: Axis { label: "requests and jobs".into(), scale: Scale::Linear },
        series: series.collect(),
        limits: Vec::new(),
    }))
}

#[cfg(test)]
pub(crate) mod tests;
