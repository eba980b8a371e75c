//! Fingerprint of a request: a keyed hash of what it asks for, by which one that workers died of is known again.

use super::work::Work;
use crate::fleet::Origin;
use crate::request_machine::deaths::RequestFingerprint;
use prost::Message;
use std::collections::{BTreeMap, HashMap};
use triptych_core::prompt::Prompt;
use triptych_core::{ContentKey, TenantId};
use triptych_proto::v1;

impl Work {
    /// Fingerprint of the request with this prompt and these items: of model, prompt, items and sampling, not of its id.
    pub(super) fn fingerprint(&self, prompt: &Prompt, items: &[ContentKey]) -> RequestFingerprint {
        let mut hasher = self.orchestrator.fleet.deaths().hasher();
        let mut sampling = self.request.sampling.clone();
        // The order of a hash map is not that of its twin.
        let biases: HashMap<u32, f32> = std::mem::take(&mut sampling.logit_bias);
        let biases: BTreeMap<u32, f32> = biases.into_iter().collect();
        let mut field = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        field(self.route.served.name.as_str().as_bytes());
        field(&v1::Prompt::from(prompt.clone()).encode_to_vec());
        field(&sampling.encode_to_vec());
        items.iter().for_each(|key| field(key.as_bytes()));
        for (token, bias) in biases {
            field(&[token.to_le_bytes(), bias.to_le_bytes()].concat());
        }
        RequestFingerprint::from_bytes(*hasher.finalize().as_bytes())
    }

    /// The request's tenant, as a digest.
    pub(super) fn tenant(&self) -> TenantId {
        TenantId::of(&self.request.tenant_secret(&self.orchestrator.materials.tenant_salt))
    }

    /// The origin of its calls, for the breaker.
    pub(super) fn origin(&self, fingerprint: &RequestFingerprint) -> Origin {
        Origin::new(fingerprint.as_bytes(), self.tenant().as_bytes())
    }
}
