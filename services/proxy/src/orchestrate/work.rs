//! A request that is worked on, and what it is worked on with.

use super::loaded_adapters::LoadedAdapters;
use crate::accounting::{Accounting, EndedUse};
use crate::bounds::RequestBounds;
use crate::budget::RetryBudget;
use crate::encode::Encodes;
use crate::fleet::Fleet;
use crate::fleet::catalog::{Route, Want};
use crate::items::Materials;
use crate::observe::Observer;
use crate::request::Request;
use crate::request_log::{EndedRequest, RequestLog, RequestRecord};
use crate::rows::RowLoader;
use crate::running::{Registered, RequestTable};
use crate::tool_calls::AnswerFormat;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;
use triptych_core::{Failure, FailureClass};
use triptych_proto::v1;
use triptych_runtime::Drain;

/// The parts that requests are worked on with.
pub struct Orchestrator {
    /// The workers.
    pub fleet: Arc<Fleet>,
    /// In-flight encodes.
    pub encodes: Encodes,
    /// Pays for whatever is sent twice.
    pub budget: Arc<RetryBudget>,
    /// Makes encoder jobs of items.
    pub materials: Materials,
    /// Reads the encoder outputs that are answers.
    pub rows: RowLoader,
    /// Metrics.
    pub observer: Observer,
    /// The process's shutdown.
    pub drain: Drain,
    /// The requests that are logged.
    pub request_log: RequestLog,
    /// Bounds on what a request may ask for.
    pub bounds: RequestBounds,
    /// Requests that run.
    pub table: RequestTable,
    /// Usage of tenants.
    pub accounting: Accounting,
    /// Adapters that requests loaded.
    pub adapters: LoadedAdapters,
}

/// A request that is worked on.
pub(super) struct Work {
    pub(super) orchestrator: Arc<Orchestrator>,
    pub(super) request: Request,
    pub(super) route: Route,
    /// Parts that are read from the answer.
    pub(super) format: AnswerFormat,
    pub(super) sender: mpsc::Sender<v1::Delta>,
    /// Facts for the request log.
    pub(super) record: Arc<RequestRecord>,
    /// Its place in the table of requests.
    pub(super) registered: Registered,
}

impl Work {
    /// The PD workers that can answer it.
    pub(super) fn decoder(&self) -> Want {
        self.route.served.decoder()
    }

    /// Sends a piece; waits for a slow reader. An error if nobody reads any more.
    pub(super) async fn send(&self, delta: v1::Delta) -> Result<(), Failure> {
        let gone = |_| Failure::new(FailureClass::Cancelled, "the caller went away");
        self.record.wrote(&delta, self.elapsed());
        self.sender.send(delta).await.map_err(gone)
    }

    /// Logs its end.
    pub(super) fn log(&self, outcome: Result<&v1::Summary, &Failure>) {
        let Orchestrator { request_log, materials, accounting, .. } = &*self.orchestrator;
        self.registered.ends(outcome.map_or_else(|failure| failure.class.as_str(), |_| "ok"));
        accounting.record(&EndedUse {
            request: &self.request,
            model: &self.route.served.name,
            tenant_hash: &self.registered.entry.tenant,
            n_tokens: self.record.n_tokens(),
            outcome,
            elapsed: self.elapsed(),
        });
        if request_log.is_on() {
            request_log.ended(&EndedRequest {
                request: &self.request,
                model: &self.route.served.name,
                tenant_secret: self.request.tenant_secret(&materials.tenant_salt),
                record: &self.record,
                outcome,
                elapsed: self.elapsed(),
            });
        }
    }

    /// Time since it arrived.
    pub(super) fn elapsed(&self) -> Duration {
        Instant::now().saturating_duration_since(self.request.arrived)
    }
}
