//! Upkeep of weights that come and go: they are looked at in intervals, loaded ahead of jobs, and reported while they are away.

use crate::job::EncoderWorkerState;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};
use triptych_core::EncoderId;
use triptych_proto::v1;

/// Between two looks at weights that nobody may need.
const LOOK: Duration = Duration::from_secs(1);
/// Grain in which the time of a load is reported, so that not every moment of a load is a change.
const GRAIN: Duration = Duration::from_millis(10);

/// Looks at the weights until the process stops.
pub fn start(state: &Arc<EncoderWorkerState>) {
    let models = state.models.all();
    if !models.iter().any(|(_, model)| model.encoders.values().any(|tower| tower.batcher.is_lazy())) {
        return;
    }
    let (weak, drain) = (Arc::downgrade(state), state.drain.clone());
    state.drain.tasks().spawn(async move {
        tokio::select! {
            () = look(weak) => {}
            () = drain.stopping() => {}
        }
    });
}

async fn look(state: Weak<EncoderWorkerState>) {
    let mut ticks = interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(state) = state.upgrade() else { return };
        for (_, model) in state.models.all() {
            model.encoders.values().for_each(|tower| tower.batcher.look());
        }
    }
}

impl EncoderWorkerState {
    /// Load of the worker, with the encoders whose weights are not in memory.
    pub fn report(&self) -> v1::WorkerLoad {
        v1::WorkerLoad { cold_encoders: self.cold_encoders(), ..self.pool.load().report() }
    }

    /// Has weights loaded that are not in memory; how many encoders wanted that.
    pub fn load_weights(&self) -> usize {
        let models = self.models.all();
        let towers = models.iter().flat_map(|(_, model)| model.encoders.values());
        towers.filter(|tower| tower.batcher.prepare()).count()
    }

    /// Encoders whose weights are not in memory, in the wire type.
    fn cold_encoders(&self) -> Vec<v1::ColdEncoder> {
        let cold = |name: &str, id: &EncoderId, load: Duration| v1::ColdEncoder {
            model: name.to_owned(),
            modality: v1::Modality::from(id.modality).into(),
            tower_index: id.tower.0.into(),
            load_us: in_grains(load),
        };
        let models = self.models.all();
        let towers = models.iter().flat_map(|(name, model)| model.encoders.iter().map(move |of| (name, of)));
        towers.filter_map(|(name, (id, tower))| Some(cold(name, id, tower.batcher.cold()?))).collect()
    }
}

/// Microseconds, rounded up to whole grains.
fn in_grains(time: Duration) -> u64 {
    let grains = time.as_micros().div_ceil(GRAIN.as_micros());
    u64::try_from(grains.saturating_mul(GRAIN.as_micros())).unwrap_or(u64::MAX)
}
