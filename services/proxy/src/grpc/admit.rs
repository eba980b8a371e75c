//! Admission before a message is read: so clients that nobody knows and a full house cost no memory, and a message
//! that trickles in has an end.
//!
//! A message that cannot be decoded never reaches the face. Our codec calls that an internal error; it is the
//! client's, and is told so here.

use crate::admission::{Admission, Permit};
use crate::auth::{Auth, Caller};
use crate::observe::Observer;
use futures::StreamExt;
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

/// A call that was let in.
#[derive(Clone, Debug)]
pub struct Admitted {
    /// Who asks, as far as the head of the call says.
    pub caller: Caller,
    /// Its place.
    pub permit: Permit,
}

/// What a call has to pass.
#[derive(Clone)]
pub struct Door {
    /// The house's places.
    pub admission: Admission,
    /// Knows clients.
    pub auth: Auth,
    /// Counts who is refused.
    pub observer: Observer,
    /// For a message to arrive.
    pub patience: Duration,
}

impl Door {
    /// Lets a call in: who it is from goes along with it, and the bytes of its message are counted as they come.
    fn admit(&self, request: Request<Body>) -> Result<Request<Body>, Failure> {
        let caller = self.auth.identify(request.headers())?;
        let (mut parts, body) = request.into_parts();
        if parts.uri.path() != GENERATE {
            parts.extensions.insert(caller);
            return Ok(Request::from_parts(parts, body));
        }
        let permit = self.admission.enter()?;
        // Where nobody shows a key, the message says whose it is, and is counted when it is here.
        let (caller, body) = if self.auth.is_required() {
            let caller = caller.enter()?;
            (caller.clone(), counted(body, caller))
        } else {
            (caller, body)
        };
        parts.extensions.insert(Admitted { caller, permit });
        Ok(Request::from_parts(parts, body))
    }
}

/// A body that breaks off with the failure when its tenant holds too much.
fn counted(body: Body, caller: Caller) -> Body {
    let pieces = axum::body::Body::new(body).into_data_stream().map(move |piece| {
        let piece = piece.map_err(|e| Status::cancelled(e.to_string()))?;
        caller.hold_bytes(piece.len()).map_err(|failure| to_status(&failure))?;
        Ok::<_, Status>(piece)
    });
    Body::new(axum::body::Body::from_stream(pieces))
}

/// The method whose calls take a place.
const GENERATE: &str = "/triptych.v1.Triptych/Generate";

/// A service behind the admission.
#[derive(Clone)]
pub struct Admit<S> {
    service: S,
    door: Door,
}

impl<S> Admit<S> {
    /// Puts `service` behind a door.
    pub fn new(service: S, door: Door) -> Self {
        Self { service, door }
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

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let observer = self.door.observer.clone();
        let refuse = move |failure: &Failure| {
            observer.refused(failure);
            to_status(failure).into_http()
        };
        let request = match self.door.admit(request) {
            Ok(request) => request,
            Err(failure) => return Box::pin(std::future::ready(Ok(refuse(&failure)))),
        };
        let (answering, patience) = (self.service.call(request), self.door.patience);
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
