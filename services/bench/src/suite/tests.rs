//! A suite of modelled clusters under a paused clock, killed in the middle and started again.

use super::*;
use crate::arrivals::Arrivals;
use crate::client::{ContentSource, PreparedRequest, Reply, Target};
use crate::cluster::ProcessTime;
use crate::offered::Offered;
use crate::outcome::End;
use crate::paired::{Compared, paired};
use crate::scrape::Scraper;
use crate::sweep::Server;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// A cluster that answers every request after a while, on a machine that grows slower for all.
struct Slow {
    topology: Topology,
    ttft: Duration,
    began: Instant,
    n_served: Arc<AtomicU64>,
}

impl Target for Slow {
    fn prepare(&self, _: &Offered, _: &ContentSource) -> PreparedRequest {
        let (ttft, began) = (self.ttft, self.began);
        let n_served = Arc::clone(&self.n_served);
        Box::new(move |clock| {
            Box::pin(async move {
                n_served.fetch_add(1, Ordering::Relaxed);
                // Four times as slow after fifty minutes.
                sleep(ttft.mul_f64(1.0 + began.elapsed().as_secs_f64() / 1000.0)).await;
                let first = clock.now();
                sleep(Duration::from_millis(10)).await;
                let tokens = vec![first, clock.now()];
                Reply { tokens, prompt_tokens: Some(40), ..Reply::without_tokens(End::Whole, clock.now()) }
            })
        })
    }

    fn name(&self) -> String {
        self.topology.to_string()
    }

    fn model(&self) -> String {
        "m".to_owned()
    }
}

struct Cluster {
    topology: Topology,
    target: Arc<Slow>,
}

impl RunningCluster for Cluster {
    fn topology(&self) -> &Topology {
        &self.topology
    }

    fn server(&self) -> Result<Server, MeasureError> {
        triptych_runtime::tls::install_provider();
        let scraper = Scraper::nobody().map_err(|e| MeasureError::failed("no client", &e))?;
        Ok(Server { target: Arc::clone(&self.target) as Arc<dyn Target>, scraper })
    }

    fn placement(&self) -> &[(String, String)] {
        &[]
    }

    fn cpu_times(&self) -> Result<Vec<ProcessTime>, MeasureError> {
        Ok(Vec::new())
    }

    fn dead(&mut self) -> Option<String> {
        None
    }

    async fn stop(self) {}
}

/// Starts clusters of which the first is a tenth faster.
struct Modelled {
    began: Instant,
    n_served: Arc<AtomicU64>,
}

impl ClusterStarter for Modelled {
    type Cluster = Cluster;

    async fn start(&self, topology: &Topology) -> Result<Cluster, MeasureError> {
        let ms = if topology.to_string() == "1e1pd" { 90 } else { 100 };
        let (topology, n_served) = (topology.clone(), Arc::clone(&self.n_served));
        let target =
            Slow { topology: topology.clone(), ttft: Duration::from_millis(ms), began: self.began, n_served };
        Ok(Cluster { topology, target: Arc::new(target) })
    }
}

struct Silent;

impl SuiteObserver for Silent {
    fn line(&self, _: &str) {}
}

fn plan() -> SuitePlan {
    let block = Some(Duration::from_secs(60));
    let max_window = Duration::from_secs(600);
    let settings = SweepSettings {
        arrivals: Arrivals::Constant,
        seeds: vec![1, 2],
        n_requests: 1000,
        max_window,
        block,
        rates: Rates::Listed(vec![2.0, 4.0]),
        max_late: Some(Duration::from_secs(1)),
        ..SweepSettings::default()
    };
    SuitePlan {
        workloads: vec![Workload::parse("text:text=5,output=2").unwrap()],
        topologies: ["1e1pd", "dp2"].map(|name| name.parse().unwrap()).to_vec(),
        slo: "ttft=1s".parse().unwrap(),
        settings,
        size: Size { n_requests: 1000, n_seeds: 2, max_window, block },
        search: SearchPlan::from(2.0, 0.1),
    }
}

#[tokio::test(start_paused = true)]
async fn a_suite_that_was_killed_goes_on_behind_the_last_block_and_slow_hours_hit_all() {
    let dir = tempfile::tempdir().unwrap();
    let results = Results::in_dir(dir.path()).unwrap();
    let plan = plan();
    let starter = Modelled { began: Instant::now(), n_served: Arc::default() };
    // 1000 requests at 2 a second are 500 s for each of two clusters and seeds; it is killed after the first seed's.
    let killed = timeout(Duration::from_secs(1500), plan.measure(&starter, &results, &Silent)).await;
    assert!(killed.is_err() && plan.n_missing(&results) == 2, "no result has ended");
    let n_runs = || std::fs::read_dir(dir.path().join("runs")).unwrap().count();
    let (n_before, served_before) = (n_runs(), starter.n_served.load(Ordering::Relaxed));
    assert!(n_before > 10, "{n_before} blocks were kept");
    plan.measure(&starter, &results, &Silent).await.unwrap();
    let found = plan.all_stored(&results);
    assert_eq!((found.len(), plan.n_missing(&results)), (2, 0));
    // Rates of 2 and 4 a second have 8 and 4 blocks a seed.
    assert_eq!(n_runs(), (8 + 4) * 2 * 2);
    let served = starter.n_served.load(Ordering::Relaxed) - served_before;
    assert!(served < 8000 * 12 / 10 - served_before / 2, "{served} more after {served_before}");
    let rates = paired(&found[0], &found[1]);
    assert_eq!(rates.iter().map(|r| r.n_pairs).collect::<Vec<_>>(), [16, 8]);
    for rate in rates {
        let (_, ttft) = rate.differences.iter().find(|(what, _)| *what == Compared::TtftP50).unwrap();
        let ttft = ttft.unwrap();
        assert!(ttft.mean < -5.0 && ttft.mean + ttft.half < 0.0, "faster beyond the interval: {ttft:?}");
    }
    let with = |settings| SuitePlan { settings, ..plan.clone() };
    let told = SweepSettings { pd_tpot_slo: Some(Duration::from_millis(5)), ..plan.settings.clone() };
    let until_clear = SweepSettings { until_clear: true, ..plan.settings.clone() };
    let flagged = SweepSettings { worker_flags: "--kv-mib 256".into(), ..plan.settings.clone() };
    let others = [told, until_clear, flagged];
    assert_eq!(others.map(|settings| with(settings).n_missing(&results)), [2, 2, 2]);
    // Both of 2 and 4 pass; of further rates the next one is to be tried.
    let until_bracketed = |rates: &[f64]| {
        let rates = Rates::Bracketed(rates.to_vec());
        with(SweepSettings { rates, ..plan.settings.clone() }).n_missing(&results)
    };
    assert_eq!((until_bracketed(&[2.0, 4.0]), until_bracketed(&[2.0, 4.0, 6.0])), (0, 2));
    assert_eq!(plan.forget(&results, "dp2").unwrap(), 1);
    assert_eq!((plan.n_missing(&results), n_runs()), (1, 24));
    assert!(plan.forget(&results, "dp9").is_err());
}
