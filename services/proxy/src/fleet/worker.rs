//! One worker: the connection to it, and what is known of it ([`super::view`]).

use super::view::{Sent, View};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Error};
use triptych_core::WorkerId;
use triptych_runtime::discovery::{Endpoint, Role};
use triptych_runtime::grpc::Dialer;

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
    /// Wakes the task that has its encoder weights loaded: it was given the role of an encoder.
    pub(super) encodes_next: Notify,
    /// It left discovery: it gets nothing new, and its task ends when it is idle.
    pub(super) leaving: CancellationToken,
    idle: Notify,
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
            encodes_next: Notify::new(),
            leaving: CancellationToken::new(),
            idle: Notify::new(),
        })
    }

    pub(super) fn role(&self) -> Role {
        self.endpoint.role
    }

    pub(super) fn channel(&self) -> Channel {
        self.channel.lock().clone()
    }

    /// Drops the connection; the next use makes a new one.
    pub(super) fn reconnect(&self) {
        // The address was accepted when the worker was made.
        if let Ok(channel) = self.dialer.dial(&self.endpoint.address) {
            *self.channel.lock() = channel;
            self.redialed.notify_one();
        }
    }

    pub(super) fn view(&self) -> MutexGuard<'_, View> {
        self.view.lock()
    }

    /// Gives it work. The number is for [`Worker::done`].
    pub(super) fn give(&self, work: Sent) -> u64 {
        self.view().give(work)
    }

    /// The work that was given in this epoch is done.
    pub(super) fn done(&self, epoch: u64, work: Sent) {
        let mut view = self.view();
        view.done(epoch, work);
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

#[cfg(test)]
mod tests;
