//! The HTTP/1.1 server: one task per connection, with timeouts for slow clients and a bound on connections.
//!
//! Not `axum::serve`, which sets no timeout on request heads. Closing at once after a response to a half-read body would
//! reset the connection, and the client would lose the response. So the sending side closes first, and remaining input is
//! discarded for a while ("lingering close", as in nginx).

use super::upgrade::UpgradeSlot;
use crate::bounds::ConnectionBounds;
use crate::config::ClientTimes;
use axum::Router;
use axum::body::Body;
use axum::http::uri::Scheme;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;
use tower::ServiceExt;
use triptych_runtime::Drain;
use triptych_runtime::listener::{Listener, PendingConnection, ServerStream};

/// Pause after a failed accept, for want of file descriptors for instance.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Longest time that a closing connection is read from.
const LINGER_TIME: Duration = Duration::from_secs(2);
/// Most bytes that are read from a closing connection.
const LINGER_BYTES: usize = 256 << 20;

/// The part that all connections share.
#[derive(Clone)]
pub struct HttpServing {
    /// Routes.
    pub routes: Router,
    /// Patience with clients.
    pub times: ClientTimes,
    /// Bounds; connections beyond theirs wait in the listener's backlog.
    pub bounds: ConnectionBounds,
}

/// Serves until listeners close. Open connections then end after their running request; one that is cut at the end of the
/// grace period still gets its error.
pub async fn serve(door: Listener, serving: HttpServing, drain: Drain) {
    let slots = Arc::new(Semaphore::new(serving.bounds.connections.min(Semaphore::MAX_PERMITS)));
    let mut closing = pin!(drain.closing());
    loop {
        let next = async {
            let slot = Arc::clone(&slots).acquire_owned().await;
            (slot, door.accept().await)
        };
        let (slot, accepted) = tokio::select! {
            () = &mut closing => return,
            next = next => next,
        };
        match accepted {
            Ok(guest) => {
                let connection = serve_connection(guest, serving.clone(), drain.clone());
                drain.tasks().spawn(async move {
                    connection.await;
                    drop(slot);
                });
            }
            Err(e) => {
                tracing::warn!(error = %e, "a connection cannot be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve_connection(guest: PendingConnection, serving: HttpServing, drain: Drain) {
    let HttpServing { routes, times, bounds } = serving;
    let Some(stream) = guest.handshake().await else { return };
    let scheme = match &stream {
        ServerStream::Plain(_) => Scheme::HTTP,
        ServerStream::Tls(_) => Scheme::HTTPS,
    };
    let slot = UpgradeSlot::default();
    let left = slot.clone();
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(scheme.clone());
        request.extensions_mut().insert(slot.clone());
        Box::pin(routes.clone().oneshot(request.map(Body::new)))
    });
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(times.head)
        .max_buf_size(bounds.head_bytes)
        .serve_connection(TokioIo::new(stream), service);
    let mut closing = pin!(drain.closing());
    let mut connections_end = pin!(drain.connections_end());
    let mut is_closing = false;
    loop {
        tokio::select! {
            _ = poll_fn(|context| connection.poll_without_shutdown(context)) => break,
            () = &mut closing, if !is_closing => {
                is_closing = true;
                std::pin::Pin::new(&mut connection).graceful_shutdown();
            }
            () = &mut connections_end => return,
        }
    }
    let parts = connection.into_parts();
    let (stream, read) = (parts.io.into_inner(), parts.read_buf);
    match left.take() {
        Some(run) => tokio::select! {
            () = run((stream, read)) => {}
            () = &mut connections_end => {}
        },
        None => linger(stream).await,
    }
}

async fn linger(mut stream: ServerStream) {
    let discarded = async {
        stream.shutdown().await?;
        let mut scrap = vec![0; 16 << 10];
        let mut left = LINGER_BYTES;
        while left > 0 {
            match stream.read(&mut scrap).await? {
                0 => break,
                n => left = left.saturating_sub(n),
            }
        }
        Ok::<_, std::io::Error>(())
    };
    // The stream closes in any case.
    let _ = tokio::time::timeout(LINGER_TIME, discarded).await;
}
