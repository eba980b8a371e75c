//! Conditional writes, in one request or in parts.

use super::BucketStore;
use super::conditional::ConditionalWrites;
use super::failure::{BucketError, is_conflict, is_not_found};
use crate::store::PutOutcome;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, GetOptions, MultipartUpload, ObjectStoreExt, PutMode, PutOptions, PutPayload,
};

/// Metadata of an object: the put that wrote it.
const WRITER: Attribute = Attribute::Metadata(std::borrow::Cow::Borrowed("writer"));
/// Attempts of a put whose conflicting object disappeared.
const ATTEMPTS: usize = 3;

impl BucketStore {
    pub(super) async fn put(
        &self,
        name: &Path,
        object: Bytes,
        conditional: ConditionalWrites,
    ) -> Result<PutOutcome, BucketError> {
        if conditional.first_copy_wins && object.len() > self.tuning.whole_bytes {
            // A cheap check before a large upload.
            return match self.backend.head(name).await {
                Err(e) if is_not_found(&e) => self.put_in_parts(name, object).await,
                there => Ok(there.map(|_| PutOutcome::AlreadyThere)?),
            };
        }
        let writer = format!("{:032x}", crate::store::nonce());
        for _ in 0..ATTEMPTS {
            let attributes = Attributes::from_iter([(WRITER, writer.clone())]);
            let options = PutOptions { mode: PutMode::Create, attributes, ..PutOptions::default() };
            match self.backend.put_opts(name, PutPayload::from(object.clone()), options).await {
                Ok(_) => return Ok(PutOutcome::Stored),
                Err(e) if is_conflict(&e) => {}
                Err(e) => return Err(e.into()),
            }
            match self.writer_of(name).await? {
                // The reply was lost, and the retry found this put's own object.
                Some(there) if there == writer => return Ok(PutOutcome::Stored),
                Some(_) => return Ok(PutOutcome::AlreadyThere),
                // Removed since, or S3 took the removal of an earlier object for a conflict.
                None => {}
            }
        }
        Err("conflicting objects appeared and disappeared in each attempt".into())
    }

    /// The put that wrote the object; empty if unknown, `None` without an object.
    async fn writer_of(&self, name: &Path) -> Result<Option<String>, BucketError> {
        let options = GetOptions { head: true, ..GetOptions::default() };
        match self.backend.get_opts(name, options).await {
            Ok(there) => {
                Ok(Some(there.attributes.get(&WRITER).map_or_else(String::new, |w| w.as_ref().to_owned())))
            }
            Err(e) if is_not_found(&e) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Uploads in parts under a temporary name, then copies to `name`.
    async fn put_in_parts(&self, name: &Path, object: Bytes) -> Result<PutOutcome, BucketError> {
        let own = self.names.upload();
        let mut upload = self.backend.put_multipart(&own).await?;
        if let Err(e) = self.upload(&mut *upload, &object).await {
            if let Err(e) = upload.abort().await {
                tracing::debug!(name = %own, error = %e, "an upload is left to the bucket's lifecycle rule");
            }
            return Err(e);
        }
        let copied = self.backend.copy_if_not_exists(&own, name).await;
        if let Err(e) = self.backend.delete(&own).await {
            tracing::debug!(name = %own, error = %e, "an object on its way is left to expire");
        }
        match copied {
            Ok(()) => Ok(PutOutcome::Stored),
            Err(e) if is_conflict(&e) => Ok(PutOutcome::AlreadyThere),
            Err(e) => Err(e.into()),
        }
    }

    async fn upload(&self, upload: &mut dyn MultipartUpload, object: &Bytes) -> Result<(), BucketError> {
        let part_bytes = self.tuning.part_bytes.max(1);
        // Every part is named before the first is sent; none holds a copy of the bytes.
        let parts: Vec<_> = (0..object.len())
            .step_by(part_bytes)
            .map(|start| object.slice(start..object.len().min(start + part_bytes)))
            .map(|part| upload.put_part(PutPayload::from(part)))
            .collect();
        stream::iter(parts).buffer_unordered(self.tuning.parts_in_flight.max(1)).try_collect::<()>().await?;
        upload.complete().await?;
        Ok(())
    }
}
