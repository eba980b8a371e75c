//! A page with one of each, and what must hold of any.

use super::*;

/// A page with lines, bars and a table.
pub(super) fn sample() -> Report {
    let line = |name: &str, place, k: f64| Series {
        name: name.into(),
        place,
        stroke: Stroke::Marked,
        points: (1..=6).map(|i| (f64::from(i) * 2.0, 60.0 + k * f64::from(i).powi(3))).collect(),
        bands: (1..=6)
            .map(|i| (55.0 + 0.8 * k * f64::from(i).powi(3), 66.0 + 1.3 * k * f64::from(i).powi(3)))
            .collect(),
    };
    let axis = |label: &str, scale| Axis { label: label.into(), scale };
    let lines = Chart::Lines(LineChart {
        title: "Time to first token, P99".into(),
        x: axis("offered rate, requests/s", Scale::Linear),
        y: axis("P99 TTFT, ms", Scale::Log),
        series: vec![line("1e1pd", 0, 2.0), line("dp2", 1, 5.0), line("colocated <auto>", 2, 9.0)],
        limits: vec![Limit { label: "SLO 500 ms".into(), at: 500.0 }],
    });
    let bar = |name: &str, k: f64| Bar { name: name.into(), values: vec![2.0 * k, 30.0 * k, f64::NAN, 9.0] };
    let bars = Chart::Bars(BarChart {
        title: "Where the time to the first token goes".into(),
        x_label: "offered rate, requests/s".into(),
        y: axis("mean, ms", Scale::Linear),
        parts: ["queue", "encode", "publish", "prefill"].map(Into::into).to_vec(),
        groups: (1..=3)
            .map(|i| (format!("{i}"), vec![bar("1e1pd", f64::from(i)), bar("dp2", 2.0)]))
            .collect(),
        limits: Vec::new(),
    });
    let table = Table {
        caption: "Goodput, requests/s".into(),
        columns: ["workload", "1e1pd", "dp2"].map(Into::into).to_vec(),
        rows: vec![vec!["epd-short | 1".into(), Cell::from("4.0").best(), "3.1 <".into()]],
    };
    Report {
        title: "A & B".into(),
        lead: "What it is.".into(),
        warnings: vec!["Shorter than the rule.".into()],
        facts: vec![("host".into(), "<two> cores".into())],
        sections: vec![Section {
            heading: "Goodput".into(),
            text: "How to read it.".into(),
            tables: vec![table],
            charts: vec![lines, bars],
        }],
    }
}

#[test]
fn a_page_needs_nothing_from_elsewhere_and_what_it_quotes_is_text() {
    let html = sample().to_html();
    for no in ["<script", "src=", "@import", "url(", "https://", "<two>", "<auto>", "NaN", "inf"] {
        assert!(!html.contains(no), "{no}");
    }
    for yes in [
        "SLO 500 ms",
        "P99 TTFT, ms",
        "&lt;two&gt;",
        "prefers-color-scheme:dark",
        "<b>4.0</b>",
        "Shorter than",
    ] {
        assert!(html.contains(yes), "{yes}");
    }
    for (open, close) in
        [("<svg", "</svg>"), ("<figure", "</figure>"), ("<section", "</section>"), ("<table", "</table>")]
    {
        assert_eq!(html.matches(open).count(), html.matches(close).count(), "{open}");
    }
}

#[test]
fn everything_drawn_lies_on_the_drawing() {
    for chart in &sample().sections[0].charts {
        let svg = chart.svg();
        for attribute in [" x=\"", " cx=\"", " y=\"", " cy=\""] {
            for found in svg.split(attribute).skip(1) {
                let value: f64 = found.split('"').next().unwrap().parse().unwrap();
                assert!((-1.0..=640.0).contains(&value), "{attribute}{value}");
            }
        }
    }
}

#[test]
fn markdown_has_the_same_tables() {
    let markdown = sample().to_markdown();
    assert!(markdown.contains("| epd-short \\| 1 | **4.0** | 3.1 < |"), "{markdown}");
    assert!(markdown.contains("> Shorter than the rule."));
    assert!(markdown.contains("| --- | ---: | ---: |"));
}

#[test]
fn an_empty_drawing_is_drawn() {
    let lines = LineChart {
        title: "nothing".into(),
        x: Axis { label: "x".into(), scale: Scale::Linear },
        y: Axis { label: "y".into(), scale: Scale::Log },
        series: Vec::new(),
        limits: Vec::new(),
    };
    assert!(Chart::Lines(lines).svg().contains("nothing"));
}
