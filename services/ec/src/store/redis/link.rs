//! The connection to the servers, with a timeout on every wait.
//!
//! The library keeps a connection whose replies time out, one that a starting server refused, and one to a master that
//! has become a replica. All would last until the process ends. So a connection that timed out, broke or was refused is
//! dropped, and the next attempt opens a new one: with sentinels it asks them again, in a cluster it reads the slots
//! again. Operations on the old one keep it until they end. In a cluster one hanging node must not block the others, so
//! the old connection is used until the new one is open. Temporary refusals (loading, failing over, no owner of a slot)
//! are retried a few times with backoff; timeouts are not.

use super::dial::{Connection, Dialer, Target};
use super::setting::{Host, RedisSetting};
use super::tuning::RedisTuning;
use crate::error::EcError;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared, ready};
use parking_lot::{Mutex, MutexGuard};
use redis::aio::ConnectionLike;
use redis::{Cmd, ErrorKind, Pipeline, RedisError, RedisResult, ServerErrorKind, Value};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::time::{sleep, timeout};
use triptych_core::Backoff;

/// Pauses between attempts.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(200));

/// Failure of a command.
#[derive(Clone, Debug, Error)]
pub enum LinkError {
    /// Timeout; the command may have run.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The key holds a value of another type.
    #[error("the key holds another kind of value")]
    WrongType,
    /// No connection, or the server's refusal.
    #[error(transparent)]
    Redis(RedisError),
}

/// Runs a command, see [`RedisLink::into_query`]; an error is a text for operators.
pub type RedisQuery =
    Arc<dyn Fn(&'static str, Cmd) -> BoxFuture<'static, Result<Value, String>> + Send + Sync>;

/// A connection that is opened on demand, and again when it was lost. Shared by many concurrent tasks.
pub struct RedisLink {
    dialer: Arc<Dialer>,
    shown: String,
    attempts: usize,
    response_timeout: Duration,
    /// Timeout of a command, connecting and retries included.
    whole: Duration,
    current: Arc<Mutex<Generation>>,
}

/// One connection, open or connecting, shared by all concurrent commands.
#[derive(Default)]
struct Generation {
    connection: Option<Connecting>,
    number: u64,
    /// True while the next connection is being opened and this one is in use.
    has_successor: bool,
}

type Connecting = Shared<BoxFuture<'static, RedisResult<Connection>>>;

impl Generation {
    fn lock(current: &Mutex<Self>) -> MutexGuard<'_, Self> {
        current.lock()
    }

    fn next(&self, connection: Option<Connecting>) -> Self {
        Self { connection, number: self.number + 1, has_successor: false }
    }
}

impl RedisLink {
    /// A link to the servers of a setting. Connects to nothing yet.
    ///
    /// # Errors
    /// [`EcError::Config`] for certificates that cannot be read.
    pub fn new(setting: &RedisSetting, tuning: &RedisTuning) -> Result<Self, EcError> {
        let dialer = Arc::new(Dialer::new(setting, tuning)?);
        let attempts = tuning.reconnects.saturating_add(1);
        let connecting =
            (dialer.limit() + BACKOFF.longest).saturating_mul(attempts.try_into().unwrap_or(u32::MAX));
        let whole = connecting.saturating_add(tuning.response_timeout.saturating_mul(2));
        Ok(Self {
            dialer,
            shown: setting.to_string(),
            attempts,
            response_timeout: tuning.response_timeout,
            whole,
            current: Arc::default(),
        })
    }

    /// The servers, without passwords.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// Sends a command to the server, or to the primary of the slot of `key`. All keys of a command must be in that
    /// slot. The command may run more than once when connections break, so it must be idempotent.
    ///
    /// # Errors
    /// [`LinkError`] without a reply, or for an error reply.
    pub async fn run(&self, key: &str, command: &Cmd) -> Result<Value, LinkError> {
        self.run_at(&Target::Key(key), command).await
    }

    pub(super) async fn run_at(&self, target: &Target<'_>, command: &Cmd) -> Result<Value, LinkError> {
        self.persist(|mut connection| async move { connection.send(target, command).await }).await
    }

    /// The link as a function of a key and a command, for crates that do not import this one.
    pub fn into_query(self) -> RedisQuery {
        let link = Arc::new(self);
        Arc::new(move |key, command| {
            let link = link.clone();
            async move { link.run(key, &command).await.map_err(|e| e.to_string()) }.boxed()
        })
    }

    /// Sends several commands to a single server in one round trip; a value of another type is an error in its
    /// position. `None` in a cluster.
    pub(super) async fn run_all(&self, commands: &Pipeline) -> Result<Option<Vec<Value>>, LinkError> {
        if self.dialer.is_cluster() {
            return Ok(None);
        }
        let answers = self.persist(|connection| async move {
            match connection {
                Connection::Server(mut server) => {
                    let answers = server.req_packed_commands(commands, 0, commands.len()).await?;
                    refusal(&answers).map_or(Ok(answers), Err)
                }
                Connection::Cluster(_) => Ok(Vec::new()),
            }
        });
        answers.await.map(Some)
    }

    pub(super) fn dialer(&self) -> &Arc<Dialer> {
        &self.dialer
    }

    /// Sends a command to every primary; returns each address and reply. A single server has no address.
    pub(super) async fn run_everywhere(
        &self,
        command: &Cmd,
    ) -> Result<Vec<(Option<Host>, Value)>, LinkError> {
        self.persist(|mut connection| async move { connection.send_to_primaries(command).await }).await
    }

    async fn persist<T, F>(&self, ask: impl Fn(Connection) -> F) -> Result<T, LinkError>
    where
        F: Future<Output = RedisResult<T>>,
    {
        match timeout(self.whole, self.attempt(ask)).await {
            Ok(answer) => answer,
            Err(_) => {
                let number = self.lock().number;
                self.replace(number);
                Err(LinkError::TimedOut(self.whole))
            }
        }
    }

    async fn attempt<T, F>(&self, ask: impl Fn(Connection) -> F) -> Result<T, LinkError>
    where
        F: Future<Output = RedisResult<T>>,
    {
        let mut pauses = BACKOFF.pauses();
        for left in (0..self.attempts).rev() {
            let (connecting, number) = self.current();
            let connected = connecting.await;
            let is_connected = connected.is_ok();
            let answer = match connected {
                Ok(connection) => ask(connection).await,
                Err(e) => Err(e),
            };
            let e = match answer {
                Ok(answer) => return Ok(answer),
                Err(e) if e.code() == Some("WRONGTYPE") => return Err(LinkError::WrongType),
                Err(e) => e,
            };
            let retryability = Retryability::of(&e);
            if e.is_timeout() && is_connected && self.dialer.is_cluster() {
                self.succeed(number);
            } else if retryability != Retryability::Final || !is_connected {
                self.replace(number);
            }
            if e.is_timeout() {
                return Err(LinkError::TimedOut(self.response_timeout));
            }
            if retryability != Retryability::Retry || left == 0 {
                return Err(LinkError::Redis(e));
            }
            sleep(pauses.next_pause()).await;
        }
        Err(LinkError::TimedOut(self.whole))
    }

    fn lock(&self) -> MutexGuard<'_, Generation> {
        Generation::lock(&self.current)
    }

    fn current(&self) -> (Connecting, u64) {
        let mut current = self.lock();
        let connection = current.connection.get_or_insert_with(|| {
            let dialer = self.dialer.clone();
            async move { dialer.connect().await }.boxed().shared()
        });
        let connection = connection.clone();
        (connection, current.number)
    }

    /// Drops the connection, unless another operation has replaced it since `number` was current.
    fn replace(&self, number: u64) {
        let mut current = self.lock();
        if current.number == number {
            *current = current.next(None);
        }
    }

    /// Opens a new connection, then replaces that of `number`.
    fn succeed(&self, number: u64) {
        let mut current = self.lock();
        if current.number != number || current.has_successor {
            return;
        }
        current.has_successor = true;
        let (generation, dialer) = (self.current.clone(), self.dialer.clone());
        // Not in a drain's task group: it ends by itself within the dialer's timeout, and nothing is lost if it is
        // aborted.
        tokio::spawn(async move {
            let made = dialer.connect().await;
            let mut current = Generation::lock(&generation);
            if current.number != number {
                return;
            }
            match made {
                Ok(made) => *current = current.next(Some(ready(Ok(made)).boxed().shared())),
                Err(_) => current.has_successor = false,
            }
        });
    }
}

/// The first error that does not concern a single key.
fn refusal(answers: &[Value]) -> Option<RedisError> {
    let mut errors = answers.iter().filter_map(|answer| match answer {
        Value::ServerError(e) => Some(RedisError::from(e.clone())),
        _ => None,
    });
    errors.find(|e| e.code() != Some("WRONGTYPE"))
}

/// Consequence of an error for its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Retryability {
    /// The connection is intact: the error is the reply.
    Final,
    /// A new connection is needed, and would get the same refusal: no retry.
    Refused,
    /// A retry on a new connection may succeed.
    Retry,
}

impl Retryability {
    fn of(e: &RedisError) -> Self {
        match e.kind() {
            ErrorKind::Io
            | ErrorKind::ClusterConnectionNotFound
            | ErrorKind::MasterNameNotFoundBySentinel
            | ErrorKind::Parse => Self::Retry,
            ErrorKind::Server(
                ServerErrorKind::BusyLoading
                | ServerErrorKind::MasterDown
                | ServerErrorKind::ReadOnly
                | ServerErrorKind::ClusterDown
                | ServerErrorKind::TryAgain
                | ServerErrorKind::Moved
                | ServerErrorKind::Ask,
            ) => Self::Retry,
            ErrorKind::AuthenticationFailed | ErrorKind::UnexpectedReturnType => Self::Refused,
            // "max number of clients reached", "NOAUTH": errors with codes of their own.
            ErrorKind::Extension if e.code() != Some("OOM") => Self::Refused,
            _ => Self::Final,
        }
    }
}
