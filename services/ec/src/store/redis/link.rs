//! The connection to the server, with every wait bounded.
//!
//! The library's manager connects again after I/O errors, but keeps a connection whose answers time out, and one
//! that the server refused while it was starting. Both would last until the process ends, so here a link that
//! timed out or was refused is thrown away and the next operation makes a new one. Operations that run on the
//! old one keep it until they end.

use super::RedisTuning;
use crate::error::EcError;
use crate::settings::without_password;
use redis::aio::{ConnectionLike, ConnectionManager, ConnectionManagerConfig};
use redis::{Client, Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use thiserror::Error;

/// Why a command has no answer.
#[derive(Debug, Error)]
pub(super) enum LinkError {
    #[error("no answer in time")]
    TimedOut,
    #[error("the key holds another kind of value")]
    WrongType,
    #[error(transparent)]
    Redis(RedisError),
}

pub(super) struct Link {
    client: Client,
    config: ConnectionManagerConfig,
    shown: String,
    /// The longest a command may take with connecting and everything: a guard behind the library's own limits.
    whole: Duration,
    current: Mutex<Generation>,
}

#[derive(Clone)]
struct Generation {
    manager: ConnectionManager,
    number: u64,
}

impl Link {
    pub(super) fn new(url: &str, tuning: &RedisTuning) -> Result<Self, EcError> {
        let shown = without_password(url);
        let wrong = |e: RedisError| EcError::Config { setting: without_password(url), reason: e.to_string() };
        let client = Client::open(url).map_err(wrong)?;
        let config = ConnectionManagerConfig::new()
            .set_response_timeout(Some(tuning.response_timeout))
            .set_connection_timeout(Some(tuning.connection_timeout))
            .set_number_of_retries(tuning.reconnects)
            .set_min_delay(Duration::from_millis(20))
            .set_max_delay(Duration::from_millis(200));
        let manager =
            ConnectionManager::new_lazy_with_config(client.clone(), config.clone()).map_err(wrong)?;
        let attempts = u32::try_from(tuning.reconnects).unwrap_or(u32::MAX).saturating_add(1);
        let connecting = (tuning.connection_timeout + Duration::from_millis(200)).saturating_mul(attempts);
        let whole = connecting.saturating_add(tuning.response_timeout.saturating_mul(2));
        Ok(Self { client, config, shown, whole, current: Mutex::new(Generation { manager, number: 0 }) })
    }

    /// The server, without passwords.
    pub(super) fn shown(&self) -> &str {
        &self.shown
    }

    pub(super) async fn run(&self, command: &Cmd) -> Result<Value, LinkError> {
        let Generation { mut manager, number } = self.current();
        let answer = tokio::time::timeout(self.whole, manager.req_packed_command(command)).await;
        let e = match answer {
            Ok(Ok(Value::ServerError(e))) => RedisError::from(e),
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(e)) => e,
            Err(_) => {
                self.replace(number);
                return Err(LinkError::TimedOut);
            }
        };
        if e.code() == Some("WRONGTYPE") {
            return Err(LinkError::WrongType);
        }
        let timed_out = e.is_timeout();
        if timed_out || is_refusal(&e) {
            self.replace(number);
        }
        Err(if timed_out { LinkError::TimedOut } else { LinkError::Redis(e) })
    }

    fn current(&self) -> Generation {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Throws the link away, unless another operation has done so since `number` was current.
    fn replace(&self, number: u64) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.number != number {
            return;
        }
        if let Ok(manager) = ConnectionManager::new_lazy_with_config(self.client.clone(), self.config.clone())
        {
            *current = Generation { manager, number: number + 1 };
        }
    }
}

/// Whether the server turned the connection away, rather than a command.
fn is_refusal(e: &RedisError) -> bool {
    match e.kind() {
        ErrorKind::AuthenticationFailed | ErrorKind::Parse | ErrorKind::UnexpectedReturnType => true,
        ErrorKind::Server(kind) => matches!(
            kind,
            ServerErrorKind::BusyLoading | ServerErrorKind::MasterDown | ServerErrorKind::ReadOnly
        ),
        // "max number of clients reached", "NOAUTH": errors with codes of their own.
        ErrorKind::Extension => e.code() != Some("OOM"),
        _ => false,
    }
}
