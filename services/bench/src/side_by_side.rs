//! Clusters side by side under the same load: all are up, one at a time is under load, and their runs are interleaved.
//!
//! If a worker dies, the measurements under way are void.

use crate::cluster::{ClusterStarter, RunningCluster};
use crate::error::{MeasureError, chain};
use crate::interleave::{ComparedServer, SweepObserver, run_interleaved};
use crate::sweep::{OfferedLoad, SweepSettings};
use crate::topology::Topology;
use std::time::Duration;
use tokio::time::sleep;

/// Pause between two liveness checks of the processes.
const LIVENESS_PAUSE: Duration = Duration::from_millis(200);

/// Running clusters.
pub struct SideBySide<C> {
    clusters: Vec<C>,
}

impl<C: RunningCluster> SideBySide<C> {
    /// Starts the clusters one after the other: they would disturb each other while they load. `report` gets a line for
    /// each.
    ///
    /// # Errors
    /// [`MeasureError`] if one cannot start.
    pub async fn start(
        starter: &impl ClusterStarter<Cluster = C>,
        topologies: &[Topology],
        report: &(dyn Fn(&str) + Sync),
    ) -> Result<Self, MeasureError> {
        let mut clusters = Vec::new();
        for topology in topologies {
            let cluster = starter.start(topology).await?;
            let placed: Vec<_> =
                cluster.placement().iter().map(|(name, cores)| format!("{name} on {cores}")).collect();
            report(&format!("{topology}: {}", placed.join(", ")));
            clusters.push(cluster);
        }
        Ok(Self { clusters })
    }

    /// Cores of every process, for a report.
    pub fn placement(&self) -> Vec<(String, String)> {
        let one = |cluster: &C| {
            let placed = cluster.placement().iter().map(|(name, cores)| format!("{name}: {cores}"));
            (format!("cores, {}", cluster.topology()), placed.collect::<Vec<_>>().join("; "))
        };
        self.clusters.iter().map(one).collect()
    }

    /// Measures the goodput of some of the clusters; the observer's lanes are their indices in `topologies`.
    ///
    /// # Errors
    /// [`MeasureError::Failed`] if a cluster does not answer, or a process dies: the measurements under way are void.
    pub async fn measure(
        &mut self,
        topologies: &[Topology],
        load: &OfferedLoad<'_>,
        settings: &SweepSettings,
        observer: &dyn SweepObserver,
    ) -> Result<(), MeasureError> {
        let mut servers = Vec::new();
        for topology in topologies {
            let cluster = self.clusters.iter().find(|cluster| cluster.topology() == topology);
            let not_up = || MeasureError::Failed(format!("{topology} is not up"));
            let server = cluster.ok_or_else(not_up)?.server()?;
            servers.push(ComparedServer { topology: topology.to_string(), server });
        }
        let measuring = run_interleaved(&servers, load, settings, observer);
        tokio::select! {
            ended = measuring => ended.map_err(|e| MeasureError::Failed(chain(&e))),
            dead = died(&mut self.clusters) => {
                Err(MeasureError::Failed(format!("{dead}\nthe measurements under way are void")))
            }
        }
    }

    /// Ends all processes.
    pub async fn stop(self) {
        for cluster in self.clusters {
            cluster.stop().await;
        }
    }
}

/// Ends when a process of any cluster has ended.
async fn died<C: RunningCluster>(clusters: &mut [C]) -> String {
    loop {
        for cluster in &mut *clusters {
            if let Some(reason) = cluster.dead() {
                return format!("{}: {reason}", cluster.topology());
            }
        }
        sleep(LIVENESS_PAUSE).await;
    }
}
