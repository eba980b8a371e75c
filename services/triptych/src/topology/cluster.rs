//! One cluster that is measured: its processes, each on its own cores, from start to end.

use super::args::{TIMED_BY, TopologyArgs, check_store};
use crate::args::engine::tpot_flags;
use crate::args::{EC_VARIABLE, EcArg, tls};
use crate::error::CliError;
use crate::listen::Ports;
use crate::model::CheckedModel;
use crate::shared_dir::SharedDir;
use crate::up::plan::{ChildSpec, ClusterPlan, Endpoints, Role, child, local, model_flags, proxy};
use crate::up::ready;
use crate::up::screen::Screen;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};
use triptych_bench::cluster::{ClusterStarter, ProcessTime, RunningCluster};
use triptych_bench::cpu_time::CpuTime;
use triptych_bench::error::MeasureError;
use triptych_bench::sweep::Server;
use triptych_bench::topology::quota::{self, Quota};
use triptych_bench::topology::{CoreList, CoreShare, Topology, WorkerKind, affinity};
use triptych_ec::EcSetting;

/// Pause between two liveness checks of the processes.
const LIVENESS_PAUSE: Duration = Duration::from_millis(100);
/// Time for an orderly end, before processes are killed.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// Starts clusters from this binary.
#[derive(Clone, Copy)]
pub struct Starter<'a> {
    /// Flags that all clusters have in common.
    pub args: &'a TopologyArgs,
    /// The model, checked.
    pub model: &'a CheckedModel,
    /// Log of the supervisor.
    pub screen: &'a Screen,
    /// Folder for logs, and for a store on disk.
    pub dir: &'a Path,
}

impl ClusterStarter for Starter<'_> {
    type Cluster = BenchCluster;

    async fn start(&self, topology: &Topology) -> Result<BenchCluster, MeasureError> {
        Ok(BenchCluster::start(self, topology).await?)
    }
}

/// A running cluster. Dropping it kills its processes.
pub struct BenchCluster {
    topology: Topology,
    model: String,
    endpoints: Endpoints,
    /// Addresses at which the processes answer `/metrics`.
    admins: Vec<SocketAddr>,
    /// Name and cores of each process.
    placement: Vec<(String, String)>,
    processes: Vec<Process>,
    // After the processes: it is removed when they are gone.
    _shared: Option<SharedDir>,
}

struct Process {
    name: String,
    worker: Option<WorkerKind>,
    child: Child,
    log: PathBuf,
    // After the child: it is removed when the process is gone.
    _quota: Option<Quota>,
}

impl BenchCluster {
    /// Starts the processes and waits until all are ready.
    ///
    /// # Errors
    /// [`CliError`] if one cannot start, names the end of its log, or if workers do not fit the cores.
    async fn start(starter: &Starter<'_>, topology: &Topology) -> Result<Self, CliError> {
        let Starter { args, model, screen, dir } = *starter;
        let models = std::slice::from_ref(model);
        let name = topology.to_string().replace(':', "-");
        let (cores, side) = args.core_lists()?;
        let shares = shares(args, topology, &cores)?;
        let (ec, shared) = args.store_of(&name, dir)?;
        check_store(&ec).await?;
        let mut ports = Ports::default();
        let plan = plan(starter, topology, &shares, &ec, &mut ports)?;
        // Children take their ports over.
        drop(ports);
        let mut cluster = Self {
            topology: topology.clone(),
            model: model.name.to_string(),
            endpoints: plan.endpoints,
            admins: plan.children.iter().map(|c| c.admin).collect(),
            placement: Vec::new(),
            processes: Vec::new(),
            _shared: shared,
        };
        let mut workers = topology.kinds().into_iter().zip(&shares);
        for spec in &plan.children {
            let is_worker = matches!(spec.role, Role::Encoder | Role::Pd);
            let (worker, share) = if is_worker { workers.next() } else { None }.unzip();
            let cores_text = share.map_or_else(|| side.to_string(), ToString::to_string);
            let (on, n_cores) = share.map_or((&side, None), |s| (&s.cores, s.quota.map(|_| s.n_cores())));
            let log = dir.join(format!("{name}-{}.log", spec.name));
            cluster.processes.push(Process { worker, ..Process::start(spec, on, n_cores, log)? });
            cluster.placement.push((spec.name.clone(), cores_text));
        }
        tokio::select! {
            () = ready::wait(&plan, models, screen) => {}
            dead = cluster.died() => return Err(CliError::Failed(format!("--topology {topology}: {dead}"))),
        }
        screen.end_progress();
        Ok(cluster)
    }

    /// Ends when a process has ended, with the reason.
    async fn died(&mut self) -> String {
        loop {
            if let Some(dead) = self.dead() {
                return dead;
            }
            sleep(LIVENESS_PAUSE).await;
        }
    }
}

impl RunningCluster for BenchCluster {
    fn topology(&self) -> &Topology {
        &self.topology
    }

    fn server(&self) -> Result<Server, MeasureError> {
        let urls = self.admins.iter().map(|at| format!("http://{at}/metrics")).collect();
        Server::grpc(&self.endpoints.local_grpc().to_string(), &self.model, urls)
    }

    fn placement(&self) -> &[(String, String)] {
        &self.placement
    }

    fn cpu_times(&self) -> Result<Vec<ProcessTime>, MeasureError> {
        let of = |process: &Process| {
            let failed = |e: &std::io::Error| {
                MeasureError::failed(format!("cannot tell the processor time of {}", process.name), e)
            };
            // A child that was waited for has no id: it has ended.
            let time = CpuTime::of(process.child.id().unwrap_or_default()).map_err(|e| failed(&e))?;
            Ok(ProcessTime { worker: process.worker, time })
        };
        self.processes.iter().map(of).collect()
    }

    fn dead(&mut self) -> Option<String> {
        self.processes.iter_mut().find_map(Process::dead)
    }

    async fn stop(mut self) {
        for process in &self.processes {
            if let Some(pid) = process.child.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
                // A process that is gone already cannot be signalled, and need not be.
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        let all = async {
            for process in &mut self.processes {
                let _ = process.child.wait().await;
            }
        };
        if timeout(STOP_GRACE, all).await.is_err() {
            for process in &mut self.processes {
                let _ = process.child.kill().await;
            }
        }
    }
}

impl Process {
    fn start(spec: &ChildSpec, on: &CoreList, n_cores: Option<f64>, log: PathBuf) -> Result<Self, CliError> {
        let failed = |e: std::io::Error| CliError::failed(format!("cannot start {}", spec.name), &e);
        let exe = std::env::current_exe().map_err(failed)?;
        let lines = File::create(&log).map_err(|e| CliError::failed(log.display(), &e))?;
        let (program, args) = affinity::command_on(on, &exe);
        let mut command = Command::new(program);
        command.args(args).args(&spec.flags).arg("--supervised-by").arg(std::process::id().to_string());
        match &spec.ec {
            Some(setting) => command.env(EC_VARIABLE, setting),
            None => command.env_remove(EC_VARIABLE),
        };
        for variable in tls::VARIABLES {
            command.env_remove(variable);
        }
        command.env("NO_COLOR", "1").stdin(Stdio::null()).stdout(Stdio::null()).stderr(lines);
        // An own process group: Ctrl-C reaches the bench alone, which ends its children.
        command.process_group(0).kill_on_drop(true);
        let child = command.spawn().map_err(|e| affinity::missing(&e))?;
        let quota = match n_cores {
            None => None,
            Some(n_cores) => {
                let pid = child.id().unwrap_or_default();
                let quota = Quota::of(&format!("{}-{pid}", spec.name), n_cores).map_err(failed)?;
                quota.hold(pid).map_err(failed)?;
                Some(quota)
            }
        };
        Ok(Self { name: spec.name.clone(), worker: None, child, log, _quota: quota })
    }

    fn dead(&mut self) -> Option<String> {
        let status = self.child.try_wait().ok().flatten()?;
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let mut last: Vec<&str> = log.lines().rev().take(5).collect();
        last.reverse();
        Some(format!("{} ended with {status}; its last lines:\n{}", self.name, last.join("\n")))
    }
}

/// Cores of each worker. Workers that compute nothing have all of them, as many as they are.
fn shares(args: &TopologyArgs, topology: &Topology, cores: &CoreList) -> Result<Vec<CoreShare>, CliError> {
    if args.models.compute.timed_by.is_some() {
        return Ok(vec![CoreShare { cores: cores.clone(), quota: None }; topology.kinds().len()]);
    }
    if args.worker_flags.split_whitespace().any(|flag| flag.starts_with(TIMED_BY)) {
        let text = format!(
            "--worker-flags: {TIMED_BY} stands by itself, so that such workers have no part of the cores each"
        );
        return Err(CliError::Setting(text));
    }
    let shares = topology.shares(cores, quota::available());
    shares.map_err(|e| CliError::Setting(format!("--topology {topology}: {e}")))
}

/// The processes in the order of starting, workers in the order of their shares.
fn plan(
    starter: &Starter<'_>,
    topology: &Topology,
    shares: &[CoreShare],
    ec: &EcArg,
    ports: &mut Ports,
) -> Result<ClusterPlan, CliError> {
    let Starter { args, model, .. } = *starter;
    let models = std::slice::from_ref(model);
    let endpoints = Endpoints { http: local(ports.next()?), grpc: local(ports.next()?) };
    let mut children = Vec::new();
    let ec_text = match &ec.setting {
        EcSetting::Memory(memory) => {
            let mut store = child(Role::Store, "store".into(), ports)?;
            store.flags.extend(["--budget-mib".into(), (memory.budget_bytes >> 20).to_string().into()]);
            let text = format!("grpc://{}", store.grpc);
            children.push(store);
            text
        }
        _ => ec.text.clone(),
    };
    for (i, (kind, share)) in topology.kinds().into_iter().zip(shares).enumerate() {
        let role = if kind == WorkerKind::Encoder { Role::Encoder } else { Role::Pd };
        let mut worker = child(role, format!("{}-{i}", kind.as_str()), ports)?;
        worker.flags.extend(["--id".into(), worker.name.clone().into()]);
        let mut own = args.models.clone();
        own.compute.threads = share.threads();
        worker.flags.extend(model_flags(&own, models));
        if kind == WorkerKind::Both {
            worker.flags.push("--with-encoder".into());
            let budget = topology.budget.iter().flat_map(|n| ["--encoder-token-budget".into(), n.into()]);
            worker.flags.extend(budget);
        }
        let told = args.told().filter(|_| role == Role::Pd);
        worker.flags.extend(told.into_iter().flat_map(tpot_flags));
        worker.flags.extend(args.worker_flags.split_whitespace().map(Into::into));
        if let Some(file) = &args.timeline {
            worker.flags.extend(["--trace-file".into(), file.into()]);
        }
        worker.ec = Some(ec_text.clone());
        children.push(worker);
    }
    let mut proxy = proxy(&children, ec_text, endpoints);
    proxy.flags.extend(["--roles".into(), topology.roles().into()]);
    children.push(proxy);
    let store = ec.setting.to_string();
    Ok(ClusterPlan { children, endpoints, store_address: store.clone(), store })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::engine::TPOT_SLO;
    use crate::cli::Cli;
    use clap::{Args, FromArgMatches, Parser};
    use std::ffi::OsString;
    use triptych_core::{Modality, ModelName};

    fn args(flags: &[&str]) -> TopologyArgs {
        let command = TopologyArgs::augment_args(clap::Command::new("t").no_binary_name(true));
        TopologyArgs::from_arg_matches(&command.get_matches_from(flags)).unwrap()
    }

    fn flags_of(topology: &str, flags: &[&str]) -> Vec<(String, String)> {
        flags_with(topology, &args(flags))
    }

    fn flags_with(topology: &str, args: &TopologyArgs) -> Vec<(String, String)> {
        let topology = topology.parse::<Topology>().unwrap();
        let model = CheckedModel {
            name: ModelName::new("m"),
            modalities: vec![Modality::Image],
            towers: Vec::new(),
            dir: "/m".into(),
        };
        let screen = Screen::silent();
        let starter = Starter { args, model: &model, screen: &screen, dir: Path::new("/tmp") };
        let shares = topology.shares(&"0-3".parse().unwrap(), false).unwrap();
        let (ec, _shared) = args.store_of("x", Path::new("/tmp")).unwrap();
        let plan = plan(&starter, &topology, &shares, &ec, &mut Ports::default()).unwrap();
        for child in &plan.children {
            let line = std::iter::once(OsString::from("triptych")).chain(child.flags.iter().cloned());
            let ec = child.ec.iter().flat_map(|ec| ["--ec".into(), OsString::from(ec)]);
            Cli::try_parse_from(line.chain(ec)).unwrap_or_else(|e| panic!("{}: {e}", child.name));
        }
        let text = |c: &ChildSpec| {
            c.flags.iter().map(|f| f.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        plan.children.iter().map(|c| (c.name.clone(), text(c))).collect()
    }

    #[test]
    fn pd_workers_are_told_the_slo_unless_their_flags_are_given() {
        let tpot_slo = Some(Duration::from_micros(2500));
        let told = |topology, flags: &[&str]| {
            let all = flags_with(topology, &TopologyArgs { tpot_slo, ..args(flags) });
            all.into_iter().filter(|(_, text)| text.contains(TPOT_SLO)).collect::<Vec<_>>()
        };
        let [(name, text)] = &told("1e1pd", &[])[..] else { panic!("PD workers alone") };
        assert!(name == "pd-1" && text.contains("--tpot-slo 2.5"), "{text}");
        let own = told("dp2", &["--worker-flags", "--tpot-slo 0"]);
        assert!(own.len() == 2 && own.iter().all(|(_, text)| !text.contains("2.5")));
    }

    #[test]
    fn workers_that_compute_nothing_share_all_cores_and_say_so() {
        let curves = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/papers/a100-qwen3-vl-4b.json");
        let (topology, cores) = ("1e3pd".parse::<Topology>().unwrap(), "0-1".parse().unwrap());
        let timed = args(&[TIMED_BY, curves, "--worker-flags", "--kv-mib 256"]);
        let shares_of_timed = shares(&timed, &topology, &cores).unwrap();
        assert!(
            shares_of_timed.len() == 4
                && shares_of_timed.iter().all(|s| s.quota.is_none() && s.cores == cores)
        );
        assert_eq!(timed.recorded_flags(), format!("--kv-mib 256 {TIMED_BY} {curves}"));
        assert_eq!(args(&[]).recorded_flags(), "");
        // Among other flags it would be timed within a quota of the cores.
        let hidden = args(&["--worker-flags", "--timed-by curves.json"]);
        assert!(shares(&hidden, &topology, &cores).unwrap_err().to_string().contains("stands by itself"));
    }

    #[test]
    fn every_topology_is_made_of_flags_that_the_roles_take() {
        for (topology, names) in [
            ("1e1pd", &["encoder-0", "pd-1", "proxy"][..]),
            ("1e2pd", &["encoder-0", "pd-1", "pd-2", "proxy"]),
            ("dp2", &["worker-0", "worker-1", "proxy"]),
            ("colocated:budget=64", &["worker-0", "proxy"]),
        ] {
            let children = flags_of(topology, &["--worker-flags", "--log debug"]);
            let found: Vec<_> = children.iter().map(|(name, _)| name.as_str()).collect();
            assert_eq!(found, names, "{topology}");
            let both = children.iter().filter(|(_, flags)| flags.contains("--with-encoder")).count();
            assert_eq!(both, names.iter().filter(|name| name.starts_with("worker")).count());
        }
        let colocated = &flags_of("colocated:budget=64", &[])[0].1;
        assert!(
            colocated.contains("--encoder-token-budget 64") && colocated.contains("--threads 4"),
            "{colocated}"
        );
        assert!(flags_of("1e2pd", &[])[2].1.contains("--threads 2"), "what is left over goes to a decoder");
        assert_eq!(flags_of("dp2", &["--ec", "memory"])[0].0, "store");
    }

    #[test]
    fn clusters_that_are_compared_have_stores_of_their_own() {
        let dir = Path::new("/tmp");
        let two = ["--topology", "1e1pd,dp2"];
        let stores =
            |args: TopologyArgs| ["a", "b"].map(|name| args.store_of(name, dir).map(|(ec, _)| ec.text));
        let [a, b] = stores(args(&two));
        assert_ne!(a.unwrap(), b.unwrap());
        let shared = stores(args(&[&two[..], &["--ec", "redis://127.0.0.1"]].concat()));
        let Err(error) = &shared[0] else { panic!("one store for two clusters") };
        assert!(error.to_string().contains("shm"), "{error}");
        assert!(stores(args(&["--topology", "dp2", "--ec", "redis://127.0.0.1"]))[0].is_ok());
    }
}
