//! The HTTP/1.1 server: one task per connection, with limits on how slow a client may be and on how many there are.
//!
//! Not `axum::serve`, which sets no timeout on request heads. A response to a request whose body was not read to its
//! end needs care: closing at once would reset the connection, and the client would lose the response. So the sending
//! side closes first, and what still arrives is thrown away for a while ("lingering close", as in nginx).

use crate::config::ClientTimes;
use axum::Router;
use axum::body::Body;
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

/// Open connections; more wait in the listener's queue.
const MAX_CONNECTIONS: usize = 4096;
/// After a connection could not be accepted, for want of file descriptors for instance.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long, and for how many bytes, a closing connection is read from.
const LINGER: (Duration, usize) = (Duration::from_secs(2), 256 << 20);

/// Serves until listeners close. Connections that are open then end after their running request.
pub async fn serve(door: Listener, routes: Router, times: ClientTimes, drain: Drain) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut closing = pin!(drain.closing());
    loop {
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, door.accept().await)
        };
        let (place, accepted) = tokio::select! {
            () = &mut closing => return,
            next = next => next,
        };
        match accepted {
            Ok(guest) => {
                let connection = converse(guest, routes.clone(), times, drain.clone());
                drain.tasks().spawn(async move {
                    connection.await;
                    drop(place);
                });
            }
            Err(e) => {
                tracing::warn!(error = %e, "a connection cannot be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn converse(guest: PendingConnection, routes: Router, times: ClientTimes, drain: Drain) {
    let Some(stream) = guest.handshake().await else { return };
    let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        Box::pin(routes.clone().oneshot(request.map(Body::new)))
    });
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(times.head)
        .max_buf_size(64 << 10)
        .serve_connection(TokioIo::new(stream), service);
    let (mut closing, abort) = (pin!(drain.closing()), drain.abort_token());
    let mut is_closing = false;
    loop {
        tokio::select! {
            _ = poll_fn(|context| connection.poll_without_shutdown(context)) => break,
            () = &mut closing, if !is_closing => {
                is_closing = true;
                std::pin::Pin::new(&mut connection).graceful_shutdown();
            }
            () = abort.cancelled() => return,
        }
    }
    linger(connection.into_parts().io.into_inner()).await;
}

async fn linger(mut stream: ServerStream) {
    let (time, limit) = LINGER;
    let drained = async {
        stream.shutdown().await?;
        let (mut scrap, mut left) = (vec![0; 16 << 10], limit);
        while left > 0 {
            match stream.read(&mut scrap).await? {
                0 => break,
                n => left = left.saturating_sub(n),
            }
        }
        Ok::<_, std::io::Error>(())
    };
    // Whatever ends it, the stream closes now.
    let _ = tokio::time::timeout(time, drained).await;
}
