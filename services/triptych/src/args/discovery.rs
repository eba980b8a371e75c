//! The registry by which workers and proxies find each other.

use crate::error::{CliError, chain};
use clap::Args;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use triptych_core::WorkerId;
use triptych_ec::store::redis::{RedisLink, RedisSetting, RedisTuning};
use triptych_runtime::Drain;
use triptych_runtime::discovery::redis::RedisRegistry;
use triptych_runtime::discovery::{Announcement, Endpoint, Role, Source, announce};

/// Flags of a proxy that discovers workers.
#[derive(Args, Clone, Debug)]
pub struct DiscoverArgs {
    /// A Redis with which workers register (`--register`), in any form of `--ec`; they come and go while the proxy runs
    #[arg(long, value_name = "REDIS", env = "TRIPTYCH_DISCOVER", hide_env_values = true)]
    pub discover: Option<String>,
}

impl DiscoverArgs {
    /// The registry as a source of workers, if one is set.
    ///
    /// # Errors
    /// [`CliError::Setting`] for what is no Redis.
    pub fn sources(&self) -> Result<Vec<Box<dyn Source>>, CliError> {
        let sources = self.discover.as_deref().map(|text| registry("--discover", text));
        Ok(sources.transpose()?.into_iter().map(|r| Box::new(r) as Box<dyn Source>).collect())
    }
}

/// Flags of a worker that registers itself.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Discovery")]
pub struct RegisterArgs {
    /// A Redis to register with, in any form of `--ec`: proxies with the same `--discover` find this worker as soon as
    /// it is ready, and forget it when it stops
    #[arg(long, value_name = "REDIS", env = "TRIPTYCH_REGISTER", hide_env_values = true)]
    pub register: Option<String>,
    /// `HOST:PORT` under which others reach this worker, to give it work and to read encoder outputs straight from its
    /// memory; needed where it listens on every address
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_ADVERTISE")]
    pub advertise: Option<String>,
}

impl RegisterArgs {
    /// Keeps the worker announced while it is ready.
    ///
    /// # Errors
    /// [`CliError::Setting`] for what is no Redis, or if nobody could reach the address.
    pub fn announce(
        &self,
        role: Role,
        worker: &WorkerId,
        grpc: &TcpListener,
        drain: &Drain,
    ) -> Result<(), CliError> {
        let Some(text) = &self.register else { return Ok(()) };
        let registry = registry("--register", text)?;
        let address = match (&self.advertise, grpc.local_addr()) {
            (Some(address), _) => address.clone(),
            (None, Ok(address)) => reachable(address)?,
            (None, Err(e)) => return Err(CliError::failed("cannot tell the own address", &e)),
        };
        let who = Announcement { endpoint: Endpoint { role, address }, worker: worker.clone() };
        announce::keep(Arc::new(registry), who, drain);
        Ok(())
    }
}

fn reachable(address: SocketAddr) -> Result<String, CliError> {
    if address.ip().is_unspecified() {
        return Err(CliError::Setting(format!(
            "--register with --grpc {address}: nobody can connect to that; say with --advertise HOST:PORT what others \
             connect to"
        )));
    }
    Ok(address.to_string())
}

fn registry(flag: &str, text: &str) -> Result<RedisRegistry, CliError> {
    let link = redis_link(flag, text)?;
    let shown = link.shown().to_owned();
    Ok(RedisRegistry::new(link.into_query(), shown))
}

/// A link to the Redis that a flag names. Connects to nothing yet.
///
/// # Errors
/// [`CliError::Setting`] for what is no Redis.
pub fn redis_link(flag: &str, text: &str) -> Result<RedisLink, CliError> {
    let setting = text.parse::<RedisSetting>();
    let setting = setting.map_err(|e| CliError::Setting(format!("{flag}: {}", chain(&e))))?;
    let setting = setting.with_environment(|name| std::env::var_os(name));
    let link = RedisLink::new(&setting, &RedisTuning::default());
    link.map_err(|e| CliError::Setting(format!("{flag}: {}", chain(&e))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_can_reach_or_is_no_redis_is_a_wrong_setting() {
        assert_eq!(reachable("10.0.0.1:7001".parse().unwrap()).unwrap(), "10.0.0.1:7001");
        let e = reachable("0.0.0.0:7001".parse().unwrap()).unwrap_err().to_string();
        assert!(e.contains("--advertise"), "{e}");
        let e = DiscoverArgs { discover: Some("ftp://x".into()) }.sources().err().unwrap().to_string();
        assert!(e.contains("--discover") && e.contains("redis"), "{e}");
        assert!(DiscoverArgs { discover: None }.sources().unwrap().is_empty());
    }
}
