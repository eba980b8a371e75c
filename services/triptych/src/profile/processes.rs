//! A proxy and a store of this binary, started for a measurement.

use crate::error::CliError;
use crate::listen::Ports;
use std::process::{Child, Command, Stdio};
use triptych_bench::overhead::Servers;

/// Running processes; dropping them ends them.
pub struct Processes {
    /// Addresses of the measurement.
    pub servers: Servers,
    _store: Process,
    _proxy: Process,
}

impl Processes {
    /// Starts a store, and a proxy before it and the null workers at `worker`.
    ///
    /// # Errors
    /// [`CliError::Failed`] if there is no free port, or a process cannot start.
    pub fn start(worker: &str) -> Result<Self, CliError> {
        let mut ports = Ports::default();
        let mut address = || ports.next().map(|port| format!("127.0.0.1:{port}"));
        let store = address()?;
        let proxy = address()?;
        let http = address()?;
        // The processes take their ports over.
        drop(ports);
        let store_process = Process::start(&format!("store --grpc {store}"))?;
        let proxy_process = Process::start(&format!(
            "proxy --grpc {proxy} --http {http} --ec grpc://{store} --encoder {worker} --pd {worker}"
        ))?;
        let servers = Servers { proxy, proxy_pid: proxy_process.0.id(), worker: worker.to_owned() };
        Ok(Self { servers, _store: store_process, _proxy: proxy_process })
    }
}

/// A process of this binary that ends with this one.
struct Process(Child);

impl Process {
    fn start(flags: &str) -> Result<Self, CliError> {
        let binary = std::env::current_exe().map_err(|e| CliError::failed("cannot find this binary", &e))?;
        let child = Command::new(binary)
            .args(flags.split(' '))
            .args(["--supervised-by", &std::process::id().to_string()])
            // Settings of the operator's cluster do not apply.
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        child.map(Self).map_err(|e| CliError::failed(format!("cannot start triptych {flags}"), &e))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
