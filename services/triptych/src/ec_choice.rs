//! Default store of a process: chosen from its environment, logged with the reason, and refused
//! where nothing that can be chosen would be the other processes' store too.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use triptych_ec::settings::ALLOWED;
use triptych_ec::store::shm::DEFAULT_BYTES;
use triptych_ec::{EcSetting, Scope};

/// Below this much free memory a store in it would be full at once.
const ROOM_BYTES: u64 = 256 << 20;
/// Mount point of shared memory.
const SHM: &str = "/dev/shm";

/// Location of the other processes of the cluster, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// None that reads the store: its reader may keep it in its own memory.
    None,
    /// On this host, all of them.
    Here,
    /// Some may be on other hosts.
    Elsewhere,
    /// They are on two hosts at least, by their addresses.
    OnSeveral,
}

impl Others {
    /// Location from the addresses at which they are reached, or at which they reach this one.
    pub fn at<'a>(addresses: impl Iterator<Item = &'a str>) -> Self {
        let away: BTreeSet<&str> = addresses.map(host).filter(|host| !is_loopback(host)).collect();
        match away.len() {
            0 => Self::Here,
            1 => Self::Elsewhere,
            _ => Self::OnSeveral,
        }
    }
}

fn host(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']')
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// Refuses a store that the other parts cannot see for certain: one host's memory, for parts on several. In containers
/// nothing is certain: those of one host may share a mount.
///
/// # Errors
/// [`NoStoreChoice`] for such a store.
pub fn check(setting: &EcSetting, around: &Surroundings) -> Result<(), NoStoreChoice> {
    let certain = around.others == Others::OnSeveral && !around.container && !around.kubernetes;
    match certain && is_one_hosts(setting) {
        true => Err(NoStoreChoice(
            "the parts of the cluster are on several hosts, of which each has its own memory",
        )),
        false => Ok(()),
    }
}

/// True if no part of it is visible to other hosts.
fn is_one_hosts(setting: &EcSetting) -> bool {
    match setting {
        EcSetting::Memory(_) | EcSetting::Shm(_) => true,
        // It may be a mount that several hosts have.
        EcSetting::Disk(_) => false,
        EcSetting::Tiered(tiers) => tiers.iter().all(is_one_hosts),
        other => other.scope() < Scope::Cluster,
    }
}

/// Environment of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Surroundings {
    /// True in a Kubernetes pod.
    pub kubernetes: bool,
    /// True in a container with its own files and memory.
    pub container: bool,
    /// Free bytes of shared memory; `None`: there is none that this process may write.
    pub shm_free: Option<u64>,
    /// For files that need not last.
    pub temp: PathBuf,
    /// User id, so that two users have separate stores.
    pub user: u32,
    /// The other parts.
    pub others: Others,
}

impl Surroundings {
    /// Looks around.
    pub fn look(others: Others) -> Self {
        let marked = ["/.dockerenv", "/run/.containerenv"].iter().any(|file| Path::new(file).exists());
        Self {
            kubernetes: std::env::var_os("KUBERNETES_SERVICE_HOST").is_some(),
            container: marked || std::env::var_os("container").is_some(),
            shm_free: free_bytes(Path::new(SHM)),
            temp: std::env::temp_dir(),
            user: rustix::process::getuid().as_raw(),
            others,
        }
    }
}

/// Free bytes of a directory that this process may write.
fn free_bytes(dir: &Path) -> Option<u64> {
    rustix::fs::access(dir, rustix::fs::Access::WRITE_OK).ok()?;
    let stat = rustix::fs::statvfs(dir).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// A store that was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreChoice {
    /// Value for `--ec`.
    pub setting: String,
    /// Reason for the choice.
    pub why: &'static str,
}

/// No store can be chosen that the other processes would see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoStoreChoice(&'static str);

impl fmt::Display for NoStoreChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; set --ec to a store that all parts reach: {ALLOWED}", self.0)
    }
}

/// The default store of a role.
///
/// # Errors
/// [`NoStoreChoice`] where the other parts would not see it.
pub fn choose(around: &Surroundings) -> Result<StoreChoice, NoStoreChoice> {
    if around.others == Others::None {
        return Ok(StoreChoice { setting: "memory".into(), why: "no other part reads the store" });
    }
    if around.kubernetes {
        return Err(NoStoreChoice(
            "no store is set, and in Kubernetes each pod has files and memory of its own",
        ));
    }
    if around.container {
        return Err(NoStoreChoice("no store is set, and a container has files and memory of its own"));
    }
    if around.others != Others::Here {
        return Err(NoStoreChoice("no store is set, and other parts of the cluster may be on other hosts"));
    }
    match around.shm_free {
        Some(free) if free >= ROOM_BYTES => {
            let mib = (free / 2).min(DEFAULT_BYTES) >> 20;
            let why = "all parts are on this host, which has shared memory to write to";
            Ok(StoreChoice { setting: format!("shm?mib={mib}"), why })
        }
        _ => {
            let dir = around.temp.join(format!("triptych-ec-{}", around.user));
            let why = "all parts are on this host, which has no shared memory with room";
            Ok(StoreChoice { setting: format!("disk:{}", dir.display()), why })
        }
    }
}

/// Kind of store that a cluster of `up` has where none is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpStore {
    /// A slab of its own in shared memory: no copy passes through a connection.
    Slab {
        /// Its size in MiB, all of which it takes at once.
        mib: u64,
    },
    /// A store process.
    Process,
}

/// The store of a cluster that `up` starts: a slab of a sixteenth of free shared memory, where that is [`ROOM_BYTES`] or more.
/// `may_have_tenants`: a store process evicts by equal shares of tenants, and a slab does not.
pub fn choose_for_up(around: &Surroundings, may_have_tenants: bool) -> UpStore {
    let size = around.shm_free.map_or(0, |free| (free / 16).min(DEFAULT_BYTES));
    match size >= ROOM_BYTES && !may_have_tenants {
        true => UpStore::Slab { mib: size >> 20 },
        false => UpStore::Process,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain_host() -> Surroundings {
        Surroundings {
            kubernetes: false,
            container: false,
            shm_free: Some(1 << 30),
            temp: "/tmp".into(),
            user: 7,
            others: Others::Here,
        }
    }

    #[test]
    fn a_host_of_its_own_has_its_store_in_memory_or_on_disk() {
        let chosen = |around| choose(&around).unwrap().setting;
        assert_eq!(chosen(plain_host()), "shm?mib=512");
        assert_eq!(chosen(Surroundings { shm_free: Some(1 << 40), ..plain_host() }), "shm?mib=1024");
        assert_eq!(chosen(Surroundings { shm_free: None, ..plain_host() }), "disk:/tmp/triptych-ec-7");
        assert_eq!(chosen(Surroundings { others: Others::None, container: true, ..plain_host() }), "memory");
        assert_eq!(
            chosen(Surroundings { shm_free: Some(64 << 20), ..plain_host() }),
            "disk:/tmp/triptych-ec-7"
        );
        assert!(choose(&plain_host()).unwrap().setting.parse::<EcSetting>().is_ok());
    }

    #[test]
    fn a_cluster_of_up_has_a_slab_of_a_sixteenth_of_shared_memory() {
        let chosen = |gib: u64, may_have_tenants| {
            choose_for_up(&Surroundings { shm_free: Some(gib << 30), ..plain_host() }, may_have_tenants)
        };
        assert_eq!([chosen(4, false), chosen(12, false)], [256, 768].map(|mib| UpStore::Slab { mib }));
        assert_eq!(chosen(1 << 10, false), UpStore::Slab { mib: 1024 });
        assert_eq!([chosen(1 << 10, true), chosen(3, false)], [UpStore::Process; 2]);
        assert_eq!(choose_for_up(&Surroundings { shm_free: None, ..plain_host() }, false), UpStore::Process);
    }

    #[test]
    fn where_others_would_not_see_it_nothing_is_chosen_and_the_refusal_says_what_is_allowed() {
        let refused = [
            (Surroundings { kubernetes: true, ..plain_host() }, "Kubernetes"),
            (Surroundings { container: true, ..plain_host() }, "container"),
            (Surroundings { others: Others::Elsewhere, ..plain_host() }, "other hosts"),
        ];
        for (around, part) in refused {
            let text = choose(&around).unwrap_err().to_string();
            assert!(text.contains(part) && text.contains("redis://") && text.contains("grpc://"), "{text}");
        }
    }

    #[test]
    fn parts_are_here_when_all_their_addresses_are() {
        let cases: [(&[&str], Others); 6] = [
            (&["127.0.0.1:1", "localhost:2", "[::1]:3", "127.9.9.9:1"], Others::Here),
            (&["127.0.0.1:1", "10.0.0.1:1", "10.0.0.1:2"], Others::Elsewhere),
            (&["10.0.0.2:1", "10.0.0.1:2"], Others::OnSeveral),
            (&["encoder:7001"], Others::Elsewhere),
            (&["0.0.0.0:7001"], Others::Elsewhere),
            (&[], Others::Here),
        ];
        for (addresses, expect) in cases {
            assert_eq!(Others::at(addresses.iter().copied()), expect, "{addresses:?}");
        }
    }

    #[test]
    fn one_hosts_memory_is_refused_for_parts_on_several_hosts() {
        let several = Surroundings { others: Others::OnSeveral, ..plain_host() };
        let check = |text: &str, around: &Surroundings| check(&text.parse().unwrap(), around);
        for text in ["shm", "memory shm:x"] {
            let refused = check(text, &several).unwrap_err().to_string();
            assert!(refused.contains("several hosts") && refused.contains("redis://"), "{refused}");
            assert!(check(text, &plain_host()).is_ok());
            assert!(check(text, &Surroundings { container: true, ..several.clone() }).is_ok());
        }
        for text in ["shm grpc://h:1", "disk:/mnt/all", "redis://h"] {
            assert!(check(text, &several).is_ok(), "{text}");
        }
    }

    #[test]
    fn a_look_around_ends_well_on_any_machine() {
        let around = Surroundings::look(Others::Here);
        assert!(choose(&around).is_ok() || around.kubernetes || around.container);
    }
}
