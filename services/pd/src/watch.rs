//! State reports of a PD worker: load, resident encoder outputs, and draining.
//!
//! Sent on change, at most ten times a second; resident keys as additions and removals. A content key reveals
//! nothing without tenant secret and item, and reports stay inside the cluster.

use crate::state::PdWorkerState;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::Sender;
use tokio::time::sleep;
use tonic::Status;
use triptych_core::ContentKey;
use triptych_engine::Stats;
use triptych_proto::v1;

/// Most keys in a report.
pub const MAX_KEYS: usize = 4096;
/// Least time between two messages.
pub const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// Steps in which block usage is reported, so that not every token is a change.
const SHARES: f32 = 64.0;

/// Grain in which compute time is reported, for the same reason.
const WORK_GRAIN_US: u64 = 10_000;
/// Steps within a factor of two in which the time of a prompt token is reported.
const STEPS_OF_DOUBLE: f64 = 8.0;

/// State that a watcher has.
#[derive(Debug, Default)]
struct ReportedState {
    load: Option<v1::WorkerLoad>,
    draining: bool,
    keys: HashSet<ContentKey>,
}

/// Sends each change to a watcher until it goes away or listeners close.
pub async fn report_changes(worker: Arc<PdWorkerState>, watcher: Sender<Result<v1::WorkerState, Status>>) {
    let mut reported = ReportedState::default();
    let mut closing = std::pin::pin!(worker.drain.closing());
    loop {
        if let Some(state) = reported.changes(&worker)
            && watcher.send(Ok(state)).await.is_err()
        {
            return;
        }
        tokio::select! {
            () = watcher.closed() => return,
            () = &mut closing => return,
            () = worker.drain.stopping(), if !reported.draining => {}
            () = sleep(MIN_INTERVAL) => {}
        }
    }
}

impl ReportedState {
    /// Changes since the last call, if there are any.
    fn changes(&mut self, worker: &PdWorkerState) -> Option<v1::WorkerState> {
        let load = worker.load();
        let draining = worker.drain.is_stopping();
        let resident = worker.loads.resident(MAX_KEYS);
        let now: HashSet<ContentKey> = resident.iter().copied().collect();
        let wire = |key: &ContentKey| key.as_bytes().to_vec().into();
        let added: Vec<_> = resident.iter().filter(|key| !self.keys.contains(*key)).map(wire).collect();
        let removed: Vec<_> = self.keys.difference(&now).map(wire).collect();
        let same = self.load.as_ref() == Some(&load) && self.draining == draining;
        if same && added.is_empty() && removed.is_empty() {
            return None;
        }
        *self = Self { load: Some(load.clone()), draining, keys: now };
        Some(v1::WorkerState { load: Some(load), draining, resident_added: added, resident_removed: removed })
    }
}

impl PdWorkerState {
    /// Load over all models.
    fn load(&self) -> v1::WorkerLoad {
        let n_requests = self.max_requests.saturating_sub(self.request_permits.available_permits());
        let models = self.models.all();
        let stats: Vec<_> =
            models.iter().map(|(name, model)| (name.as_str(), model.driver.stats())).collect();
        let encoders = self.colocated_load.as_ref().map(|load| load()).unwrap_or_default();
        load(RequestSlots { used: n_requests, total: self.max_requests }, &stats, encoders)
    }
}

/// Admitted requests of a worker.
#[derive(Clone, Copy, Debug)]
pub struct RequestSlots {
    /// Admitted requests.
    pub used: usize,
    /// Most requests.
    pub total: usize,
}

/// Work of the engines and the colocated encoders since the start.
fn computed<'a>(
    stats: impl Iterator<Item = &'a Stats>,
    encoders: Option<v1::ComputedWork>,
) -> v1::ComputedWork {
    let coarse = |n: u64, grain: u64| n / grain * grain;
    let mut sum = v1::ComputedWork::default();
    for stats in stats {
        sum.step_us = sum.step_us.saturating_add(stats.step_work_us);
        sum.step_fixed_us = sum.step_fixed_us.saturating_add(stats.step_fixed_us);
        sum.step_slo_us = sum.step_slo_us.saturating_add(stats.step_slo_us);
    }
    v1::ComputedWork {
        encode_us: coarse(encoders.map_or(0, |encoders| encoders.encode_us), WORK_GRAIN_US),
        step_us: coarse(sum.step_us, WORK_GRAIN_US),
        step_fixed_us: coarse(sum.step_fixed_us, WORK_GRAIN_US),
        step_slo_us: coarse(sum.step_slo_us, WORK_GRAIN_US),
    }
}

/// Load of a worker from its admitted requests, the statistics of its engines under the names of their models, and the load of
/// colocated encoders.
pub fn load(requests: RequestSlots, engines: &[(&str, Stats)], encoders: v1::WorkerLoad) -> v1::WorkerLoad {
    let stats = || engines.iter().map(|(_, stats)| stats);
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    // Engines count sequences, and a request has at least one, so at most as many requests wait as sequences.
    let waiting = stats().map(|s| s.waiting).sum::<usize>().min(requests.used);
    let share = |used: usize, total: usize| match total {
        0 => 0.0,
        total => ((used as f32 / total as f32) * SHARES).round() / SHARES,
    };
    let fullest = |shares: &mut dyn Iterator<Item = f32>| shares.fold(0.0, f32::max);
    let prefill_cost = |(model, stats): &(&str, Stats)| {
        let token_us = coarse(stats.prefill_row?.as_secs_f64() * 1e6);
        Some(v1::PrefillCost { model: (*model).to_owned(), token_us })
    };
    v1::WorkerLoad {
        running: count(requests.used - waiting),
        waiting: count(waiting),
        capacity: count(requests.total),
        kv_usage: fullest(&mut stats().map(|s| share(s.self_used, s.self_total))),
        cross_kv_usage: fullest(&mut stats().map(|s| share(s.cross_used, s.cross_total))),
        waiting_tokens: stats().map(|s| s.waiting_tokens as u64).sum(),
        prefill_costs: engines.iter().filter_map(prefill_cost).collect(),
        // Of colocated encoders: the proxy gives them work too.
        queued_us: encoders.queued_us,
        costs: encoders.costs,
        cold_encoders: encoders.cold_encoders,
        computed: Some(computed(stats(), encoders.computed)),
    }
}

/// A time at a grain that is a part of itself.
fn coarse(us: f64) -> f64 {
    ((us.log2() * STEPS_OF_DOUBLE).round() / STEPS_OF_DOUBLE).exp2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_that_of_all_engines() {
        let slots = RequestSlots { used: 0, total: 8 };
        let stats =
            Stats { step_work_us: 30_000, step_fixed_us: 20_000, step_slo_us: 50_000, ..Stats::default() };
        let reported =
            load(slots, &[("a", stats), ("b", stats)], v1::WorkerLoad::default()).computed.unwrap();
        assert_eq!(
            (reported.step_us, reported.step_fixed_us, reported.step_slo_us),
            (60_000, 40_000, 100_000)
        );
    }

    #[test]
    fn the_time_of_a_prompt_token_is_of_each_model_that_has_read_some() {
        let slots = RequestSlots { used: 0, total: 8 };
        let of = |us: Option<u64>| Stats { prefill_row: us.map(Duration::from_micros), ..Stats::default() };
        let costs = |engines: &[(&str, Stats)]| load(slots, engines, v1::WorkerLoad::default()).prefill_costs;
        let both = costs(&[("small", of(Some(30))), ("new", of(None)), ("large", of(Some(900)))]);
        let names: Vec<_> = both.iter().map(|cost| cost.model.as_str()).collect();
        assert_eq!(names, ["small", "large"]);
        for (cost, us) in both.iter().zip([30.0, 900.0]) {
            assert!((cost.token_us / us - 1.0).abs() < 0.05, "{cost:?}");
        }
        assert_eq!(
            costs(&[("m", of(Some(1000)))]),
            costs(&[("m", of(Some(1010)))]),
            "no change worth a message"
        );
        assert_eq!(costs(&[("m", of(Some(0)))])[0].token_us, 0.0);
    }
}
