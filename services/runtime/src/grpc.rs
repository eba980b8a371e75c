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
/// That time for clients: the default of gRPC. A process that stands still while a ping is out (a migrated machine, swap) takes
/// the answer for late, though it has arrived. Requests to a worker are sent again then; the streams of a client are lost.
const CLIENT_KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// The peers of a server.
#[derive(Clone, Copy, Debug)]
pub enum Peers {
    /// Processes of the cluster.
    Cluster,
    /// Clients from outside.
    Clients {
        /// Time in which the HTTP/2 preface of a connection must arrive.
        preface_timeout: Duration,
    },
}

impl Peers {
    /// Time in which the HTTP/2 preface of a connection must arrive; `None`: any.
    pub const fn preface_timeout(self) -> Option<Duration> {
        match self {
            Self::Cluster => None,
            Self::Clients { preface_timeout } => Some(preface_timeout),
        }
    }

    const fn keepalive_timeout(self) -> Duration {
        match self {
            Self::Cluster => KEEPALIVE_TIMEOUT,
            Self::Clients { .. } => CLIENT_KEEPALIVE_TIMEOUT,
        }
    }
}

/// A server builder with the data plane's settings.
pub fn server(peers: Peers) -> Server {
    Server::builder()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(peers.keepalive_timeout()))
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
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn descriptors_parse_and_addresses_are_checked() {
        assert!(reflection(&["triptych.v1.Triptych"]).is_ok());
        assert!(channel("127.0.0.1:1").is_ok());
        assert!(channel("not an address").is_err());
    }

    /// Time from the start of a connection to its end, if its peer answers no ping.
    async fn time_of_a_silent_connection(peers: Peers) -> Duration {
        /// An empty SETTINGS frame.
        const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
        let (mut client, connection) = tokio::io::duplex(1 << 16);
        let connection = futures::stream::iter([Ok::<_, std::io::Error>(connection)]);
        let connections = futures::StreamExt::chain(connection, futures::stream::pending());
        let (_, health) = tonic_health::server::health_reporter();
        let serving = tokio::spawn(server(peers).add_service(health).serve_with_incoming(connections));
        let start = tokio::time::Instant::now();
        client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        client.write_all(&SETTINGS).await.unwrap();
        client.read_to_end(&mut Vec::new()).await.unwrap();
        serving.abort();
        start.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_client_is_dropped_later_than_a_silent_process_of_the_cluster() {
        let clients = Peers::Clients { preface_timeout: Duration::from_secs(1) };
        for (peers, timeout) in [(Peers::Cluster, 5), (clients, 20)] {
            let time = time_of_a_silent_connection(peers).await;
            let expected = KEEPALIVE + Duration::from_secs(timeout);
            assert!(time >= expected && time < expected + Duration::from_secs(1), "{peers:?}: {time:?}");
        }
    }
}
