//! Discovery of a master through sentinels. All sentinels are asked concurrently, and of the answers of a majority the
//! highest configuration epoch wins, as among the sentinels: one behind a partition names an old master with an old
//! epoch. The named server must confirm that it is the master.
//!
//! Sentinels are asked without credentials first, and with those of the setting if they require some.

use super::options::{ConnectOptions, with_timeout};
use super::setting::Host;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use redis::aio::MultiplexedConnection;
use redis::{Client, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value, cmd};
use std::collections::HashMap;

pub(super) struct Sentinels {
    /// A client without and one with credentials for each sentinel.
    clients: Vec<(Client, Client)>,
    name: String,
}

impl Sentinels {
    pub(super) fn new(hosts: &[Host], name: &str, options: &ConnectOptions) -> RedisResult<Self> {
        let (anonymous, known) = (options.anonymous(), options.in_database_0());
        let clients = hosts.iter().map(|host| Ok((anonymous.client(host)?, known.client(host)?)));
        Ok(Self { clients: clients.collect::<RedisResult<_>>()?, name: name.to_owned() })
    }

    pub(super) async fn connect_to_master(
        &self,
        options: &ConnectOptions,
    ) -> RedisResult<MultiplexedConnection> {
        let master = self.master(options).await?;
        let mut connection = options.connect(&options.client(&master)?).await?;
        match with_timeout(options.connection_timeout, cmd("ROLE").query_async(&mut connection)).await {
            Ok(Value::Array(role)) if role.first().and_then(text) == Some("master") => Ok(connection),
            // A user without permission for ROLE learns it from the first write.
            Err(e) if e.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => Ok(connection),
            Ok(_) => Err(lost("the sentinels name a server that is no master")),
            Err(e) => Err(e),
        }
    }

    /// Address of the master.
    pub(super) async fn master(&self, options: &ConnectOptions) -> RedisResult<Host> {
        let mut asked: FuturesUnordered<_> =
            self.clients.iter().map(|clients| self.ask(options, clients)).collect();
        let majority = self.clients.len() / 2 + 1;
        let (mut named, mut last) = (Vec::new(), None);
        while named.len() < majority
            && let Some(answer) = asked.next().await
        {
            match answer {
                Ok(master) => named.push(master),
                Err(e) => last = Some(e),
            }
        }
        match named.into_iter().max_by_key(|(epoch, _)| *epoch) {
            Some((_, master)) => Ok(master),
            None => Err(last.unwrap_or_else(|| lost("no sentinel answers"))),
        }
    }

    /// The master and its epoch, as one sentinel reports them.
    async fn ask(
        &self,
        options: &ConnectOptions,
        (anonymous, known): &(Client, Client),
    ) -> RedisResult<(u64, Host)> {
        match self.ask_as(options, anonymous).await {
            Err(e) if e.code() == Some("NOAUTH") || e.kind() == ErrorKind::AuthenticationFailed => {
                self.ask_as(options, known).await
            }
            answer => answer,
        }
    }

    async fn ask_as(&self, options: &ConnectOptions, client: &Client) -> RedisResult<(u64, Host)> {
        with_timeout(options.connection_timeout, async {
            let mut connection = options.connect(client).await?;
            let mut command = cmd("SENTINEL");
            let fields: HashMap<String, String> =
                command.arg("MASTER").arg(&self.name).query_async(&mut connection).await?;
            let epoch = fields.get("config-epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
            let port = fields.get("port").and_then(|port| port.parse().ok());
            match (fields.get("ip"), port) {
                (Some(ip), Some(port)) => Ok((epoch, Host { name: ip.clone(), port })),
                _ => Err(lost("a sentinel's answer names no address")),
            }
        })
        .await
    }
}

fn lost(what: &'static str) -> RedisError {
    (ErrorKind::MasterNameNotFoundBySentinel, what).into()
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}
