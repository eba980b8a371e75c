//! Adapters that requests loaded, loaded again into worker processes that come without them: one that has restarted, or has joined.

use super::adapters::{Half, Pool};
use super::work::Orchestrator;
use crate::fleet::catalog::Known;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use triptych_proto::v1;
use triptych_runtime::discovery::Role;

/// Between two looks, if nothing changes.
const INTERVAL: Duration = Duration::from_secs(5);
/// Time of a worker to load an adapter.
const LOAD_TIMEOUT: Duration = Duration::from_secs(30);

impl Orchestrator {
    /// Loads adapters again where they are missing, until listeners close.
    pub(crate) async fn restore_adapters(self: Arc<Self>) {
        tokio::select! {
            () = self.restore_missing() => {}
            () = self.drain.closing() => {}
        }
    }

    async fn restore_missing(&self) {
        let mut changes = self.fleet.changes();
        loop {
            let catalog = changes.borrow_and_update().clone();
            for (request, known) in self.adapters.needs(&catalog) {
                self.restore(&request, &known).await;
            }
            // After a while also without a change: one that failed is asked again.
            let _ = timeout(INTERVAL, changes.changed()).await;
        }
    }

    async fn restore(&self, request: &v1::LoadAdapterRequest, known: &Known) {
        let Some(channel) = self.fleet.channel_of(&known.id) else { return };
        // The encoder's half first: who announces the decoder's is asked for both.
        let mut pools = Vec::new();
        if known.is_encoder() {
            pools.push(Pool::Encoder);
        }
        if known.role == Role::Pd {
            pools.push(Pool::Pd);
        }
        for pool in pools {
            let half = Half { worker: known.id.clone(), pool, channel: channel.clone() };
            let deadline = Instant::now() + LOAD_TIMEOUT;
            match self.ask_half(&half, deadline, half.load(request.clone(), deadline)).await {
                Ok(_) => tracing::info!(adapter = %request.name, worker = %known.id, "adapter loaded again"),
                Err(failure) => {
                    tracing::warn!(adapter = %request.name, worker = %known.id, %failure, "adapter not loaded again");
                    if failure.class.is_retryable() {
                        self.adapters.ask_again(&request.name, &known.id);
                    }
                    return;
                }
            }
        }
    }
}
