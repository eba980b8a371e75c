//! Clusters that are started to be measured, as the measurements see them. The binary implements it: only that knows the
//! flags of its roles.

use crate::cpu_time::CpuTime;
use crate::error::MeasureError;
use crate::sweep::Server;
use crate::topology::{Topology, WorkerKind};

/// Processor time of a process of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessTime {
    /// Its worker; `None`: the proxy or a store.
    pub worker: Option<WorkerKind>,
    /// Since its start.
    pub time: CpuTime,
}

/// A running cluster. Dropping it ends its processes.
pub trait RunningCluster {
    /// Its workers.
    fn topology(&self) -> &Topology;

    /// A client of its proxy, and the metrics of its processes.
    ///
    /// # Errors
    /// [`MeasureError::Failed`] if a client cannot be made.
    fn server(&self) -> Result<Server, MeasureError>;

    /// Name and cores of each process, for the report.
    fn placement(&self) -> &[(String, String)];

    /// Processor time of each process, in a fixed order.
    ///
    /// # Errors
    /// [`MeasureError::Failed`] if the system does not tell.
    fn cpu_times(&self) -> Result<Vec<ProcessTime>, MeasureError>;

    /// The reason, if a process has ended: then the measurements under way are void.
    fn dead(&mut self) -> Option<String>;

    /// Ends every process: first by request, then by force.
    fn stop(self) -> impl Future<Output = ()>;
}

/// Starts clusters with the same model and the same total of cores.
pub trait ClusterStarter {
    /// The running cluster.
    type Cluster: RunningCluster;

    /// Starts a cluster and waits until all of its processes are ready.
    ///
    /// # Errors
    /// [`MeasureError`] if a process cannot start, or the workers do not fit the cores.
    fn start(&self, topology: &Topology) -> impl Future<Output = Result<Self::Cluster, MeasureError>>;
}
