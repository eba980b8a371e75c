//! gRPC servers and channels with the settings that the data plane needs.
//!
//! Defaults move a 20 MiB object at half the speed and leave a connection wedged after a partition, so windows,
//! frames and keep-alive are set here, for both ends.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::{Channel, Endpoint, Server};
use tonic_health::server::HealthReporter;

/// HTTP/2 window of one stream, in bytes.
const STREAM_WINDOW: u32 = 16 << 20;
/// HTTP/2 window of a connection, in bytes.
const CONNECTION_WINDOW: u32 = 32 << 20;
/// Largest HTTP/2 frame, in bytes.
const FRAME: u32 = 1 << 20;
/// Idle time before a ping.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Time after which a connection with an unanswered ping is dropped.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// A server builder with the data plane's settings.
pub fn server() -> Server {
    Server::builder()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .max_concurrent_streams(4096)
        .tcp_nodelay(true)
}

/// Opens channels to other processes of the cluster. A process has one, which decides the transport: plain TCP, TLS, or
/// a simulated network.
#[derive(Clone)]
pub struct Dialer(Dial);

/// Opens a channel to `host:port` that connects on first use.
pub type Dial = Arc<dyn Fn(&str) -> Result<Channel, tonic::transport::Error> + Send + Sync>;

impl Dialer {
    /// A dialer that calls `dial`.
    pub fn new(
        dial: impl Fn(&str) -> Result<Channel, tonic::transport::Error> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(dial))
    }

    /// A channel to `host:port`.
    ///
    /// # Errors
    /// If `address` is malformed.
    pub fn dial(&self, address: &str) -> Result<Channel, tonic::transport::Error> {
        (self.0)(address)
    }

    /// The dial function, for crates that do not import this one.
    pub fn as_fn(&self) -> Dial {
        Arc::clone(&self.0)
    }
}

impl Default for Dialer {
    /// Plain TCP.
    fn default() -> Self {
        Self::new(channel)
    }
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Dialer")
    }
}

/// A channel that connects on first use and reconnects by itself.
///
/// # Errors
/// If `address` is not `host:port` or an http(s) URL.
pub fn channel(address: &str) -> Result<Channel, tonic::transport::Error> {
    Ok(endpoint(address)?.connect_lazy())
}

/// An endpoint with the data plane's settings.
pub(crate) fn endpoint(address: &str) -> Result<Endpoint, tonic::transport::Error> {
    let url = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
    Ok(Endpoint::from_shared(url)?
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_timeout(Duration::from_secs(3))
        .tcp_nodelay(true))
}

/// The two reflection services, v1 and v1alpha. They list `services`, gRPC's health, and themselves: what this server
/// answers, and not all that our schema has.
///
/// # Errors
/// Only for a descriptor set that does not parse, which a test rules out.
#[allow(clippy::type_complexity)]
pub fn reflection(
    services: &[&str],
) -> Result<
    (
        tonic_reflection::server::v1::ServerReflectionServer<
            impl tonic_reflection::server::v1::ServerReflection + use<>,
        >,
        tonic_reflection::server::v1alpha::ServerReflectionServer<
            impl tonic_reflection::server::v1alpha::ServerReflection + use<>,
        >,
    ),
    tonic_reflection::server::Error,
> {
    let builder = |version: &str| {
        let builder = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(triptych_proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name(tonic_health::pb::health_server::SERVICE_NAME)
            .with_service_name(format!("grpc.reflection.{version}.ServerReflection"));
        services.iter().fold(builder, |builder, name| builder.with_service_name(*name))
    };
    Ok((builder("v1").build_v1()?, builder("v1alpha").build_v1alpha()?))
}

/// Sets the overall health (`""`) and that of `service`.
pub async fn set_health(reporter: &HealthReporter, service: &str, ready: bool) {
    use tonic_health::ServingStatus::{NotServing, Serving};
    let status = if ready { Serving } else { NotServing };
    reporter.set_service_status("", status).await;
    reporter.set_service_status(service, status).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn descriptors_parse_and_addresses_are_checked() {
        assert!(reflection(&["triptych.v1.Triptych"]).is_ok());
        assert!(channel("127.0.0.1:1").is_ok());
        assert!(channel("not an address").is_err());
    }
}
