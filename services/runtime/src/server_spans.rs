//! Spans of the calls that a server answers: a layer for gRPC, and a response body that keeps its call's span open.
//!
//! A call of a worker or store is part of a request's trace, or has no span: watches, health checks and descriptions would
//! be traces of their own, as many as there are processes and seconds.

use crate::spans::{attribute, served_failure, set};
use crate::status::{CLASS_KEY, from_status};
use crate::trace_context;
use futures::future::BoxFuture;
use http::{HeaderMap, Request, Response};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use std::pin::Pin;
use std::task::{Context, Poll};
use tonic::body::Body;
use tonic::{Code, Status};
use tower::{Layer, Service};
use tracing::{Instrument, Span};
use triptych_core::FailureClass;
use triptych_core::timeline::CALLS;
use triptych_proto::v1::triptych_server;

/// Header or trailer with the code of a call.
const GRPC_STATUS: &str = "grpc-status";
/// Longest name of a method that becomes the name of a span.
const MAX_METHOD: usize = 32;

/// A gRPC service whose calls have spans.
#[derive(Clone, Debug)]
pub struct ServerSpans<S>(S);

/// Wraps services in [`ServerSpans`].
#[derive(Clone, Copy, Debug)]
pub struct ServerSpansLayer;

impl<S> Layer<S> for ServerSpansLayer {
    type Service = ServerSpans<S>;

    fn layer(&self, service: S) -> ServerSpans<S> {
        ServerSpans(service)
    }
}

impl<S, B> Service<Request<B>> for ServerSpans<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response<Body>, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let Some(span) = span_of(request.uri(), request.headers()) else {
            return Box::pin(self.0.call(request));
        };
        let answering = span.in_scope(|| self.0.call(request));
        let answer = async {
            let response = answering.await?;
            let span = Span::current();
            let has_ended = response.headers().contains_key(GRPC_STATUS);
            if has_ended {
                ended(&span, response.headers());
            }
            Ok(response.map(|body| Body::new(SpanBody { body, span, end: grpc_end, has_ended })))
        };
        Box::pin(answer.instrument(span))
    }
}

/// The span of a call, a child of the context in its headers; `None` for a call that has none.
fn span_of(uri: &http::Uri, headers: &HeaderMap) -> Option<Span> {
    let (service, method) = uri.path().strip_prefix('/')?.split_once('/')?;
    let is_public = service == triptych_server::SERVICE_NAME;
    let is_named = method.len() <= MAX_METHOD && method.bytes().all(|b| b.is_ascii_alphanumeric());
    let is_ours = is_public || (service.starts_with("triptych.v1.") && trace_context::is_in(headers));
    if !is_ours || !is_named || method == "Watch" {
        return None;
    }
    let span = tracing::info_span!(
        target: CALLS,
        "rpc",
        otel.kind = "server",
        otel.name = uri.path().trim_start_matches('/'),
        rpc.system = "grpc",
        rpc.service = service,
        rpc.method = method,
        server.address = uri.host(),
        server.port = uri.port_u16().map(i64::from),
    );
    trace_context::adopt(&span, headers);
    Some(span)
}

/// Notes the status of a call.
fn ended(span: &Span, trailers: &HeaderMap) {
    let Some(status) = Status::from_header_map(trailers) else { return };
    set(span, attribute::GRPC_STATUS, status.code() as i64);
    if status.code() == Code::Ok {
        return;
    }
    let is_classed = trailers.contains_key(CLASS_KEY);
    let class = match status.code() {
        // A store's miss, which is no failure.
        Code::NotFound if !is_classed => return,
        // Of the transport or of a codec.
        Code::Cancelled if !is_classed => FailureClass::Cancelled,
        Code::InvalidArgument if !is_classed => FailureClass::InvalidArgument,
        _ => from_status(&status).class,
    };
    served_failure(span, class);
}

fn grpc_end(span: &Span, end: BodyEnd<'_>) {
    match end {
        BodyEnd::Whole(trailers) => trailers.into_iter().for_each(|trailers| ended(span, trailers)),
        BodyEnd::Dropped => {
            set(span, attribute::GRPC_STATUS, Code::Cancelled as i64);
            served_failure(span, FailureClass::Cancelled);
        }
    }
}

/// The end of a response's body.
#[derive(Clone, Copy, Debug)]
pub enum BodyEnd<'a> {
    /// All of it was taken, with these trailers.
    Whole(Option<&'a HeaderMap>),
    /// The client went away, or the connection ended.
    Dropped,
}

/// A body that keeps the span of its call open, and is polled inside it.
#[derive(Debug)]
pub struct SpanBody<B: HttpBody> {
    body: B,
    span: Span,
    end: fn(&Span, BodyEnd<'_>),
    has_ended: bool,
}

impl<B: HttpBody> SpanBody<B> {
    /// Calls `end` once.
    pub fn new(body: B, span: Span, end: fn(&Span, BodyEnd<'_>)) -> Self {
        Self { body, span, end, has_ended: false }
    }

    fn end(&mut self, end: BodyEnd<'_>) {
        if !std::mem::replace(&mut self.has_ended, true) {
            (self.end)(&self.span, end);
        }
    }
}

impl<B: HttpBody> Drop for SpanBody<B> {
    fn drop(&mut self) {
        // Who knows the length does not ask for more than that.
        let end = if self.body.is_end_stream() { BodyEnd::Whole(None) } else { BodyEnd::Dropped };
        self.end(end);
    }
}

impl<B: HttpBody + Unpin> HttpBody for SpanBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let span = self.span.clone();
        let _inside = span.enter();
        let frame = Pin::new(&mut self.body).poll_frame(context);
        match &frame {
            Poll::Ready(None) => self.end(BodyEnd::Whole(None)),
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(trailers) = frame.trailers_ref() {
                    self.end(BodyEnd::Whole(Some(trailers)));
                }
            }
            Poll::Ready(Some(Err(_))) => self.end(BodyEnd::Dropped),
            Poll::Pending => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::body::Bytes;
    use std::cell::RefCell;
    use std::future::poll_fn;

    #[test]
    fn calls_of_a_request_have_spans_and_those_of_processes_among_themselves_have_none() {
        let cases = [
            ("/triptych.v1.Triptych/Generate", false, true),
            ("/triptych.v1.Triptych/ListModels", false, true),
            ("/triptych.v1.EncoderWorker/Encode", true, true),
            ("/triptych.v1.EcObjects/Get", true, true),
            // Nobody's request: a readiness probe, a description.
            ("/triptych.v1.EcObjects/Head", false, false),
            ("/triptych.v1.EncoderWorker/Describe", false, false),
            ("/triptych.v1.EncoderWorker/Watch", true, false),
            ("/grpc.health.v1.Health/Check", true, false),
            ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", true, false),
            // A name that a client made up.
            ("/triptych.v1.Triptych/what-is-in-this-picture", false, false),
            ("/triptych.v1.Triptych/ThisNameIsLongerThanThoseOfOurMethods", false, false),
            ("/", true, false),
        ];
        for (path, is_traced, expect) in cases {
            let mut headers = HeaderMap::new();
            if is_traced {
                let context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
                headers.insert("traceparent", context.parse().unwrap());
            }
            let span = span_of(&path.parse().unwrap(), &headers);
            assert_eq!(span.is_some(), expect, "{path}");
        }
    }

    thread_local! {
        static ENDS: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
    }

    fn note(_: &Span, end: BodyEnd<'_>) {
        let end = match end {
            BodyEnd::Whole(None) => "whole",
            BodyEnd::Whole(Some(_)) => "trailers",
            BodyEnd::Dropped => "dropped",
        };
        ENDS.with_borrow_mut(|ends| ends.push(end));
    }

    /// A body of some frames.
    struct Frames(Vec<Frame<Bytes>>);

    impl HttpBody for Frames {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Ready(if self.0.is_empty() { None } else { Some(Ok(self.0.remove(0))) })
        }
    }

    async fn end_after(n_polls: usize, frames: Vec<Frame<Bytes>>) -> Vec<&'static str> {
        let mut body = SpanBody::new(Frames(frames), Span::none(), note);
        for _ in 0..n_polls {
            poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await.transpose().unwrap();
        }
        drop(body);
        ENDS.take()
    }

    #[tokio::test]
    async fn a_body_ends_once_whole_or_dropped() {
        let data = || Frame::data(Bytes::from_static(b"x"));
        let trailers = || Frame::trailers(HeaderMap::new());
        assert_eq!(end_after(1, vec![data(), data()]).await, ["dropped"]);
        assert_eq!(end_after(2, vec![data(), data()]).await, ["dropped"], "it might go on");
        assert_eq!(end_after(3, vec![data(), data()]).await, ["whole"]);
        assert_eq!(end_after(2, vec![data(), trailers()]).await, ["trailers"]);
        assert_eq!(end_after(3, vec![data(), trailers()]).await, ["trailers"]);
        // One of a known length is not asked for more than that.
        drop(SpanBody::new(Body::empty(), Span::none(), note));
        assert_eq!(ENDS.take(), ["whole"]);
    }
}
