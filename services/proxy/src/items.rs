//! The items of a request as encoder jobs: their bytes, and the content keys of those. An item has a job for each tower that
//! reads it, as a rule one.

pub mod byte_budget;
pub mod preparing;

use crate::encode::job::EncodeJob;
use crate::fetch::Fetcher;
use crate::fleet::catalog::Route;
use crate::request::{Item, OutputName, Request, Source, check_len, param_of_item};
use crate::request_machine::failures::not_stored;
use crate::request_machine::output::Wanted;
use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use byte_budget::ByteBudget;
use bytes::Bytes;
use preparing::Preparing;
use std::sync::Arc;
use triptych_core::key::KeyParts;
use triptych_core::limits::Limits;
use triptych_core::{
    ContentKey, EncoderId, Failure, Fingerprint, ItemIdx, ItemOptions, Modality, TowerIdx, embeddings,
};

/// Above this many bytes, decoding and hashing leave the threads that serve connections.
const INLINE_BYTES: usize = 64 << 10;

/// Base64 as clients write it, with or without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Turns the items of a request into encoder jobs: fetches, decodes and hashes them, all at once.
pub struct Materials {
    /// Fetches URLs.
    pub fetcher: Fetcher,
    /// Limits of items.
    pub limits: Limits,
    /// Secret in every key.
    pub tenant_salt: Arc<[u8]>,
    /// Threads that decode and hash large items.
    pub preparing: Preparing,
}

impl Materials {
    /// The jobs, in the order of the items, and of each in the order of its towers.
    ///
    /// # Errors
    /// [`Failure`] of the first item that cannot be had, which it names as `items[i]`.
    pub async fn jobs(&self, request: &Request, route: &Route) -> Result<Vec<EncodeJob>, Failure> {
        // URLs multiply: a small body may name much. What they bring together stays within a body.
        let budget = ByteBudget::new(self.limits.max_body_bytes);
        let jobs = request.items.iter().enumerate().map(|(i, item)| {
            let (budget, idx) = (&budget, ItemIdx(i as u32));
            async move {
                let jobs = self.jobs_of(request, route, (idx, item), budget).await;
                jobs.map_err(|f| f.with_param(param_of_item(idx)))
            }
        });
        Ok(futures::future::try_join_all(jobs).await?.into_iter().flatten().collect())
    }

    async fn jobs_of(
        &self,
        request: &Request,
        route: &Route,
        (idx, item): (ItemIdx, &Item),
        budget: &ByteBudget,
    ) -> Result<Vec<EncodeJob>, Failure> {
        let modality = item.modality;
        let towers: Vec<_> = route.towers(modality).collect();
        if towers.is_empty() {
            let name = &route.served.name;
            return Err(Failure::internal(format!("model {name:?} was chosen for {modality}")));
        }
        let source = match &item.source {
            Source::Output(name) => return self.stored(request, route, (idx, name), &towers),
            Source::Url(url) => {
                let bytes = self.fetcher.fetch(url, modality, budget).await?;
                request.caller.hold_bytes(bytes.len())?;
                Source::Bytes(bytes)
            }
            other => other.clone(),
        };
        request.caller.account.take_items(source.declared_len().unwrap_or(0)).await?;
        let (limits, salt) = (self.limits.clone(), request.tenant_secret(&self.tenant_salt));
        let canonical = item.options.canonical();
        let prepare = move || {
            let bytes = decode(source)?;
            check_len(bytes.len(), &limits)?;
            // A tower is in the key by its fingerprint.
            let wanted = towers.into_iter().map(|(tower, fingerprint)| {
                let parts = KeyParts {
                    tenant_salt: &salt,
                    fingerprint: &fingerprint,
                    modality,
                    options: &canonical,
                    item: &bytes,
                };
                Wanted { key: ContentKey::of(parts), fingerprint, modality, tower }
            });
            Ok::<_, Failure>((wanted.collect::<Vec<_>>(), bytes))
        };
        let len = match &item.source {
            Source::Bytes(bytes) | Source::Base64(bytes) | Source::Base64Frames(bytes) => bytes.len(),
            Source::Embeddings { rows, grid } => rows.len() + grid.len(),
            Source::Url(_) | Source::Output(_) => usize::MAX,
        };
        let (wanted, bytes) =
            if len > INLINE_BYTES { self.preparing.run(prepare).await?? } else { prepare()? };
        let job = |wanted| EncodeJob {
            bytes: bytes.clone(),
            options: item.options.clone(),
            is_stored: false,
            ..stored_job(request, route, idx, wanted)
        };
        Ok(wanted.into_iter().map(job).collect())
    }

    /// The jobs of an item whose outputs must be in the store. One of another tenant is as if it were not there.
    fn stored(
        &self,
        request: &Request,
        route: &Route,
        (idx, name): (ItemIdx, &OutputName),
        towers: &[(TowerIdx, Fingerprint)],
    ) -> Result<Vec<EncodeJob>, Failure> {
        let is_of_model = name.keys().len() == towers.len();
        if !is_of_model || !name.is_of(&request.tenant_secret(&self.tenant_salt)) {
            return Err(not_stored());
        }
        let modality: Modality = name.modality;
        let job = |(key, (tower, fingerprint)): (&ContentKey, &(TowerIdx, Fingerprint))| {
            let wanted = Wanted { key: *key, fingerprint: *fingerprint, modality, tower: *tower };
            stored_job(request, route, idx, wanted)
        };
        Ok(name.keys().iter().zip(towers).map(job).collect())
    }

    /// The same item with other options.
    ///
    /// # Errors
    /// Internal, if hashing fails.
    pub async fn with_options(
        &self,
        request: &Request,
        job: &EncodeJob,
        options: ItemOptions,
    ) -> Result<EncodeJob, Failure> {
        let (salt, canonical) = (request.tenant_secret(&self.tenant_salt), options.canonical());
        let (wanted, bytes) = (job.wanted, job.bytes.clone());
        let hash = move || {
            ContentKey::of(KeyParts {
                tenant_salt: &salt,
                fingerprint: &wanted.fingerprint,
                modality: wanted.modality,
                options: &canonical,
                item: &bytes,
            })
        };
        let key = self.preparing.run(hash).await?;
        Ok(EncodeJob { wanted: Wanted { key, ..job.wanted }, options, ..job.clone() })
    }
}

/// The job of an output that is in the store, or nowhere.
fn stored_job(request: &Request, route: &Route, item: ItemIdx, wanted: Wanted) -> EncodeJob {
    let encoder: EncoderId = wanted.encoder();
    EncodeJob {
        request_id: request.id,
        model: route.served.encoder_model().clone(),
        item,
        wanted,
        tower_name: route.tower_name(encoder).into(),
        bytes: Bytes::new(),
        options: ItemOptions::default(),
        deadline: request.deadline,
        priority: request.priority,
        account: Arc::clone(&request.caller.account),
        placement: None,
        is_stored: true,
    }
}

fn decode(source: Source) -> Result<Bytes, Failure> {
    match source {
        Source::Bytes(bytes) => Ok(bytes),
        Source::Base64(text) => {
            let decoded = BASE64.decode(&text);
            decoded.map(Bytes::from).map_err(|e| Failure::invalid(format!("the data is not base64: {e}")))
        }
        Source::Base64Frames(text) => {
            let mut all = Vec::with_capacity(text.len() / 4 * 3);
            for (i, frame) in text.split(|byte| *byte == b',').enumerate() {
                let decoded = BASE64.decode_vec(frame, &mut all);
                decoded.map_err(|e| Failure::invalid(format!("frame {i} of the data is not base64: {e}")))?;
            }
            Ok(all.into())
        }
        Source::Embeddings { rows, grid } => {
            let file = |text: &Bytes, name: &str| {
                let decoded = BASE64.decode(text);
                decoded.map_err(|e| Failure::invalid(format!("{name} is not base64: {e}")))
            };
            let (rows, grid) = (file(&rows, "image_embeds")?, file(&grid, "image_grid_thw")?);
            Ok(embeddings::join(&rows, &grid).into())
        }
        Source::Url(_) | Source::Output(_) => Err(Failure::internal("an item whose bytes are elsewhere")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_decodes_with_and_without_padding() {
        let decoded = |text: &str| decode(Source::Base64(Bytes::copy_from_slice(text.as_bytes())));
        assert_eq!(decoded("aGk=").unwrap(), "hi");
        assert_eq!(decoded("aGk").unwrap(), "hi");
        for bad in ["a", "aGk*", "a b c d"] {
            assert!(decoded(bad).unwrap_err().message.contains("not base64"), "{bad}");
        }
    }

    #[test]
    fn frames_are_decoded_one_by_one_and_stand_one_after_another() {
        let decoded = |text: &'static str| decode(Source::Base64Frames(Bytes::from_static(text.as_bytes())));
        assert_eq!(decoded("aGk=,aG8,aGE=").unwrap(), "hihoha");
        assert_eq!(decoded("aGk=").unwrap(), "hi");
        assert!(decoded("aGk=,*").unwrap_err().message.contains("frame 1 of the data is not base64"));
    }
}
