//! A timeout for the HTTP/2 preface of a connection.
//!
//! After the preface, keep-alive pings detect a dead client; before it, nothing else would.

use super::ServerStream;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};
use tonic::transport::server::{Connected, TcpConnectInfo};

/// Length of the client's preface (RFC 9113, section 3.4).
const PREFACE_BYTES: usize = 24;

/// A preface that is not complete.
struct PrefaceWait {
    missing_bytes: usize,
    timeout: Pin<Box<Sleep>>,
}

/// A stream that fails if the preface does not arrive in time.
pub struct PrefaceTimeout {
    stream: ServerStream,
    /// `None` without a timeout, and once the preface is complete.
    waiting: Option<PrefaceWait>,
}

impl PrefaceTimeout {
    /// Wraps a connection that was just accepted. `None`: no timeout.
    pub fn new(stream: ServerStream, timeout: Option<Duration>) -> Self {
        let wait = |timeout| PrefaceWait { missing_bytes: PREFACE_BYTES, timeout: Box::pin(sleep(timeout)) };
        Self { stream, waiting: timeout.map(wait) }
    }
}

impl AsyncRead for PrefaceTimeout {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(waiting) = &mut self.waiting
            && waiting.timeout.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let n_read = buffer.filled().len() - before;
        if let Some(waiting) = &mut self.waiting {
            waiting.missing_bytes = waiting.missing_bytes.saturating_sub(n_read);
        }
        self.waiting = self.waiting.take().filter(|waiting| waiting.missing_bytes > 0);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for PrefaceTimeout {
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

impl Connected for PrefaceTimeout {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}
