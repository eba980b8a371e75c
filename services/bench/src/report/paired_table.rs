//! Table of paired differences: the first result of a section against each of the others.

use super::names::{name, short};
use super::table::{Cell, Table};
use crate::paired::{Compared, Difference, PairedRate, paired};
use crate::result::SweepResult;

/// The table; `None` if no two results had a rate in common, or if there are fewer than three pairs at each.
pub(super) fn paired_table(sweeps: &[&SweepResult]) -> Option<Table> {
    let (first, others) = sweeps.split_first()?;
    let rows: Vec<_> = others
        .iter()
        .flat_map(|other| paired(first, other).into_iter().map(move |rate| (name(other), rate)))
        .filter(|(_, rate)| rate.differences.iter().any(|(_, difference)| difference.is_some()))
        .map(row)
        .collect();
    let columns = ["less", "requests/s", "pairs"].into_iter().chain(Compared::ALL.map(Compared::name));
    (!rows.is_empty()).then(|| Table {
        caption: format!(
            "{} less each other, of runs or blocks with the same requests, one beside the other: mean [95 % interval]",
            name(first)
        ),
        columns: columns.map(str::to_owned).collect(),
        rows,
    })
}

fn row((other, rate): (String, PairedRate)) -> Vec<Cell> {
    let first = [other, short(rate.rate), rate.n_pairs.to_string()].map(Cell::from);
    first.into_iter().chain(rate.differences.iter().map(|(_, difference)| cell(*difference))).collect()
}

/// A difference; one whose interval holds no zero stands out.
fn cell(difference: Option<Difference>) -> Cell {
    let Some(Difference { mean, half, .. }) = difference else { return "–".into() };
    let cell = Cell::from(format!("{mean:+.2} [{:+.2}, {:+.2}]", mean - half, mean + half));
    if mean.abs() > half { cell.best() } else { cell }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests_support::sweep;

    #[test]
    fn the_first_is_compared_with_each_other_at_common_rates() {
        let all = ["1e1pd", "dp2"].map(|name| sweep(name, "epd-short:images=1", 12.0));
        let table = paired_table(&all.each_ref()[..]).unwrap();
        assert_eq!(table.rows.len(), all[0].rates.len());
        assert!(table.rows.iter().all(|row| row[0].text == "dp2" && row[2].text == "3"), "{table:?}");
        assert!(
            table.rows.iter().all(|row| row[4].text.starts_with("+0.00") && !row[4].is_best),
            "{table:?}"
        );
        assert!(paired_table(&[&all[0]]).is_none(), "nothing to compare with");
    }
}
