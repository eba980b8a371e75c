//! Pages of stored objects. Redis keeps no order, so each page costs a SCAN over every key of every primary, chunks and
//! foreign keys included, in steps that block a server for about a millisecond: to read a large store, ask for large
//! pages. It is for operators, not for requests. What is kept in memory is one page.

use super::RedisStore;
use super::dial::Target;
use super::link::LinkError;
use super::manifest::Manifest;
use super::setting::Host;
use crate::error::EcError;
use crate::store::{Listed, Op, StoreKind};
use futures::{StreamExt, TryStreamExt, stream};
use redis::{Cmd, Value, cmd};
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::time::timeout;
use triptych_core::ContentKey;

/// Timeout of a page.
const LIMIT: Duration = Duration::from_secs(30);
/// Keys scanned by one command: about a millisecond of a server's time.
const STEP: usize = 1000;
/// Concurrent reads of lengths.
const READS_IN_FLIGHT: usize = 64;

impl RedisStore {
    pub(super) async fn page(
        &self,
        after: Option<&ContentKey>,
        limit: usize,
    ) -> Result<Vec<Listed>, EcError> {
        let page = timeout(LIMIT, async {
            let keys = self.scan(after, limit).await.map_err(|e| self.refine(Op::List, None, e))?;
            let lengths = stream::iter(keys).map(|key| async move { self.listed(key).await });
            lengths
                .buffered(READS_IN_FLIGHT)
                .try_filter_map(|listed| async move { Ok(listed) })
                .try_collect()
                .await
        });
        let timed_out = |_| EcError::TimedOut { store: StoreKind::Redis, op: Op::List, limit: LIMIT };
        page.await.map_err(timed_out)?
    }

    /// The first `limit` keys after `after`.
    async fn scan(
        &self,
        after: Option<&ContentKey>,
        limit: usize,
    ) -> Result<BTreeSet<ContentKey>, LinkError> {
        let mut page = BTreeSet::new();
        let mut keep = |names: Vec<Vec<u8>>| {
            page.extend(names.iter().filter_map(|name| key_of(name)).filter(|key| after < Some(key)));
            while page.len() > limit {
                page.pop_last();
            }
        };
        for (node, first) in self.link.run_everywhere(&step(b"0")).await? {
            let (mut cursor, names) = parts(first)?;
            keep(names);
            while cursor != b"0" {
                let target = node.as_ref().map_or(Target::Key(""), |host: &Host| Target::Node(host));
                let (next, names) = parts(self.link.run_at(&target, &step(&cursor)).await?)?;
                keep(names);
                cursor = next;
            }
        }
        Ok(page)
    }

    /// `None` if it is gone by now, or no manifest.
    async fn listed(&self, key: ContentKey) -> Result<Option<Listed>, EcError> {
        let start = Cmd::getrange(Self::manifest_key(&key), 0, Manifest::OWN_BYTES as isize - 1);
        match self.run(Op::List, &key, &start).await {
            Ok(Value::BulkString(start)) => {
                Ok(Manifest::len_of(&start).map(|len| Listed { key, len, stored: None }))
            }
            Ok(_) | Err(EcError::Corrupt { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

fn step(cursor: &[u8]) -> Cmd {
    let mut scan = cmd("SCAN");
    scan.arg(cursor).arg("MATCH").arg("triptych:ec:{*}").arg("COUNT").arg(STEP);
    scan
}

/// The cursor and the names of an answer to SCAN.
fn parts(answer: Value) -> Result<(Vec<u8>, Vec<Vec<u8>>), LinkError> {
    redis::from_redis_value(answer).map_err(|e| LinkError::Redis(e.into()))
}

fn key_of(name: &[u8]) -> Option<ContentKey> {
    let hex = name.strip_prefix(b"triptych:ec:{")?.strip_suffix(b"}")?;
    ContentKey::from_hex(std::str::from_utf8(hex).ok()?)
}
