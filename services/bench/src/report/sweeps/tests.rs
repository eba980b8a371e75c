//! Pages of results that were made up: a server that takes so many requests a second, and not more.

use super::*;
use crate::goodput::{Tested, goodput};
use crate::judge::{Ends, JudgedWindow, Rule, Run, judge_runs};
use crate::outcome::{End, ItemCounts, Outcome};
use crate::result::{Distribution, Generator, Host, Setup, Stages, Throughput, TimelineSample, VERSION};
use crate::slo::Slo;
use std::collections::BTreeMap;
use std::time::Duration;

const N: u64 = 400;

/// Outcomes at a rate of a server with a capacity: a queue that grows as it fills, and without end past it.
fn outcomes(rate: f64, capacity: f64, seed: u64) -> (Vec<Outcome>, JudgedWindow) {
    let load = rate / capacity;
    let ms = |v: f64| Duration::from_secs_f64(v.clamp(0.0, 60_000.0) / 1e3);
    let one = |i: u64| {
        let due = Duration::from_secs_f64(i as f64 / rate);
        let spread = ((i * 7919 + seed * 104_729) % 1000) as f64 / 1000.0;
        let wait =
            if load < 1.0 { 60.0 * load / (1.0 - load) } else { (load - 1.0) * due.as_secs_f64() * 1e3 };
        let first = due + ms(90.0 + wait * (0.2 + 1.6 * spread));
        let pace = ms(14.0 + 18.0 * load.min(1.3) * (0.6 + 0.8 * spread));
        let tokens: Vec<Duration> = (0..20).map(|k| first + pace * k).collect();
        let ended = *tokens.last().unwrap();
        Outcome {
            index: i,
            due,
            sent: due,
            tokens,
            ended,
            end: End::Whole,
            items: ItemCounts::default(),
            slo: None,
        }
    };
    let window = JudgedWindow { from: Duration::ZERO, to: Duration::from_secs_f64(N as f64 / rate) };
    ((0..N).map(one).collect(), window)
}

fn run(rate: f64, seed: u64, (outcomes, window): &(Vec<Outcome>, JudgedWindow), slo: &Slo) -> RunResult {
    let verdict = judge_runs(&[Run { outcomes, window: *window }], slo, &Rule::default());
    let ms = |value: fn(&Outcome) -> Option<Duration>| {
        Distribution::of(outcomes.iter().filter_map(value).map(|d| d.as_secs_f64() * 1e3))
    };
    let stage = |ms: f64| Distribution::of([ms]);
    let wait = ms(Outcome::ttft).mean.unwrap() - 90.0;
    let sample = |t: u64| TimelineSample {
        t_s: t as f64,
        in_flight: 3 + (t * 7 + seed) % 5,
        encoding: Some(((t * 3 + seed) % 4) as f64),
        running: Some(((t * 5) % 3) as f64),
        waiting: Some(((t * 11) % 2) as f64),
        kv_usage: Some(0.2),
    };
    RunResult {
        version: VERSION,
        rate,
        seed,
        block: None,
        warm_up_s: 0.0,
        window_s: window.seconds(),
        n_sent: N,
        ttft_ms: ms(Outcome::ttft),
        tpot_ms: ms(Outcome::tpot),
        itl_ms: ms(Outcome::tpot),
        e2el_ms: Distribution::default(),
        throughput: Throughput {
            good_per_s: verdict.n_good as f64 / window.seconds(),
            ..Throughput::default()
        },
        generator: Generator::default(),
        prompt_tokens: None,
        stages: Some(Stages {
            queue: stage(wait),
            encode: stage(45.0),
            publish: stage(2.0),
            load: stage(3.0),
            prefill: stage(40.0),
            decode: stage(300.0),
        }),
        item_sources: None,
        server: None,
        all_ends: Ends::of(outcomes),
        errors: BTreeMap::new(),
        timeline: (0..60).map(sample).collect(),
        verdict,
    }
}

/// A result of a workload at a topology with this capacity.
pub(crate) fn sweep(topology: &str, workload: &str, capacity: f64) -> SweepResult {
    let slo: Slo = "ttft=500ms,tpot=50ms".parse().unwrap();
    let tested: Vec<Tested> = [0.25, 0.5, 0.7, 0.8, 0.87, 0.95, 1.1]
        .map(|load| load * capacity)
        .map(|rate| Tested {
            rate,
            runs: (0..3).map(|seed| outcomes(rate, capacity, seed)).collect(),
            n_first: 0,
            void: false,
        })
        .into();
    let rate = |t: &Tested| RateResult {
        rate: t.rate,
        offered_per_s: Some(t.offered()),
        verdict: t.judge(&slo, &Rule::default()),
        runs: t.runs.iter().zip(0..).map(|(one, seed)| run(t.rate, seed, one, &slo)).collect(),
    };
    SweepResult {
        version: VERSION,
        host: Host { cpu: "a processor".into(), cores: 2, memory_mib: Some(8192), ..Host::default() },
        setup: Setup {
            target: "127.0.0.1:1".into(),
            topology: Some(topology.into()),
            model: "tiny".into(),
            workload: workload.into(),
            arrivals: "poisson".into(),
            slo: slo.to_string(),
            slo_ttft_ms: Some(500.0),
            slo_tpot_ms: Some(50.0),
            slo_e2el_ms: None,
            rule: Rule::default(),
            seeds: vec![0, 1, 2],
            n_requests: N,
            max_window_s: 600.0,
            block_s: None,
            until_clear: false,
            pd_tpot_slo_ms: None,
            worker_flags: String::new(),
            resolution: 0.05,
            salt: 0,
        },
        shorter_than_the_rule: Some("400 requests instead of 1000".into()),
        partial: false,
        rates: tested.iter().map(rate).collect(),
        goodput: goodput(&tested, &slo, &Rule::default()),
    }
}

/// Three topologies over two workloads.
pub(crate) fn sweeps() -> Vec<SweepResult> {
    let all = [("1e1pd", 12.0), ("dp2", 10.0), ("colocated", 8.0)];
    let of = |workload: &'static str, k: f64| all.map(|(name, capacity)| sweep(name, workload, k * capacity));
    of("epd-short:images=1", 1.0).into_iter().chain(of("epd-short:images=4", 0.4)).collect()
}

#[test]
fn results_of_one_workload_are_compared_and_all_workloads_are_in_one_table() {
    let report = Report::of_sweeps("Goodput", &sweeps());
    let headings: Vec<_> = report.sections.iter().map(|s| s.heading.as_str()).collect();
    assert_eq!(headings.len(), 4, "{headings:?}");
    let table = &report.sections[0].tables[0];
    assert_eq!(table.columns, ["workload", "SLO", "1e1pd", "dp2", "colocated", "1e1pd : best other"]);
    assert_eq!(table.rows.len(), 2);
    assert!(
        table.rows.iter().all(|row| row[2].is_best && !row[3].is_best && row[2].text.contains('[')),
        "{table:?}"
    );
    // 12 against 10, to the resolution of the tested rates.
    assert!(table.rows.iter().all(|row| row[5].text.starts_with("1.2")), "{table:?}");
    assert!(report.warnings[0].contains("400 requests instead of 1000"), "{:?}", report.warnings);
    let charts = &report.sections[1].charts;
    assert_eq!(charts.len(), 7 + 3, "goodput, three of attainment, TTFT, TPOT, stages, and a timeline each");
    let html = report.to_html();
    assert!(html.contains("limit: 500 ms") && html.contains("99 %") && html.contains("90 %"));
    assert!(!html.contains("NaN"));
}

#[test]
fn one_result_shows_each_limit() {
    let report = Report::of_sweeps("Goodput", &[sweep("dp2", "text", 5.0)]);
    assert_eq!(report.sections.len(), 1);
    let html = report.to_html();
    assert!(html.contains("TTFT alone") && html.contains("TPOT alone"));
}

#[test]
fn no_results_are_a_page_without_sections() {
    assert!(Report::of_sweeps("Goodput", &[]).sections.is_empty());
}

#[test]
fn what_failed_everywhere_is_said_in_words() {
    let mut failed = sweep("dp2", "text", 5.0);
    failed.goodput = goodput(&[], &"ttft=1ms".parse().unwrap(), &Rule::default());
    let markdown = Report::of_sweeps("Goodput", &[failed]).to_markdown();
    assert!(markdown.contains("none passes"), "{markdown}");
}
