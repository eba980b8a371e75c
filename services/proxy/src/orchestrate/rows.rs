//! Rows of a request's only item, for answers without a decoder: the item is encoded, shared and cached as any other.

use super::aborted_by_operator;
use super::supply::Supply;
use super::work::{Orchestrator, Work};
use crate::admission::Permit;
use crate::fleet::catalog::Route;
use crate::request::{Item, Request};
use crate::request_machine::event::RequestEvent;
use crate::request_machine::failures::out_of_time;
use crate::request_machine::output::Announced;
use crate::tool_calls::AnswerFormat;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::time::timeout_at;
use triptych_core::prompt::{MessagePart, Prompt};
use triptych_core::{EncodedItem, EncoderOutput, Failure, ItemIdx, ModelName};
use triptych_proto::v1;

/// Times that an output is encoded which then cannot be read.
const MAX_ENCODES: usize = 2;

/// Encoder outputs that an answer may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowsOf {
    /// That of the only tower; a model with several is refused.
    OneTower,
    /// Those of each tower.
    EachTower,
}

/// Encoder outputs of an item, and the model whose encoder made them.
#[derive(Clone, Debug)]
pub struct Rows {
    /// One for each tower, at least one.
    outputs: Vec<EncoderOutput>,
    /// The model.
    pub model: ModelName,
}

impl Rows {
    /// Metadata of the outputs, in the order of the towers.
    pub fn items(&self) -> Vec<&EncodedItem> {
        self.outputs.iter().map(EncoderOutput::item).collect()
    }

    /// The only output.
    ///
    /// # Errors
    /// Internal, if there are others.
    pub fn output(&self) -> Result<&EncoderOutput, Failure> {
        match &self.outputs[..] {
            [output] => Ok(output),
            other => Err(Failure::internal(format!("{} outputs in the place of one", other.len()))),
        }
    }
}

impl Orchestrator {
    /// Rows of the request's item, or of its text for a model whose encoder reads text. Ends when it is dropped.
    ///
    /// # Errors
    /// [`Failure`] if the request is refused, has no item that an encoder of its model reads or more than one; of the
    /// encode; if the time is up.
    pub async fn rows(
        self: &Arc<Self>,
        mut request: Request,
        of: RowsOf,
        permit: &Permit,
    ) -> Result<Rows, Failure> {
        let refused = |failure: &Failure, request: &Request| {
            self.observer.refused(failure);
            self.request_log.refused(request.id, request.api, failure);
        };
        let admitted = self.admit(&mut request, permit).and_then(|(route, _)| {
            check_item(&request, &route.served.name)?;
            check_towers(&request, &route, of)?;
            Ok(route)
        });
        let route = admitted.inspect_err(|failure| refused(failure, &request))?;
        let (sender, _) = mpsc::channel(1);
        let (record, registered) = self.register(&request, &route);
        let (orchestrator, format) = (Arc::clone(self), AnswerFormat::default());
        let work = Work { orchestrator, request, route, format, sender, record, registered };
        let (arrived, deadline) = (work.request.arrived, work.request.deadline);
        let aborted = work.registered.entry.abort.clone();
        let abort = self.drain.abort_token();
        let encoding = self.drain.tasks().track_future(encoded(&work));
        let outcome = tokio::select! {
            done = timeout_at(deadline, encoding) => {
                done.unwrap_or_else(|_| Err(out_of_time(deadline.duration_since(arrived))))
            }
            () = aborted.cancelled() => Err(aborted_by_operator()),
            () = abort.cancelled() => {
                self.drain.count_cut();
                Err(Failure::unavailable("the server is stopping"))
            }
        };
        self.observer.ended(&work.route.served.name, outcome.as_ref().map(|_| ()), arrived);
        let outcome = outcome.map_err(|failure| work.request.localise(failure));
        let summary = v1::Summary::default();
        work.log(outcome.as_ref().map(|_| &summary));
        Ok(Rows { outputs: outcome?, model: work.route.served.name.clone() })
    }
}

/// Refuses a request without an item, or with one beside text that its encoder does not read.
fn check_item(request: &Request, model: &ModelName) -> Result<(), Failure> {
    let is_text = |part: &MessagePart| !matches!(part, MessagePart::Item(_));
    if let Prompt::Chat(chat) = &request.prompt
        && !request.items.is_empty()
        && chat.messages.iter().flat_map(|message| &message.parts).any(is_text)
    {
        let message =
            format!("the encoder of model {model:?} reads no text with an item: leave the text out");
        return Err(Failure::invalid(message).with_param("messages"));
    }
    match request.items.len() {
        1 => Ok(()),
        0 => {
            let message =
                format!("model {model:?} has no encoder of text: send an item that it reads as messages");
            Err(Failure::invalid(message).with_param("prompt"))
        }
        n => {
            let message = format!("the request has {n} items, allowed is one: its rows are the embedding");
            Err(Failure::invalid(message).with_param("messages"))
        }
    }
}

/// Refuses a model whose towers have rows of their own, where an answer is the rows of one.
fn check_towers(request: &Request, route: &Route, of: RowsOf) -> Result<(), Failure> {
    let has_several = |item: &Item| route.towers(item.modality).count() > 1;
    if of == RowsOf::EachTower || !request.items.iter().any(has_several) {
        return Ok(());
    }
    let names: Vec<_> = route.served.tower_names.values().map(String::as_str).collect();
    let text = format!(
        "model {:?} has the towers {}, each with rows of its own: it has no embeddings",
        route.served.name,
        names.join(" and ")
    );
    Err(Failure::invalid(text).with_param("model"))
}

/// The outputs of each tower.
async fn encoded(work: &Work) -> Result<Vec<EncoderOutput>, Failure> {
    let jobs = work.orchestrator.materials.jobs(&work.request, &work.route).await?;
    let mut supply = Supply::begin(work, jobs);
    for attempt in 1..=MAX_ENCODES {
        while supply.is_pending() {
            if let RequestEvent::ItemFailed { item, failure } = supply.next().await {
                return Err(supply.at_item(failure, Some(item)));
            }
        }
        if attempt == 1 {
            supply.supplied();
        }
        let announced: Vec<Announced> = supply.announced();
        let (mut outputs, mut lost) = (Vec::new(), Vec::new());
        for (announced, idx) in announced.iter().zip(0..) {
            match work.orchestrator.rows.load(announced).await? {
                Some(output) => outputs.push(output),
                None => lost.push(ItemIdx(idx)),
            }
        }
        if lost.is_empty() && !outputs.is_empty() {
            return Ok(outputs);
        }
        if attempt < MAX_ENCODES {
            lost.into_iter().for_each(|idx| supply.renew(idx));
        }
    }
    Err(Failure::unavailable("an encoder output was made and is gone"))
}
