//! Reading: one request for a small object, concurrent ranges for a large one.

use super::BucketStore;
use super::failure::{BucketError, is_not_found, transport};
use crate::object::ObjectError;
use bytes::{Bytes, BytesMut};
use futures::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, GetResult, ObjectMeta, ObjectStoreExt};
use std::ops::Range;

/// Attempts to read an object that is replaced concurrently.
const ATTEMPTS: usize = 3;

/// First range of an object.
enum Opened {
    Missing,
    Empty,
    There(Box<GetResult>),
}

impl BucketStore {
    /// The whole object. The inner error: it is over the limit.
    pub(super) async fn read(&self, name: &Path) -> Result<Result<Option<Bytes>, ObjectError>, BucketError> {
        for _ in 0..ATTEMPTS {
            let first = match self.open_at(name, self.tuning.part_bytes.max(1)).await? {
                Opened::Missing => return Ok(Ok(None)),
                Opened::Empty => return Ok(Ok(Some(Bytes::new()))),
                Opened::There(first) => first,
            };
            let (limit, len) = (self.limits.max_object_bytes, first.meta.size);
            let len = match usize::try_from(len) {
                Ok(len) if len <= limit => len,
                _ => {
                    let actual = usize::try_from(len).unwrap_or(usize::MAX);
                    return Ok(Err(ObjectError::TooLarge { limit, actual }));
                }
            };
            let mut object = BytesMut::zeroed(len);
            match self.fill_object(name, *first, &mut object).await {
                Ok(()) => return Ok(Ok(Some(object.freeze()))),
                Err(BucketError::Service(object_store::Error::Precondition { .. })) => {}
                Err(BucketError::Service(e)) if is_not_found(&e) => return Ok(Ok(None)),
                Err(e) => return Err(e),
            }
        }
        Err("the object was replaced each time it was read".into())
    }

    /// At most `n` bytes from the start of an object, and its whole length.
    pub(super) async fn first_bytes(
        &self,
        name: &Path,
        n: usize,
    ) -> Result<Option<(Bytes, usize)>, BucketError> {
        Ok(self.first_bytes_and_meta(name, n).await?.map(|(bytes, meta)| {
            // A length that does not fit is over every limit.
            (bytes, usize::try_from(meta.size).unwrap_or(usize::MAX))
        }))
    }

    /// Like [`Self::first_bytes`], with the service's metadata. `None` for an empty object.
    pub(super) async fn first_bytes_and_meta(
        &self,
        name: &Path,
        n: usize,
    ) -> Result<Option<(Bytes, ObjectMeta)>, BucketError> {
        let Opened::There(first) = self.open_at(name, n).await? else { return Ok(None) };
        let meta = first.meta.clone();
        let mut bytes = BytesMut::zeroed(n.min(usize::try_from(meta.size).unwrap_or(n)));
        fill(*first, &mut bytes).await?;
        Ok(Some((bytes.freeze(), meta)))
    }

    async fn open_at(&self, name: &Path, n: usize) -> Result<Opened, BucketError> {
        let options = GetOptions { range: Some(GetRange::Bounded(0..n as u64)), ..GetOptions::default() };
        match self.backend.get_opts(name, options).await {
            Ok(first) => Ok(Opened::There(Box::new(first))),
            Err(e) if is_not_found(&e) => Ok(Opened::Missing),
            // An empty object has no first byte, and each service says so in its own way.
            Err(e @ object_store::Error::Generic { .. }) if transport(&e).is_none() => {
                match self.backend.head(name).await {
                    Ok(meta) if meta.size == 0 => Ok(Opened::Empty),
                    _ => Err(e.into()),
                }
            }
            Err(e) => Err(e.into()),
        }
    }

    /// Reads the rest of an object while its first range arrives.
    async fn fill_object(&self, name: &Path, first: GetResult, object: &mut [u8]) -> Result<(), BucketError> {
        let n_first = usize::try_from(first.range.end).unwrap_or(usize::MAX).min(object.len());
        let tag = first.meta.e_tag.clone();
        let (head, rest) = object.split_at_mut(n_first);
        let mut start = n_first as u64;
        let mut ranges = Vec::new();
        for part in rest.chunks_mut(self.tuning.part_bytes.max(1)) {
            let range = start..start + part.len() as u64;
            start = range.end;
            ranges.push(self.fill_range(name, range, tag.clone(), part));
        }
        // The first range is one of those in flight.
        let width = self.tuning.parts_in_flight.saturating_sub(1).max(1);
        let rest = stream::iter(ranges).buffer_unordered(width).try_collect::<()>();
        futures::future::try_join(fill(first, head), rest).await.map(drop)
    }

    async fn fill_range(
        &self,
        name: &Path,
        range: Range<u64>,
        tag: Option<String>,
        part: &mut [u8],
    ) -> Result<(), BucketError> {
        let options =
            GetOptions { range: Some(GetRange::Bounded(range)), if_match: tag, ..GetOptions::default() };
        fill(self.backend.get_opts(name, options).await?, part).await
    }
}

/// Fills the buffer exactly.
async fn fill(result: GetResult, mut room: &mut [u8]) -> Result<(), BucketError> {
    let mut bytes = result.into_stream();
    while let Some(bytes) = bytes.try_next().await? {
        let (here, left) =
            room.split_at_mut_checked(bytes.len()).ok_or("the service sent more than was asked for")?;
        here.copy_from_slice(&bytes);
        room = left;
    }
    if room.is_empty() { Ok(()) } else { Err("the service sent less than was asked for".into()) }
}
