//! `triptych plan validate`: clusters on this machine beside their simulation.
//!
//! Each topology is started as the bench starts it, its capacity is searched, and it is run at parts of that; the very
//! requests that it was offered are then simulated. For workloads that nobody tuned anything with, the planned topology's
//! measured goodput is set beside the best of all. With `--quick` each run is a few seconds: it shows that everything works,
//! and validates nothing. With `--results` nothing is started: what `triptych bench` stored is compared ([`stored`]).

mod stored;

use super::{Asked, QuestionArgs, blocking, print, to_json};
use crate::args::LogArgs;
use crate::bench::report::{read_all, write};
use crate::error::{CliError, chain};
use crate::model::{self, CheckedModel};
use crate::topology::{BenchCluster, ClusterSettings, TopologyArgs};
use crate::up::screen::Screen;
use clap::Args;
use clap::builder::FalseyValueParser;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use triptych_bench::client::grpc::GrpcTarget;
use triptych_bench::result::Goodput;
use triptych_bench::scrape::Scraper;
use triptych_bench::sweep::{News, Rates, Server, Sweep, SweepSettings, run_sweep};
use triptych_bench::topology::{Topology, Workers};
use triptych_bench::workload::Workload;
use triptych_plan::curves::CostCurves;
use triptych_plan::planner::{self, Budget, Effort, Found, Named, Question, Shape};
use triptych_plan::profile::Busy;
use triptych_plan::simulator::simulate;
use triptych_plan::validation::{Compared, LOADS, Regret, Validation, candidate, compare};
use triptych_runtime::grpc;
use triptych_runtime::turnstile::EncoderBudget;

/// Connections to a cluster.
const N_CHANNELS: usize = 4;
/// Workloads that neither planner nor simulator was tuned with.
const HELD_OUT: &str = "epd-long:images=2 mixed";

/// Flags of `triptych plan validate`.
#[derive(Args, Clone, Debug)]
pub struct ValidateArgs {
    /// What is asked
    #[command(flatten)]
    pub question: QuestionArgs,
    /// Workloads on which the plan is set beside an exhaustive sweep, separated by spaces; `none`: only latencies
    #[arg(long, value_name = "WORKLOADS", default_value = HELD_OUT)]
    pub held_out: String,
    /// Judged requests of a measured run
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(10..))]
    pub measured_requests: u64,
    /// Longest judged part of a measured run, in seconds
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    pub max_window_s: u64,
    /// Stored results of `triptych bench`, or folders of them: these are compared, and nothing is started
    #[arg(long, value_name = "RESULT.json")]
    pub results: Vec<PathBuf>,
    /// With --results: simulate a machine that is as slow as the workers told of each run, by the mean time of an engine
    /// step. What neighbours on a shared machine take is then no error of the simulation
    #[arg(long, requires = "results", value_parser = FalseyValueParser::new())]
    pub as_told: bool,
    /// Folder for `validation.json`, `.md` and `.html`
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub output: PathBuf,
    /// The clusters
    #[command(flatten)]
    pub topology: TopologyArgs,
    /// Logs
    #[command(flatten)]
    pub log: LogArgs,
}

/// Measures, simulates, compares; writes the files, prints the page.
///
/// # Errors
/// [`CliError`] for settings that cannot work, and if a cluster dies: what was measured of it is void.
pub async fn run(args: ValidateArgs) -> Result<(), CliError> {
    let asked = args.question.read()?;
    if !args.output.is_dir() {
        return Err(CliError::Setting(format!("--output: there is no directory {}", args.output.display())));
    }
    if !args.results.is_empty() {
        let results = read_all(&args.results)?;
        let validation = blocking({
            let (asked, as_told) = (asked.clone(), args.as_told);
            move || stored::validate(&asked, &results, as_told)
        });
        let validation = Validation { warnings: warnings(&args, &asked), ..validation.await? };
        save(&args.output, &validation)?;
        return print(&validation.report().to_markdown());
    }
    let held_out = held_out(&args.held_out)?;
    args.topology.pin_self()?;
    let models = model::check_all(&args.topology.models).await?;
    let [model] = models.as_slice() else {
        return Err(CliError::Setting("one model is compared; name it with --model DIR".into()));
    };
    let screen = Screen::new(&args.log)?;
    let dir = tempfile::tempdir().map_err(|e| CliError::failed("cannot make a folder", &e))?;
    let mut lab = Lab {
        topologies: topologies(&args)?,
        args: &args,
        asked: &asked,
        model,
        screen: &screen,
        dir: dir.path(),
        validation: Validation {
            facts: facts(&args, &asked),
            warnings: warnings(&args, &asked),
            ..Validation::default()
        },
    };
    lab.latencies().await?;
    for workload in &held_out {
        lab.regret(workload).await?;
    }
    let validation = lab.validation;
    print(&validation.report().to_markdown())?;
    let (misses, all) = validation.misses();
    screen.say(&format!("{misses} of {all} percentiles miss their goal"));
    Ok(())
}

/// Writes what was compared so far.
fn save(dir: &Path, validation: &Validation) -> Result<(), CliError> {
    let report = validation.report();
    let json = dir.join("validation.json");
    std::fs::write(&json, to_json(validation)?)
        .map_err(|e| CliError::failed(format!("cannot write {}", json.display()), &e))?;
    write(&dir.join("validation.md"), &report)?;
    write(&dir.join("validation.html"), &report)
}

fn held_out(text: &str) -> Result<Vec<Workload>, CliError> {
    if text.trim() == "none" {
        return Ok(Vec::new());
    }
    let read =
        |text: &str| Workload::parse(text).map_err(|e| CliError::setting(format!("--held-out {text}"), &e));
    text.split_whitespace().map(read).collect()
}

/// Those that were named, or those that fit: one worker for each core, every ratio.
fn topologies(args: &ValidateArgs) -> Result<Vec<Topology>, CliError> {
    if !args.topology.topologies.is_empty() {
        return Ok(args.topology.topologies.clone());
    }
    let (cores, _) = args.topology.core_lists()?;
    let n = cores.iter().count();
    let apart = (1..n).map(|n_encoders| Workers::Apart { n_encoders, n_pds: n - n_encoders });
    let together = [Workers::Together { n }, Workers::Together { n: 1 }];
    let mut all: Vec<Topology> =
        apart.chain(together).map(|workers| Topology { workers, budget: None }).collect();
    all.dedup();
    Ok(all)
}

fn facts(args: &ValidateArgs, asked: &Asked) -> Vec<(String, String)> {
    let curves = asked.curves.iter().map(|c| {
        format!("{} threads, commit {}, {:.0} % busy", c.threads, c.measured.commit, c.measured.busy * 1e2)
    });
    vec![
        ("workload".into(), args.question.workload.clone()),
        ("promises".into(), asked.slo.to_string()),
        ("curves".into(), curves.collect::<Vec<_>>().join("; ")),
        ("judged requests of a run".into(), n_requests(args).to_string()),
    ]
}

/// Judged ones, of a measured run.
fn n_requests(args: &ValidateArgs) -> u64 {
    if args.question.quick { 20 } else { args.measured_requests }
}

fn warnings(args: &ValidateArgs, asked: &Asked) -> Vec<String> {
    let mut warnings = Vec::new();
    if args.question.quick {
        warnings.push(
            "a quick run: a few requests of one seed; it shows that everything works, and validates nothing"
                .to_owned(),
        );
    }
    let busy = asked.curves.iter().map(|c| c.measured.busy).fold(0.0, f64::max);
    if busy > Busy::DOUBTFUL {
        warnings
            .push(format!("the curves were measured on a machine of which others used {:.0} %", busy * 1e2));
    }
    warnings
}

struct Lab<'a> {
    args: &'a ValidateArgs,
    asked: &'a Asked,
    model: &'a CheckedModel,
    screen: &'a Screen,
    dir: &'a Path,
    topologies: Vec<Topology>,
    validation: Validation,
}

impl Lab<'_> {
    fn settings(&self, topology: &Topology, first: Option<f64>) -> SweepSettings {
        let args = self.args;
        let seeds =
            if args.question.quick { vec![1] } else { (1..=args.question.seeds.unwrap_or(3)).collect() };
        SweepSettings {
            arrivals: args.question.arrivals,
            seeds,
            n_requests: n_requests(args),
            max_window: Duration::from_secs(if args.question.quick { 4 } else { args.max_window_s }),
            warm_up: args.question.quick.then(|| Duration::from_secs(1)),
            rates: Rates::Search { first, resolution: if args.question.quick { 1.0 } else { 0.05 } },
            topology: Some(topology.to_string()),
            commit: crate::cli::commit(),
            ..SweepSettings::default()
        }
    }

    async fn start(&self, topology: &Topology) -> Result<(BenchCluster, Server), CliError> {
        let models = std::slice::from_ref(self.model);
        let settings = ClusterSettings {
            topology,
            args: &self.args.topology,
            models,
            screen: self.screen,
            dir: self.dir,
        };
        let cluster = BenchCluster::start(settings).await?;
        let failed = |e: &dyn std::error::Error| CliError::failed("cannot make a client", e);
        let address = cluster.faces.grpc_here().to_string();
        let channels = (0..N_CHANNELS).map(|_| grpc::channel(&address)).collect::<Result<Vec<_>, _>>();
        let channels = channels.map_err(|e| failed(&e))?;
        let target = GrpcTarget::new(&address, channels, self.model.name.to_string(), None);
        let target = target.map_err(|e| failed(&e))?;
        let urls = cluster.admins.iter().map(|(_, at)| format!("http://{at}/metrics")).collect();
        let scraper = Scraper::new(urls).map_err(|e| failed(&e))?;
        Ok((cluster, Server { target: Arc::new(target), scraper }))
    }

    /// Goodput of a topology, searched from what is expected of it.
    async fn capacity(
        &mut self,
        server: &Server,
        topology: &Topology,
        w: &Workload,
    ) -> Result<Goodput, CliError> {
        let first = self.expected(topology, w).await?;
        let settings = self.settings(topology, first);
        let listener = |news: News<'_>| {
            if let News::Rate(rate) = news {
                let word = if rate.verdict.passed { "passes" } else { "fails" };
                self.screen.say(&format!("{topology} {}: {} requests/s {word}", w.text(), rate.rate));
            }
        };
        let found = run_sweep(server, w, &self.asked.slo, &settings, &listener).await;
        let found = found.map_err(|e| CliError::Failed(format!("{topology}: {}", chain(&e))))?;
        Ok(found.goodput)
    }

    async fn latencies(&mut self) -> Result<(), CliError> {
        let workload = self.asked.demand.workload.clone();
        for topology in self.topologies.clone() {
            let Some(curves) = self.curves_of(&topology)? else { continue };
            let (mut cluster, server) = self.start(&topology).await?;
            let capacity = self.capacity(&server, &topology, &workload).await?.rate.unwrap_or(0.0);
            if capacity == 0.0 {
                let none = format!(
                    "{topology} keeps the promises at no rate of {}; nothing is compared",
                    workload.text()
                );
                self.validation.warnings.push(none);
                cluster.stop().await;
                continue;
            }
            let settings = self.settings(&topology, None);
            let sweep = Sweep::begin(&server, &workload, &self.asked.slo, &settings).await;
            let sweep = sweep.map_err(|e| CliError::Failed(format!("{topology}: {}", chain(&e))))?;
            for (load, goal) in LOADS {
                let rate = capacity * load;
                let measured = sweep.run(rate, SEED, &|_| ()).await;
                let simulated = self.simulate(&topology, &curves, rate, measured.outcomes.len()).await?;
                let pairs = compare(&measured.outcomes, &simulated, measured.window, &self.asked.slo);
                let (workload, topology) = (workload.text().to_owned(), topology.to_string());
                self.validation.compared.push(Compared {
                    workload,
                    topology,
                    load,
                    rate,
                    goal,
                    slowness: 1.0,
                    pairs,
                });
                save(&self.args.output, &self.validation)?;
            }
            let died = cluster.dead();
            cluster.stop().await;
            if let Some(died) = died {
                return Err(CliError::Failed(format!("{topology}: {died}\nwhat was measured is void")));
            }
        }
        Ok(())
    }

    /// Curves for as many cores as a worker of the topology has.
    fn curves_of(&mut self, topology: &Topology) -> Result<Option<Arc<CostCurves>>, CliError> {
        let (cores, _) = self.args.topology.core_lists()?;
        let each = cores.iter().count() / topology.kinds().len().max(1);
        let found = self.asked.curves.iter().find(|c| c.threads == each.max(1)).map(Arc::clone);
        if found.is_none() {
            let missing = format!(
                "{topology} is not simulated: its workers have {each} cores each, and no file of --curves is of such workers"
            );
            if !self.validation.warnings.contains(&missing) {
                self.validation.warnings.push(missing);
            }
        }
        Ok(found)
    }

    async fn simulate(
        &self,
        topology: &Topology,
        curves: &Arc<CostCurves>,
        rate: f64,
        n: usize,
    ) -> Result<Vec<triptych_bench::outcome::Outcome>, CliError> {
        let candidate = candidate(shape(topology), curves, budget(topology));
        let demand = self.asked.demand.clone();
        let question = self.asked.question(Budget::Workers(topology.kinds().len()), &self.asked.demand);
        let spec = candidate.spec(&question);
        let arrivals = self.args.question.arrivals;
        blocking(move || {
            let offered = demand.workload.requests(rate, arrivals, SEED).take(n);
            let run = simulate(&spec, offered, SEED).map_err(|e| CliError::setting("cannot simulate", &e))?;
            Ok(run.outcomes)
        })
        .await
    }

    /// What the plan chooses for a workload, and what each topology really does.
    async fn regret(&mut self, workload: &Workload) -> Result<(), CliError> {
        let mut candidates = Vec::new();
        for topology in self.topologies.clone() {
            candidates.extend(self.curves_of(&topology)?.map(|curves| (topology, curves)));
        }
        let (asked, arrivals) = (self.asked.clone(), self.args.question.arrivals);
        let demand = Named { workload: workload.clone(), arrivals };
        let settings = self.settings(&Topology { workers: Workers::Together { n: 1 }, budget: None }, None);
        let length = Length { n_requests: settings.n_requests, longest: settings.max_window };
        let found = blocking(move || choose(&asked, &demand, candidates, length)).await?;
        let mut measured = Vec::new();
        for topology in self.topologies.clone() {
            let (cluster, server) = self.start(&topology).await?;
            let goodput = self.capacity(&server, &topology, workload).await?;
            cluster.stop().await;
            measured.push((topology.to_string(), goodput.rate.unwrap_or(0.0), goodput.fails_at));
        }
        self.validation.regrets.push(Regret::new(workload.text(), measured, &found, settings.seeds.len()));
        save(&self.args.output, &self.validation)
    }

    /// What the simulation expects of a topology, where it can be simulated: a little below it a search is short.
    async fn expected(&mut self, topology: &Topology, w: &Workload) -> Result<Option<f64>, CliError> {
        let Some(curves) = self.curves_of(topology)? else { return Ok(None) };
        let candidate = candidate(shape(topology), &curves, budget(topology));
        let (n, question) = (topology.kinds().len(), self.args.question.clone());
        let demand = Named { workload: w.clone(), arrivals: question.arrivals };
        let rate = blocking(move || {
            let asked = question.read()?;
            let found = planner::expected(&asked.question(Budget::Workers(n), &demand), candidate);
            found.map(|found| found.rate).map_err(|e| CliError::setting("cannot simulate", &e))
        });
        Ok(Some(rate.await? * CAUTION).filter(|rate| *rate > 0.0))
    }
}

/// How long the runs of a measurement are.
#[derive(Clone, Copy)]
struct Length {
    n_requests: u64,
    longest: Duration,
}

/// What runs of that length are expected to find of clusters as they were measured; what the plan takes of them is first.
fn choose(
    asked: &Asked,
    demand: &Named,
    clusters: Vec<(Topology, Arc<CostCurves>)>,
    length: Length,
) -> Result<Vec<(String, Found)>, CliError> {
    let (names, candidates): (Vec<_>, Vec<_>) = clusters
        .into_iter()
        .map(|(t, curves)| {
            ((t.to_string(), shape(&t), budget(&t)), candidate(shape(&t), &curves, budget(&t)))
        })
        .unzip();
    if candidates.is_empty() {
        return Ok(Vec::new());
    }
    let question = asked.question(Budget::Workers(usize::MAX), demand);
    let effort = Effort {
        requests: usize::try_from(length.n_requests).unwrap_or(usize::MAX),
        longest: length.longest,
        seeds: question.effort.seeds.max(MANY_SEEDS),
        ..question.effort
    };
    let found = planner::choose(&Question { effort, ..question }, candidates);
    let found = found.map_err(|e| CliError::setting("no plan", &e))?;
    let name = |found: Found| {
        let is = |(_, shape, budget): &&(String, Shape, EncoderBudget)| {
            *shape == found.candidate.shape && *budget == found.candidate.settings.encoder_budget
        };
        let name = names.iter().find(is).map(|(name, ..)| name.clone());
        (name.unwrap_or_default(), found)
    };
    Ok(found.into_iter().map(name).collect())
}

/// Seeds whose spread is what one measurement may find.
const MANY_SEEDS: u64 = 12;

/// Of what is expected, where a search begins.
const CAUTION: f64 = 0.8;

/// Of what is offered while latencies are compared.
const SEED: u64 = 1;

fn budget(topology: &Topology) -> EncoderBudget {
    topology.budget.as_ref().and_then(|b| b.parse().ok()).unwrap_or_default()
}

fn shape(topology: &Topology) -> Shape {
    match topology.workers {
        Workers::Apart { n_encoders, n_pds } => Shape::Split { encoders: n_encoders, pds: n_pds },
        Workers::Together { n: 1 } => Shape::Colocated,
        Workers::Together { n } => Shape::Replicated { workers: n },
    }
}
