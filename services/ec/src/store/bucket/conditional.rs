//! Probe for conditional writes: some S3-compatible services accept the headers and ignore them.

use super::failure::{BucketError, is_conflict, is_not_found};
use bytes::Bytes;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutPayload, UpdateVersion};

/// Result of the probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConditionalWrites {
    /// A write whose condition fails changes nothing.
    pub(super) first_wins: bool,
    /// The same for copies.
    pub(super) first_copy_wins: bool,
}

/// Writes to two names and removes them.
pub(super) async fn probe(
    backend: &dyn ObjectStore,
    names: [Path; 2],
) -> Result<ConditionalWrites, BucketError> {
    let conditional = try_conditions(backend, &names).await;
    for name in &names {
        match backend.delete(name).await {
            Err(e) if !is_not_found(&e) => {
                tracing::debug!(%name, error = %e, "a probe is left to expire");
            }
            _ => {}
        }
    }
    conditional
}

async fn try_conditions(
    backend: &dyn ObjectStore,
    [name, other]: &[Path; 2],
) -> Result<ConditionalWrites, BucketError> {
    let write = |name, text: &'static str, mode: PutMode| {
        backend.put_opts(name, PutPayload::from(Bytes::from_static(text.as_bytes())), mode.into())
    };
    let first = write(name, "first", PutMode::Create).await?;
    let again = refused(write(name, "again", PutMode::Create).await)?;
    let version = UpdateVersion::from(first);
    write(name, "update", PutMode::Update(version.clone())).await?;
    let outdated = refused(write(name, "outdated", PutMode::Update(version)).await)?;
    write(other, "other", PutMode::Overwrite).await?;
    // Services without conditional copies report it in different ways.
    let copied = backend.copy_if_not_exists(name, other).await;
    let first_copy_wins = copied.is_err_and(|e| is_conflict(&e));
    Ok(ConditionalWrites { first_wins: again && outdated, first_copy_wins })
}

/// True if a write was refused for its condition.
fn refused<T>(written: object_store::Result<T>) -> Result<bool, BucketError> {
    match written {
        Ok(_) => Ok(false),
        Err(e) if is_conflict(&e) => Ok(true),
        Err(e) => Err(e.into()),
    }
}
