//! Mutual TLS between two processes, and refused clients.

use super::*;
use crate::grpc::{self, Dialer};
use crate::listener::Listener;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

struct Ca(CertifiedIssuer<'static, KeyPair>);

impl Ca {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// A process's certificate, valid until this year, and its key, in PEM.
    fn issue(&self, name: &str, until: i32) -> (String, String) {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        (params.not_before, params.not_after) = (date_time_ymd(2000, 1, 1), date_time_ymd(until, 1, 1));
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.0).unwrap();
        (cert.pem(), key.serialize_pem())
    }
}

/// The files of one process.
struct Process {
    dir: tempfile::TempDir,
    server_name: Option<String>,
}

impl Process {
    fn new(ca: &Ca, own: (String, String)) -> Self {
        let process = Self { dir: tempfile::tempdir().unwrap(), server_name: None };
        process.write(ca, own);
        process
    }

    fn write(&self, ca: &Ca, (cert, key): (String, String)) {
        let write = |name: &str, text: &str| std::fs::write(self.dir.path().join(name), text).unwrap();
        write("cert", &cert);
        write("key", &key);
        write("ca", &ca.0.pem());
    }

    fn files(&self) -> ClusterTlsFiles {
        let file = |name: &str| self.dir.path().join(name);
        ClusterTlsFiles {
            identity: Identity { cert: file("cert"), key: file("key") },
            ca: file("ca"),
            server_name: self.server_name.clone(),
        }
    }

    fn tls(&self, drain: &Drain) -> ClusterTls {
        ClusterTls::start(self.files(), drain).unwrap()
    }

    /// A client that trusts the CA and presents no certificate.
    fn anonymous(&self) -> Dialer {
        Arc::new(ClientTls::anonymous(self.files()).unwrap()).dialer()
    }

    fn dialer(&self) -> Dialer {
        Arc::new(ClientTls::mutual(self.files()).unwrap()).dialer()
    }
}

/// A server that answers gRPC health.
async fn server(tls: Arc<ServerTls>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (_, health) = tonic_health::server::health_reporter();
    let serving = grpc::server(grpc::Peers::Cluster).add_service(health);
    tokio::spawn(serving.serve_with_incoming(Listener::new(listener, Some(tls)).incoming()));
    address
}

/// Sends a health check.
async fn asks(dialer: &Dialer, address: SocketAddr) -> Result<(), tonic::Status> {
    let mut client = HealthClient::new(dialer.dial(&address.to_string()).unwrap());
    client.check(HealthCheckRequest::default()).await.map(|_| ())
}

const NOW: i32 = 4000;
const EXPIRED: i32 = 2001;

#[tokio::test]
async fn only_processes_of_one_cluster_connect() {
    let (ca, other) = (Ca::new(), Ca::new());
    let process = |ca: &Ca, own| Process::new(ca, own);
    let host = "127.0.0.1";
    let good = process(&ca, ca.issue(host, NOW));
    let address = server(good.tls(&Drain::new()).server).await;
    asks(&good.dialer(), address).await.unwrap();
    let stranger = process(&ca, other.issue(host, NOW));
    let late = process(&ca, ca.issue(host, EXPIRED));
    for (who, dialer) in [
        ("a certificate of another CA", stranger.dialer()),
        ("an expired certificate", late.dialer()),
        ("no certificate", process(&ca, ca.issue(host, NOW)).anonymous()),
        ("plaintext", Dialer::default()),
    ] {
        // How a call fails depends on how far the handshake came before it was refused.
        assert!(asks(&dialer, address).await.is_err(), "{who}");
    }
    asks(&good.dialer(), address).await.unwrap();
}

#[tokio::test]
async fn a_client_checks_the_name_of_its_server() {
    let ca = Ca::new();
    let named = Process::new(&ca, ca.issue("part.cluster", NOW));
    let address = server(named.tls(&Drain::new()).server).await;
    assert!(asks(&named.dialer(), address).await.is_err(), "the address is not in its certificate");
    let knowing =
        Process { server_name: Some("part.cluster".into()), ..Process::new(&ca, ca.issue("x", NOW)) };
    asks(&knowing.dialer(), address).await.unwrap();
    let wrong =
        Process { server_name: Some("other.cluster".into()), ..Process::new(&ca, ca.issue("x", NOW)) };
    assert!(asks(&wrong.dialer(), address).await.is_err());
    let none = Process { server_name: Some("not a name!".into()), ..Process::new(&ca, ca.issue("x", NOW)) };
    assert!(matches!(ClientTls::mutual(none.files()), Err(TlsError::ServerName(_))));
}

#[tokio::test]
async fn certificates_change_under_a_running_server() {
    let (old, new) = (Ca::new(), Ca::new());
    let host = "127.0.0.1";
    let serving = Process::new(&old, old.issue(host, NOW));
    let tls = Arc::new(ServerTls::mutual(serving.files().identity, serving.files().ca).unwrap());
    let address = server(Arc::clone(&tls)).await;
    let (before, after) =
        (Process::new(&old, old.issue(host, NOW)), Process::new(&new, new.issue(host, NOW)));
    asks(&before.dialer(), address).await.unwrap();
    assert!(asks(&after.dialer(), address).await.is_err());
    serving.write(&new, new.issue(host, NOW));
    tls.reload().unwrap();
    asks(&after.dialer(), address).await.unwrap();
    assert!(asks(&before.dialer(), address).await.is_err());
    std::fs::write(serving.files().identity.key, "no key").unwrap();
    assert!(tls.reload().is_err());
    asks(&after.dialer(), address).await.unwrap();
}

#[tokio::test]
async fn plaintext_gets_no_response_but_an_alert() {
    let ca = Ca::new();
    let process = Process::new(&ca, ca.issue("127.0.0.1", NOW));
    let address = server(process.tls(&Drain::new()).server).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    // A reset after the alert loses nothing.
    let _ = stream.read_to_end(&mut answer).await;
    assert!(answer.len() < 16 && !answer.starts_with(b"HTTP"), "an alert at most: {answer:?}");
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let ca = Ca::new();
    let process = Process::new(&ca, ca.issue("a", NOW));
    let broken = |name: &str, text: &str| {
        process.write(&ca, ca.issue("a", NOW));
        std::fs::write(process.dir.path().join(name), text).unwrap();
        let Err(e) = ClientTls::mutual(process.files()) else { panic!("{name} {text}") };
        assert!(e.to_string().contains(name), "{e}");
    };
    broken("cert", "");
    broken("key", "nonsense");
    broken("ca", &ca.issue("a", NOW).1);
    broken("cert", &ca.issue("a", NOW).0);
}
