//! Table of the cells of a page: when, with which commit and on which machine each result was measured.

use super::Section;
use super::names::name;
use super::table::{Cell, Table};
use crate::result::SweepResult;

/// The section; `None` for a single result, whose facts are at the top of the page.
pub(super) fn section(sweeps: &[SweepResult]) -> Option<Section> {
    if sweeps.len() < 2 {
        return None;
    }
    let mut rows: Vec<Vec<Cell>> = sweeps.iter().map(row).collect();
    rows.sort_by(|a, b| (&a[0].text, &a[1].text).cmp(&(&b[0].text, &b[1].text)));
    let columns = [
        "workload",
        "",
        "measured at",
        "commit",
        "machine",
        "runs at each rate",
        "PD workers",
        "all workers",
    ];
    Some(Section {
        heading: "Cells".into(),
        text: "Each result was measured by itself, and only those that are measured anew change.".into(),
        tables: vec![Table {
            caption: "Provenance of each result".into(),
            columns: columns.map(str::to_owned).to_vec(),
            rows,
        }],
        charts: Vec::new(),
    })
}

fn row(sweep: &SweepResult) -> Vec<Cell> {
    let (host, setup) = (&sweep.host, &sweep.setup);
    let blocks = setup.block_s.map_or_else(String::new, |s| format!(", in blocks of {s:.0} s"));
    [
        setup.workload.clone(),
        name(sweep),
        utc(host.at_unix_s),
        host.commit.clone().unwrap_or_else(|| "unknown".to_owned()),
        format!("{}, {} cores", host.cpu, host.cores),
        format!(
            "{} seeds of {} requests or {:.0} s{blocks}",
            setup.n_seeds(),
            setup.n_requests,
            setup.max_window_s
        ),
        setup.pd_tpot_slo_ms.map_or_else(String::new, |ms| format!("--tpot-slo {ms}")),
        setup.worker_flags.clone(),
    ]
    .map(Cell::from)
    .to_vec()
}

/// A time in UTC, to the minute (Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms").
fn utc(unix_s: u64) -> String {
    let (days, seconds) = (unix_s / 86_400, unix_s % 86_400);
    // Days after the first of March of year 0; years of 400 have the same length.
    let days = days.saturating_add(719_468);
    let (era, day) = (days / 146_097, days % 146_097);
    let year_of_era = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year}-{month:02}-{day_of_month:02} {:02}:{:02}", seconds / 3600, seconds % 3600 / 60)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Report;
    use crate::report::tests_support::sweeps;

    #[test]
    fn times_are_days_of_the_calendar() {
        for (at, expect) in [
            (0, "1970-01-01 00:00"),
            (951_782_399, "2000-02-28 23:59"),
            (951_782_400, "2000-02-29 00:00"),
            (1_772_323_140, "2026-02-28 23:59"),
            (1_772_323_200, "2026-03-01 00:00"),
            (1_798_761_599, "2026-12-31 23:59"),
        ] {
            assert_eq!(utc(at), expect);
        }
        let _ = utc(u64::MAX);
    }

    #[test]
    fn every_result_has_its_date_and_commit() {
        let mut all = sweeps();
        all[1].host.at_unix_s = 1_772_323_200;
        all[1].host.commit = Some("abc".into());
        all[1].setup.block_s = Some(120.0);
        all[1].setup.until_clear = true;
        all[1].setup.pd_tpot_slo_ms = Some(5.0);
        all[1].setup.worker_flags = "--kv-mib 256".into();
        let page = Report::of_sweeps("Goodput", &all).to_markdown();
        let line = page.lines().find(|line| line.contains("2026-03-01 00:00")).unwrap();
        assert!(line.contains("dp2") && line.contains("abc") && line.contains("blocks of 120 s"), "{line}");
        assert!(
            line.contains("| 1 to 3 seeds of ") && line.contains("| --tpot-slo 5 | --kv-mib 256 |"),
            "{line}"
        );
        assert!(section(&all[..1]).is_none());
    }
}
