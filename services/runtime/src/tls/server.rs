//! The server's side of TLS: handshakes, each with the certificates that are current when it starts.

use super::files::{H2, Identity, TlsError, provider, read_ca, read_chain, read_key};
use crate::listener::stream::ServerStream;
use arc_swap::ArcSwap;
use rustls::ServerConfig;
use rustls::server::WebPkiClientVerifier;
use std::io;
use std::path::PathBuf;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

/// Longest handshake.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);

/// TLS configuration of a server.
pub struct ServerTls {
    identity: Identity,
    /// CA of the clients' certificates; `None`: clients present none.
    ca: Option<PathBuf>,
    protocols: Vec<Vec<u8>>,
    current: ArcSwap<ServerConfig>,
}

impl ServerTls {
    /// For other processes of the cluster, which speak HTTP/2 and present a certificate of the CA.
    ///
    /// # Errors
    /// [`TlsError`] for files that cannot be used.
    pub fn mutual(identity: Identity, ca: PathBuf) -> Result<Self, TlsError> {
        Self::new(identity, Some(ca), vec![H2.to_vec()])
    }

    /// For external clients, which present no certificate; `protocol` is `h2` or `http/1.1`.
    ///
    /// # Errors
    /// [`TlsError`] for files that cannot be used.
    pub fn public(identity: Identity, protocol: &str) -> Result<Self, TlsError> {
        Self::new(identity, None, vec![protocol.as_bytes().to_vec()])
    }

    fn new(identity: Identity, ca: Option<PathBuf>, protocols: Vec<Vec<u8>>) -> Result<Self, TlsError> {
        let current = ArcSwap::from_pointee(config(&identity, ca.as_ref(), &protocols)?);
        Ok(Self { identity, ca, protocols, current })
    }

    /// Certificate, key and CA files.
    pub fn files(&self) -> Vec<PathBuf> {
        let own = [self.identity.cert.clone(), self.identity.key.clone()];
        own.into_iter().chain(self.ca.clone()).collect()
    }

    /// Reads the files again; new connections use them.
    ///
    /// # Errors
    /// [`TlsError`]; then the previous configuration stays in use.
    pub fn reload(&self) -> Result<(), TlsError> {
        let new = config(&self.identity, self.ca.as_ref(), &self.protocols)?;
        self.current.store(new.into());
        Ok(())
    }

    /// Performs the handshake.
    ///
    /// # Errors
    /// A refused handshake, or a timeout.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<ServerStream> {
        let acceptor = TlsAcceptor::from(self.current.load_full());
        let handshake = tokio::time::timeout(HANDSHAKE_TIME, acceptor.accept(stream));
        let stream = handshake.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        Ok(ServerStream::Tls(Box::new(stream)))
    }
}

fn config(
    identity: &Identity,
    ca: Option<&PathBuf>,
    protocols: &[Vec<u8>],
) -> Result<ServerConfig, TlsError> {
    let unusable = |source| TlsError::Unusable { path: identity.cert.clone(), source };
    let builder = ServerConfig::builder_with_provider(provider());
    let builder = builder.with_safe_default_protocol_versions().map_err(unusable)?;
    let builder = match ca {
        None => builder.with_no_client_auth(),
        Some(ca) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(read_ca(ca)?, provider()).build();
            let verifier = verifier.map_err(|e| TlsError::Unusable {
                path: ca.clone(),
                source: rustls::Error::General(e.to_string()),
            })?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let (chain, key) = (read_chain(&identity.cert)?, read_key(&identity.key)?);
    let mut config = builder.with_single_cert(chain, key).map_err(unusable)?;
    config.alpn_protocols = protocols.to_vec();
    Ok(config)
}
