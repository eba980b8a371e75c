//! Clusters side by side under the same load: all are up, one at a time is under load, and runs go round.
//!
//! A sweep of each cluster goes on at the same time as the others', but each run waits for its turn: so the rates that
//! one search picks do not depend on another's, and a bad minute of the machine hits all alike. A worker that dies makes
//! everything that was under way void.

use crate::error::{CliError, chain};
use crate::model::{self, CheckedModel};
use crate::topology::{BenchCluster, ClusterSettings, TopologyArgs};
use crate::up::screen::Screen;
use futures::future::{join_all, select_all};
use std::path::Path;
use std::sync::Arc;
use tokio::sync::Mutex;
use triptych_bench::client::grpc::GrpcTarget;
use triptych_bench::result::{RateResult, SweepResult};
use triptych_bench::scrape::Scraper;
use triptych_bench::slo::Slo;
use triptych_bench::sweep::{News, Server, SweepSettings, run_sweep};
use triptych_bench::topology::Topology;
use triptych_bench::workload::Workload;
use triptych_runtime::grpc;

/// Connections to each cluster: a stream of one must not wait behind all others.
const N_CHANNELS: usize = 4;

/// The clusters, up.
pub struct SideBySide {
    clusters: Vec<BenchCluster>,
    model: CheckedModel,
    screen: Screen,
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
            return Err(CliError::Setting("clusters are compared with one model; name it with --model DIR".into()));
        };
        let mut clusters = Vec::new();
        for topology in topologies {
            let settings = ClusterSettings { topology, args, models: &models, screen, dir };
            let cluster = BenchCluster::start(settings).await?;
            let places: Vec<_> = cluster.placement.iter().map(|(name, cores)| format!("{name} on {cores}")).collect();
            screen.say(&format!("{topology}: {}", places.join(", ")));
            clusters.push(cluster);
        }
        Ok(Self { clusters, model: model.clone(), screen: screen.clone() })
    }

    /// Where everything runs, for a report.
    pub fn placement(&self) -> Vec<(String, String)> {
        let one = |cluster: &BenchCluster| {
            let places = cluster.placement.iter().map(|(name, cores)| format!("{name}: {cores}"));
            (format!("cores, {}", cluster.topology), places.collect::<Vec<_>>().join("; "))
        };
        self.clusters.iter().map(one).collect()
    }

    /// A sweep of each of the clusters that `wanted` says, in turns; each result goes to `done` as soon as it is there.
    ///
    /// # Errors
    /// [`CliError::Failed`] if a cluster does not answer, or a process of one dies: what was under way is void.
    pub async fn sweep(
        &mut self,
        (workload, slo): (&Workload, &Slo),
        settings: &SweepSettings,
        wanted: impl Fn(&Topology) -> bool,
        done: &(dyn Fn(&Topology, &SweepResult) -> Result<(), CliError> + Sync),
    ) -> Result<(), CliError> {
        let turn = Arc::new(Mutex::new(()));
        let mut servers = Vec::new();
        for cluster in self.clusters.iter().filter(|cluster| wanted(&cluster.topology)) {
            servers.push((cluster.topology.clone(), self.server(cluster)?));
        }
        let screen = &self.screen;
        let sweeps = servers.iter().map(|(topology, server)| {
            let mut settings = settings.clone();
            settings.topology = Some(topology.to_string());
            settings.turn = Some(Arc::clone(&turn));
            let listener = move |news: News<'_>| tell(screen, topology, workload, &news);
            async move {
                let found = run_sweep(server, workload, slo, &settings, &listener).await;
                let found = found.map_err(|e| CliError::Failed(format!("{topology}: {}", chain(&e))))?;
                done(topology, &found)
            }
        });
        let died = select_all(self.clusters.iter_mut().map(|cluster| {
            Box::pin(async {
                let how = cluster.died().await;
                (cluster.topology.clone(), how)
            })
        }));
        tokio::select! {
            ended = join_all(sweeps) => ended.into_iter().collect(),
            ((topology, how), ..) = died => {
                Err(CliError::Failed(format!("{topology}: {how}\nwhat was being measured is void")))
            }
        }
    }

    fn server(&self, cluster: &BenchCluster) -> Result<Server, CliError> {
        let failed = |e: &dyn std::error::Error| CliError::failed("cannot make a client", e);
        let address = cluster.faces.grpc_here().to_string();
        let channels = (0..N_CHANNELS).map(|_| grpc::channel(&address));
        let channels = channels.collect::<Result<Vec<_>, _>>().map_err(|e| failed(&e))?;
        let target = GrpcTarget::new(&address, channels, self.model.name.to_string(), None).map_err(|e| failed(&e))?;
        let urls = cluster.admins.iter().map(|(_, at)| format!("http://{at}/metrics")).collect();
        let scraper = Scraper::new(urls).map_err(|e| failed(&e))?;
        Ok(Server { target: Arc::new(target), scraper })
    }

    /// Ends all processes.
    pub async fn stop(self) {
        join_all(self.clusters.into_iter().map(BenchCluster::stop)).await;
    }
}

fn tell(screen: &Screen, topology: &Topology, workload: &Workload, news: &News<'_>) {
    let who = format!("{topology:<10} {}", workload.text());
    match news {
        News::Plan(plan) => screen.say(&format!("{who}: {plan}")),
        News::Rate(rate) => screen.say(&format!("{who}: {}", of_rate(rate))),
        News::Run { .. } | News::Progress(_) => {}
    }
}

/// A rate in a line.
fn of_rate(rate: &RateResult) -> String {
    let verdict = &rate.verdict;
    let ms = |value: Option<f64>| value.map_or_else(|| "no end".to_owned(), |v| format!("{v:.0} ms"));
    let word = if verdict.passed { "passes" } else { "fails" };
    let broken: Vec<_> = verdict.findings.iter().filter(|f| !f.passed).map(|f| f.rule.as_str()).collect();
    let why = if broken.is_empty() { String::new() } else { format!(" ({})", broken.join(", ")) };
    format!(
        "{} requests/s {word}{why}: {:.1} % kept every promise, P99 TTFT {}, P99 TPOT {}",
        rate.rate,
        verdict.attainment() * 100.0,
        ms(verdict.ttft_ms.p99),
        ms(verdict.tpot_ms.p99)
    )
}
