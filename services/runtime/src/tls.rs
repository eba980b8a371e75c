//! TLS has one provider, ring, installed first thing in `main`; and it has two uses.
//!
//! Between the parts of a cluster it is mutual ([`PartsTls`]): a server takes only clients with a certificate of the
//! cluster's CA, a client only servers with one that is for the name it dialled. Towards clients of the cluster it is
//! the server's alone ([`server::ServerTls`]). Certificates, keys and the CA are read again when their files change;
//! connections that are open go on, new ones use the new ones.

pub mod client;
pub mod server;

use crate::drain::Drain;
use crate::reload::Files;
use client::ClientTls;
use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem};
use server::ServerTls;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// What gRPC speaks.
const H2: &[u8] = b"h2";

/// Installs the provider. Called again, it does nothing.
pub fn install_provider() {
    // The error only says that a provider is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// A certificate chain and its key, PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The certificate, and those between it and the CA.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// What a part of the cluster needs to talk to the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartsFiles {
    /// Who it is.
    pub identity: Identity,
    /// The CA that all parts are known by.
    pub ca: PathBuf,
    /// The name that servers' certificates are for; `None`: the host that is dialled.
    pub server_name: Option<String>,
}

/// TLS cannot be set up.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file cannot be read, or is not PEM.
    #[error("{} cannot be read as PEM", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// Why.
        source: pem::Error,
    },
    /// A file has nothing of what is looked for in it.
    #[error("{} has no {what}", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// `certificate`, for instance.
        what: &'static str,
    },
    /// Certificate and key do not go together, or a certificate cannot be used.
    #[error("{} cannot be used", path.display())]
    Unusable {
        /// The certificate's file.
        path: PathBuf,
        /// Why.
        source: rustls::Error,
    },
    /// The name is no host and no address.
    #[error("{0:?} is no server name; allowed are host names and IP addresses")]
    ServerName(String),
}

/// Mutual TLS of one part: it serves the others, and dials them.
#[derive(Clone)]
pub struct PartsTls {
    /// For what it serves.
    pub server: Arc<ServerTls>,
    /// For whom it dials.
    pub client: Arc<ClientTls>,
}

impl PartsTls {
    /// Reads the files, and reads them again when they change, until the process stops.
    ///
    /// # Errors
    /// [`TlsError`] for files that cannot be used.
    pub fn start(files: PartsFiles, drain: &Drain) -> Result<Self, TlsError> {
        let paths = vec![files.identity.cert.clone(), files.identity.key.clone(), files.ca.clone()];
        let watched = Files::new(paths);
        let server = Arc::new(ServerTls::mutual(files.identity.clone(), files.ca.clone())?);
        let client = Arc::new(ClientTls::mutual(files)?);
        let parts = Self { server, client };
        let (reader, stopping) = (parts.clone(), drain.clone());
        drain.tasks().spawn(async move {
            let again = || report(reader.server.read_again().and_then(|()| reader.client.read_again()));
            tokio::select! {
                () = watched.on_change(LOOK_EVERY, again) => {}
                () = stopping.stopping() => {}
            }
        });
        Ok(parts)
    }
}

fn report(outcome: Result<(), TlsError>) {
    match outcome {
        Ok(()) => tracing::info!("certificates read again"),
        Err(e) => tracing::error!(error = ?e, "certificates stay as they were"),
    }
}

fn read_chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |source| TlsError::Pem { path: path.to_owned(), source };
    let certs: Vec<_> =
        CertificateDer::pem_file_iter(path).map_err(failed)?.collect::<Result<_, _>>().map_err(failed)?;
    if certs.is_empty() {
        return Err(TlsError::Empty { path: path.to_owned(), what: "certificate" });
    }
    Ok(certs)
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_file(path).map_err(|source| match source {
        pem::Error::NoItemsFound => TlsError::Empty { path: path.to_owned(), what: "private key" },
        source => TlsError::Pem { path: path.to_owned(), source },
    })
}

fn read_ca(path: &Path) -> Result<Arc<RootCertStore>, TlsError> {
    let mut roots = RootCertStore::empty();
    for cert in read_chain(path)? {
        roots.add(cert).map_err(|source| TlsError::Unusable { path: path.to_owned(), source })?;
    }
    Ok(Arc::new(roots))
}

#[cfg(test)]
mod tests;
