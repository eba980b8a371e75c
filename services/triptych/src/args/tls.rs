//! Flags of TLS: between the parts of a cluster, and towards its clients.

use crate::error::{CliError, chain};
use clap::Args;
use std::net::SocketAddr;
use std::path::PathBuf;
use tokio::net::TcpListener;
use triptych_runtime::Drain;
use triptych_runtime::grpc::Dialer;
use triptych_runtime::listener::Listener;
use triptych_runtime::tls::server::ServerTls;
use triptych_runtime::tls::{ClusterTls, ClusterTlsFiles, Identity};

/// The variables of all of these flags.
pub const VARIABLES: [&str; 6] = [
    "TRIPTYCH_TLS_CERT",
    "TRIPTYCH_TLS_KEY",
    "TRIPTYCH_TLS_CA",
    "TRIPTYCH_TLS_SERVER_NAME",
    "TRIPTYCH_PUBLIC_TLS_CERT",
    "TRIPTYCH_PUBLIC_TLS_KEY",
];

/// Mutual TLS with the other parts of the cluster.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "TLS between the parts")]
pub struct TlsArgs {
    /// This part's certificate, and those between it and the CA, in PEM; it must be for servers and for clients. Files
    /// are read again when they change
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_TLS_CERT", requires_all = ["tls_key", "tls_ca"])]
    pub tls_cert: Option<PathBuf>,
    /// The certificate's private key, in PEM
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_TLS_KEY", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// The CA that all parts of the cluster have their certificates from, in PEM
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_TLS_CA", requires = "tls_cert")]
    pub tls_ca: Option<PathBuf>,
    /// The name that the other parts' certificates are for, where they are reached by addresses that are not in them
    #[arg(long, value_name = "NAME", env = "TRIPTYCH_TLS_SERVER_NAME", requires = "tls_cert")]
    pub tls_server_name: Option<String>,
}

/// Flags of TLS between the processes.
pub struct Links {
    tls: Option<ClusterTls>,
}

impl TlsArgs {
    /// Reads the files.
    ///
    /// # Errors
    /// [`CliError::Setting`] for files that cannot be used.
    pub fn links(&self, drain: &Drain) -> Result<Links, CliError> {
        let (Some(cert), Some(key), Some(ca)) = (&self.tls_cert, &self.tls_key, &self.tls_ca) else {
            return Ok(Links { tls: None });
        };
        let files = ClusterTlsFiles {
            identity: Identity { cert: cert.clone(), key: key.clone() },
            ca: ca.clone(),
            server_name: self.tls_server_name.clone(),
        };
        let tls = ClusterTls::start(files, drain).map_err(|e| CliError::Setting(chain(&e)))?;
        Ok(Links { tls: Some(tls) })
    }
}

impl Links {
    /// Makes channels to the other parts.
    pub fn dialer(&self) -> Dialer {
        self.tls.as_ref().map_or_else(Dialer::default, |tls| tls.client.dialer())
    }

    /// Listener for the other processes. Without TLS it is on the loopback address, or on one that the operator declares safe.
    ///
    /// # Errors
    /// [`CliError::Setting`] for plaintext on an address that others reach.
    pub fn listener(&self, listener: TcpListener, plaintext: PlaintextArgs) -> Result<Listener, CliError> {
        let address = listener.local_addr().map_err(|e| CliError::failed("cannot tell the address", &e))?;
        if self.tls.is_none() {
            plaintext.allow(address)?;
        }
        Ok(Listener::new(listener, self.tls.as_ref().map(|tls| tls.server.clone())))
    }
}

/// The way around [`TlsArgs`].
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct PlaintextArgs {
    /// Answer without TLS on an address that is not loopback: only where nobody but the cluster reaches it
    #[arg(long, env = "TRIPTYCH_INSECURE_PLAINTEXT", help_heading = "TLS between the parts",
          value_parser = clap::builder::FalseyValueParser::new())]
    pub insecure_plaintext: bool,
}

impl PlaintextArgs {
    /// Checks that a role may answer without TLS at an address.
    ///
    /// # Errors
    /// [`CliError::Setting`] for one that others reach, if they were not said to be safe.
    fn allow(self, address: SocketAddr) -> Result<(), CliError> {
        if address.ip().is_loopback() || self.insecure_plaintext {
            return Ok(());
        }
        Err(CliError::Setting(format!(
            "--grpc {address} is not a loopback address, and without TLS every client that reaches it can read and feed this \
             process; give --tls-cert, --tls-key and --tls-ca, or --insecure-plaintext if only the cluster's own \
             machines reach it"
        )))
    }

    /// Checks the text of `grpc` and `tls`. Names are resolved at the start only.
    ///
    /// # Errors
    /// Those of a start, for a numeric address.
    pub fn check(self, tls: &TlsArgs, grpc: &str) -> Result<(), CliError> {
        match grpc.parse() {
            Ok(address) if tls.tls_cert.is_none() => self.allow(address),
            _ => Ok(()),
        }
    }
}

/// Flags of TLS towards clients, for HTTP and gRPC.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "TLS towards clients")]
pub struct PublicTlsArgs {
    /// Certificate of the HTTP and gRPC APIs, and those between it and its CA, in PEM; read again when it changes
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_PUBLIC_TLS_CERT", requires = "public_tls_key")]
    pub public_tls_cert: Option<PathBuf>,
    /// The certificate's private key, in PEM
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_PUBLIC_TLS_KEY", requires = "public_tls_cert")]
    pub public_tls_key: Option<PathBuf>,
}

impl PublicTlsArgs {
    /// A listener with the ALPN protocol `h2` or `http/1.1`.
    ///
    /// # Errors
    /// [`CliError::Setting`] for files that cannot be used.
    pub fn listener(
        &self,
        listener: TcpListener,
        protocol: &str,
        drain: &Drain,
    ) -> Result<Listener, CliError> {
        let (Some(cert), Some(key)) = (&self.public_tls_cert, &self.public_tls_key) else {
            return Ok(listener.into());
        };
        let identity = Identity { cert: cert.clone(), key: key.clone() };
        let tls = ServerTls::public(identity, protocol).map_err(|e| CliError::Setting(chain(&e)))?;
        Ok(Listener::reloading(listener, tls, drain))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn plaintext_beyond_this_machine_has_to_be_asked_for() {
        let links = TlsArgs::default().links(&Drain::new()).unwrap();
        let bind = async |address| TcpListener::bind(address).await.unwrap();
        assert!(links.listener(bind("127.0.0.1:0").await, PlaintextArgs::default()).is_ok());
        let Err(e) = links.listener(bind("0.0.0.0:0").await, PlaintextArgs::default()) else { panic!() };
        assert!(matches!(e, CliError::Setting(_)));
        let text = e.to_string();
        assert!(text.contains("--insecure-plaintext") && text.contains("--tls-cert"), "{text}");
        let insecure = PlaintextArgs { insecure_plaintext: true };
        assert!(links.listener(bind("0.0.0.0:0").await, insecure).is_ok());
        let check = |address| PlaintextArgs::default().check(&TlsArgs::default(), address);
        assert!(check("127.0.0.1:1").is_ok() && check("localhost:1").is_ok() && check("0.0.0.0:1").is_err());
    }
}
