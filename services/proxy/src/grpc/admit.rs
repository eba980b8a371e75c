//! Admission before a message is read: unknown clients and overload cost no memory, and a slow message times out.
//!
//! A message that cannot be decoded never reaches the service. Tonic's codec calls that an internal error; it is the
//! client's, and is reported as InvalidArgument here.

use crate::admission::{Admission, Permit};
use crate::auth::{Auth, Caller};
use crate::observe::Observer;
use crate::request::Api;
use crate::request_log::RequestLog;
use futures::StreamExt;
use futures::future::BoxFuture;
use http::{Extensions, HeaderMap, Request, Response};
use std::convert::Infallible;
use std::task::{Context, Poll};
use std::time::Duration;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::{Code, Status};
use tower::Service;
use triptych_core::{Failure, FailureClass, RequestId};
use triptych_runtime::status::{CLASS_KEY, to_status};

/// An admitted call.
#[derive(Clone, Debug)]
pub struct Admitted {
    /// The caller, as far as the headers identify it.
    pub caller: Caller,
    /// Its permit.
    pub permit: Permit,
}

/// The checks of a call before its message is read.
#[derive(Clone)]
pub struct AdmissionCheck {
    /// Bound on requests in flight.
    pub admission: Admission,
    /// Identifies clients.
    pub auth: Auth,
    /// Counts refusals.
    pub observer: Observer,
    /// Logs refusals.
    pub request_log: RequestLog,
    /// Longest time that a message may take to arrive.
    pub message_timeout: Duration,
}

impl AdmissionCheck {
    /// Admits a call: attaches its caller, and counts the bytes of its message as they arrive.
    fn admit(&self, request: Request<Body>) -> Result<Request<Body>, Failure> {
        let caller = self.auth.identify(request.headers())?;
        let (mut parts, body) = request.into_parts();
        if !ADMITTED.contains(&parts.uri.path()) {
            parts.extensions.insert(caller);
            return Ok(Request::from_parts(parts, body));
        }
        let permit = self.admission.enter()?;
        // Without authentication the message names the tenant, so it is counted once it has arrived.
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

/// A body that fails when its tenant holds too many bytes.
fn counted(body: Body, caller: Caller) -> Body {
    let pieces = axum::body::Body::new(body).into_data_stream().map(move |piece| {
        let piece = piece.map_err(|e| Status::cancelled(e.to_string()))?;
        caller.hold_bytes(piece.len()).map_err(|failure| to_status(&failure))?;
        Ok::<_, Status>(piece)
    });
    Body::new(axum::body::Body::from_stream(pieces))
}

/// The methods whose calls take a permit.
const ADMITTED: [&str; 3] =
    ["/triptych.v1.Triptych/Generate", "/triptych.v1.Triptych/Tokenize", "/triptych.v1.Triptych/Detokenize"];

/// A service behind an [`AdmissionCheck`].
#[derive(Clone)]
pub struct Admit<S> {
    service: S,
    check: AdmissionCheck,
}

impl<S> Admit<S> {
    /// Puts `service` behind `check`.
    pub fn new(service: S, check: AdmissionCheck) -> Self {
        Self { service, check }
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
        let (observer, request_log) = (self.check.observer.clone(), self.check.request_log);
        let id = RequestId::from_bits(rand::random());
        request.extensions_mut().insert(id);
        let refuse = move |failure: &Failure| {
            observer.refused(failure);
            request_log.refused(id, Api::Grpc, failure);
            to_status(failure).into_http()
        };
        let request = match self.check.admit(request) {
            Ok(request) => request,
            Err(failure) => return Box::pin(std::future::ready(Ok(refuse(&failure)))),
        };
        let answering = self.service.call(request);
        let message_timeout = self.check.message_timeout;
        Box::pin(async move {
            let Ok(answer) = tokio::time::timeout(message_timeout, answering).await else {
                let message =
                    format!("the message did not arrive within {} s", message_timeout.as_secs_f32());
                return Ok(refuse(&Failure::new(FailureClass::DeadlineExceeded, message)));
            };
            answer.map(|response| match undecodable(response.headers()) {
                Some(failure) => refuse(&failure),
                None => response,
            })
        })
    }
}

/// The id that a call was given on arrival.
pub fn request_id(extensions: &Extensions) -> RequestId {
    extensions.get::<RequestId>().copied().unwrap_or_else(|| RequestId::from_bits(rand::random()))
}

/// The failure behind a status of the codec. Statuses of the service carry a class.
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
