//! A connection that a route takes over, for a protocol other than HTTP.
//!
//! The server puts an [`UpgradeSlot`] into each request of a connection that can be taken over. A route answers 101 and leaves
//! in it what is to be run; the server runs it with the stream once the answer was sent. It knows no protocol.

use bytes::Bytes;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use std::sync::Arc;
use triptych_runtime::listener::ServerStream;

/// A stream that is no longer HTTP, and the bytes of it that were read too far.
pub(super) type TakenStream = (ServerStream, Bytes);
type Takeover = Box<dyn FnOnce(TakenStream) -> BoxFuture<'static, ()> + Send>;

/// Place for what a route runs with its connection.
#[derive(Clone, Default)]
pub(super) struct UpgradeSlot(Arc<Mutex<Option<Takeover>>>);

impl UpgradeSlot {
    /// Leaves what runs once the answer was sent. The route's answer is 101.
    pub(super) fn leave<F>(&self, run: impl FnOnce(TakenStream) -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        *self.0.lock() = Some(Box::new(|stream| Box::pin(run(stream))));
    }

    /// Takes what was left.
    pub(super) fn take(&self) -> Option<Takeover> {
        self.0.lock().take()
    }
}
