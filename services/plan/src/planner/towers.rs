//! Encoder workers of each tower, where several towers read the same item and each has workers of its own.

use serde::{Serialize, Serializer};
use std::fmt;
use triptych_core::TowerIdx;

/// Most towers of a model.
const MOST: usize = TowerIdx::LIMIT as usize;

/// Encoder workers of each tower, in the model's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TowerWorkers {
    counts: [usize; MOST],
    n_towers: usize,
}

impl TowerWorkers {
    /// Workers of each tower; those of towers beyond the limit are left out.
    pub fn new(of_towers: &[usize]) -> Self {
        let mut counts = [0; MOST];
        let n_towers = of_towers.len().min(MOST);
        counts[..n_towers].copy_from_slice(&of_towers[..n_towers]);
        Self { counts, n_towers }
    }

    /// Workers of each tower, in the model's order.
    pub fn counts(&self) -> &[usize] {
        &self.counts[..self.n_towers]
    }

    /// The same with other workers of a tower.
    #[must_use]
    pub fn with(mut self, tower: usize, n: usize) -> Self {
        if let Some(own) = self.counts[..self.n_towers].get_mut(tower) {
            *own = n;
        }
        self
    }

    /// Workers of all towers.
    pub fn total(&self) -> usize {
        self.counts().iter().sum()
    }

    /// All ways in which so many workers are divided among towers, at least one for each.
    pub fn all(n_workers: usize, n_towers: usize) -> Vec<Self> {
        let mut all = Vec::new();
        divide(n_workers, n_towers.min(MOST), &mut Vec::new(), &mut all);
        all
    }

    /// So many workers divided in proportion to the towers' shares of the work, at least one for each; `None`: there are
    /// fewer workers than towers.
    pub fn in_proportion(n_workers: usize, shares: &[f64]) -> Option<Self> {
        let n_towers = shares.len();
        let spare = n_workers.checked_sub(n_towers)?;
        let sum: f64 = shares.iter().sum::<f64>().max(f64::MIN_POSITIVE);
        let exact = |share: f64| share / sum * n_workers as f64;
        let mut counts = vec![1; n_towers];
        // One after the other to whose workers have most to do.
        for _ in 0..spare {
            let lack = |i: &usize| exact(shares[*i]) / counts[*i] as f64;
            let next = (0..n_towers).max_by(|a, b| lack(a).total_cmp(&lack(b)))?;
            counts[next] += 1;
        }
        Some(Self::new(&counts))
    }
}

fn divide(n_workers: usize, n_towers: usize, before: &mut Vec<usize>, all: &mut Vec<TowerWorkers>) {
    let left = n_towers.saturating_sub(before.len());
    match left {
        0 => {}
        1 if n_workers > 0 => {
            let counts: Vec<_> = before.iter().copied().chain([n_workers]).collect();
            all.push(TowerWorkers::new(&counts));
        }
        _ => {
            for own in 1..=n_workers.saturating_sub(left - 1) {
                before.push(own);
                divide(n_workers - own, n_towers, before, all);
                before.pop();
            }
        }
    }
}

/// As in `3+1`.
impl fmt::Display for TowerWorkers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts: Vec<_> = self.counts().iter().map(usize::to_string).collect();
        f.write_str(&counts.join("+"))
    }
}

impl Serialize for TowerWorkers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.counts())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_divided_in_all_ways_and_in_proportion() {
        let all =
            |n, towers| TowerWorkers::all(n, towers).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(all(4, 2), ["1+3", "2+2", "3+1"]);
        assert_eq!(all(4, 3), ["1+1+2", "1+2+1", "2+1+1"]);
        assert_eq!(all(1, 2), Vec::<String>::new());
        let part = |n, shares: &[f64]| TowerWorkers::in_proportion(n, shares).map(|w| w.counts().to_vec());
        assert_eq!(part(8, &[3.0, 1.0]), Some(vec![6, 2]));
        assert_eq!(part(3, &[1.0, 100.0]), Some(vec![1, 2]));
        assert_eq!((part(2, &[0.0, 0.0]), part(1, &[1.0, 1.0])), (Some(vec![1, 1]), None));
    }
}
