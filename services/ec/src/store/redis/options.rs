//! Connections to one server: credentials, certificates, timeouts, keep-alive.

use super::setting::Host;
use futures::TryFutureExt;
use redis::aio::{MultiplexedConnection, PubSub};
use redis::io::tcp::{TcpSettings, socket2};
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo,
    RedisError, RedisResult, TlsCertificates,
};
use std::io;
use std::time::Duration;

/// TCP keep-alive: idle time, interval and probes. An idle connection to a dead host is noticed after about 30 s.
const KEEP_ALIVE: (Duration, Duration, u32) = (Duration::from_secs(15), Duration::from_secs(5), 3);
/// Credentials, certificates and timeouts of connections.
#[derive(Clone)]
pub(super) struct ConnectOptions {
    pub(super) redis: RedisConnectionInfo,
    pub(super) certificates: Option<TlsCertificates>,
    pub(super) connection_timeout: Duration,
    pub(super) response_timeout: Duration,
}

impl ConnectOptions {
    /// As `self`, without user and password and database.
    pub(super) fn anonymous(&self) -> Self {
        let redis = RedisConnectionInfo::default().set_protocol(self.redis.protocol());
        Self { redis, ..self.clone() }
    }

    /// As `self`, in database 0.
    pub(super) fn in_database_0(&self) -> Self {
        Self { redis: self.redis.clone().set_db(0), ..self.clone() }
    }

    pub(super) fn client(&self, host: &Host) -> RedisResult<Client> {
        let info = self.info(host)?;
        match &self.certificates {
            Some(certificates) => Client::build_with_tls(info, certificates.clone()),
            None => Client::open(info),
        }
    }

    pub(super) async fn connect(&self, client: &Client) -> RedisResult<MultiplexedConnection> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connection_timeout))
            .set_response_timeout(Some(self.response_timeout));
        client.get_multiplexed_async_connection_with_config(&config).await
    }

    pub(super) async fn subscribe(&self, client: &Client, channel: &str) -> RedisResult<PubSub> {
        let subscribe = client.get_async_pubsub().and_then(|mut subscription| async {
            subscription.subscribe(channel).await?;
            Ok(subscription)
        });
        with_timeout(self.connection_timeout, subscribe).await
    }

    pub(super) fn info(&self, host: &Host) -> RedisResult<ConnectionInfo> {
        let (name, port) = (host.name.clone(), host.port);
        let addr = match self.certificates {
            Some(_) => ConnectionAddr::TcpTls { host: name, port, insecure: false, tls_params: None },
            None => ConnectionAddr::Tcp(name, port),
        };
        Ok(addr.into_connection_info()?.set_tcp_settings(tcp()).set_redis_settings(self.redis.clone()))
    }
}

/// Bounds a step that the library does not bound.
pub(super) async fn with_timeout<T>(
    limit: Duration,
    step: impl Future<Output = RedisResult<T>>,
) -> RedisResult<T> {
    let timed_out = |_| RedisError::from(io::Error::new(io::ErrorKind::TimedOut, "no connection in time"));
    tokio::time::timeout(limit, step).await.map_err(timed_out)?
}

pub(super) fn tcp() -> TcpSettings {
    let (time, interval, retries) = KEEP_ALIVE;
    let keep_alive =
        socket2::TcpKeepalive::new().with_time(time).with_interval(interval).with_retries(retries);
    TcpSettings::default().set_nodelay(true).set_keepalive(keep_alive)
}
