//! Flags of TLS: between the parts of a cluster, and towards its clients.

use crate::error::{CliError, chain};
use clap::Args;
use std::net::SocketAddr;
use std::path::PathBuf;
use tokio::net::TcpListener;
use triptych_runtime::Drain;
use triptych_runtime::door::Door;
use triptych_runtime::grpc::Dialer;
use triptych_runtime::tls::server::ServerTls;
use triptych_runtime::tls::{Identity, PartsFiles, PartsTls};

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

/// What a part talks to the others with.
pub struct Links {
    tls: Option<PartsTls>,
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
        let files = PartsFiles {
            identity: Identity { cert: cert.clone(), key: key.clone() },
            ca: ca.clone(),
            server_name: self.tls_server_name.clone(),
        };
        let tls = PartsTls::start(files, drain).map_err(|e| CliError::Setting(chain(&e)))?;
        Ok(Links { tls: Some(tls) })
    }
}

impl Links {
    /// Makes channels to the other parts.
    pub fn dialer(&self) -> Dialer {
        self.tls.as_ref().map_or_else(Dialer::default, |tls| tls.client.dialer())
    }

    /// Where the other parts come in. Without TLS that is the loopback address, or what the operator says is safe.
    ///
    /// # Errors
    /// [`CliError::Setting`] for plaintext on an address that others reach.
    pub fn door(&self, listener: TcpListener, plaintext: PlaintextArgs) -> Result<Door, CliError> {
        let address = listener.local_addr().map_err(|e| CliError::failed("cannot tell the address", &e))?;
        if self.tls.is_none() {
            plaintext.allow(address)?;
        }
        Ok(Door::new(listener, self.tls.as_ref().map(|tls| tls.server.clone())))
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
    /// Whether a role may answer without TLS at an address.
    ///
    /// # Errors
    /// [`CliError::Setting`] for one that others reach, if they were not said to be safe.
    fn allow(self, address: SocketAddr) -> Result<(), CliError> {
        if address.ip().is_loopback() || self.insecure_plaintext {
            return Ok(());
        }
        Err(CliError::Setting(format!(
            "--grpc {address} is not a loopback address, and without TLS whoever reaches it can read and feed this \
             process; give --tls-cert, --tls-key and --tls-ca, or --insecure-plaintext if only the cluster's own \
             machines reach it"
        )))
    }

    /// The same of settings: `grpc` as it was written, beside `tls`. A name is left to the start, which resolves it.
    ///
    /// # Errors
    /// As for a start, for an address written in numbers.
    pub fn check(self, tls: &TlsArgs, grpc: &str) -> Result<(), CliError> {
        match grpc.parse() {
            Ok(address) if tls.tls_cert.is_none() => self.allow(address),
            _ => Ok(()),
        }
    }
}

/// TLS towards clients, on both faces.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "TLS towards clients")]
pub struct PublicTlsArgs {
    /// Certificate of the HTTP and gRPC faces, and those between it and its CA, in PEM; read again when it changes
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_PUBLIC_TLS_CERT", requires = "public_tls_key")]
    pub public_tls_cert: Option<PathBuf>,
    /// The certificate's private key, in PEM
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_PUBLIC_TLS_KEY", requires = "public_tls_cert")]
    pub public_tls_key: Option<PathBuf>,
}

impl PublicTlsArgs {
    /// A face; `protocol` is what is spoken there, `h2` or `http/1.1`.
    ///
    /// # Errors
    /// [`CliError::Setting`] for files that cannot be used.
    pub fn door(&self, listener: TcpListener, protocol: &str, drain: &Drain) -> Result<Door, CliError> {
        let (Some(cert), Some(key)) = (&self.public_tls_cert, &self.public_tls_key) else {
            return Ok(listener.into());
        };
        let identity = Identity { cert: cert.clone(), key: key.clone() };
        let tls = ServerTls::public(identity, protocol).map_err(|e| CliError::Setting(chain(&e)))?;
        Ok(Door::reloading(listener, tls, drain))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn plaintext_beyond_this_machine_has_to_be_asked_for() {
        let links = TlsArgs::default().links(&Drain::new()).unwrap();
        let bind = async |address| TcpListener::bind(address).await.unwrap();
        assert!(links.door(bind("127.0.0.1:0").await, PlaintextArgs::default()).is_ok());
        let Err(e) = links.door(bind("0.0.0.0:0").await, PlaintextArgs::default()) else { panic!() };
        assert!(matches!(e, CliError::Setting(_)));
        let text = e.to_string();
        assert!(text.contains("--insecure-plaintext") && text.contains("--tls-cert"), "{text}");
        let insecure = PlaintextArgs { insecure_plaintext: true };
        assert!(links.door(bind("0.0.0.0:0").await, insecure).is_ok());
        let check = |address| PlaintextArgs::default().check(&TlsArgs::default(), address);
        assert!(check("127.0.0.1:1").is_ok() && check("localhost:1").is_ok() && check("0.0.0.0:1").is_err());
    }
}
