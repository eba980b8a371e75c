//! The encoders whose outputs a model takes: those with its fingerprints, and vLLM's with the same towers.

use crate::adapters::ServedAdapter;
use std::collections::BTreeMap;
use triptych_core::{EncodedItem, EncoderId, Fingerprint, Modality, Tower, TowerIdx};
use triptych_models::{Model, ModelError};
use triptych_proto::v1;

/// The encoders of a model, by kind of item and tower.
#[derive(Clone, Debug)]
pub struct AcceptedEncoders {
    fingerprints: BTreeMap<EncoderId, Fingerprint>,
    /// Names of the towers that read an item; one without a name where there are no others.
    names: Vec<&'static str>,
    /// Towers whose outputs are taken from vLLM too.
    towers: BTreeMap<Modality, Tower>,
}

impl AcceptedEncoders {
    /// Those of a model, whose encoders of ours have a fingerprint each.
    ///
    /// # Errors
    /// As [`Model::fingerprint_in`].
    pub fn of(
        model: &Model,
        fingerprint: impl Fn(EncoderId) -> Result<Fingerprint, ModelError>,
    ) -> Result<Self, ModelError> {
        let (mut fingerprints, mut towers) = (BTreeMap::new(), BTreeMap::new());
        for (id, _) in model.encoders() {
            fingerprints.insert(id, fingerprint(id)?);
        }
        for &modality in model.modalities() {
            towers.extend(model.tower(modality)?.map(|tower| (modality, tower)));
        }
        let names = model.towers().map(|(_, name)| name).collect();
        Ok(Self { fingerprints, names, towers })
    }

    /// Those of an adapter, if there is one. The towers of vLLM are without adapters.
    #[must_use]
    pub fn with(&self, adapter: Option<&ServedAdapter>) -> Self {
        let Some(adapter) = adapter else { return self.clone() };
        let towers = if adapter.encoder_part.is_some() { BTreeMap::new() } else { self.towers.clone() };
        Self { fingerprints: adapter.encoders(&self.fingerprints), names: self.names.clone(), towers }
    }

    /// The kinds of items.
    pub fn modalities(&self) -> impl Iterator<Item = &Modality> {
        let firsts = self.fingerprints.keys().filter(|id| id.tower == TowerIdx::default());
        firsts.map(|id| &id.modality)
    }

    /// Outputs of an item: one for each tower that reads it.
    pub fn n_towers(&self) -> usize {
        self.names.len().max(1)
    }

    /// True if an output of a tower is of one of them.
    pub fn accepts(&self, item: &EncodedItem, tower: TowerIdx) -> bool {
        let EncodedItem { modality, fingerprint, .. } = item;
        self.fingerprints.get(&EncoderId { modality: *modality, tower }) == Some(fingerprint)
            || self.towers.get(modality).is_some_and(|tower| tower.is_of_vllm(*modality, fingerprint))
    }

    /// Their description to the proxy.
    pub fn announced(&self, takes_prompt: bool) -> Vec<v1::worker_model::Encoder> {
        let encoder = |(id, fingerprint): (&EncoderId, &Fingerprint)| v1::worker_model::Encoder {
            modality: v1::Modality::from(id.modality).into(),
            fingerprint: fingerprint.as_bytes().to_vec().into(),
            takes_prompt,
            tower: self.towers.get(&id.modality).map(Into::into),
            tower_index: id.tower.0.into(),
            tower_name: self.names.get(usize::from(id.tower.0)).copied().unwrap_or_default().into(),
        };
        self.fingerprints.iter().map(encoder).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;
    use triptych_core::{AdapterId, ContentKey, DType, Extent};

    fn item(modality: Modality, fingerprint: Fingerprint) -> EncodedItem {
        let key = ContentKey::from_bytes([1; 32]);
        let extent = Extent::Grid { t: 1, h: 2, w: 2 };
        EncodedItem {
            key,
            fingerprint,
            modality,
            n_tokens: 1,
            hidden: 8,
            dtype: DType::F32,
            extent,
            checksum: [0; 32],
        }
    }

    #[test]
    fn outputs_of_vllm_are_taken_from_the_same_tower_without_an_adapter_alone() {
        let digest = |n| Fingerprint::from_bytes([n; 32]);
        let tower = Tower { configuration: digest(1), processor: digest(2), weights: digest(3) };
        let fingerprints =
            BTreeMap::from([(Modality::Image.into(), digest(7)), (Modality::Video.into(), digest(8))]);
        let accepted =
            AcceptedEncoders { fingerprints, names: vec![""], towers: [(Modality::Image, tower)].into() };
        let first = TowerIdx::default();
        let of_vllm = tower.rows_of_vllm(Modality::Image, DType::Bf16);
        let other = Tower { weights: digest(4), ..tower }.rows_of_vllm(Modality::Image, DType::Bf16);
        for (modality, fingerprint, expect) in [
            (Modality::Image, digest(7), true),
            (Modality::Image, digest(8), false),
            (Modality::Image, of_vllm, true),
            (Modality::Video, of_vllm, false),
            (Modality::Image, other, false),
            (Modality::Audio, digest(7), false),
        ] {
            assert_eq!(
                accepted.accepts(&item(modality, fingerprint), first),
                expect,
                "{modality} {fingerprint}"
            );
        }
        let adapter = |encoder_part| ServedAdapter {
            id: AdapterId::from_bytes([1; 32]),
            encoder_part,
            created: SystemTime::UNIX_EPOCH,
        };
        let of_decoder = accepted.with(Some(&adapter(None)));
        let of_both = accepted.with(Some(&adapter(Some(AdapterId::from_bytes([2; 32])))));
        let vllm = item(Modality::Image, of_vllm);
        assert!(of_decoder.accepts(&vllm, first) && !of_both.accepts(&vllm, first));
        let told = |accepted: &AcceptedEncoders| {
            accepted.announced(false).iter().map(|e| e.tower.is_some()).collect::<Vec<_>>()
        };
        assert_eq!((told(&accepted), told(&of_both)), (vec![true, false], vec![false, false]));
    }
}
