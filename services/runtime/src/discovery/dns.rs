//! Discovery by DNS: every address of a name, resolved periodically, for headless services and round-robin records.
//!
//! A name that does not resolve keeps its last addresses: an error may come from the name or from the resolver, and
//! dead workers are noticed by their silence.

use super::{Endpoint, EndpointSink, Role, Source};
use futures::future::BoxFuture;
use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::{sleep, timeout};
use triptych_core::backoff::jitter;

/// Mean interval between resolutions.
const INTERVAL: Duration = Duration::from_secs(5);
/// Relative spread of the interval, so that many proxies do not ask at the same moment.
const JITTER: f64 = 0.2;
/// Timeout of the resolver.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Resolves a name to addresses: the system's resolver, or a test's.
pub type Resolve = Box<dyn Fn() -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> + Send + Sync>;

/// A name that is resolved periodically.
pub struct Dns {
    role: Role,
    name: String,
    resolve: Resolve,
    /// Text before and after each address.
    affixes: (&'static str, String),
}

impl Dns {
    /// Resolves `host:port` with the system's resolver.
    pub fn new(role: Role, name: &str) -> Self {
        let asked = name.to_owned();
        let resolve: Resolve = Box::new(move || {
            let name = asked.clone();
            Box::pin(async move { Ok(tokio::net::lookup_host(name).await?.collect()) })
        });
        Self::with_resolver(role, name, resolve)
    }

    /// Resolves it with `resolve`.
    pub fn with_resolver(role: Role, name: &str, resolve: Resolve) -> Self {
        Self { role, name: name.to_owned(), resolve, affixes: ("", String::new()) }
    }

    /// The same, with a text before and after each address.
    #[must_use]
    pub fn with_affixes(self, before: &'static str, after: String) -> Self {
        Self { affixes: (before, after), ..self }
    }

    async fn resolve_once(&self) -> Result<BTreeSet<Endpoint>, String> {
        let found = timeout(TIMEOUT, (self.resolve)()).await;
        let found = found.map_err(|_| format!("no answer within {TIMEOUT:?}"))?.map_err(|e| e.to_string())?;
        if found.is_empty() {
            return Err("it has no address".into());
        }
        let (before, after) = &self.affixes;
        let endpoint = |a: SocketAddr| Endpoint { role: self.role, address: format!("{before}{a}{after}") };
        Ok(found.into_iter().map(endpoint).collect())
    }
}

impl Source for Dns {
    fn describe(&self) -> String {
        format!("{} dns:{}", self.role, self.name)
    }

    fn run(self: Box<Self>, sink: EndpointSink) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let mut failing = false;
            loop {
                match self.resolve_once().await {
                    Ok(set) => {
                        if failing {
                            tracing::info!(name = self.name, "the name resolves again");
                        }
                        failing = false;
                        sink.publish(set);
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
                sleep(jitter(INTERVAL, JITTER, rand::random())).await;
            }
        })
    }
}
