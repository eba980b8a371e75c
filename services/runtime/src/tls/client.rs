//! The client's side of mutual TLS: connections to other processes of the cluster.

use super::files::{ClusterTlsFiles, H2, TlsError, provider, read_ca, read_chain, read_key};
use crate::grpc::{Dialer, endpoint};
use arc_swap::ArcSwap;
use http::Uri;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::io;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tower::service_fn;

/// TLS configuration of a client.
pub struct ClientTls {
    files: ClusterTlsFiles,
    /// Parsed from `files`.
    server_name: Option<ServerName<'static>>,
    current: ArcSwap<ClientConfig>,
}

impl ClientTls {
    /// A client that presents a certificate, and expects one of the same CA for the dialled name.
    ///
    /// # Errors
    /// [`TlsError`] for files that cannot be used.
    pub fn mutual(files: ClusterTlsFiles) -> Result<Self, TlsError> {
        let name = |name: &String| {
            ServerName::try_from(name.clone()).map_err(|_| TlsError::ServerName(name.clone()))
        };
        let server_name = files.server_name.as_ref().map(name).transpose()?;
        let current = ArcSwap::from_pointee(config(&files)?);
        Ok(Self { files, server_name, current })
    }

    /// A client that presents no certificate.
    #[cfg(test)]
    pub(super) fn anonymous(files: ClusterTlsFiles) -> Result<Self, TlsError> {
        let mut config = config(&files)?;
        config.client_auth_cert_resolver = Arc::new(NoCertificate);
        Ok(Self { files, server_name: None, current: ArcSwap::from_pointee(config) })
    }

    /// Reads the files again; new connections use them.
    ///
    /// # Errors
    /// [`TlsError`]; then the previous configuration stays in use.
    pub fn reload(&self) -> Result<(), TlsError> {
        self.current.store(config(&self.files)?.into());
        Ok(())
    }

    /// A dialer whose channels use this configuration.
    pub fn dialer(self: &Arc<Self>) -> Dialer {
        let tls = Arc::clone(self);
        Dialer::new(move |address| {
            let tls = Arc::clone(&tls);
            let connector = service_fn(move |uri: Uri| {
                let tls = Arc::clone(&tls);
                async move { tls.connect(&uri).await.map(TokioIo::new) }
            });
            Ok(endpoint(address)?.connect_with_connector_lazy(connector))
        })
    }

    async fn connect(&self, uri: &Uri) -> io::Result<TlsStream<TcpStream>> {
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
        let port = uri.port_u16().unwrap_or(443);
        let name = match &self.server_name {
            Some(name) => name.clone(),
            None => ServerName::try_from(host.to_owned()).map_err(io::Error::other)?,
        };
        let stream = TcpStream::connect((host, port)).await?;
        stream.set_nodelay(true)?;
        let connected = TlsConnector::from(self.current.load_full()).connect(name, stream).await;
        connected.inspect_err(|e| tracing::warn!(server = %uri, error = %e, "TLS handshake failed"))
    }
}

fn config(files: &ClusterTlsFiles) -> Result<ClientConfig, TlsError> {
    let unusable = |source| TlsError::Unusable { path: files.identity.cert.clone(), source };
    let builder = ClientConfig::builder_with_provider(provider());
    let builder = builder.with_safe_default_protocol_versions().map_err(unusable)?;
    let builder = builder.with_root_certificates(read_ca(&files.ca)?);
    let (chain, key) = (read_chain(&files.identity.cert)?, read_key(&files.identity.key)?);
    let mut config = builder.with_client_auth_cert(chain, key).map_err(unusable)?;
    config.alpn_protocols = vec![H2.to_vec()];
    Ok(config)
}

#[cfg(test)]
#[derive(Debug)]
struct NoCertificate;

#[cfg(test)]
impl rustls::client::ResolvesClientCert for NoCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<rustls::sign::CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}
