//! Every address of a name, asked again and again: for headless services and for round-robin records.
//!
//! A name that cannot be resolved is as good as the last time it could: the resolver does not say whether the name is
//! gone or the resolver is, and workers that are gone are noticed by their silence.

use super::{Endpoint, Role, Source, Tell};
use futures::future::BoxFuture;
use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Between two questions, on average.
const EVERY: Duration = Duration::from_secs(5);
/// Each pause is longer or shorter by up to this, so that many proxies do not ask in step.
const JITTER: f64 = 0.2;
/// How long the resolver may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// What turns a name into addresses; the system's resolver, or a test's.
pub type Resolve = Box<dyn Fn() -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> + Send + Sync>;

/// A name that is resolved again and again.
pub struct Dns {
    role: Role,
    name: String,
    resolve: Resolve,
}

impl Dns {
    /// Resolves `host:port` as the system does.
    pub fn new(role: Role, name: &str) -> Self {
        let asked = name.to_owned();
        let resolve: Resolve = Box::new(move || {
            let name = asked.clone();
            Box::pin(async move { Ok(tokio::net::lookup_host(name).await?.collect()) })
        });
        Self::with_resolver(role, name, resolve)
    }

    /// Resolves it as `resolve` does.
    pub fn with_resolver(role: Role, name: &str, resolve: Resolve) -> Self {
        Self { role, name: name.to_owned(), resolve }
    }

    async fn ask(&self) -> Result<BTreeSet<Endpoint>, String> {
        let found = timeout(PATIENCE, (self.resolve)()).await;
        let found =
            found.map_err(|_| format!("no answer within {PATIENCE:?}"))?.map_err(|e| e.to_string())?;
        if found.is_empty() {
            return Err("it has no address".into());
        }
        Ok(found.into_iter().map(|a| Endpoint { role: self.role, address: a.to_string() }).collect())
    }
}

impl Source for Dns {
    fn describe(&self) -> String {
        format!("{} dns:{}", self.role, self.name)
    }

    fn run(self: Box<Self>, tell: Tell) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let mut failing = false;
            loop {
                match self.ask().await {
                    Ok(set) => {
                        if failing {
                            tracing::info!(name = self.name, "the name resolves again");
                        }
                        failing = false;
                        tell.present(set);
                    }
                    Err(why) => {
                        if !failing {
                            tracing::warn!(
                                name = self.name,
                                why,
                                "the name does not resolve; its last addresses stay"
                            );
                        }
                        failing = true;
                    }
                }
                sleep(EVERY.mul_f64(rand::random_range(1.0 - JITTER..1.0 + JITTER))).await;
            }
        })
    }
}
