//! The members of the fleet: those that discovery names, each with a task; and the fleet's own clock.

use super::state::FleetState;
use super::task;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};
use triptych_runtime::discovery::{Discovery, EndpointSet};

/// After each, success rates are compared.
const INTERVAL: Duration = Duration::from_secs(10);

/// Follows discovery until it is dropped; the tasks of all workers end with it.
pub(super) async fn run(shared: Arc<FleetState>, discovery: Discovery) {
    let mut present = discovery.present();
    let mut tasks = JoinSet::new();
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let set = present.borrow_and_update().clone();
        for worker in shared.follow(&set) {
            tasks.spawn(task::run(Arc::clone(&shared), worker));
        }
        until_changed(&shared, &mut present, (&mut tasks, &mut ticks)).await;
    }
}

/// Keeps house until the set is another.
async fn until_changed(
    shared: &FleetState,
    present: &mut watch::Receiver<EndpointSet>,
    (tasks, ticks): (&mut JoinSet<()>, &mut tokio::time::Interval),
) {
    loop {
        tokio::select! {
            changed = present.changed() => match changed {
                Ok(()) => return,
                // Without a source there is nothing to follow.
                Err(_) => std::future::pending().await,
            },
            _ = ticks.tick() => shared.compare_rates(Instant::now()),
            Some(ended) = tasks.join_next(), if !tasks.is_empty() => {
                if let Err(e) = ended {
                    tracing::error!(error = %e, "the task of a worker died");
                }
            }
        }
    }
}
