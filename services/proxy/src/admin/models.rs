//! Models: who serves which, and the load or unload of one on workers that are named, or on all.

use super::api::{AdminApi, AdminError, body, not_found};
use super::changes::{ChangeOrder, ChangeOutcome, ModelChanges};
use crate::fleet::Fleet;
use crate::wire::{CallFailure, outgoing};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures::future::join_all;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::transport::Channel;
use triptych_core::{Failure, WorkerId};
use triptych_proto::v1;
use triptych_proto::v1::worker_admin_client::WorkerAdminClient;
use triptych_runtime::discovery::Role;
use triptych_runtime::status::http_status_of;

/// Between two looks at what a worker serves while its models change.
const LOOK: Duration = Duration::from_millis(200);
/// Time for requests to end, and for all of an order, where nothing is said.
const DRAIN_S: u64 = 60;
const TIMEOUT_S: u64 = 600;
/// Longest time of an order.
const MAX_TIMEOUT_S: u64 = 7200;

/// A model to load.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Load {
    model: String,
    path: String,
    #[serde(default)]
    replaces: String,
    #[serde(default)]
    workers: Vec<String>,
    drain_s: Option<u64>,
    timeout_s: Option<u64>,
}

/// A model to unload.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Unload {
    model: String,
    #[serde(default)]
    workers: Vec<String>,
    drain_s: Option<u64>,
    timeout_s: Option<u64>,
}

/// Workers of an order, and its times.
#[derive(Clone, Debug)]
struct On {
    /// Names of workers; empty: all.
    workers: Vec<String>,
    drain_s: Option<u64>,
    timeout_s: Option<u64>,
}

/// An order to one worker.
#[derive(Clone, Debug)]
enum Order {
    Load(v1::LoadModelRequest),
    Unload(v1::UnloadModelRequest),
}

impl Order {
    fn shown(&self, worker: &WorkerId) -> ChangeOrder {
        let (action, model) = match self {
            Self::Load(order) => ("load", &order.name),
            Self::Unload(order) => ("unload", &order.name),
        };
        ChangeOrder { action, model: model.clone(), worker: worker.to_string() }
    }

    async fn send(self, channel: Channel, deadline: Instant) -> Result<bool, Failure> {
        let mut client = WorkerAdminClient::new(channel);
        let answer = async {
            match self {
                Self::Load(order) => client
                    .load_model(outgoing(order, deadline))
                    .await
                    .map(|answer| answer.into_inner().serves),
                Self::Unload(order) => client.unload_model(outgoing(order, deadline)).await.map(|_| true),
            }
        };
        match timeout_at(deadline, answer).await {
            Ok(answer) => answer.map_err(|status| CallFailure::from(status).failure),
            Err(_) => Err(Failure::unavailable("the worker has not answered; it goes on with the order")),
        }
    }
}

pub(super) async fn list(State(api): State<AdminApi>) -> Json<Value> {
    let mut models: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for worker in api.orchestrator.fleet.statuses() {
        for model in worker.models {
            models.entry(model).or_default().push(worker.id.clone());
        }
    }
    let models: Vec<Value> =
        models.into_iter().map(|(name, workers)| json!({"name": name, "workers": workers})).collect();
    Json(json!({"models": models, "changes": api.changes.shown()}))
}

pub(super) async fn load(State(api): State<AdminApi>, bytes: Bytes) -> Result<Response, AdminError> {
    let Load { model, path, replaces, workers, drain_s, timeout_s } = body(&bytes)?;
    let on = On { workers, drain_s, timeout_s };
    let order = |drain_ms| Order::Load(v1::LoadModelRequest { name: model, path, replaces, drain_ms });
    run(&api, on, order, |_| true).await
}

pub(super) async fn unload(State(api): State<AdminApi>, bytes: Bytes) -> Result<Response, AdminError> {
    let Unload { model, workers, drain_s, timeout_s } = body(&bytes)?;
    let on = On { workers, drain_s, timeout_s };
    let known = api.orchestrator.fleet.statuses().into_iter();
    let serving: Vec<String> =
        known.filter(|worker| worker.models.contains(&model)).map(|worker| worker.id).collect();
    if serving.is_empty() {
        return Err(not_found(format!("no worker serves {model:?}")));
    }
    let order = |drain_ms| Order::Unload(v1::UnloadModelRequest { name: model, drain_ms });
    run(&api, on, order, |id| serving.iter().any(|serves| id == serves)).await
}

/// Sends an order to the workers that it names, or to all that it is for, and waits for them. A caller that goes away ends nothing.
async fn run(
    api: &AdminApi,
    on: On,
    order: impl FnOnce(u64) -> Order,
    is_for: impl Fn(&str) -> bool,
) -> Result<Response, AdminError> {
    let drain_s = on.drain_s.unwrap_or(DRAIN_S);
    let timeout_s = on.timeout_s.unwrap_or(TIMEOUT_S.max(drain_s));
    if timeout_s > MAX_TIMEOUT_S || drain_s > timeout_s {
        let text = format!(
            "drain_s is {drain_s} and timeout_s {timeout_s}: allowed are {MAX_TIMEOUT_S} at most, and no longer drain than timeout"
        );
        return Err(Failure::invalid(text).into());
    }
    let fleet = &api.orchestrator.fleet;
    let all = fleet.all_up();
    let names = |id: &WorkerId| on.workers.iter().any(|name| *name == id.to_string());
    if let Some(unknown) = on.workers.iter().find(|name| !all.iter().any(|(id, ..)| id.to_string() == **name))
    {
        let known: Vec<_> = all.iter().map(|(id, ..)| id.to_string()).collect();
        return Err(not_found(format!(
            "there is no worker {unknown:?} that is up; there are {}",
            known.join(", ")
        )));
    }
    let chosen = all.into_iter().filter(|(id, ..)| match on.workers.is_empty() {
        true => is_for(&id.to_string()),
        false => names(id),
    });
    let order = order(drain_s.saturating_mul(1000));
    let deadline = Instant::now() + Duration::from_secs(timeout_s);
    let work = OnWorkers { fleet: Arc::clone(fleet), changes: api.changes.clone(), order, deadline };
    let ended = api.orchestrator.drain.tasks().spawn(work.run(chosen.collect()));
    Ok(answer(ended.await.map_err(Failure::internal)?))
}

/// An order on its way to workers.
struct OnWorkers {
    fleet: Arc<Fleet>,
    changes: ModelChanges,
    order: Order,
    deadline: Instant,
}

/// Result of an order on a worker.
type Ended = (WorkerId, ChangeOutcome, Option<Failure>);

impl OnWorkers {
    /// Encoders load before PD workers and give up after them, so that no request is sent an item that nobody encodes.
    async fn run(self, workers: Vec<(WorkerId, Role, Channel)>) -> Vec<Ended> {
        let (encoders, pds): (Vec<_>, Vec<_>) =
            workers.into_iter().partition(|(_, role, _)| *role == Role::Encoder);
        let groups = match self.order {
            Order::Load(_) => [encoders, pds],
            Order::Unload(_) => [pds, encoders],
        };
        let mut ended = Vec::new();
        for group in groups {
            ended.extend(join_all(group.into_iter().map(|(id, _, channel)| self.one(id, channel))).await);
        }
        ended
    }

    async fn one(&self, id: WorkerId, channel: Channel) -> Ended {
        let change = self.changes.begin(self.order.shown(&id));
        tracing::info!(worker = %id, order = ?self.order, "an operator changes the models of a worker");
        let sent = self.order.clone().send(channel, self.deadline);
        let look = async {
            // What it drains is to be known before it has ended.
            loop {
                sleep(LOOK).await;
                self.fleet.ask_again(&id);
            }
        };
        let result = tokio::select! { result = sent => result, () = look => unreachable!("it has no end") };
        self.fleet.ask_again(&id);
        if let Err(failure) = &result {
            tracing::warn!(worker = %id, error = %failure, "the models of a worker were not changed as ordered");
        }
        (id, self.changes.end(change, &result), result.err())
    }
}

fn answer(ended: Vec<Ended>) -> Response {
    let failure = ended.iter().find_map(|(_, _, failure)| failure.clone());
    let workers: Vec<Value> = ended
        .iter()
        .map(|(id, outcome, _)| {
            let mut shown = json!(outcome);
            shown["worker"] = json!(id.to_string());
            shown
        })
        .collect();
    match failure {
        None => Json(json!({"workers": workers})).into_response(),
        Some(failure) => {
            let status: StatusCode = http_status_of(&failure);
            let error = json!({"message": failure.message, "code": failure.class.as_str()});
            (status, Json(json!({"error": error, "workers": workers}))).into_response()
        }
    }
}
