//! Interference between the workers of a host: after each change of what runs, the factors on the time of what else runs.

use super::spec::FrontCores;
use super::world::World;
use crate::curves::{Costs, Interference, Stage};
use std::rc::Rc;

impl World<'_> {
    /// Costs of a forward or a step of a worker that begins now: with all cores of the host if they are lent and no other
    /// worker computes. A worker looks again when its next one begins, as the product does between two parts of its work.
    pub(super) fn costs_now(&self, worker: usize) -> Rc<Costs> {
        let own = &self.workers[worker];
        match &own.lent {
            Some(lent) if !self.others_compute(worker) => Rc::clone(lent),
            _ => Rc::clone(&own.costs),
        }
    }

    /// True if another worker computes.
    fn others_compute(&self, worker: usize) -> bool {
        self.workers.iter().enumerate().any(|(i, other)| i != worker && other.computes())
    }

    /// True if another worker encodes.
    pub(super) fn others_encode(&self, worker: usize) -> bool {
        self.workers.iter().enumerate().any(|(i, other)| i != worker && other.encodes())
    }

    /// Slows a worker's tasks by what runs on its own cores and beside them. True if that has changed.
    pub(super) fn interfere(&mut self, worker: usize) -> bool {
        let costs: Rc<Costs> = Rc::clone(&self.workers[worker].costs);
        let Some(interference) = &costs.curves().interference else { return false };
        let neighbours = self.neighbours_of(worker);
        let now = self.queue.now();
        let cores = &mut self.workers[worker].cores;
        // Threads beyond the cores, of which one was measured.
        let excess = (cores.width() - costs.curves().threads as f64).clamp(0.0, 1.0);
        cores.slow_down(now, |task| {
            task.stage().map_or(1.0, |stage| factor(interference, stage, &neighbours, excess))
        })
    }

    /// Cores that each task on the other workers of the host uses, and its stage.
    fn neighbours_of(&self, worker: usize) -> Vec<(f64, Option<Stage>)> {
        if self.spec.proxy.cores != FrontCores::Workers {
            return Vec::new();
        }
        let others = self.workers.iter().enumerate().filter(|(i, _)| *i != worker);
        others.flat_map(|(_, w)| w.cores.shares().map(|(task, cores)| (cores, task.stage()))).collect()
    }
}

fn factor(
    interference: &Interference,
    stage: Stage,
    neighbours: &[(f64, Option<Stage>)],
    excess: f64,
) -> f64 {
    let beyond = interference.of(stage).map_or(1.0, |times| times.beyond_share());
    interference.factor(stage, neighbours.iter().copied()) * (1.0 + excess * (beyond - 1.0))
}
