//! Connecting: to a single server, to the master that the sentinels name, or to the nodes of a cluster. Every attempt
//! has a timeout; the [link](super::link) decides about retries.

use super::options::{ConnectOptions, tcp, with_timeout};
use super::sentinel::Sentinels;
use super::setting::{Host, RedisServers, RedisSetting};
use super::tuning::RedisTuning;
use crate::error::EcError;
use redis::aio::{ConnectionLike, MultiplexedConnection, PubSub};
use redis::cluster::{ClusterClient, ClusterClientBuilder};
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{
    MultipleNodeRoutingInfo, Route, RoutingInfo, SingleNodeRoutingInfo, Slot, SlotAddr,
};
use redis::{Client, Cmd, ErrorKind, RedisConnectionInfo, RedisResult, TlsMode, Value};
use std::io;
use std::time::Duration;

/// Redirections and retries of the cluster client itself.
const CLUSTER_RETRIES: u32 = 3;
/// Its shortest and longest pause before that, in milliseconds.
const CLUSTER_PAUSES_MS: (u64, u64) = (20, 200);

/// A connection; clones share it.
#[derive(Clone)]
pub(super) enum Connection {
    Server(MultiplexedConnection),
    Cluster(ClusterConnection),
}

/// Node that a command is sent to.
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

    /// The reply of the server, or of each primary of a cluster with its address.
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

/// Opens connections to the servers of one setting.
pub(super) struct Dialer {
    options: ConnectOptions,
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
        let options = ConnectOptions {
            redis,
            certificates: setting.certificates()?,
            connection_timeout: tuning.connection_timeout,
            response_timeout: tuning.response_timeout,
        };
        let servers = Clients::new(setting, &options).map_err(|e| setting.wrong(e.to_string()))?;
        Ok(Self { options, servers })
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.servers, Clients::Cluster(..))
    }

    /// Timeout of [`Self::connect`].
    pub(super) fn limit(&self) -> Duration {
        let steps = match self.servers {
            Clients::Single(_) => 1,
            // The sentinels, with and without password; the master; its role.
            Clients::Sentinel(_) => 4,
            // The named nodes; all nodes; what is slow of them once more.
            Clients::Cluster(..) => 4,
        };
        self.options.connection_timeout.saturating_mul(steps).saturating_add(Duration::from_millis(200))
    }

    pub(super) async fn connect(&self) -> RedisResult<Connection> {
        with_timeout(self.limit(), async {
            Ok(match &self.servers {
                Clients::Single(client) => Connection::Server(self.options.connect(client).await?),
                Clients::Sentinel(sentinels) => {
                    Connection::Server(sentinels.connect_to_master(&self.options).await?)
                }
                Clients::Cluster(client, _) => Connection::Cluster(client.get_async_connection().await?),
            })
        })
        .await
    }

    /// A connection subscribed to a channel. In a cluster every node has every message, so any node is used.
    pub(super) async fn subscribe(&self, channel: &str) -> RedisResult<PubSub> {
        match &self.servers {
            Clients::Single(client) => self.options.subscribe(client, channel).await,
            Clients::Sentinel(sentinels) => {
                let master = with_timeout(self.limit(), sentinels.master(&self.options)).await?;
                self.options.subscribe(&self.options.client(&master)?, channel).await
            }
            Clients::Cluster(_, nodes) => {
                let mut last = None;
                for node in nodes {
                    match self.options.subscribe(node, channel).await {
                        Ok(subscription) => return Ok(subscription),
                        Err(e) => last = Some(e),
                    }
                }
                Err(last.unwrap_or_else(|| io::Error::other("the setting names no node").into()))
            }
        }
    }
}

impl Clients {
    fn new(setting: &RedisSetting, options: &ConnectOptions) -> RedisResult<Self> {
        Ok(match &setting.servers {
            RedisServers::Single(host) => Self::Single(Box::new(options.client(host)?)),
            RedisServers::Sentinel { sentinels, master } => {
                Self::Sentinel(Sentinels::new(sentinels, master, options)?)
            }
            RedisServers::Cluster(hosts) => {
                let nodes = hosts.iter().map(|host| options.client(host)).collect::<RedisResult<_>>()?;
                Self::Cluster(Box::new(cluster(setting, hosts, options)?.build()?), nodes)
            }
        })
    }
}

fn cluster(
    setting: &RedisSetting,
    hosts: &[Host],
    options: &ConnectOptions,
) -> RedisResult<ClusterClientBuilder> {
    let infos: Vec<_> = hosts.iter().map(|host| options.info(host)).collect::<RedisResult<_>>()?;
    let (shortest, longest) = CLUSTER_PAUSES_MS;
    let mut builder = ClusterClientBuilder::new(infos)
        .connection_timeout(options.connection_timeout)
        .response_timeout(options.response_timeout)
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
    if let Some(certificates) = &options.certificates {
        builder = builder.tls(TlsMode::Secure).certs(certificates.clone());
    }
    Ok(builder)
}
