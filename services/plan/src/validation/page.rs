//! A validation as a report: the bars first, then latencies, then the plan beside what was measured.

use super::report::{DRIFT, DriftCounts, REGRET, Validation};
use super::{bars, tables};
use triptych_bench::report::{Report, Section};

impl Validation {
    /// The report.
    pub fn report(&self) -> Report {
        let mut report = Report {
            title: "Simulated beside measured".to_owned(),
            lead: "The same requests, offered to a cluster on this machine and to its simulation; and the cluster that the \
                   plan chose beside the best of all that were measured."
                .to_owned(),
            facts: self.facts.clone(),
            warnings: self.warnings.clone(),
            ..Report::default()
        };
        report.sections.push(bars::section(self));
        if !self.compared.is_empty() {
            report.sections.push(Section {
                heading: "Latencies".to_owned(),
                text: format!(
                    "Relative error is simulated over measured, less one. The goal is 10 % at half load and 20 % near \
                     capacity, for TTFT and TPOT at p50 and p90.{}",
                    drift(self.drift())
                ),
                tables: self.compared.iter().map(tables::latencies).collect(),
                charts: Vec::new(),
            });
        }
        if !self.regrets.is_empty() {
            report.sections.push(Section {
                heading: "Regret of the plan".to_owned(),
                text: format!(
                    "Measured goodput of the cluster that the plan recommends over that of the best measured one; the goal is \
                     {REGRET} and more. Then what each cluster was expected to show in a measurement of the same length, \
                     with the interval in which 95 % of measurements should lie, the model's own error included: \
                     goodput lies between the highest rate that passed and the lowest that failed."
                ),
                tables: vec![tables::regrets(&self.regrets), tables::expectations(&self.regrets)],
                charts: Vec::new(),
            });
        }
        report
    }
}

/// Words for the effect of the machine's drift; none where it was not simulated.
fn drift(DriftCounts { changed, explained, all }: DriftCounts) -> String {
    if all == 0 {
        return String::new();
    }
    let [least, most] = DRIFT;
    format!(
        " A machine's speed drifts: with {least} and {most} times the time of compute, {changed} of {all} of these latencies change by \
         more than their goal, and {explained} of {all} are measured within their goal of what is simulated between the two."
    )
}
