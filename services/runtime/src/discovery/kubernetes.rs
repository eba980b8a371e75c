//! The ready pods of a Kubernetes service, from its EndpointSlices: listed once, then watched
//! (kubernetes.io, "API Concepts: efficient detection of changes"; "EndpointSlices: conditions").
//!
//! Two requests are all that is needed of the API, so they are made with the HTTP client that the tree has: Kubernetes'
//! own crates would bring thirty others. A watch that ends is taken up where it was; a version that the server has
//! forgotten (410 Gone) begins with a list again. While the server cannot be asked, the last answer stays.

mod api;
mod scale;
mod slices;

pub use api::ApiServer;
pub use scale::Scaler;

use super::{DiscoveryError, Endpoint, Role, Source, Tell};
use api::{Api, Event, Watched};
use futures::future::BoxFuture;
use slices::Slices;
use std::fmt;
use std::time::Duration;
use tokio::time::sleep;

/// First and longest pause before the server is asked again after trouble.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));

/// A service, and which of its ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The port's name; `None`: the first port.
    pub port: Option<String>,
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "k8s:{}/{}", self.namespace, self.name)?;
        self.port.as_ref().map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// The pods of a service.
pub struct Kubernetes {
    role: Role,
    service: Service,
    api: Api,
}

/// Why a round of list and watch ended.
#[derive(Debug)]
enum Ended {
    /// The server forgot the version that the watch was at.
    Gone,
    /// It could not be asked, or said something that cannot be read.
    Trouble(DiscoveryError),
}

impl From<DiscoveryError> for Ended {
    fn from(e: DiscoveryError) -> Self {
        Self::Trouble(e)
    }
}

impl Kubernetes {
    /// Asks the API server of the cluster that this process runs in, as its service account.
    ///
    /// # Errors
    /// [`DiscoveryError::NotInCluster`] if there is none.
    pub fn in_cluster(role: Role, service: Service) -> Result<Self, DiscoveryError> {
        Self::new(role, service, ApiServer::in_cluster()?)
    }

    /// Asks this server.
    ///
    /// # Errors
    /// [`DiscoveryError::NotInCluster`] if its certificate cannot be read.
    pub fn new(role: Role, service: Service, server: ApiServer) -> Result<Self, DiscoveryError> {
        Ok(Self { role, api: Api::new(server, &service)?, service })
    }

    /// Lists, then watches, until something goes wrong. `told` says that the set is known.
    async fn follow(&self, tell: &Tell, mut told: impl FnMut()) -> Ended {
        let (mut slices, mut version) = match self.api.list().await {
            Ok(listed) => listed,
            Err(e) => return e.into(),
        };
        self.tell(tell, &slices);
        told();
        loop {
            let mut watch = match self.api.watch(&version).await {
                Ok(Watched::Stream(stream)) => stream,
                Ok(Watched::Gone) => return Ended::Gone,
                Err(e) => return e.into(),
            };
            loop {
                match watch.next().await {
                    Ok(Some(Event::Slices { change, version: at })) => {
                        slices.apply(change);
                        version = at;
                        self.tell(tell, &slices);
                    }
                    Ok(Some(Event::Bookmark { version: at })) => version = at,
                    Ok(Some(Event::Gone)) => return Ended::Gone,
                    // The server ends every watch after a while.
                    Ok(None) => break,
                    Err(e) => return e.into(),
                }
            }
            sleep(PAUSES.0).await;
        }
    }

    fn tell(&self, tell: &Tell, slices: &Slices) {
        let endpoint = |address| Endpoint { role: self.role, address };
        tell.present(slices.addresses(self.service.port.as_deref()).map(endpoint).collect());
    }
}

impl Source for Kubernetes {
    fn describe(&self) -> String {
        format!("{} {}", self.role, self.service)
    }

    fn run(self: Box<Self>, tell: Tell) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let (mut pause, mut failing) = (PAUSES.0, false);
            loop {
                let told = || {
                    if failing {
                        tracing::info!(service = %self.service, "the Kubernetes API answers again");
                    }
                    (pause, failing) = (PAUSES.0, false);
                };
                match self.follow(&tell, told).await {
                    Ended::Gone => {
                        tracing::debug!(service = %self.service, "listed again: the version is gone")
                    }
                    Ended::Trouble(e) => {
                        if !failing {
                            tracing::warn!(service = %self.service, error = %e, "its last addresses stay");
                        }
                        failing = true;
                    }
                }
                sleep(pause).await;
                pause = (pause * 2).min(PAUSES.1);
            }
        })
    }
}

#[cfg(test)]
mod tests;
