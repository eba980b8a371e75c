//! One worker: the connection to it, what it says of itself, and what this proxy keeps it busy with.

use super::catalog::Health;
use super::outlier::{Circuit, Outlier};
use super::size::Curve;
use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Error};
use triptych_core::{ContentKey, Modality, ModelName, WorkerId};
use triptych_proto::convert;
use triptych_proto::v1;
use triptych_runtime::discovery::{Endpoint, Role};
use triptych_runtime::grpc::Dialer;

/// Resident keys that are remembered of one worker; a worker tells 4096 at first, and its news later.
const MAX_RESIDENT: usize = 1 << 16;

/// A worker.
pub(super) struct Worker {
    pub(super) id: WorkerId,
    pub(super) endpoint: Endpoint,
    dialer: Dialer,
    /// Replaced when the old one may be wedged. Held only to clone or replace it.
    channel: Mutex<Channel>,
    /// Held for a few operations each time.
    view: Mutex<View>,
    /// Wakes the task that asks it to describe itself before its time.
    pub(super) ask_again: Notify,
    /// Wakes the task that watches it: it answers.
    pub(super) came_up: Notify,
    /// It has a new connection.
    pub(super) redialed: Notify,
    /// It left discovery: it gets nothing new, and its task ends when it is idle.
    pub(super) leaving: CancellationToken,
    idle: Notify,
}

/// What is known of a worker.
#[derive(Debug, Default)]
pub(super) struct View {
    /// It answered when it was last asked.
    pub(super) is_up: bool,
    /// It said that it takes nothing new.
    pub(super) is_draining: bool,
    /// As it was reported last; `None`: it does not report.
    pub(super) report: Option<Report>,
    /// Given to it since then and not done.
    pub(super) sent: Sent,
    /// Counts reports: what was given before the latest one is in it.
    pub(super) epoch: u64,
    /// Pieces of work that are under way, whenever they were given.
    pub(super) n_leases: u64,
    /// Keys whose encoder outputs it holds.
    pub(super) resident: HashSet<ContentKey>,
    /// Its circuit.
    pub(super) outlier: Outlier,
}

/// A report, and when it came.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) at: Instant,
    pub(super) load: v1::WorkerLoad,
}

/// Work, in the measures that choices are made with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sent {
    pub(super) n: u64,
    pub(super) encode_us: u64,
    pub(super) tokens: u64,
}

impl Sent {
    fn add(&mut self, other: Self) {
        self.n = self.n.saturating_add(other.n);
        self.encode_us = self.encode_us.saturating_add(other.encode_us);
        self.tokens = self.tokens.saturating_add(other.tokens);
    }

    fn take(&mut self, other: Self) {
        self.n = self.n.saturating_sub(other.n);
        self.encode_us = self.encode_us.saturating_sub(other.encode_us);
        self.tokens = self.tokens.saturating_sub(other.tokens);
    }
}

impl Worker {
    pub(super) fn new(endpoint: Endpoint, dialer: Dialer) -> Result<Self, Error> {
        let channel = dialer.dial(&endpoint.address)?;
        Ok(Self {
            id: WorkerId::new(format!("{}@{}", endpoint.role, endpoint.address)),
            endpoint,
            dialer,
            channel: Mutex::new(channel),
            view: Mutex::default(),
            ask_again: Notify::new(),
            came_up: Notify::new(),
            redialed: Notify::new(),
            leaving: CancellationToken::new(),
            idle: Notify::new(),
        })
    }

    pub(super) fn role(&self) -> Role {
        self.endpoint.role
    }

    pub(super) fn channel(&self) -> Channel {
        self.channel.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Drops the connection; the next use makes a new one.
    pub(super) fn reconnect(&self) {
        // The address was accepted when the worker was made.
        if let Ok(channel) = self.dialer.dial(&self.endpoint.address) {
            *self.channel.lock().unwrap_or_else(PoisonError::into_inner) = channel;
            self.redialed.notify_one();
        }
    }

    pub(super) fn view(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives it work. The number is for [`Worker::done`].
    pub(super) fn give(&self, work: Sent) -> u64 {
        let mut view = self.view();
        view.sent.add(work);
        view.n_leases += 1;
        view.epoch
    }

    /// The work that was given in this epoch is done.
    pub(super) fn done(&self, epoch: u64, work: Sent) {
        let mut view = self.view();
        if view.epoch == epoch {
            view.sent.take(work);
        }
        view.n_leases = view.n_leases.saturating_sub(1);
        if view.n_leases == 0 {
            self.idle.notify_one();
        }
    }

    /// Ends when it left discovery and has nothing more to do.
    pub(super) async fn gone(&self) {
        self.leaving.cancelled().await;
        while self.view().n_leases > 0 {
            self.idle.notified().await;
        }
    }
}

impl View {
    /// What all that is known comes to.
    pub(super) fn health(&self) -> Health {
        match self.outlier.circuit() {
            _ if !self.is_up => Health::Down,
            _ if self.is_draining => Health::Draining,
            Circuit::Open { .. } => Health::Ejected,
            Circuit::HalfOpen { .. } => Health::Probing,
            Circuit::Closed => Health::Ready,
        }
    }

    /// A message of its watch. `first`: nothing that was known before holds.
    pub(super) fn take_report(&mut self, state: v1::WorkerState, first: bool, now: Instant) {
        if first {
            self.resident.clear();
        }
        self.is_draining = state.draining;
        for key in state.resident_removed.iter().filter_map(|key| convert::key(key, "resident").ok()) {
            self.resident.remove(&key);
        }
        for key in state.resident_added.iter().filter_map(|key| convert::key(key, "resident").ok()) {
            if self.resident.len() < MAX_RESIDENT {
                self.resident.insert(key);
            }
        }
        if let Some(load) = state.load {
            self.report = Some(Report { at: now, load });
            self.sent = Sent::default();
            self.epoch += 1;
        }
    }

    /// Its watch ended: what was reported grows old, and what it holds is not known. One that drains still does.
    pub(super) fn end_reports(&mut self) {
        self.report = None;
        self.resident.clear();
    }

    /// It does not answer. Whoever answers next is another process.
    pub(super) fn go_down(&mut self) {
        (self.is_up, self.is_draining) = (false, false);
    }

    fn load(&self) -> Option<&v1::WorkerLoad> {
        self.report.as_ref().map(|report| &report.load)
    }

    /// Encoding that is before a new job, in microseconds: what was reported less the time since, and what was sent
    /// after.
    pub(super) fn queued_us(&self, now: Instant) -> u64 {
        let reported = self.report.as_ref().map_or(0, |report| {
            let since = now.saturating_duration_since(report.at).as_micros();
            report.load.queued_us.saturating_sub(u64::try_from(since).unwrap_or(u64::MAX))
        });
        reported.saturating_add(self.sent.encode_us)
    }

    /// What an item costs it, if it has measured that.
    pub(super) fn curve(&self, model: &ModelName, modality: Modality) -> Option<Curve> {
        let wire = i32::from(v1::Modality::from(modality));
        let mut costs = self.load()?.costs.iter();
        costs.find(|c| c.modality == wire && c.model == model.as_str()).map(Curve::from)
    }

    /// Whether it would refuse one more.
    pub(super) fn is_full(&self) -> bool {
        let Some(load) = self.load().filter(|load| load.capacity > 0) else { return false };
        let taken = u64::from(load.running) + u64::from(load.waiting) + self.sent.n;
        taken >= u64::from(load.capacity)
    }

    /// Requests that run, that wait, tokens that wait: what was sent since the report waits.
    pub(super) fn requests(&self) -> (u64, u64, u64) {
        let (running, waiting, tokens) =
            self.load().map_or((0, 0, 0), |l| (l.running.into(), l.waiting.into(), l.waiting_tokens));
        (running, self.sent.n.saturating_add(waiting), tokens.saturating_add(self.sent.tokens))
    }

    /// The fuller of its caches; each request since the report takes a hundredth of it, until the next report knows.
    pub(super) fn kv_usage(&self) -> f64 {
        let reported = self.load().map_or(0.0, |l| f64::from(l.kv_usage.max(l.cross_kv_usage)));
        let reported = if reported.is_finite() { reported } else { 1.0 };
        reported + self.sent.n as f64 / 100.0
    }
}

#[cfg(test)]
mod tests;
