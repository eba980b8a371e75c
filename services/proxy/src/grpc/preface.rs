//! A connection that must begin to speak HTTP/2 in time.
//!
//! Once it does, keep-alive pings find out whether the client is still there; before, nothing would.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};
use tonic::transport::server::{Connected, TcpConnectInfo};
use triptych_runtime::listener::ServerStream;

/// Length of the client's preface (RFC 9113, section 3.4).
const PREFACE_BYTES: usize = 24;

/// A stream that fails if its first bytes do not come in time.
pub struct Prefaced {
    stream: ServerStream,
    /// Until the preface is complete: its missing bytes, and the end of patience.
    waiting: Option<(usize, Pin<Box<Sleep>>)>,
}

impl Prefaced {
    /// Wraps a connection that was just accepted.
    pub fn new(stream: ServerStream, patience: Duration) -> Self {
        Self { stream, waiting: Some((PREFACE_BYTES, Box::pin(sleep(patience)))) }
    }
}

impl AsyncRead for Prefaced {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some((_, patience)) = &mut self.waiting
            && patience.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let n_read = buffer.filled().len() - before;
        self.waiting = self.waiting.take().and_then(|(missing, patience)| {
            let missing = missing.saturating_sub(n_read);
            (missing > 0).then_some((missing, patience))
        });
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Prefaced {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl Connected for Prefaced {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}
