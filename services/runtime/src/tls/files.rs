//! Certificate, key and CA files, and the provider that all of TLS uses.

use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;

/// ALPN protocol of gRPC.
pub(super) const H2: &[u8] = b"h2";

/// Installs the process-wide provider. Idempotent.
pub fn install_provider() {
    // Fails only if a provider is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// A certificate chain and its key, PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The certificate chain, up to the CA.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Files for mutual TLS between the processes of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterTlsFiles {
    /// Certificate of this process.
    pub identity: Identity,
    /// The cluster's CA.
    pub ca: PathBuf,
    /// Expected name in servers' certificates; `None`: the host that is dialled.
    pub server_name: Option<String>,
}

/// A TLS configuration that cannot be used.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file cannot be read, or is not PEM.
    #[error("{} cannot be read as PEM", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: pem::Error,
    },
    /// A file without the expected PEM item.
    #[error("{} has no {what}", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// `certificate`, for instance.
        what: &'static str,
    },
    /// The certificate and the key do not match, or the certificate is unusable.
    #[error("{} cannot be used", path.display())]
    Unusable {
        /// The certificate's file.
        path: PathBuf,
        /// Cause.
        source: rustls::Error,
    },
    /// A name that is neither a host name nor an IP address.
    #[error("{0:?} is no server name; allowed are host names and IP addresses")]
    ServerName(String),
}

pub(super) fn read_chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |source| TlsError::Pem { path: path.to_owned(), source };
    let certs: Vec<_> =
        CertificateDer::pem_file_iter(path).map_err(failed)?.collect::<Result<_, _>>().map_err(failed)?;
    if certs.is_empty() {
        return Err(TlsError::Empty { path: path.to_owned(), what: "certificate" });
    }
    Ok(certs)
}

pub(super) fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_file(path).map_err(|source| match source {
        pem::Error::NoItemsFound => TlsError::Empty { path: path.to_owned(), what: "private key" },
        source => TlsError::Pem { path: path.to_owned(), source },
    })
}

pub(super) fn read_ca(path: &Path) -> Result<Arc<RootCertStore>, TlsError> {
    let mut roots = RootCertStore::empty();
    for cert in read_chain(path)? {
        roots.add(cert).map_err(|source| TlsError::Unusable { path: path.to_owned(), source })?;
    }
    Ok(Arc::new(roots))
}
