//! The end of a run: what everything came to.

use super::result::{LeftOver, PoolUse, PrefixUse, Simulation};
use super::world::World;
use std::time::Duration;
use triptych_engine::Stats;

impl World<'_> {
    /// The totals of the run.
    pub(super) fn totals(mut self) -> Simulation {
        let now = self.queue.now();
        let last = self.requests.last().map_or(Duration::ZERO, |r| r.offered.at);
        let window_s = last.max(Duration::from_nanos(1)).as_secs_f64();
        let mut pools: Vec<PoolUse> = self
            .spec
            .pools
            .iter()
            .map(|pool| PoolUse {
                name: pool.name.clone(),
                workers: pool.workers,
                cores: pool.workers * pool.curves.threads,
                ..PoolUse::default()
            })
            .collect();
        let mut left = LeftOver {
            requests: self.in_flight,
            jobs: self.jobs.len(),
            leases: self.proxy.views.iter().map(|view| view.n_leases).sum(),
            ..LeftOver::default()
        };
        let (mut prefix, mut preemptions) = (PrefixUse::default(), 0);
        for worker in &mut self.workers {
            let pool = &mut pools[worker.pool];
            let used = worker.used;
            pool.preprocess_s += used.preprocess / 1e9;
            pool.encode_s += (used.preprocess + used.encode) / 1e9;
            pool.step_s += used.step / 1e9;
            pool.front_s += used.front / 1e9;
            pool.busy_s += worker.cores.used(now) / 1e9;
            pool.n_batches += used.n_batches;
            pool.n_encoded += used.n_encoded;
            pool.n_steps += used.n_steps;
            pool.n_rows += used.n_rows;
            pool.n_requests += used.n_requests;
            if let Some(pd) = &worker.pd {
                let counts = pd.scheduler.counts();
                prefix.tokens += counts.prompt_tokens;
                prefix.found += counts.cached_tokens;
                preemptions += counts.preemptions;
                let stats = Stats::of(&pd.scheduler);
                left.sequences += stats.running + stats.waiting;
                left.blocks += stats.self_used + stats.cross_used;
                left.places += pd.n_requests;
            }
        }
        for pool in &mut pools {
            pool.utilisation = pool.busy_s / (pool.cores.max(1) as f64 * window_s);
        }
        let (mut outcomes, mut stages) = (Vec::new(), Vec::new());
        for request in self.requests {
            outcomes.push(request.outcome);
            stages.push(request.stages);
        }
        Simulation {
            outcomes,
            stages,
            pools,
            timeline: self.timeline,
            spans: self.spans,
            items: self.items,
            prefix,
            preemptions,
            left,
            span: Duration::from_nanos(now),
            n_events: self.queue.n_taken(),
        }
    }
}
