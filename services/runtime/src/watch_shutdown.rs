//! A layer that ends watch streams when listeners close. They never end by themselves and would delay a drain by its
//! whole grace period: gRPC's health check (github.com/grpc/grpc, doc/health-checking.md, `Watch`), a worker's state,
//! and the reflection of debugging tools.

use crate::drain::Drain;
use futures::future::BoxFuture;
use http::{HeaderMap, HeaderValue, Request, Response};
use hyper::body::{Bytes, Frame, SizeHint};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tonic::body::Body;
use tonic::{Code, Status};
use tower::{Layer, Service};

/// A service whose watch calls end when the drain closes listeners.
#[derive(Clone, Debug)]
pub struct WatchShutdown<S> {
    service: S,
    drain: Drain,
}

/// Wraps services in a [`WatchShutdown`].
#[derive(Clone, Debug)]
pub struct WatchShutdownLayer(Drain);

impl WatchShutdownLayer {
    /// Watch calls end when this drain closes listeners.
    pub fn new(drain: &Drain) -> Self {
        Self(drain.clone())
    }
}

impl<S> Layer<S> for WatchShutdownLayer {
    type Service = WatchShutdown<S>;

    fn layer(&self, service: S) -> WatchShutdown<S> {
        WatchShutdown { service, drain: self.0.clone() }
    }
}

impl<S, B> Service<Request<B>> for WatchShutdown<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response<Body>, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let path = request.uri().path();
        let watches = path.ends_with("/Watch") || path.ends_with("/ServerReflectionInfo");
        let closing = watches.then(|| self.drain.closing());
        let response = self.service.call(request);
        Box::pin(async move {
            let response = response.await?;
            Ok(match closing {
                Some(closing) => response.map(|body| {
                    Body::new(ShutdownBody { body, closing: Box::pin(closing), has_ended: false })
                }),
                None => response,
            })
        })
    }
}

/// A body that ends with UNAVAILABLE trailers when `closing` completes.
struct ShutdownBody {
    body: Body,
    closing: Pin<Box<dyn Future<Output = ()> + Send>>,
    has_ended: bool,
}

impl hyper::body::Body for ShutdownBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            return Poll::Ready(frame);
        }
        ready!(self.closing.as_mut().poll(context));
        self.has_ended = true;
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from(Code::Unavailable as i32));
        trailers.insert("grpc-message", HeaderValue::from_static("the server is stopping"));
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.has_ended || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drain::DrainTimes;
    use crate::grpc;
    use std::time::{Duration, Instant};
    use tokio::net::TcpListener;
    use tonic::transport::server::TcpIncoming;
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_client::HealthClient;

    #[tokio::test]
    async fn a_health_watch_ends_with_unavailable_and_does_not_delay_the_drain() {
        let (health, service) = tonic_health::server::health_reporter();
        let drain =
            Drain::with_times(DrainTimes { lame_duck: Duration::ZERO, grace: Duration::from_secs(300) });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server =
            grpc::server(grpc::Peers::Cluster).layer(WatchShutdownLayer::new(&drain)).add_service(service);
        let incoming = TcpIncoming::from(listener);
        drain.tasks().spawn(server.serve_with_incoming_shutdown(incoming, drain.closing()));
        grpc::set_health(&health, "s", true).await;
        let mut client = HealthClient::new(grpc::channel(&address).unwrap());
        let asked = HealthCheckRequest { service: String::new() };
        let mut watch = client.watch(asked).await.unwrap().into_inner();
        assert_eq!(watch.message().await.unwrap().unwrap().status, 1);
        grpc::set_health(&health, "s", false).await;
        drain.begin();
        let start = Instant::now();
        let (received, ()) = futures::join!(
            async {
                let not_serving = watch.message().await.unwrap().unwrap().status;
                (not_serving, watch.message().await.unwrap_err().code())
            },
            drain.finish(drain.times())
        );
        assert_eq!(received, (2, Code::Unavailable));
        assert!(start.elapsed() < Duration::from_secs(60), "far below the grace");
    }
}
