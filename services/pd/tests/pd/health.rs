//! Health service before and during drain.

use crate::support::start;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use triptych_runtime::grpc;

#[tokio::test]
async fn a_worker_is_serving_until_drain_begins() {
    let pd = start().await;
    let mut client = HealthClient::new(grpc::channel(&pd.address.to_string()).unwrap());
    for service in ["", "triptych.v1.PrefillDecodeWorker"] {
        let request = HealthCheckRequest { service: service.into() };
        let mut watch = client.watch(request.clone()).await.unwrap().into_inner();
        let first = watch.message().await.unwrap().unwrap();
        let expect = if pd.drain.is_stopping() { ServingStatus::NotServing } else { ServingStatus::Serving };
        assert_eq!(first.status(), expect, "{service:?}");
        pd.drain.begin();
        if expect == ServingStatus::Serving {
            // Arrives while the connection lives, so before the listener's connections are closed.
            let second = watch.message().await.unwrap().unwrap();
            assert_eq!(second.status(), ServingStatus::NotServing, "{service:?}");
        }
    }
    drop(client);
    assert!(pd.running.await.unwrap().is_ok());
}
