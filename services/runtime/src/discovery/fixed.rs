//! A fixed list of workers.

use super::{Endpoint, EndpointSink, Role, Source};
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

    fn run(self: Box<Self>, sink: EndpointSink) -> BoxFuture<'static, ()> {
        let Self { role, addresses } = *self;
        sink.publish(addresses.into_iter().map(|address| Endpoint { role, address }).collect());
        Box::pin(std::future::pending())
    }
}
