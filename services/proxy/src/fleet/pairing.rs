//! Pairs of encoders and PD workers of different engines, made again whenever the catalog changes.
//!
//! A PD worker of another engine reads the one encoder of its model ([`super::foreign`]). A PD worker of ours reads what its own
//! encoders made; where there are none, what vLLM's made with the same tower.

use super::catalog::{Catalog, Edition, Known, Served};
use super::foreign::Announced;
use std::collections::{BTreeMap, BTreeSet};
use triptych_core::{EncoderId, Fingerprint, Modality, ModelName, WorkerId};
use triptych_runtime::discovery::Role;

/// A worker of another engine and the encoder of a kind of its items.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pairing {
    /// The worker.
    pub worker: WorkerId,
    /// Its model.
    pub model: ModelName,
    /// Kind of the items.
    pub modality: Modality,
    /// The encoder; `None`: the worker itself.
    pub encoder: Option<Fingerprint>,
    /// True if items go to the worker with their bytes.
    pub has_bytes: bool,
}

/// Pairs PD workers with the encoders that are known.
pub fn pair(catalog: &mut Catalog) {
    let encoders: Vec<Known> = catalog.workers.iter().filter(|known| known.is_encoder()).cloned().collect();
    let pds = catalog.workers.iter_mut().filter(|known| known.role == Role::Pd);
    for served in pds.flat_map(|known| &mut known.models) {
        let announced = announced(&encoders, served);
        let of_vllm = vllm_edition(&encoders, served);
        served.edition = match &mut served.foreign {
            Some(foreign) => foreign.pair(&served.own, &announced),
            None => of_vllm,
        };
    }
}

/// The encoders of a PD worker of ours. Once it is paired with one of vLLM's, it reads no items that nobody encodes: vLLM's publish
/// some kinds alone, and the model would never be ready.
fn vllm_edition(encoders: &[Known], served: &Served) -> Edition {
    let models = || {
        let models = encoders.iter().flat_map(|known| &known.models);
        models.filter(|model| model.foreign.is_none() && model.name == *served.encoder_model())
    };
    let is_known = |id: &EncoderId, fingerprint: &Fingerprint| {
        models().any(|model| model.own.get(id) == Some(fingerprint))
    };
    let paired = |(id, own): (&EncoderId, &Fingerprint)| {
        if is_known(id, own) {
            return None;
        }
        let tower = served.towers.get(&id.modality)?;
        let with_it = models().filter(|model| model.towers.get(&id.modality) == Some(tower));
        let of_vllm = with_it.filter_map(|model| model.own.get(id));
        of_vllm.filter(|fingerprint| tower.is_of_vllm(id.modality, fingerprint)).min().copied()
    };
    let paired: Edition = served.own.iter().filter_map(|own| Some((*own.0, paired(own)?))).collect();
    let mut edition = served.own.clone();
    if !paired.is_empty() {
        edition.retain(|id, own| is_known(id, own));
        edition.extend(paired);
    }
    edition
}

/// Encoders under the name of a model, by kind of item. One that reads text beside an item is for workers of ours, and so are
/// towers that read the same item.
fn announced(encoders: &[Known], served: &Served) -> BTreeMap<Modality, BTreeSet<Announced>> {
    let mut found: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    let workers = encoders.iter().filter(|known| known.role == Role::Encoder);
    let models = workers.flat_map(|known| &known.models);
    for model in models.filter(|model| model.name == *served.encoder_model()) {
        for (id, fingerprint) in &model.edition {
            let EncoderId { modality, .. } = id;
            let is_alone = !model.tower_names.contains_key(id);
            if is_alone && *modality != Modality::Text && !model.prompted.contains(modality) {
                found.entry(*modality).or_default().insert((*fingerprint, model.family.clone()));
            }
        }
    }
    found
}

/// All pairs.
pub fn pairings(catalog: &Catalog) -> BTreeSet<Pairing> {
    let mut found = BTreeSet::new();
    for known in &catalog.workers {
        for served in &known.models {
            let Some(foreign) = &served.foreign else { continue };
            found.extend(served.edition.iter().map(|(id, fingerprint)| Pairing {
                worker: known.id.clone(),
                model: served.name.clone(),
                modality: id.modality,
                encoder: Some(*fingerprint).filter(|encoder| served.own.get(id) != Some(encoder)),
                has_bytes: foreign.reads_bytes(id.modality),
            }));
        }
    }
    found
}

#[cfg(test)]
mod tests;
