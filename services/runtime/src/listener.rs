//! A server's listener, with or without TLS, and the handshakes of its connections.

pub(crate) mod preface;
pub(crate) mod stream;

pub use stream::ServerStream;

use crate::drain::Drain;
use crate::reload::WatchedFiles;
use crate::tls::server::ServerTls;
use futures::{Stream, StreamExt};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tonic::transport::server::TcpIncoming;

/// Handshakes in parallel; further connections wait in the listener's backlog.
const HANDSHAKES: usize = 1024;
/// Interval at which certificate files are checked for changes.
const RELOAD_INTERVAL: Duration = Duration::from_secs(2);

/// A TCP listener and the TLS configuration of its connections, if any.
pub struct Listener {
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self { listener, tls: None }
    }
}

impl Listener {
    /// A listener with this TLS configuration; `None`: plain TCP.
    pub fn new(listener: TcpListener, tls: Option<Arc<ServerTls>>) -> Self {
        Self { listener, tls }
    }

    /// A TLS listener whose certificate files are reloaded when they change, until drain begins.
    pub fn reloading(listener: TcpListener, tls: ServerTls, drain: &Drain) -> Self {
        let files = WatchedFiles::new(tls.files());
        let tls = Arc::new(tls);
        let (reader, stopping) = (Arc::clone(&tls), drain.clone());
        drain.tasks().spawn(async move {
            let again = || match reader.reload() {
                Ok(()) => tracing::info!("certificate reloaded"),
                Err(e) => {
                    tracing::error!(error = ?e, "certificate not reloaded, the previous one stays in use")
                }
            };
            tokio::select! {
                () = files.on_change(RELOAD_INTERVAL, again) => {}
                () = stopping.stopping() => {}
            }
        });
        Self::new(listener, Some(tls))
    }

    /// Local address.
    ///
    /// # Errors
    /// The listener's.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// The next connection, before any handshake.
    ///
    /// # Errors
    /// The listener's.
    pub async fn accept(&self) -> io::Result<PendingConnection> {
        let (stream, peer) = self.listener.accept().await?;
        // Tokens are small and latency-bound. An error surfaces again at the first write.
        let _ = stream.set_nodelay(true);
        Ok(PendingConnection { stream, peer, tls: self.tls.clone() })
    }

    /// Accepted connections after their handshakes. A failed handshake is logged and dropped.
    pub fn incoming(self) -> impl Stream<Item = io::Result<ServerStream>> + Send {
        let tls = self.tls;
        // The server's own setting for it is ignored with a listener created elsewhere; without it a response
        // that waits for an acknowledgement takes 40 ms.
        let accepted = TcpIncoming::from(self.listener).with_nodelay(Some(true));
        let handshakes = accepted.map(move |stream| {
            let tls = tls.clone();
            async move {
                let stream = match stream {
                    Ok(stream) => stream,
                    Err(e) => return Some(Err(e)),
                };
                let peer = stream.peer_addr().ok()?;
                PendingConnection { stream, peer, tls }.handshake().await.map(Ok)
            }
        });
        handshakes.buffer_unordered(HANDSHAKES).filter_map(std::future::ready)
    }
}

/// An accepted connection before its handshake.
pub struct PendingConnection {
    stream: TcpStream,
    peer: SocketAddr,
    tls: Option<Arc<ServerTls>>,
}

impl PendingConnection {
    /// Performs the TLS handshake, if the listener has TLS. `None` if it fails; the failure is logged.
    pub async fn handshake(self) -> Option<ServerStream> {
        let Some(tls) = self.tls else { return Some(ServerStream::Plain(self.stream)) };
        let stream = tls.accept(self.stream).await;
        stream.inspect_err(|e| tracing::warn!(peer = %self.peer, error = %e, "TLS handshake refused")).ok()
    }
}
