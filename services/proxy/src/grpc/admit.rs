//! Admission before a message is read: so a full house costs no memory, and a message that trickles in has an end.
//!
//! A message that cannot be decoded never reaches the face. Our codec calls that an internal error; it is the
//! client's, and is told so here.

use crate::admission::Gate;
use crate::observe::Observer;
use futures::future::BoxFuture;
use http::{HeaderMap, Request, Response};
use std::convert::Infallible;
use std::task::{Context, Poll};
use std::time::Duration;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::{Code, Status};
use tower::Service;
use triptych_core::{Failure, FailureClass};
use triptych_runtime::status::{CLASS_KEY, to_status};

/// The method whose calls take a place.
const GENERATE: &str = "/triptych.v1.Triptych/Generate";

/// A service behind the gate.
#[derive(Clone)]
pub struct Admit<S> {
    service: S,
    gate: Gate,
    observer: Observer,
    /// For a message to arrive.
    patience: Duration,
}

impl<S> Admit<S> {
    /// Puts `service` behind `gate`.
    pub fn new(service: S, gate: Gate, observer: Observer, patience: Duration) -> Self {
        Self { service, gate, observer, patience }
    }
}

impl<S: NamedService> NamedService for Admit<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Admit<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let observer = self.observer.clone();
        let refuse = move |failure: &Failure| {
            observer.refused(failure);
            to_status(failure).into_http()
        };
        if request.uri().path() == GENERATE {
            match self.gate.enter() {
                Ok(permit) => drop(request.extensions_mut().insert(permit)),
                Err(failure) => return Box::pin(std::future::ready(Ok(refuse(&failure)))),
            }
        }
        let (answering, patience) = (self.service.call(request), self.patience);
        Box::pin(async move {
            let Ok(answer) = tokio::time::timeout(patience, answering).await else {
                let message = format!("the message did not arrive within {} s", patience.as_secs_f32());
                return Ok(refuse(&Failure::new(FailureClass::DeadlineExceeded, message)));
            };
            answer.map(|response| match undecodable(response.headers()) {
                Some(failure) => refuse(&failure),
                None => response,
            })
        })
    }
}

/// The failure behind a status that the codec gave. Every status of our own carries its class.
fn undecodable(headers: &HeaderMap) -> Option<Failure> {
    if headers.contains_key(CLASS_KEY) {
        return None;
    }
    let status = Status::from_header_map(headers)?;
    match status.code() {
        Code::Internal => Some(Failure::invalid(format!("the message cannot be read: {}", status.message()))),
        Code::OutOfRange => Some(Failure::new(FailureClass::TooLarge, status.message())),
        _ => None,
    }
}
