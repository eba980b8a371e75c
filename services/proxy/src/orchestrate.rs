//! A request's life in the proxy: choose a model, get its items encoded, hand hashes to a PD worker, stream back.
//!
//! Each request is one task. It ends when its answer is complete, when its time is up, when the process gives up
//! on running work, or as soon as nobody reads the answer any more; whatever it held is dropped with it. Nothing here
//! knows which API the request came from. What is done for it is decided by [`crate::request_machine::request`].

mod adapters;
mod answer;
mod chat_format;
mod decode;
mod fingerprint;
mod loaded_adapters;
mod restores;
mod rows;
mod sequence;
mod sent;
mod span;
mod supply;
mod tokens;
mod work;

pub use adapters::NewAdapter;
pub use answer::{Answer, Piece};
pub use loaded_adapters::LoadedAdapters;
pub use rows::{Rows, RowsOf};
pub use tokens::TokenOptions;
pub use work::Orchestrator;

use crate::admission::Permit;
use crate::fleet::catalog::Route;
use crate::request::Request;
use crate::request_log::{RequestRecord, tenant_hash};
use crate::request_machine::failures::out_of_time;
use crate::running::{Entry, Registered};
use crate::tool_calls::AnswerFormat;
use answer::READ_AHEAD;
use decode::Decoding;
use std::sync::Arc;
use supply::Supply;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout_at;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span};
use triptych_core::prompt::Prompt;
use triptych_core::{Failure, FailureClass, Modality};
use triptych_proto::v1;
use triptych_runtime::spans;
use work::Work;

impl Orchestrator {
    /// Checks a request, chooses its model, and sets to work.
    ///
    /// # Errors
    /// [`Failure`] if the request is refused; then nothing was begun.
    pub fn start(self: &Arc<Self>, mut request: Request, permit: Permit) -> Result<Answer, Failure> {
        let span = span::begin(&request);
        let admitted = span.in_scope(|| self.admit(&mut request, &permit));
        let route = admitted.inspect_err(|failure| {
            spans::failed(&span, failure.class);
            self.observer.refused(failure);
            self.request_log.refused(request.id, request.api, failure);
        });
        let (route, format) = route?;
        span::routed(&span, &request, &route.served.name);
        let ((sender, pieces), (ends, end)) = (mpsc::channel(READ_AHEAD), oneshot::channel());
        let answer =
            Answer { request_id: request.id, model: route.served.name.clone(), pieces, end: Some(end) };
        let (record, registered) = self.register(&request, &route);
        let work =
            Work { orchestrator: Arc::clone(self), request, route, format, sender, record, registered };
        let task = async move {
            // A reader that went away needs no end; one that is slow finds it behind what it has still to read.
            let _ = ends.send(work.run().await);
            drop(permit);
        };
        self.drain.tasks().spawn(task.instrument(span));
        Ok(answer)
    }

    /// Enters a request into the table of those that run.
    fn register(&self, request: &Request, route: &Route) -> (Arc<RequestRecord>, Registered) {
        let record = Arc::<RequestRecord>::default();
        let entry = Entry {
            id: request.id,
            api: request.api.as_str(),
            model: route.served.name.clone(),
            tenant: tenant_hash(&request.tenant_secret(&self.materials.tenant_salt)),
            n_items: request.items.len(),
            arrived: request.arrived,
            record: Arc::clone(&record),
            abort: CancellationToken::new(),
        };
        (record, self.table.register(entry))
    }

    /// Moves the text to the side of the model that reads it.
    fn lay_out(&self, request: &mut Request, route: &Route) -> Result<(), Failure> {
        let takes_prompt = |item: &crate::request::Item| route.served.prompted.contains(&item.modality);
        if request.items.iter().any(takes_prompt) {
            return request.move_text_to_the_item();
        }
        if !matches!(request.prompt, Prompt::Explicit { encoder: Some(_), .. }) {
            return match route.fingerprint(Modality::Text) {
                Some(_) => request.move_encoder_text_to_items(),
                None => Ok(()),
            };
        }
        let name = &route.served.name;
        let refuse = |message: String| Err(Failure::invalid(message).with_param("prompt.explicit.encoder"));
        if !request.items.is_empty() {
            return refuse(format!(
                "the encoder of model {name:?} reads either an encoder prompt or an item, the request has both"
            ));
        }
        match route.fingerprint(Modality::Text) {
            Some(_) => request.move_encoder_text_to_items(),
            None => refuse(format!("model {name:?} has no text encoder, so it takes no encoder prompt")),
        }
    }

    fn admit(&self, request: &mut Request, permit: &Permit) -> Result<(Route, AnswerFormat), Failure> {
        request.check(&self.materials.limits)?;
        if request.has_items_to_encode() {
            permit.with_items()?;
            request.caller.with_items()?;
        }
        self.bounds.check(request)?;
        request.priority = request.caller.priority(request.priority);
        request.start_sequence();
        let needs = request.modalities();
        let route = self.fleet.catalog().choose(request.model.as_ref(), &needs).map_err(|failure| {
            // Which item does not fit says more than that the model does not.
            let alien = |f: &Failure| f.class == FailureClass::InvalidArgument && request.items.len() == 1;
            if alien(&failure) { failure.with_param(&*request.items[0].param) } else { failure }
        })?;
        request.caller.check_model(&route.served.name)?;
        let format = chat_format::apply(request, &route.served)?;
        self.lay_out(request, &route)?;
        if request.src_lang.is_some() {
            let name = &route.served.name;
            let message =
                format!("no text of this request is for an encoder of model {name:?}: leave src_lang out");
            return Err(Failure::invalid(message).with_param("src_lang"));
        }
        let n_items = request.items.len();
        match route.served.max_items {
            Some(limit) if n_items > limit as usize => Err(Failure::invalid(format!(
                "the request has {n_items} items, the limit of model {:?} is {limit}",
                route.served.name
            ))
            .with_param("items")),
            _ => Ok((route, format)),
        }
    }
}

/// The end of a request that the admin API aborts.
fn aborted_by_operator() -> Failure {
    Failure::new(FailureClass::Cancelled, "an operator ended this request")
}

/// A request from its start to its end.
impl Work {
    async fn run(self) -> Result<v1::Summary, Failure> {
        let abort = self.orchestrator.drain.abort_token();
        let (deadline, aborted) = (self.request.deadline, self.registered.entry.abort.clone());
        let outcome = tokio::select! {
            done = timeout_at(deadline, self.stages()) => done.unwrap_or_else(|_| Err(self.out_of_time())),
            () = self.sender.closed() => Err(Failure::new(FailureClass::Cancelled, "the caller went away")),
            () = aborted.cancelled() => Err(aborted_by_operator()),
            () = abort.cancelled() => {
                self.orchestrator.drain.count_cut();
                Err(Failure::unavailable("the server is stopping"))
            }
        };
        let observer = &self.orchestrator.observer;
        observer.ended(&self.route.served.name, outcome.as_ref().map(|_| ()), self.request.arrived);
        let outcome = outcome.map_err(|failure| {
            report(&failure);
            self.request.localise(failure)
        });
        span::end(&Span::current(), &self.record, outcome.as_ref());
        self.log(outcome.as_ref());
        outcome
    }

    async fn stages(&self) -> Result<v1::Summary, Failure> {
        let jobs = self.orchestrator.materials.jobs(&self.request, &self.route).await?;
        if let (Some(task), [job]) = (self.request.in_sequence(), jobs.as_slice()) {
            return sequence::run(self, task.clone(), job.clone()).await;
        }
        let supply = Supply::begin(self, jobs);
        let (summary, _) = Decoding::new(self, supply).run().await?;
        Ok(summary)
    }

    fn out_of_time(&self) -> Failure {
        out_of_time(self.request.deadline.duration_since(self.request.arrived))
    }
}

/// Logs failures that are not the client's. No message: it may quote the request.
fn report(failure: &Failure) {
    let (class, detail) = (failure.class.as_str(), failure.detail.as_deref());
    match failure.class {
        FailureClass::Internal | FailureClass::Mismatch | FailureClass::Quarantined => {
            tracing::error!(class, detail, "request failed")
        }
        FailureClass::Unavailable | FailureClass::DeadlineExceeded | FailureClass::Unprocessable => {
            tracing::warn!(class, detail, message = %failure.message, "request failed");
        }
        _ => tracing::info!(class, detail, "request ended"),
    }
}
