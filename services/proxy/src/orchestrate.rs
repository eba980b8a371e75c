//! A request's life in the proxy: choose a model, get its items encoded, hand hashes to a PD worker, stream back.
//!
//! Each request is one task. It ends when its answer is complete, when its time is up, when the process gives up
//! on running work, or as soon as nobody reads the answer any more; whatever it held is dropped with it. Nothing here
//! knows which face the request came from.

mod decode;
mod said;
mod sequence;
mod supply;

use crate::admission::Permit;
use crate::budget::RetryBudget;
use crate::encode::Encodes;
use crate::fleet::Fleet;
use crate::fleet::catalog::{Route, Want};
use crate::items::Materials;
use crate::observe::Observer;
use crate::request::{Request, param_of_item};
use decode::Decoding;
use std::sync::Arc;
use std::time::Duration;
use supply::Supply;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout_at};
use tracing::Instrument;
use triptych_core::prompt::Prompt;
use triptych_core::{Failure, FailureClass, ItemIdx, Modality, ModelName, RequestId};
use triptych_proto::v1;
use triptych_runtime::Drain;

/// Pieces of an answer that may wait for a slow reader before the PD worker's stream is left to wait too.
const READ_AHEAD: usize = 64;

/// A piece of an answer.
#[derive(Clone, Debug)]
pub enum Piece {
    /// New text.
    Delta(v1::Delta),
    /// The end.
    Summary(v1::Summary),
}

/// An answer as it comes. Dropping it ends the work on it.
#[derive(Debug)]
pub struct Answer {
    /// The request.
    pub request_id: RequestId,
    /// The model that answers.
    pub model: ModelName,
    pieces: mpsc::Receiver<v1::Delta>,
    /// How it ended, kept for a reader that is behind.
    end: Option<oneshot::Receiver<Result<v1::Summary, Failure>>>,
}

impl Answer {
    /// The next piece. After a summary or a failure there is none; before, there always is one.
    pub async fn next(&mut self) -> Option<Result<Piece, Failure>> {
        let end = self.end.as_mut()?;
        if let Some(delta) = self.pieces.recv().await {
            return Some(Ok(Piece::Delta(delta)));
        }
        let lost = |_| Err(Failure::internal("the task of a request ended without a word"));
        let end = end.await.unwrap_or_else(lost);
        self.end = None;
        Some(end.map(Piece::Summary))
    }
}

/// What requests are worked on with.
pub struct Orchestrator {
    /// The workers.
    pub fleet: Arc<Fleet>,
    /// Encoder jobs in flight.
    pub encodes: Encodes,
    /// Pays for whatever is sent twice.
    pub budget: Arc<RetryBudget>,
    /// Makes jobs of items.
    pub materials: Materials,
    /// Metrics.
    pub observer: Observer,
    /// The process's end.
    pub drain: Drain,
}

impl Orchestrator {
    /// Checks a request, chooses its model, and sets to work.
    ///
    /// # Errors
    /// [`Failure`] if the request is refused; then nothing was begun.
    pub fn start(self: &Arc<Self>, mut request: Request, permit: Permit) -> Result<Answer, Failure> {
        let route = self.admit(&mut request).inspect_err(|failure| self.observer.refused(failure))?;
        let ((sender, pieces), (ends, end)) = (mpsc::channel(READ_AHEAD), oneshot::channel());
        let answer =
            Answer { request_id: request.id, model: route.served.name.clone(), pieces, end: Some(end) };
        let work = Work { orchestrator: Arc::clone(self), request, route, sender };
        let task = async move {
            // A reader that went away needs no end; one that is slow finds it behind what it has still to read.
            let _ = ends.send(work.run().await);
            drop(permit);
        };
        self.drain.tasks().spawn(task.in_current_span());
        Ok(answer)
    }

    /// Gives each side of the model what it reads.
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

    fn admit(&self, request: &mut Request) -> Result<Route, Failure> {
        request.check(&self.materials.limits)?;
        request.start_sequence();
        let needs = request.modalities();
        let route = self.fleet.catalog().choose(request.model.as_ref(), &needs).map_err(|failure| {
            // Which item does not fit says more than that the model does not.
            let alien = |f: &Failure| f.class == FailureClass::InvalidArgument && request.items.len() == 1;
            if alien(&failure) { failure.with_param(&*request.items[0].param) } else { failure }
        })?;
        request.caller.check_model(&route.served.name)?;
        self.lay_out(request, &route)?;
        let n_items = request.items.len();
        match route.served.max_items {
            Some(limit) if n_items > limit as usize => Err(Failure::invalid(format!(
                "the request has {n_items} items, the limit of model {:?} is {limit}",
                route.served.name
            ))
            .with_param("items")),
            _ => Ok(route),
        }
    }
}

/// One request on its way.
struct Work {
    orchestrator: Arc<Orchestrator>,
    request: Request,
    route: Route,
    sender: mpsc::Sender<v1::Delta>,
}

impl Work {
    async fn run(self) -> Result<v1::Summary, Failure> {
        let abort = self.orchestrator.drain.abort_token();
        let deadline = self.request.deadline;
        let outcome = tokio::select! {
            done = timeout_at(deadline, self.stages()) => done.unwrap_or_else(|_| Err(self.out_of_time())),
            () = self.sender.closed() => Err(Failure::new(FailureClass::Cancelled, "the caller went away")),
            () = abort.cancelled() => Err(Failure::unavailable("the server is stopping")),
        };
        let observer = &self.orchestrator.observer;
        observer.ended(&self.route.served.name, outcome.as_ref().map(|_| ()), self.request.arrived);
        outcome.map_err(|failure| {
            report(&failure);
            self.request.localise(failure)
        })
    }

    /// Who can answer it.
    fn decoder(&self) -> Want {
        let served = &self.route.served;
        Want::Pd { model: served.name.clone(), edition: served.edition.clone() }
    }

    async fn stages(&self) -> Result<v1::Summary, Failure> {
        let jobs = self.orchestrator.materials.jobs(&self.request, &self.route).await?;
        if let (Some(task), [job]) = (self.request.in_sequence(), jobs.as_slice()) {
            return sequence::run(self, task.clone(), job.clone()).await;
        }
        let supply = Supply::begin(self, jobs).await?;
        let (summary, _) = Decoding::new(self, supply).run().await?;
        Ok(summary)
    }

    fn out_of_time(&self) -> Failure {
        let limit = self.request.deadline.duration_since(self.request.arrived);
        let message = format!("the request was not answered within {} s", limit.as_secs_f32());
        Failure::new(FailureClass::DeadlineExceeded, message)
    }

    /// Sends a piece; waits for a slow reader. An error if nobody reads any more.
    async fn send(&self, delta: v1::Delta) -> Result<(), Failure> {
        let gone = |_| Failure::new(FailureClass::Cancelled, "the caller went away");
        self.sender.send(delta).await.map_err(gone)
    }

    fn elapsed(&self) -> Duration {
        Instant::now().saturating_duration_since(self.request.arrived)
    }
}

/// An encoder that refuses an item names the item, unless it names a setting.
fn at_item(failure: Failure, i: usize) -> Failure {
    match failure.param {
        None => failure.with_param(param_of_item(ItemIdx(i as u32))),
        Some(_) => failure,
    }
}

/// Tells the operator of failures that are not the client's. No message: it may quote the request.
fn report(failure: &Failure) {
    let (class, detail) = (failure.class.as_str(), failure.detail.as_deref());
    match failure.class {
        FailureClass::Internal | FailureClass::Mismatch => tracing::error!(class, detail, "request failed"),
        FailureClass::Unavailable | FailureClass::DeadlineExceeded => {
            tracing::warn!(class, detail, message = %failure.message, "request failed");
        }
        _ => tracing::info!(class, detail, "request ended"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer() -> (mpsc::Sender<v1::Delta>, oneshot::Sender<Result<v1::Summary, Failure>>, Answer) {
        let ((sender, pieces), (ends, end)) = (mpsc::channel(2), oneshot::channel());
        let request_id = RequestId::from_bits(1);
        (sender, ends, Answer { request_id, model: ModelName::new("m"), pieces, end: Some(end) })
    }

    #[tokio::test]
    async fn a_reader_that_is_behind_finds_the_end_behind_what_it_has_still_to_read() {
        for ends_well in [true, false] {
            let (sender, ends, mut answer) = answer();
            sender.try_send(v1::Delta::default()).unwrap();
            sender.try_send(v1::Delta::default()).unwrap();
            let end = if ends_well { Ok(v1::Summary::default()) } else { Err(Failure::unavailable("gone")) };
            ends.send(end).unwrap();
            drop(sender);
            for _ in 0..2 {
                assert!(matches!(answer.next().await, Some(Ok(Piece::Delta(_)))));
            }
            match answer.next().await {
                Some(Ok(Piece::Summary(_))) => assert!(ends_well),
                Some(Err(failure)) => assert!(!ends_well && failure.message == "gone"),
                other => panic!("{other:?}"),
            }
            assert!(answer.next().await.is_none(), "it ends once");
        }
    }

    #[tokio::test]
    async fn a_task_that_is_gone_ends_its_answer_with_a_failure() {
        let (sender, ends, mut answer) = answer();
        drop((sender, ends));
        let failure = answer.next().await.unwrap().unwrap_err();
        assert_eq!(failure.class, FailureClass::Internal);
        assert!(answer.next().await.is_none());
    }
}
