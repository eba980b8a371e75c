//! The resolver of the fetcher's connections: looks a name up once, and hands out only judged addresses.

use super::policy::{FetchPolicy, Refused};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use std::sync::Arc;
use tokio::net::lookup_host;

/// Resolves under a policy. One address that may not be reached refuses the name: a mixture is a trick.
pub(super) struct GuardedResolver(Arc<FetchPolicy>);

impl GuardedResolver {
    pub(super) fn new(policy: Arc<FetchPolicy>) -> Self {
        Self(policy)
    }
}

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let policy = Arc::clone(&self.0);
        Box::pin(async move {
            // Port 0 is replaced by the URL's.
            let found = lookup_host((name.as_str(), 0)).await.map_err(|_| Refused::Unknown)?;
            let addresses: Vec<_> = found.collect();
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
