//! Maps of where disaggregated encoders serve more: the ratio of goodputs over images of a request and text length, for
//! shares of repeated images, SLOs and sizes of a fleet.
//!
//! A cell is one demand at one fleet: the best of a few ratios of encoders to PD workers against workers that hold both, as
//! many of them. Cells are independent of each other, so a map can be made in parts: what a [`Map`] holds is not made again.

pub mod draw;

use crate::curves::CostCurves;
use crate::planner::means::Means;
use crate::planner::{
    Budget, Candidate, CurveKind, Effort, Named, PlanError, Question, Residuals, Shape, WorkerSettings,
    bound, search,
};
use crate::simulator::spec::FrontCores;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use triptych_bench::arrivals::Arrivals;
use triptych_bench::judge::Rule;
use triptych_bench::slo::Slo;
use triptych_bench::text::TextError;
use triptych_bench::workload::Workload;

/// Shares of encoders around the one at which both kinds have as much to do.
const AROUND: [f64; 3] = [0.75, 1.0, 1.3];
/// Most requests of a run.
const MAX_REQUESTS: usize = 1 << 20;

/// Axes of a map. Every combination is a cell.
#[derive(Clone, Debug)]
pub struct MapAxes {
    /// Workers of a fleet.
    pub workers: Vec<usize>,
    /// SLOs.
    pub slos: Vec<Slo>,
    /// Shares of images that were sent before.
    pub reuse: Vec<f64>,
    /// Tokens of text.
    pub text: Vec<u32>,
    /// Images of a request.
    pub images: Vec<u32>,
}

/// Settings that all cells have in common.
#[derive(Clone, Debug)]
pub struct MapSettings {
    /// Curves of a worker.
    pub curves: Arc<CostCurves>,
    /// Settings of a worker.
    pub worker: WorkerSettings,
    /// Shape of an image, as `640x640`.
    pub size: String,
    /// Output tokens.
    pub output: u32,
    /// Length of a run: many times that of a request, or requests under way at its end are a backlog.
    pub span: Duration,
    /// Seeds of a goodput, which is their median: a search of one run ends at a rate that fails by chance.
    pub seeds: u64,
}

/// A map, whole or in parts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Map {
    /// Cells in the order in which they were made.
    pub cells: Vec<MapCell>,
}

/// A demand at a fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// Workers of both kinds.
    pub workers: usize,
    /// SLO.
    pub slo: String,
    /// Share of images that were sent before.
    pub reuse: f64,
    /// Tokens of text.
    pub text: u32,
    /// Images of a request.
    pub images: u32,
}

/// A place of the map, and what each kind of cluster serves there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MapCell {
    /// The place.
    pub place: Place,
    /// The best disaggregated cluster.
    pub disaggregated: String,
    /// Its goodput, in requests a second; 0: it meets the SLO at no rate.
    pub goodput: f64,
    /// Goodput of workers that hold both.
    pub colocated: f64,
}

/// A map that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// A demand that is none.
    #[error(transparent)]
    Workload(#[from] TextError),
    /// A cluster that cannot be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl MapAxes {
    /// All places, those of small fleets first.
    pub fn places(&self) -> Vec<Place> {
        let mut places = Vec::new();
        for &workers in &self.workers {
            for slo in &self.slos {
                for &reuse in &self.reuse {
                    for &text in &self.text {
                        for &images in &self.images {
                            places.push(Place { workers, slo: slo.to_string(), reuse, text, images });
                        }
                    }
                }
            }
        }
        places
    }
}

impl Map {
    /// The cell of a place, if it was made.
    pub fn cell(&self, place: &Place) -> Option<&MapCell> {
        self.cells.iter().find(|cell| cell.place == *place)
    }
}

impl MapCell {
    /// Goodput of the disaggregated cluster over that of workers that hold both; `None`: neither serves.
    pub fn ratio(&self) -> Option<f64> {
        match (self.goodput > 0.0, self.colocated > 0.0) {
            (false, false) => None,
            (true, false) => Some(f64::INFINITY),
            _ => Some(self.goodput / self.colocated),
        }
    }
}

impl MapSettings {
    /// Searches one cell.
    ///
    /// # Errors
    /// [`MapError`].
    pub fn cell(&self, place: &Place, slo: Slo) -> Result<MapCell, MapError> {
        let share = if place.reuse > 0.0 { format!(",share={}", place.reuse) } else { String::new() };
        let text = format!(
            "epd-short:images={},text={},output={},size={}{share}",
            place.images, place.text, self.output, self.size
        );
        let demand = Named { workload: Workload::parse(&text)?, arrivals: Arrivals::Own };
        let question = Question {
            demand: &demand,
            slo,
            rule: Rule::default(),
            curves: vec![Arc::clone(&self.curves)],
            budget: Budget::Workers(place.workers),
            front: FrontCores::Own,
            shares_cores: false,
            prompt: self.curves.prompt,
            effort: self.effort(),
            error: Residuals::default().error_for(&text, CurveKind::Idle),
        };
        let means = Means::of(&demand, &self.curves).ok_or(PlanError::Empty)?;
        let goodput = |shape| {
            let candidate = Candidate { shape, curves: Arc::clone(&self.curves), settings: self.worker };
            let bound = bound::of(&candidate, &means);
            let found = search::goodput(&question, candidate, bound, question.effort)?;
            let rates = match self.seeds {
                0 | 1 => vec![found.rate],
                _ => search::settle(&question, found)?.by_seed,
            };
            Ok::<_, MapError>(median(rates))
        };
        let colocated = goodput(Shape::Replicated { workers: place.workers })?;
        let mut best = (String::new(), 0.0);
        for encoders in self.encoders(place.workers, &means) {
            let shape = Shape::Split { encoders, pds: place.workers - encoders };
            let rate = goodput(shape)?;
            if rate > best.1 || best.0.is_empty() {
                best = (shape.name(), rate);
            }
        }
        Ok(MapCell { place: place.clone(), disaggregated: best.0, goodput: best.1, colocated })
    }

    fn effort(&self) -> Effort {
        Effort {
            requests: MAX_REQUESTS,
            longest: self.span,
            seeds: self.seeds.max(1),
            tolerance: 0.08,
            tunes: false,
            what_if: false,
            first_seed: 1,
        }
    }

    /// Numbers of encoders near the one at which both kinds have as much to do.
    fn encoders(&self, workers: usize, means: &Means) -> BTreeSet<usize> {
        let one =
            Candidate { shape: Shape::Colocated, curves: Arc::clone(&self.curves), settings: self.worker };
        let bound = bound::of(&one, means);
        let share = bound.encode_s / (bound.encode_s + bound.decode_s).max(f64::MIN_POSITIVE);
        let balanced = share * workers as f64;
        let most = workers.saturating_sub(1).max(1);
        AROUND.iter().map(|part| ((balanced * part).round() as usize).clamp(1, most)).collect()
    }
}

/// The middle one, of an even number the lower one; 0 without any.
fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_seed_that_fails_by_chance_does_not_make_a_cell() {
        assert_eq!(median(vec![6.1, 2.7, 6.4]), 6.1);
        assert_eq!(median(vec![6.1, 2.7]), 2.7);
        assert_eq!((median(vec![5.0]), median(Vec::new())), (5.0, 0.0));
    }
}
