//! `triptych ec verify`: reads objects whole, as a worker would, and says which do not verify.

use super::objects::{ConcurrentTasks, all, failed, find, line, note, progress};
use crate::args::OperatorEcArgs;
use crate::error::{CliError, chain};
use crate::units::count;
use clap::Args;
use std::sync::Arc;
use tokio::task::spawn_blocking;
use triptych_core::ContentKey;
use triptych_core::limits::Limits;
use triptych_ec::{Access, EcError, EcStore, object};

/// Flags of `triptych ec verify`.
#[derive(Args, Debug)]
pub struct VerifyArgs {
    /// Keys of objects, or the first digits of them. Default: every object
    keys: Vec<String>,
    /// Take what is bad out of view, so that it is encoded again
    #[arg(long)]
    quarantine: bool,
    /// Number of objects to read at once
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: u16,
    /// The store.
    #[command(flatten)]
    ec: OperatorEcArgs,
}

/// Outcome of an object.
pub(super) enum ObjectState {
    /// It verifies.
    Good,
    /// It went before it was read: expired, evicted or removed.
    Gone,
    /// It does not verify.
    Bad(String),
}

/// Reads and verifies.
///
/// # Errors
/// [`CliError::Failed`] if an object is bad, one that was named is not there, or the store fails.
pub async fn run(args: VerifyArgs) -> Result<(), CliError> {
    let limits = Limits::default();
    let access = if args.quarantine { Access::Existing } else { Access::ReadOnly };
    let store = args.ec.open(&limits, access).await?;
    let mut keys = Vec::new();
    for text in &args.keys {
        keys.push(find(&*store, text).await?);
    }
    let is_named = !args.keys.is_empty();
    if !is_named {
        keys = all(&*store).await?.into_iter().map(|listed| listed.key).collect();
    }
    let bar = progress(keys.len(), "verifying");
    let mut tasks = ConcurrentTasks::of(args.jobs.into());
    let mut keys = keys.into_iter();
    let (mut n_good, mut n_gone, mut n_bad) = (0, 0, 0);
    loop {
        let ended = match keys.next() {
            Some(key) => {
                let task = judge(store.clone(), key, limits.clone());
                match tasks.start(async move { (key, task.await) }).await? {
                    Some(ended) => ended,
                    None => continue,
                }
            }
            None => match tasks.end().await? {
                Some(ended) => ended,
                None => break,
            },
        };
        bar.inc(1);
        let (key, verdict) = ended;
        match verdict.map_err(|e| failed(&e))? {
            ObjectState::Good => n_good += 1,
            ObjectState::Gone if is_named => {
                n_bad += 1;
                line(&bar, &format!("{key} not there"))?;
            }
            ObjectState::Gone => n_gone += 1,
            ObjectState::Bad(why) => {
                n_bad += 1;
                line(&bar, &format!("{key} {why}"))?;
                if args.quarantine {
                    store.quarantine(&key).await.map_err(|e| failed(&e))?;
                }
            }
        }
    }
    bar.finish_and_clear();
    let gone = if n_gone > 0 { format!(", {} went meanwhile", count(n_gone)) } else { String::new() };
    note(&bar, &format!("{} good, {} bad{gone}", count(n_good), count(n_bad)));
    match n_bad {
        0 => Ok(()),
        n if args.quarantine => Err(CliError::Failed(format!("{n} objects are bad and were taken out"))),
        n => Err(CliError::Failed(format!("{n} objects are bad; --quarantine takes them out"))),
    }
}

/// Reads one object and verifies it.
pub(super) async fn judge(
    store: Arc<dyn EcStore>,
    key: ContentKey,
    limits: Limits,
) -> Result<ObjectState, EcError> {
    let object = match store.get(&key).await {
        Ok(Some(object)) => object,
        Ok(None) => return Ok(ObjectState::Gone),
        Err(e @ EcError::Corrupt { .. }) => return Ok(ObjectState::Bad(chain(&e))),
        Err(e) => return Err(e),
    };
    let decoded = spawn_blocking(move || object::decode(object, &key, &limits).map(drop)).await;
    Ok(match decoded {
        Ok(Ok(())) => ObjectState::Good,
        Ok(Err(e)) => ObjectState::Bad(chain(&e)),
        Err(e) => ObjectState::Bad(format!("verifying ended early: {e}")),
    })
}
