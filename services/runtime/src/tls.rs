//! TLS with one provider, ring, which `main` installs first.
//!
//! Between the processes of a cluster it is mutual ([`ClusterTls`]): a server accepts only clients with a certificate
//! of the cluster's CA, a client only servers whose certificate names the dialled host. Towards external clients only
//! the server has a certificate ([`server::ServerTls`]). Certificates, keys and the CA are reloaded when their files
//! change; open connections continue, new ones use the new files.

mod files;

pub mod client;
pub mod server;

pub use files::{ClusterTlsFiles, Identity, TlsError, install_provider};

use crate::drain::Drain;
use crate::reload::WatchedFiles;
use client::ClientTls;
use server::ServerTls;
use std::sync::Arc;
use std::time::Duration;

/// Interval at which the files are checked for changes.
const RELOAD_INTERVAL: Duration = Duration::from_secs(2);
/// Mutual TLS of one process, as server and as client.
#[derive(Clone)]
pub struct ClusterTls {
    /// Configuration of its listeners.
    pub server: Arc<ServerTls>,
    /// Configuration of its connections to other processes.
    pub client: Arc<ClientTls>,
}

impl ClusterTls {
    /// Reads the files, and reloads them when they change, until drain begins.
    ///
    /// # Errors
    /// [`TlsError`] for files that cannot be used.
    pub fn start(files: ClusterTlsFiles, drain: &Drain) -> Result<Self, TlsError> {
        let paths = vec![files.identity.cert.clone(), files.identity.key.clone(), files.ca.clone()];
        let watched = WatchedFiles::new(paths);
        let server = Arc::new(ServerTls::mutual(files.identity.clone(), files.ca.clone())?);
        let client = Arc::new(ClientTls::mutual(files)?);
        let tls = Self { server, client };
        let (reader, stopping) = (tls.clone(), drain.clone());
        drain.tasks().spawn(async move {
            let again = || report(reader.server.reload().and_then(|()| reader.client.reload()));
            tokio::select! {
                () = watched.on_change(RELOAD_INTERVAL, again) => {}
                () = stopping.stopping() => {}
            }
        });
        Ok(tls)
    }
}

fn report(outcome: Result<(), TlsError>) {
    match outcome {
        Ok(()) => tracing::info!("certificates reloaded"),
        Err(e) => tracing::error!(error = ?e, "certificates not reloaded, the previous ones stay in use"),
    }
}

#[cfg(test)]
mod tests;
