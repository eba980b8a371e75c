//! The page of a comparison.

use super::ComparedDemand;
use triptych_bench::report::{Cell, Report, Section, Table};

impl ComparedDemand {
    fn row(&self) -> Vec<Cell> {
        let best = self.goodput.iter().map(|(_, goodput)| goodput.mean).fold(0.0, f64::max);
        let cell = |(_, goodput): &(String, crate::planner::Interval)| {
            let cell = Cell::from(format!("{:.2} ({:.2} to {:.2})", goodput.mean, goodput.low, goodput.high));
            if goodput.mean >= best { cell.best() } else { cell }
        };
        let ratio =
            self.ratio().map_or_else(|| "none other passes".to_owned(), |ratio| format!("{ratio:.3}"));
        let names = [Cell::from(self.demand.clone()), Cell::from(self.slo.clone())];
        names.into_iter().chain(self.goodput.iter().map(cell)).chain([Cell::from(ratio)]).collect()
    }
}

/// The report of compared demands.
pub fn report(compared: &[ComparedDemand], facts: Vec<(String, String)>) -> Report {
    let names: Vec<String> = compared
        .first()
        .map(|one| one.goodput.iter().map(|(name, _)| name.clone()).collect())
        .unwrap_or_default();
    let first = names.first().cloned().unwrap_or_default();
    let columns = ["demand".to_owned(), "SLO".to_owned()].into_iter().chain(names);
    let table = Table {
        caption: "Simulated goodput, requests/s".to_owned(),
        columns: columns.chain([format!("{first} : best other")]).collect(),
        rows: compared.iter().map(ComparedDemand::row).collect(),
    };
    let ratios: Vec<f64> = compared.iter().filter_map(ComparedDemand::ratio).collect();
    let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let text = format!(
        "Requests per second within the SLO, mean over the seeds, with the 95 % interval. Over the best of the others \
         {first} has {least:.2} at the least, in {} demands.",
        ratios.len()
    );
    Report {
        title: format!("{first} beside other topologies, simulated"),
        lead: "Simulated, not measured: the product's own router, request machine and scheduler on virtual time, with times \
               drawn from cost curves."
            .to_owned(),
        warnings: Vec::new(),
        facts,
        sections: vec![Section {
            heading: "Goodput".to_owned(),
            text,
            tables: vec![table],
            charts: Vec::new(),
        }],
    }
}
