//! Waiting until the cluster can answer: every child says so by gRPC health, and the proxy lists every model.
//!
//! The addresses of the proxy may have been taken by another cluster since they were checked. A child is therefore asked at
//! its admin address too, which nobody else was given, and which it opens after the others.

use super::plan::{ChildSpec, ClusterPlan};
use super::screen::Screen;
use crate::health;
use crate::model::CheckedModel;
use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::{sleep, timeout};
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use triptych_proto::v1::ListModelsRequest;
use triptych_proto::v1::triptych_client::TriptychClient;
use triptych_runtime::grpc;

const PAUSE: Duration = Duration::from_millis(50);
/// A child that does not answer in this time is asked again.
const PATIENCE: Duration = Duration::from_secs(2);

/// Ends when everything is ready. Has no limit of its own: weights may take minutes, and a child that cannot start
/// ends the cluster.
pub async fn wait(plan: &ClusterPlan, models: &[CheckedModel], screen: &Screen) {
    let names: Vec<_> = models.iter().map(|m| m.name.as_str()).collect();
    let child = |c: &ChildSpec| Some((c.name.clone(), Probe::new(c.grpc, c.admin)?));
    let mut waiting: Vec<_> = plan.children.iter().filter_map(child).collect();
    let mut said = usize::MAX;
    while !waiting.is_empty() {
        if waiting.len() != said {
            said = waiting.len();
            let children: Vec<_> = waiting.iter().map(|(name, _)| name.as_str()).collect();
            screen.progress(&format!("loading {}: waiting for {}", names.join(", "), children.join(", ")));
        }
        let mut still = Vec::new();
        for (name, mut probe) in waiting {
            if !probe.is_ready().await {
                still.push((name, probe));
            }
        }
        waiting = still;
        sleep(if waiting.is_empty() { Duration::ZERO } else { PAUSE }).await;
    }
    screen.progress("waiting for the proxy to find every model");
    while !lists_all(plan.endpoints.local_grpc(), &names).await {
        sleep(PAUSE).await;
    }
}

/// Asks one child.
struct Probe {
    health: HealthClient<Channel>,
    admin: SocketAddr,
}

impl Probe {
    fn new(grpc: SocketAddr, admin: SocketAddr) -> Option<Self> {
        let health = HealthClient::new(grpc::channel(&grpc.to_string()).ok()?);
        Some(Self { health, admin })
    }

    /// True if this child, and not another process at its address, says that it serves.
    async fn is_ready(&mut self) -> bool {
        let asked = async {
            health::over_http(&self.admin.to_string(), "/readyz").await.ok()?;
            self.health.check(HealthCheckRequest::default()).await.ok()
        };
        let answer = timeout(PATIENCE, asked).await.ok().flatten();
        answer.is_some_and(|answer| answer.get_ref().status() == ServingStatus::Serving)
    }
}

async fn lists_all(address: SocketAddr, names: &[&str]) -> bool {
    let Ok(channel) = grpc::channel(&address.to_string()) else { return false };
    let mut client = TriptychClient::new(channel);
    let Ok(Ok(answer)) = timeout(PATIENCE, client.list_models(ListModelsRequest {})).await else {
        return false;
    };
    let listed: HashSet<_> = answer.get_ref().models.iter().map(|m| m.name.as_str()).collect();
    names.iter().all(|name| listed.contains(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;
    use tonic::transport::server::TcpIncoming;
    use triptych_runtime::admin::{self, Readiness};
    use triptych_runtime::{Drain, MetricsRegistry};

    #[tokio::test]
    async fn a_process_of_another_cluster_at_the_same_address_is_not_taken_for_the_child() {
        let drain = Drain::new();
        let other = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let grpc = other.local_addr().unwrap();
        let (reporter, health) = tonic_health::server::health_reporter();
        reporter.set_service_status("", tonic_health::ServingStatus::Serving).await;
        let server = tonic::transport::Server::builder().add_service(health);
        drain.tasks().spawn(server.serve_with_incoming(TcpIncoming::from(other)));
        let own = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let admin = own.local_addr().unwrap();
        let mut probe = Probe::new(grpc, admin).unwrap();
        // Nobody accepts there yet: the own child could not listen.
        drop(own);
        assert!(!probe.is_ready().await);
        let readiness = Readiness::new(drain.clone());
        let own = TcpListener::bind(admin).await.unwrap();
        admin::spawn(own, admin::router(readiness.clone(), MetricsRegistry::default()), &drain);
        assert!(!probe.is_ready().await, "it listens, and is not loaded");
        readiness.set_loaded();
        assert!(probe.is_ready().await);
    }
}
