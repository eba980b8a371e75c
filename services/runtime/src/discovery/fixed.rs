//! A list that was written down: it never changes.

use super::{Endpoint, Role, Source, Tell};
use futures::future::BoxFuture;

/// Addresses of one role.
#[derive(Clone, Debug)]
pub struct Fixed {
    role: Role,
    addresses: Vec<String>,
}

impl Fixed {
    /// `host:port` of each worker.
    pub fn new(role: Role, addresses: Vec<String>) -> Self {
        Self { role, addresses }
    }
}

impl Source for Fixed {
    fn describe(&self) -> String {
        format!("{} {}", self.role, self.addresses.join(","))
    }

    fn is_dynamic(&self) -> bool {
        false
    }

    fn run(self: Box<Self>, tell: Tell) -> BoxFuture<'static, ()> {
        let Self { role, addresses } = *self;
        tell.present(addresses.into_iter().map(|address| Endpoint { role, address }).collect());
        Box::pin(std::future::pending())
    }
}
