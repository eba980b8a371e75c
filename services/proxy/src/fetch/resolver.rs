//! The resolver of the fetcher's connections: looks a name up once, and hands out only judged addresses.

use super::policy::{FetchPolicy, Refused};
use futures::future::BoxFuture;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::lookup_host;

/// Resolves under a policy. One address that may not be reached refuses the name: a mixture is a trick.
pub(super) struct GuardedResolver {
    policy: Arc<FetchPolicy>,
    lookup: Lookup,
}

/// Asks for the addresses of a name.
pub(super) type Lookup =
    Arc<dyn Fn(String) -> BoxFuture<'static, std::io::Result<Vec<SocketAddr>>> + Send + Sync>;

/// The system's resolver. Port 0 is replaced by the URL's.
pub(super) fn system() -> Lookup {
    Arc::new(|name| Box::pin(async move { Ok(lookup_host((name, 0)).await?.collect()) }))
}

impl GuardedResolver {
    pub(super) fn new(policy: Arc<FetchPolicy>, lookup: Lookup) -> Self {
        Self { policy, lookup }
    }
}

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let (policy, found) = (Arc::clone(&self.policy), (self.lookup)(name.as_str().to_owned()));
        Box::pin(async move {
            let addresses = found.await.map_err(|_| Refused::Unknown)?;
            if addresses.is_empty() {
                return Err(Refused::Unknown.into());
            }
            for address in &addresses {
                policy.judge_address(Some(name.as_str()), address.ip())?;
            }
            Ok(Box::new(addresses.into_iter()) as Addrs)
        })
    }
}
