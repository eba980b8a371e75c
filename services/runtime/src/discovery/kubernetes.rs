//! The ready pods of a Kubernetes service, from its EndpointSlices: listed once, then watched
//! (kubernetes.io, "API Concepts: efficient detection of changes"; "EndpointSlices: conditions").
//!
//! Only two requests of the API are needed, so they use the HTTP client that the workspace has; the crate `kube` would
//! bring thirty others. A watch that ends resumes at its last version; a version that the server no longer has (410
//! Gone) starts with a list again. While the server cannot be reached, the last set stays.

mod api;
mod scale;
mod service;
mod slices;

pub use api::ApiServer;
pub use scale::Scaler;
pub use service::Service;

use super::{DiscoveryError, Endpoint, EndpointSink, Role, Source};
use api::{Api, Event, Watched};
use futures::future::BoxFuture;
use slices::Slices;
use std::time::Duration;
use tokio::time::sleep;
use triptych_core::Backoff;

/// Pauses after failures.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));

/// Source of the ready pods of a service.
pub struct Kubernetes {
    role: Role,
    service: Service,
    api: Api,
}

/// End of a round of list and watch.
#[derive(Debug)]
enum RoundEnd {
    /// The server no longer has the version of the watch.
    Gone,
    /// No response, or one that cannot be parsed.
    Failed(DiscoveryError),
}

impl From<DiscoveryError> for RoundEnd {
    fn from(e: DiscoveryError) -> Self {
        Self::Failed(e)
    }
}

impl Kubernetes {
    /// Uses the API server of the cluster that this process runs in, with its service account.
    ///
    /// # Errors
    /// [`DiscoveryError::NotInCluster`] if there is none.
    pub fn in_cluster(role: Role, service: Service) -> Result<Self, DiscoveryError> {
        Self::new(role, service, ApiServer::in_cluster()?)
    }

    /// Uses this API server.
    ///
    /// # Errors
    /// [`DiscoveryError::NotInCluster`] if its certificate cannot be read.
    pub fn new(role: Role, service: Service, server: ApiServer) -> Result<Self, DiscoveryError> {
        Ok(Self { role, api: Api::new(server, &service)?, service })
    }

    /// Lists, then watches, until a failure. Calls `listed` once the set is known.
    async fn follow(&self, sink: &EndpointSink, mut listed: impl FnMut()) -> RoundEnd {
        let (mut slices, mut version) = match self.api.list().await {
            Ok(found) => found,
            Err(e) => return e.into(),
        };
        self.publish(sink, &slices);
        listed();
        loop {
            let mut watch = match self.api.watch(&version).await {
                Ok(Watched::Stream(stream)) => stream,
                Ok(Watched::Gone) => return RoundEnd::Gone,
                Err(e) => return e.into(),
            };
            loop {
                match watch.next().await {
                    Ok(Some(Event::Slices { change, version: at })) => {
                        slices.apply(change);
                        version = at;
                        self.publish(sink, &slices);
                    }
                    Ok(Some(Event::Bookmark { version: at })) => version = at,
                    Ok(Some(Event::Gone)) => return RoundEnd::Gone,
                    // The server ends every watch after a while.
                    Ok(None) => break,
                    Err(e) => return e.into(),
                }
            }
            sleep(BACKOFF.first).await;
        }
    }

    fn publish(&self, sink: &EndpointSink, slices: &Slices) {
        let endpoint = |address| Endpoint { role: self.role, address };
        sink.publish(slices.addresses(self.service.port.as_deref()).map(endpoint).collect());
    }
}

impl Source for Kubernetes {
    fn describe(&self) -> String {
        format!("{} {}", self.role, self.service)
    }

    fn run(self: Box<Self>, sink: EndpointSink) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let (mut pauses, mut failing) = (BACKOFF.pauses(), false);
            loop {
                let listed = || {
                    if failing {
                        tracing::info!(service = %self.service, "the Kubernetes API answers again");
                    }
                    pauses.reset();
                    failing = false;
                };
                match self.follow(&sink, listed).await {
                    RoundEnd::Gone => {
                        tracing::debug!(service = %self.service, "listing again: the version is gone")
                    }
                    RoundEnd::Failed(e) => {
                        if !failing {
                            tracing::warn!(service = %self.service, error = %e, "discovery failed; the last addresses stay");
                        }
                        failing = true;
                    }
                }
                sleep(pauses.next_pause()).await;
            }
        })
    }
}

#[cfg(test)]
mod tests;
