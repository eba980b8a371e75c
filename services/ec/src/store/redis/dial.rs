//! Making connections: to the one server, to the master that the sentinels name, to the nodes of a cluster. Every attempt
//! is bounded in time; whether to make another one is the [link](super::link)'s affair.

use super::RedisTuning;
use super::sentinel::Sentinels;
use super::setting::{Host, RedisSetting, Servers};
use crate::error::EcError;
use futures::TryFutureExt;
use redis::aio::{ConnectionLike, MultiplexedConnection, PubSub};
use redis::cluster::{ClusterClient, ClusterClientBuilder};
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{
    MultipleNodeRoutingInfo, Route, RoutingInfo, SingleNodeRoutingInfo, Slot, SlotAddr,
};
use redis::io::tcp::{TcpSettings, socket2};
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo,
    RedisConnectionInfo, RedisError, RedisResult, TlsCertificates, TlsMode, Value,
};
use std::io;
use std::time::Duration;

/// A connection to a host that is gone is noticed after about 15 s + 3 · 5 s even where nothing is asked of it.
const KEEP_ALIVE: (Duration, Duration, u32) = (Duration::from_secs(15), Duration::from_secs(5), 3);
/// How often the cluster client follows a redirection or asks again by itself.
const CLUSTER_RETRIES: u32 = 3;
/// Its shortest and longest pause before that, in milliseconds.
const CLUSTER_PAUSES_MS: (u64, u64) = (20, 200);

/// A connection; clones share it.
#[derive(Clone)]
pub(super) enum Connection {
    Server(MultiplexedConnection),
    Cluster(ClusterConnection),
}

/// Who answers a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Target<'a> {
    /// The server, or the primary of the slot that a key is in.
    Key(&'a str),
    /// The primary of a cluster at this address.
    Node(&'a Host),
}

impl Connection {
    pub(super) async fn send(&mut self, target: &Target<'_>, command: &Cmd) -> RedisResult<Value> {
        let value = match self {
            Self::Server(server) => server.req_packed_command(command).await?,
            Self::Cluster(cluster) => {
                let node = match target {
                    Target::Key(key) => {
                        let route = Route::with_slot(Slot::for_key(key), SlotAddr::Master);
                        SingleNodeRoutingInfo::SpecificNode(route)
                    }
                    Target::Node(Host { name, port }) => {
                        SingleNodeRoutingInfo::ByAddress { host: name.clone(), port: *port }
                    }
                };
                cluster.route_command(command.clone(), RoutingInfo::SingleNode(node)).await?
            }
        };
        value.extract_error()
    }

    /// The answer of the server, or of each primary of a cluster under its address.
    pub(super) async fn send_to_primaries(
        &mut self,
        command: &Cmd,
    ) -> RedisResult<Vec<(Option<Host>, Value)>> {
        let cluster = match self {
            Self::Server(server) => {
                return Ok(vec![(None, server.req_packed_command(command).await?.extract_error()?)]);
            }
            Self::Cluster(cluster) => cluster,
        };
        let everywhere = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
        let Value::Map(answers) =
            cluster.route_command(command.clone(), everywhere).await?.extract_error()?
        else {
            return Err((ErrorKind::UnexpectedReturnType, "the primaries' answers are no map").into());
        };
        let named = answers.into_iter().map(|(node, answer)| {
            let address: String = redis::from_redis_value(node)?;
            let host = address.rsplit_once(':').and_then(|(name, port)| {
                Some(Host { name: name.trim_matches(['[', ']']).to_owned(), port: port.parse().ok()? })
            });
            let no_address = (ErrorKind::UnexpectedReturnType, "a node's address has no port");
            Ok((Some(host.ok_or(no_address)?), answer))
        });
        named.collect()
    }
}

/// How servers are reached.
#[derive(Clone)]
pub(super) struct Way {
    redis: RedisConnectionInfo,
    certificates: Option<TlsCertificates>,
    connection_timeout: Duration,
    response_timeout: Duration,
}

impl Way {
    pub(super) fn connection_timeout(&self) -> Duration {
        self.connection_timeout
    }

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

    async fn subscribe(&self, client: &Client, channel: &str) -> RedisResult<PubSub> {
        let subscribe = client.get_async_pubsub().and_then(|mut news| async {
            news.subscribe(channel).await?;
            Ok(news)
        });
        in_time(self.connection_timeout, subscribe).await
    }

    fn info(&self, host: &Host) -> RedisResult<ConnectionInfo> {
        let (name, port) = (host.name.clone(), host.port);
        let addr = match self.certificates {
            Some(_) => ConnectionAddr::TcpTls { host: name, port, insecure: false, tls_params: None },
            None => ConnectionAddr::Tcp(name, port),
        };
        Ok(addr.into_connection_info()?.set_tcp_settings(tcp()).set_redis_settings(self.redis.clone()))
    }
}

/// Ends a step that the library does not bound.
pub(super) async fn in_time<T>(
    limit: Duration,
    step: impl Future<Output = RedisResult<T>>,
) -> RedisResult<T> {
    let timed_out = |_| RedisError::from(io::Error::new(io::ErrorKind::TimedOut, "no connection in time"));
    tokio::time::timeout(limit, step).await.map_err(timed_out)?
}

fn tcp() -> TcpSettings {
    let (time, interval, retries) = KEEP_ALIVE;
    let keep_alive =
        socket2::TcpKeepalive::new().with_time(time).with_interval(interval).with_retries(retries);
    TcpSettings::default().set_nodelay(true).set_keepalive(keep_alive)
}

/// Makes connections of one setting.
pub(super) struct Dialer {
    way: Way,
    servers: Clients,
}

enum Clients {
    Single(Box<Client>),
    Sentinel(Sentinels),
    /// The client, and the nodes that the setting names, for subscriptions.
    Cluster(Box<ClusterClient>, Vec<Client>),
}

impl Dialer {
    pub(super) fn new(setting: &RedisSetting, tuning: &RedisTuning) -> Result<Self, EcError> {
        let mut redis = RedisConnectionInfo::default().set_db(setting.db).set_protocol(setting.protocol());
        if let Some(user) = &setting.user {
            redis = redis.set_username(user);
        }
        if let Some(password) = &setting.password {
            redis = redis.set_password(password);
        }
        let way = Way {
            redis,
            certificates: setting.certificates()?,
            connection_timeout: tuning.connection_timeout,
            response_timeout: tuning.response_timeout,
        };
        let servers = Clients::new(setting, &way).map_err(|e| setting.wrong(e.to_string()))?;
        Ok(Self { way, servers })
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.servers, Clients::Cluster(..))
    }

    /// The longest that [`Self::connect`] may take.
    pub(super) fn limit(&self) -> Duration {
        let steps = match self.servers {
            Clients::Single(_) => 1,
            // The sentinels, with and without password; the master; its role.
            Clients::Sentinel(_) => 4,
            // The named nodes; all nodes; what is slow of them once more.
            Clients::Cluster(..) => 4,
        };
        self.way.connection_timeout.saturating_mul(steps).saturating_add(Duration::from_millis(200))
    }

    pub(super) async fn connect(&self) -> RedisResult<Connection> {
        in_time(self.limit(), async {
            Ok(match &self.servers {
                Clients::Single(client) => Connection::Server(self.way.connect(client).await?),
                Clients::Sentinel(sentinels) => {
                    Connection::Server(sentinels.connect_to_master(&self.way).await?)
                }
                Clients::Cluster(client, _) => Connection::Cluster(client.get_async_connection().await?),
            })
        })
        .await
    }

    /// A connection on which the channel's messages arrive. In a cluster every node has every message, so any will do.
    pub(super) async fn subscribe(&self, channel: &str) -> RedisResult<PubSub> {
        match &self.servers {
            Clients::Single(client) => self.way.subscribe(client, channel).await,
            Clients::Sentinel(sentinels) => {
                let master = in_time(self.limit(), sentinels.master(&self.way)).await?;
                self.way.subscribe(&self.way.client(&master)?, channel).await
            }
            Clients::Cluster(_, nodes) => {
                let mut last = None;
                for node in nodes {
                    match self.way.subscribe(node, channel).await {
                        Ok(news) => return Ok(news),
                        Err(e) => last = Some(e),
                    }
                }
                Err(last.unwrap_or_else(|| io::Error::other("the setting names no node").into()))
            }
        }
    }
}

impl Clients {
    fn new(setting: &RedisSetting, way: &Way) -> RedisResult<Self> {
        Ok(match &setting.servers {
            Servers::Single(host) => Self::Single(Box::new(way.client(host)?)),
            Servers::Sentinel { sentinels, master } => {
                Self::Sentinel(Sentinels::new(sentinels, master, way)?)
            }
            Servers::Cluster(hosts) => {
                let nodes = hosts.iter().map(|host| way.client(host)).collect::<RedisResult<_>>()?;
                Self::Cluster(Box::new(cluster(setting, hosts, way)?.build()?), nodes)
            }
        })
    }
}

fn cluster(setting: &RedisSetting, hosts: &[Host], way: &Way) -> RedisResult<ClusterClientBuilder> {
    let infos: Vec<_> = hosts.iter().map(|host| way.info(host)).collect::<RedisResult<_>>()?;
    let (shortest, longest) = CLUSTER_PAUSES_MS;
    let mut builder = ClusterClientBuilder::new(infos)
        .connection_timeout(way.connection_timeout)
        .response_timeout(way.response_timeout)
        .retries(CLUSTER_RETRIES)
        .min_retry_wait(shortest)
        .max_retry_wait(longest)
        .use_protocol(setting.protocol())
        .tcp_settings(tcp());
    if let Some(user) = &setting.user {
        builder = builder.username(user);
    }
    if let Some(password) = &setting.password {
        builder = builder.password(password);
    }
    if let Some(certificates) = &way.certificates {
        builder = builder.tls(TlsMode::Secure).certs(certificates.clone());
    }
    Ok(builder)
}
