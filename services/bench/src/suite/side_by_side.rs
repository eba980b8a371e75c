//! Clusters side by side under the same load: all are up, one at a time is under load, and runs go round. A worker that
//! dies makes everything that was under way void.

use crate::error::{CliError, chain};
use crate::model::{self, CheckedModel};
use crate::topology::{BenchCluster, ClusterSettings, TopologyArgs};
use crate::up::screen::Screen;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;
use triptych_bench::client::grpc::GrpcTarget;
use triptych_bench::race::{Entrant, Spectator, run_race};
use triptych_bench::scrape::Scraper;
use triptych_bench::slo::Slo;
use triptych_bench::sweep::{Server, SweepSettings};
use triptych_bench::topology::Topology;
use triptych_bench::workload::Workload;
use triptych_runtime::grpc;

/// Connections to each cluster: a stream of one must not wait behind all others.
const N_CHANNELS: usize = 4;
/// Between two looks whether all processes live.
const LOOK: Duration = Duration::from_millis(200);

/// The clusters, up.
pub struct SideBySide {
    clusters: Vec<BenchCluster>,
    model: CheckedModel,
}

impl SideBySide {
    /// Starts them, one after the other: they would be in each other's way while they load.
    ///
    /// # Errors
    /// [`CliError`] if one cannot start.
    pub async fn start(
        args: &TopologyArgs,
        topologies: &[Topology],
        dir: &Path,
        screen: &Screen,
    ) -> Result<Self, CliError> {
        args.pin_self()?;
        let models = model::check_all(&args.models).await?;
        let [model] = models.as_slice() else {
            let one = "clusters are compared with one model; name it with --model DIR";
            return Err(CliError::Setting(one.into()));
        };
        let mut clusters = Vec::new();
        for topology in topologies {
            let settings = ClusterSettings { topology, args, models: &models, screen, dir };
            let cluster = BenchCluster::start(settings).await?;
            let places: Vec<_> =
                cluster.placement.iter().map(|(name, cores)| format!("{name} on {cores}")).collect();
            screen.say(&format!("{topology}: {}", places.join(", ")));
            clusters.push(cluster);
        }
        Ok(Self { clusters, model: model.clone() })
    }

    /// Where everything runs, for a report.
    pub fn placement(&self) -> Vec<(String, String)> {
        let one = |cluster: &BenchCluster| {
            let places = cluster.placement.iter().map(|(name, cores)| format!("{name}: {cores}"));
            (format!("cores, {}", cluster.topology), places.collect::<Vec<_>>().join("; "))
        };
        self.clusters.iter().map(one).collect()
    }

    /// The goodput of these clusters for one workload; the spectator's lanes are their places in `wanted`.
    ///
    /// # Errors
    /// [`CliError::Failed`] if a cluster does not answer, or a process of one dies: what was under way is void.
    pub async fn race(
        &mut self,
        wanted: &[Topology],
        what: (&Workload, &Slo),
        settings: &SweepSettings,
        spectator: &dyn Spectator,
    ) -> Result<(), CliError> {
        let mut entrants = Vec::new();
        for topology in wanted {
            let cluster = self.clusters.iter().find(|cluster| cluster.topology == *topology);
            let not_up = || CliError::Failed(format!("{topology} is not up"));
            let server = self.server(cluster.ok_or_else(not_up)?)?;
            entrants.push(Entrant { topology: topology.to_string(), server });
        }
        let racing = run_race(&entrants, what, settings, spectator);
        tokio::select! {
            ended = racing => ended.map_err(|e| CliError::Failed(chain(&e))),
            dead = died(&mut self.clusters) => {
                Err(CliError::Failed(format!("{dead}\nwhat was being measured is void")))
            }
        }
    }

    fn server(&self, cluster: &BenchCluster) -> Result<Server, CliError> {
        let failed = |e: &dyn std::error::Error| CliError::failed("cannot make a client", e);
        let address = cluster.faces.grpc_here().to_string();
        let channels = (0..N_CHANNELS).map(|_| grpc::channel(&address));
        let channels = channels.collect::<Result<Vec<_>, _>>().map_err(|e| failed(&e))?;
        let target = GrpcTarget::new(&address, channels, self.model.name.to_string(), None);
        let target = target.map_err(|e| failed(&e))?;
        let urls = cluster.admins.iter().map(|(_, at)| format!("http://{at}/metrics")).collect();
        let scraper = Scraper::new(urls).map_err(|e| failed(&e))?;
        Ok(Server { target: Arc::new(target), scraper })
    }

    /// Ends all processes.
    pub async fn stop(self) {
        for cluster in self.clusters {
            cluster.stop().await;
        }
    }
}

/// Ends when a process of any cluster does.
async fn died(clusters: &mut [BenchCluster]) -> String {
    loop {
        for cluster in &mut *clusters {
            if let Some(how) = cluster.dead() {
                return format!("{}: {how}", cluster.topology);
            }
        }
        sleep(LOOK).await;
    }
}
