//! Waiting until the cluster can answer: every child says so by gRPC health, and the proxy lists every model.

use super::plan::ClusterPlan;
use super::screen::Screen;
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
    let mut waiting: Vec<_> =
        plan.children.iter().filter_map(|c| Some((c.name.as_str(), health_client(c.grpc)?))).collect();
    let mut said = usize::MAX;
    while !waiting.is_empty() {
        if waiting.len() != said {
            said = waiting.len();
            let children: Vec<_> = waiting.iter().map(|(name, _)| *name).collect();
            screen.progress(&format!("loading {}: waiting for {}", names.join(", "), children.join(", ")));
        }
        let mut still = Vec::new();
        for (name, mut client) in waiting {
            if !is_serving(&mut client).await {
                still.push((name, client));
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

fn health_client(address: SocketAddr) -> Option<HealthClient<Channel>> {
    grpc::channel(&address.to_string()).ok().map(HealthClient::new)
}

async fn is_serving(client: &mut HealthClient<Channel>) -> bool {
    let answer = timeout(PATIENCE, client.check(HealthCheckRequest::default())).await;
    answer.is_ok_and(|a| a.is_ok_and(|a| a.get_ref().status() == ServingStatus::Serving))
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
