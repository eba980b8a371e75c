//! Listening, with errors that name the flag at fault, and the choice of free ports.

use crate::error::CliError;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener as StdListener};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};

/// Time that a starting process waits for its port: the process that it replaces may still be closing.
const PATIENCE: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(100);

/// Listens on an address; `flag` is where it came from.
///
/// # Errors
/// [`CliError::Setting`] for what is no address of this machine, [`CliError::Failed`] for a port that stays taken.
pub async fn bind(flag: &str, address: &str) -> Result<TcpListener, CliError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return Ok(listener),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => sleep(PAUSE).await,
            Err(e) => return Err(refused(flag, address, &e)),
        }
    }
}

/// Fails at once for a port that is in use, or for one address given twice. Returns the resolved addresses; port 0 becomes a free
/// one.
///
/// # Errors
/// Those of [`bind`].
pub async fn check_free(
    (flag, address): (&str, &str),
    (other_flag, other): (&str, &str),
) -> Result<(SocketAddr, SocketAddr), CliError> {
    let is_chosen = |address: &str| address.ends_with(":0");
    let (at, held) = free(flag, address).await?;
    // The kernel may choose a port again that nobody holds. One that was given twice is not in use by another process.
    let held = (is_chosen(address) || is_chosen(other)).then_some(held);
    let (other_at, _) = free(other_flag, other).await?;
    drop(held);
    match at == other_at {
        true => {
            Err(CliError::Setting(format!("{flag} and {other_flag} are both {at}; choose two addresses")))
        }
        false => Ok((at, other_at)),
    }
}

async fn free(flag: &str, address: &str) -> Result<(SocketAddr, TcpListener), CliError> {
    let listener = TcpListener::bind(address).await.map_err(|e| refused(flag, address, &e))?;
    let at = listener.local_addr().map_err(|e| refused(flag, address, &e))?;
    Ok((at, listener))
}

fn refused(flag: &str, address: &str, e: &io::Error) -> CliError {
    match e.kind() {
        io::ErrorKind::AddrInUse => CliError::Failed(format!(
            "{address} is in use by another process; stop that one, or choose another address with {flag}"
        )),
        io::ErrorKind::PermissionDenied => CliError::Setting(format!(
            "may not listen on {address}: ports below 1024 are the system's; choose another with {flag}"
        )),
        _ => CliError::Setting(format!(
            "{flag} {address} is no address to listen on, as 127.0.0.1:8080 is: {e}"
        )),
    }
}

/// An address to listen on as a client on this machine reaches it: "every address" is nothing to connect to. What is no
/// address stays as it is.
pub fn here(address: &str) -> String {
    match address.parse::<SocketAddr>() {
        Ok(at) if at.ip().is_unspecified() => SocketAddr::new(loopback(at.ip()), at.port()).to_string(),
        _ => address.to_owned(),
    }
}

/// The loopback address of the same family.
pub const fn loopback(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
    }
}

/// Free ports of the loopback address, each given once.
///
/// They lie below the range from which the kernel takes the ports of outgoing connections, so that none is
/// taken while the worker that owns it is being restarted. A port is held until this value is dropped.
#[derive(Debug, Default)]
pub struct Ports {
    held: Vec<StdListener>,
    /// Ports that are spoken for although nobody listens on them yet.
    reserved: Vec<u16>,
}

const FIRST_PORT: u16 = 20_000;
const N_PORTS: u16 = 12_000;
/// Ports of a cluster, as a rule.
const OF_CLUSTER: u16 = 12;

impl Ports {
    /// Ports other than those that a process of this cluster is going to listen on.
    pub const fn without(reserved: Vec<u16>) -> Self {
        Self { held: Vec::new(), reserved }
    }

    /// A port that nobody listens on.
    ///
    /// # Errors
    /// [`CliError::Failed`] if there is none.
    pub fn next(&mut self) -> Result<u16, CliError> {
        let start = start(std::process::id());
        for i in 0..N_PORTS {
            let port = FIRST_PORT + (start + i) % N_PORTS;
            if self.reserved.contains(&port) {
                continue;
            }
            if let Ok(listener) = StdListener::bind((IpAddr::V4(Ipv4Addr::LOCALHOST), port)) {
                self.held.push(listener);
                return Ok(port);
            }
        }
        Err(CliError::Failed("no free port on 127.0.0.1".into()))
    }
}

/// Offset of the first port to try. Clusters that start at the same time have other process ids, so that none takes a port
/// that another has chosen and its worker does not hold yet.
fn start(process_id: u32) -> u16 {
    let n_clusters = N_PORTS / OF_CLUSTER;
    match u16::try_from(process_id % u32::from(n_clusters)) {
        // The first process of any container.
        _ if process_id == 1 => rand::random_range(0..N_PORTS),
        Ok(cluster) => cluster * OF_CLUSTER,
        Err(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_of_neighbouring_processes_try_other_ports() {
        let starts: Vec<u16> = (2..1002).map(start).collect();
        assert!(starts.iter().all(|at| *at <= N_PORTS - OF_CLUSTER));
        let mut apart = starts.clone();
        apart.sort_unstable();
        assert!(apart.windows(2).all(|pair| pair[1] - pair[0] >= OF_CLUSTER), "{apart:?}");
    }

    #[tokio::test]
    async fn a_taken_port_names_address_and_flag() {
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = taken.local_addr().unwrap().to_string();
        let e = check_free(("--grpc", "127.0.0.1:0"), ("--http", &address)).await.unwrap_err();
        assert!(matches!(e, CliError::Failed(_)));
        let text = e.to_string();
        assert!(text.contains(&address) && text.contains("--http"), "{text}");
    }

    #[tokio::test]
    async fn what_is_no_address_is_a_wrong_setting() {
        for address in ["nonsense", "127.0.0.1", "127.0.0.1:99999"] {
            let e = check_free(("--grpc", address), ("--http", "127.0.0.1:0")).await.unwrap_err();
            assert!(matches!(e, CliError::Setting(_)), "{address}: {e}");
        }
    }

    #[tokio::test]
    async fn two_addresses_have_two_ports() {
        for _ in 0..100 {
            let any = "127.0.0.1:0";
            let (http, grpc) = check_free(("--http", any), ("--grpc", any)).await.unwrap();
            assert_ne!(http, grpc);
        }
        let address = format!("127.0.0.1:{}", Ports::default().next().unwrap());
        let e = check_free(("--http", &address), ("--grpc", &address)).await.unwrap_err();
        assert_eq!(e.to_string(), format!("--http and --grpc are both {address}; choose two addresses"));
    }

    #[test]
    fn every_address_is_reached_on_loopback() {
        for (address, expect) in [
            ("0.0.0.0:80", "127.0.0.1:80"),
            ("[::]:80", "[::1]:80"),
            ("10.0.0.1:80", "10.0.0.1:80"),
            ("localhost:80", "localhost:80"),
        ] {
            assert_eq!(here(address), expect);
        }
    }

    #[test]
    fn ports_are_given_once() {
        let mut ports = Ports::default();
        let mut seen = (0..20).map(|_| ports.next().unwrap()).collect::<Vec<_>>();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 20);
    }

    #[test]
    fn reserved_ports_are_not_given() {
        let first = Ports::default().next().unwrap();
        let mut ports = Ports::without(vec![first, first + 1]);
        let given: Vec<u16> = (0..20).map(|_| ports.next().unwrap()).collect();
        assert!(!given.contains(&first) && !given.contains(&(first + 1)), "{given:?}");
    }
}
