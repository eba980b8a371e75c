//! Where a process is spoken to: a listener, plain or TLS.

use crate::drain::Drain;
use crate::reload::Files;
use crate::tls::server::ServerTls;
use futures::{Stream, StreamExt};
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::server::TlsStream;
use tonic::transport::server::{Connected, TcpConnectInfo, TcpIncoming};

/// Handshakes at once; whoever comes then waits in the listener's queue.
const HANDSHAKES: usize = 1024;
/// How often the files of certificates are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// A listener and what is spoken there.
pub struct Door {
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
}

impl From<TcpListener> for Door {
    fn from(listener: TcpListener) -> Self {
        Self { listener, tls: None }
    }
}

impl Door {
    /// A door with TLS; `None`: without.
    pub fn new(listener: TcpListener, tls: Option<Arc<ServerTls>>) -> Self {
        Self { listener, tls }
    }

    /// A door with TLS whose files are read again when they change, until the process stops.
    pub fn reloading(listener: TcpListener, tls: ServerTls, drain: &Drain) -> Self {
        let files = Files::new(tls.files());
        let tls = Arc::new(tls);
        let (reader, stopping) = (Arc::clone(&tls), drain.clone());
        drain.tasks().spawn(async move {
            let again = || match reader.read_again() {
                Ok(()) => tracing::info!("certificate read again"),
                Err(e) => tracing::error!(error = ?e, "the certificate stays as it was"),
            };
            tokio::select! {
                () = files.on_change(LOOK_EVERY, again) => {}
                () = stopping.stopping() => {}
            }
        });
        Self::new(listener, Some(tls))
    }

    /// Where it is.
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
    pub async fn accept(&self) -> io::Result<Guest> {
        let (stream, peer) = self.listener.accept().await?;
        // Tokens are small and each is waited for. An error shows again at the first write.
        let _ = stream.set_nodelay(true);
        Ok(Guest { stream, peer, tls: self.tls.clone() })
    }

    /// Connections as they come, handshakes done; those that fail are in the log and nowhere else.
    pub fn incoming(self) -> impl Stream<Item = io::Result<DoorStream>> + Send {
        let tls = self.tls;
        // The server's own setting for it is ignored with a listener that was made elsewhere; without it an answer
        // that waits for an acknowledgement takes 40 ms.
        let accepted = TcpIncoming::from(self.listener).with_nodelay(Some(true));
        let shaking = accepted.map(move |stream| {
            let tls = tls.clone();
            async move {
                let stream = match stream {
                    Ok(stream) => stream,
                    Err(e) => return Some(Err(e)),
                };
                let peer = stream.peer_addr().ok()?;
                Guest { stream, peer, tls }.come_in().await.map(Ok)
            }
        });
        shaking.buffer_unordered(HANDSHAKES).filter_map(std::future::ready)
    }
}

/// Somebody at the door.
pub struct Guest {
    stream: TcpStream,
    peer: SocketAddr,
    tls: Option<Arc<ServerTls>>,
}

impl Guest {
    /// Shakes hands, where that is asked for. `None` if it fails, which the log then says.
    pub async fn come_in(self) -> Option<DoorStream> {
        let Some(tls) = self.tls else { return Some(DoorStream::Plain(self.stream)) };
        let shaken = tls.accept(self.stream).await;
        shaken.inspect_err(|e| tracing::warn!(peer = %self.peer, error = %e, "TLS handshake refused")).ok()
    }
}

/// A connection.
pub enum DoorStream {
    /// Without TLS.
    Plain(TcpStream),
    /// With it.
    Tls(Box<TlsStream<TcpStream>>),
}

macro_rules! either {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            DoorStream::Plain($stream) => $call,
            DoorStream::Tls($stream) => $call,
        }
    };
}

impl AsyncRead for DoorStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_read(context, buffer))
    }
}

impl AsyncWrite for DoorStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write(context, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write_vectored(context, bytes))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_shutdown(context))
    }
}

impl Connected for DoorStream {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        match self {
            Self::Plain(stream) => stream.connect_info(),
            Self::Tls(stream) => stream.get_ref().0.connect_info(),
        }
    }
}
