//! The certificate authority that the containers trust, and an HTTPS server with one of its certificates.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::thread;

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority() -> &'static Authority {
    static AUTHORITY: OnceLock<Authority> = OnceLock::new();
    AUTHORITY.get_or_init(|| {
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("a CA")
    })
}

fn issue(name: &str) -> (rcgen::Certificate, KeyPair) {
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new(vec![name.to_owned()]).expect("parameters");
    (params.signed_by(&key, authority()).expect("a certificate"), key)
}

/// The authority's certificate in PEM.
pub fn root_pem() -> String {
    authority().pem()
}

/// Writes the certificate files that `deploy/compose/tls.yaml` mounts.
pub fn write_part(folder: &Path, name: &str) {
    let (part, key) = issue(name);
    for (file, text) in [("ca.pem", root_pem()), ("part.pem", part.pem()), ("part.key", key.serialize_pem())]
    {
        std::fs::write(folder.join(file), text).expect("the folder can be written");
    }
}

/// Serves one body over HTTPS under a name, on a free port, until it was sent once.
pub fn serve_once(name: &str, body: Vec<u8>) -> u16 {
    let (certificate, key) = issue(name);
    let key = PrivatePkcs8KeyDer::from(key.serialize_der()).into();
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .expect("a certificate");
    let (config, listener) =
        (Arc::new(config), TcpListener::bind("127.0.0.1:0").expect("loopback has ports"));
    let port = listener.local_addr().expect("bound").port();
    thread::spawn(move || {
        let mut served = false;
        while !served {
            let Ok((stream, _)) = listener.accept() else { return };
            served = answer(&config, stream, &body).is_ok();
        }
    });
    port
}

fn answer(config: &Arc<ServerConfig>, stream: TcpStream, body: &[u8]) -> std::io::Result<()> {
    let connection = ServerConnection::new(Arc::clone(config)).map_err(std::io::Error::other)?;
    let mut stream = StreamOwned::new(connection, stream);
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let length = body.len();
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    stream.conn.send_close_notify();
    stream.flush()
}
