//! Processes of the cluster with their flags and ports. Decided once, before any of them starts, so that
//! a child that comes back is found where it was.

use super::args::UpArgs;
use crate::args::cores::CoreShareArgs;
use crate::args::{EcArg, ModelArgs};
use crate::error::CliError;
use crate::listen::{Ports, loopback};
use crate::model::CheckedModel;
use crate::shared_dir::SharedDir;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;
use triptych_ec::EcSetting;
use triptych_runtime::core_share::MAX_PLACES;

/// The two addresses for users.
#[derive(Clone, Copy, Debug)]
pub struct Endpoints {
    /// OpenAI's API.
    pub http: SocketAddr,
    /// gRPC.
    pub grpc: SocketAddr,
}

impl Endpoints {
    /// HTTP as a client on this machine reaches it.
    pub fn local_http(&self) -> SocketAddr {
        here(self.http)
    }

    /// gRPC as a client on this machine reaches it.
    pub fn local_grpc(&self) -> SocketAddr {
        here(self.grpc)
    }
}

fn here(address: SocketAddr) -> SocketAddr {
    let ip = address.ip();
    SocketAddr::new(if ip.is_unspecified() { loopback(ip) } else { ip }, address.port())
}

/// By default a child drains for up to 21 s.
const STOP_PATIENCE: Duration = Duration::from_secs(25);

/// Role of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The frontend: HTTP and gRPC API.
    Proxy,
    /// An encoder worker.
    Encoder,
    /// A prefill/decode worker.
    Pd,
    /// The memory store.
    Store,
}

impl Role {
    /// The command that runs it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Proxy => "proxy",
            Self::Encoder => "encoder",
            Self::Pd => "pd",
            Self::Store => "store",
        }
    }
}

/// One child. Without `Debug`, since the store setting may hold a password.
#[derive(Clone)]
pub struct ChildSpec {
    /// Its name in the log.
    pub name: String,
    /// Its kind.
    pub role: Role,
    /// Its command line.
    pub flags: Vec<OsString>,
    /// The store setting, for the environment; `None` for the store itself.
    pub ec: Option<String>,
    /// Address of gRPC and its health service.
    pub grpc: SocketAddr,
    /// Address of `/metrics`.
    pub admin: SocketAddr,
    /// Time for its end, before it is killed.
    pub stop_patience: Duration,
}

/// The cluster.
#[derive(Clone)]
pub struct ClusterPlan {
    /// Children in the order of starting.
    pub children: Vec<ChildSpec>,
    /// Addresses for users.
    pub endpoints: Endpoints,
    /// The store as its operator knows it.
    pub store: String,
    /// The store as other processes of this machine reach it: a value for `--ec`, without passwords.
    pub store_address: String,
}

impl ClusterPlan {
    /// Chooses ports and writes the children's flags.
    ///
    /// # Errors
    /// [`CliError::Failed`] if no port is free.
    pub fn new(
        args: &UpArgs,
        ec: &EcArg,
        models: &[CheckedModel],
        endpoints: Endpoints,
    ) -> Result<Self, CliError> {
        // Nobody listens on the users' ports before the proxy does.
        let mut ports = Ports::without(vec![endpoints.http.port(), endpoints.grpc.port()]);
        let mut children = Vec::new();
        let shown = ec.setting.to_string();
        let mut store_address = shown.clone();
        let ec = match &ec.setting {
            EcSetting::Memory(memory) => {
                let mut store = child(Role::Store, "store".into(), &mut ports)?;
                let mib = (memory.budget_bytes >> 20).to_string();
                store.flags.extend(["--budget-mib".into(), mib.into()]);
                store.flags.extend(args.given([args.limits.object.to_flags().to_vec()]));
                let setting = format!("grpc://{}", store.grpc);
                children.push(store);
                store_address.clone_from(&setting);
                setting
            }
            _ => ec.text.clone(),
        };
        let encoded: Vec<CheckedModel> = models.iter().filter(|model| model.has_encoder()).cloned().collect();
        let encoders = if encoded.is_empty() { Vec::new() } else { args.encoders.towers() };
        let pds = vec![None; usize::from(args.pds)];
        for (role, towers, models) in [(Role::Encoder, encoders, encoded.as_slice()), (Role::Pd, pds, models)]
        {
            for (i, tower) in towers.into_iter().enumerate() {
                let mut worker = child(role, format!("{}-{i}", role.as_str()), &mut ports)?;
                worker.flags.extend(["--id".into(), worker.name.clone().into()]);
                worker.flags.extend(source_flags(models));
                worker.flags.extend(args.given([computation_flags(&args.models), worker_flags(args, role)]));
                if role == Role::Encoder {
                    // Given also where it is the default: the variable of a PD worker's memory has the same name.
                    let memory = ["--memory-mib".into(), args.encoder_memory_mib.to_string().into()];
                    worker.flags.extend(memory);
                }
                worker.flags.extend(tower.into_iter().flat_map(|tower| ["--towers".into(), tower.into()]));
                if role == Role::Pd && args.with_encoder {
                    worker.flags.push("--with-encoder".into());
                    worker.flags.extend(args.given([args.weights.to_flags()]));
                }
                worker.ec = Some(ec.clone());
                children.push(worker);
            }
        }
        let mut proxy = proxy(&children, ec, endpoints);
        // An own address: whoever answers at the public ones may be the proxy of another cluster.
        let admin = args.admin.map_or_else(|| ports.next().map(local), Ok)?;
        proxy.admin = if admin.ip().is_unspecified() { local(admin.port()) } else { admin };
        proxy.flags.extend(["--admin".into(), admin.to_string().into()]);
        proxy.flags.extend(args.given([proxy_flags(args)]));
        children.push(proxy);
        for child in &mut children {
            child.flags.extend(args.given([args.log.to_flags()]));
            child.flags.extend(args.drain.to_flags());
            child.flags.extend(args.config.to_flags());
            child.stop_patience = args.drain.patience();
        }
        Ok(Self { children, endpoints, store: shown, store_address })
    }

    /// Lets the workers divide the machine's cores through a file, which lives as long as the result. One worker alone has
    /// them all.
    ///
    /// # Errors
    /// [`CliError::Failed`] if its directory cannot be made.
    pub fn share_cores(&mut self) -> Result<Option<SharedDir>, CliError> {
        let computes = |child: &&mut ChildSpec| matches!(child.role, Role::Encoder | Role::Pd);
        if self.children.iter_mut().filter(computes).count() < 2 {
            return Ok(None);
        }
        let dir = SharedDir::new("triptych-cores-");
        let dir = dir.map_err(|e| CliError::failed("cannot make a file to share cores", &e))?;
        let file = dir.path().join("cores");
        // Places beyond the last are not shared; so many workers on one machine have a core each at most.
        for (place, worker) in (0..MAX_PLACES).zip(self.children.iter_mut().filter(computes)) {
            worker.flags.extend(CoreShareArgs::flags_of(file.clone(), place));
        }
        Ok(Some(dir))
    }

    /// Number of children with the role.
    pub fn count(&self, role: Role) -> usize {
        self.children.iter().filter(|c| c.role == role).count()
    }
}

/// A child of a role with free ports.
///
/// # Errors
/// [`CliError::Failed`] if no port is free.
pub fn child(role: Role, name: String, ports: &mut Ports) -> Result<ChildSpec, CliError> {
    let grpc = local(ports.next()?);
    let admin = local(ports.next()?);
    let flags =
        [role.as_str(), "--grpc", &grpc.to_string(), "--admin", &admin.to_string()].map(OsString::from);
    Ok(ChildSpec { name, role, flags: flags.to_vec(), ec: None, grpc, admin, stop_patience: STOP_PATIENCE })
}

/// Flags of the models and of computation.
pub fn model_flags(args: &ModelArgs, models: &[CheckedModel]) -> Vec<OsString> {
    [computation_flags(args), source_flags(models)].concat()
}

fn computation_flags(args: &ModelArgs) -> Vec<OsString> {
    [args.compute.to_flags(), args.rows.to_flags(), args.graphs.to_flags()].concat()
}

fn source_flags(models: &[CheckedModel]) -> Vec<OsString> {
    let mut flags = Vec::new();
    for model in models {
        let mut source = OsString::from(format!("{}=", model.name));
        source.push(&model.dir);
        flags.extend(["--model".into(), source]);
    }
    flags
}

/// Flags of a worker of `up`, but for models and computation.
fn worker_flags(args: &UpArgs, role: Role) -> Vec<OsString> {
    let own = match role {
        Role::Pd => [args.lora.to_flags(), args.memory.to_flags(), args.engine.to_flags()].concat(),
        _ => args.lora.loaded.to_flags(),
    };
    [args.watchdog.to_flags(), args.updates.to_flags(), args.limits.to_flags(), own].concat()
}

/// Flags of the proxy of `up`, but for addresses.
fn proxy_flags(args: &UpArgs) -> Vec<OsString> {
    let bounds = [args.bounds.to_flags(), args.operator.to_flags(), args.fetch.to_flags()].concat();
    [bounds, args.limits.to_flags(), args.api.to_flags()].concat()
}

/// The proxy before these workers.
pub fn proxy(workers: &[ChildSpec], ec: String, endpoints: Endpoints) -> ChildSpec {
    let flags = ["proxy", "--http", &endpoints.http.to_string(), "--grpc", &endpoints.grpc.to_string()];
    let mut flags = flags.map(OsString::from).to_vec();
    for worker in workers {
        let flag = match worker.role {
            Role::Encoder => "--encoder",
            Role::Pd => "--pd",
            Role::Store | Role::Proxy => continue,
        };
        flags.extend([flag.into(), worker.grpc.to_string().into()]);
    }
    let grpc = endpoints.local_grpc();
    let admin = endpoints.local_http();
    ChildSpec {
        name: "proxy".into(),
        role: Role::Proxy,
        flags,
        ec: Some(ec),
        grpc,
        admin,
        stop_patience: STOP_PATIENCE,
    }
}

/// A port of the loopback address.
pub fn local(port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;
    use std::collections::HashSet;
    use std::path::Path;
    use triptych_core::{Modality, ModelName};

    fn plan(flags: &[&str]) -> ClusterPlan {
        plan_of(flags, &[("m", &[Modality::Image])])
    }

    fn plan_of(flags: &[&str], models: &[(&str, &[Modality])]) -> ClusterPlan {
        let line = ["triptych", "up"].iter().chain(flags).map(OsString::from).collect();
        let Command::Up(args) = Cli::of_completed(line).unwrap().command else { panic!() };
        let models: Vec<CheckedModel> = models
            .iter()
            .map(|(name, modalities)| CheckedModel {
                name: ModelName::new(*name),
                modalities: modalities.to_vec(),
                towers: Vec::new(),
                dir: format!("/models/{name}").into(),
            })
            .collect();
        let endpoints =
            Endpoints { http: "0.0.0.0:8080".parse().unwrap(), grpc: "127.0.0.1:50051".parse().unwrap() };
        let ec = args.ec.given().unwrap().unwrap_or_else(|| "memory".parse().unwrap());
        ClusterPlan::new(&args, &ec, &models, endpoints).unwrap()
    }

    fn names(plan: &ClusterPlan) -> Vec<&str> {
        plan.children.iter().map(|c| c.name.as_str()).collect()
    }

    #[test]
    fn children_are_as_many_as_asked_and_every_port_is_its_own() {
        let plan = plan(&["--encoders", "2", "--pds", "3"]);
        assert_eq!(names(&plan), ["store", "encoder-0", "encoder-1", "pd-0", "pd-1", "pd-2", "proxy"]);
        let ports: HashSet<_> = plan.children.iter().flat_map(|c| [c.grpc, c.admin]).collect();
        assert_eq!(ports.len(), 14);
        assert_eq!(
            (plan.store.as_str(), plan.store_address),
            ("memory", format!("grpc://{}", plan.children[0].grpc))
        );
        let proxy = plan.children.last().unwrap();
        assert_ne!(proxy.admin, plan.endpoints.local_http(), "it answers for itself");
    }

    #[test]
    fn encoder_workers_of_a_tower_are_told_so() {
        let plan = plan(&["--encoders", "low:2,high:1"]);
        let towers = plan.children.iter().filter(|child| child.role == Role::Encoder).map(|child| {
            let at = child.flags.iter().position(|flag| flag == "--towers").expect("a tower");
            child.flags[at + 1].to_str().expect("a name").to_owned()
        });
        assert_eq!(towers.collect::<Vec<_>>(), ["low", "low", "high"]);
        assert_eq!(names(&plan)[1..4], ["encoder-0", "encoder-1", "encoder-2"]);
    }

    #[test]
    fn every_child_s_flags_are_flags_of_its_role() {
        for child in plan(&["--precision", "bf16", "--log-json", "--encoders", "low:1"]).children {
            let mut line = vec![OsString::from("triptych")];
            line.extend(child.flags);
            line.extend(child.ec.map(|ec| [OsString::from("--ec"), ec.into()]).into_iter().flatten());
            Cli::try_parse_from(line).unwrap();
        }
    }

    #[test]
    fn workers_share_the_cores_each_at_a_place_of_its_own() {
        let mut cluster = plan(&["--encoders", "2"]);
        let dir = cluster.share_cores().unwrap().expect("three workers");
        let places: Vec<_> = cluster
            .children
            .iter()
            .filter_map(|child| {
                let [.., path, _, place] = child.flags.as_slice() else { return None };
                (Path::new(path) == dir.path().join("cores")).then(|| place.clone().into_string().unwrap())
            })
            .collect();
        assert_eq!(places, ["0", "1", "2"]);
        let mut alone = plan(&["--encoders", "0", "--with-encoder"]);
        assert!(alone.share_cores().unwrap().is_none());
    }

    #[test]
    fn what_operators_set_is_handed_to_the_roles_that_have_it() {
        let plan = plan(&[
            "--admin",
            "0.0.0.0:9190",
            "--max-n",
            "4",
            "--max-stops",
            "2",
            "--memory-mib",
            "900",
            "--encoder-memory-mib",
            "700",
            "--ec-cache-mib",
            "7",
            "--tpot-slo",
            "2.5",
            "--model-updates",
            "/models",
            "--admin-token-file",
            "/token",
        ]);
        let flags = |i: usize| plan.children[i].flags.join(std::ffi::OsStr::new(" ")).into_string().unwrap();
        let (encoder, pd, proxy) = (flags(1), flags(2), flags(3));
        assert!(encoder.contains("--model-updates /models") && encoder.contains("--memory-mib 700"));
        assert!(
            pd.contains("--memory-mib 900")
                && pd.contains("--ec-cache-mib 7")
                && pd.contains("--tpot-slo 2.5")
                && pd.contains("--model-updates /models")
        );
        for flag in ["--admin 0.0.0.0:9190", "--max-n 4", "--max-stops 2", "--admin-token-file /token"] {
            assert!(proxy.contains(flag), "{proxy}");
        }
        assert_eq!(plan.children[3].admin.to_string(), "127.0.0.1:9190");
    }

    #[test]
    fn what_operators_leave_is_for_the_file_to_set_in_the_sections_of_the_roles() {
        let plan = plan(&["--decode-share", "33", "--encoders", "1"]);
        let flags = |i: usize| plan.children[i].flags.join(std::ffi::OsStr::new(" ")).into_string().unwrap();
        let (encoder, pd, proxy) = (flags(1), flags(2), flags(3));
        assert!(pd.contains("--decode-share 33"), "given, although it is the default: {pd}");
        assert!(encoder.contains("--memory-mib 0") && !pd.contains("--memory-mib"));
        for flag in ["--precision", "--token-budget", "--step-timeout", "--log", "--max-n"] {
            assert!([&encoder, &pd, &proxy].iter().all(|flags| !flags.contains(flag)), "{flag}");
        }
        assert!(pd.contains("--model m=/models/m") && proxy.contains("--http 0.0.0.0:8080"), "its own");
        assert!(
            [&encoder, &pd, &proxy].iter().all(|flags| flags.contains("--drain-grace")),
            "it waits as long"
        );
    }

    #[test]
    fn a_store_elsewhere_is_not_started_and_its_password_is_on_no_command_line() {
        let plan = plan(&["--ec", "redis://:s3cret@h:6379"]);
        assert_eq!(names(&plan), ["encoder-0", "pd-0", "proxy"]);
        assert!(plan.children.iter().all(|c| c.ec.as_deref() == Some("redis://:s3cret@h:6379")));
        assert!(
            !format!("{:?}", plan.children.iter().map(|c| &c.flags).collect::<Vec<_>>()).contains("s3cret")
        );
        assert!(!plan.store.contains("s3cret") && !plan.store_address.contains("s3cret"));
    }

    #[test]
    fn workers_without_encoder_workers_hold_the_encoders_and_stop_as_told() {
        let plan = plan(&["--encoders", "0", "--with-encoder", "--drain-grace", "60"]);
        assert_eq!(names(&plan), ["store", "pd-0", "proxy"]);
        let flags = |i: usize| plan.children[i].flags.join(std::ffi::OsStr::new(" ")).into_string().unwrap();
        assert!(flags(1).contains("--with-encoder") && !flags(2).contains("--with-encoder"));
        assert!(
            flags(0).contains("--drain-grace 60") && plan.children[0].stop_patience > Duration::from_secs(60)
        );
    }

    #[test]
    fn models_without_an_encoder_are_the_pd_workers_alone() {
        let alone = plan_of(&["--encoders", "2"], &[("text", &[])]);
        assert_eq!(names(&alone), ["store", "pd-0", "proxy"]);
        let both = plan_of(&[], &[("text", &[]), ("eyes", &[Modality::Image])]);
        assert_eq!(names(&both), ["store", "encoder-0", "pd-0", "proxy"]);
        let serves = |i: usize, model: &str| {
            both.children[i]
                .flags
                .iter()
                .any(|flag| *flag == OsString::from(format!("{model}=/models/{model}")))
        };
        assert!(serves(1, "eyes") && !serves(1, "text"));
        assert!(serves(2, "eyes") && serves(2, "text"));
    }

    #[test]
    fn every_address_is_reached_through_this_machine() {
        assert_eq!(plan(&[]).endpoints.local_http().to_string(), "127.0.0.1:8080");
    }
}
