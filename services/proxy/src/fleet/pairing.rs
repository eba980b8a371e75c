//! Pairs of encoders and PD workers of other engines ([`super::foreign`]), made again whenever the catalog changes.

use super::catalog::{Catalog, Known, Served};
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

/// Pairs the workers of other engines with the encoders that are known.
pub fn pair(catalog: &mut Catalog) {
    let encoders: Vec<Known> =
        catalog.workers.iter().filter(|known| known.role == Role::Encoder).cloned().collect();
    for served in catalog.workers.iter_mut().flat_map(|known| &mut known.models) {
        let announced = announced(&encoders, served);
        if let Some(foreign) = &mut served.foreign {
            served.edition = foreign.pair(&announced);
        }
    }
}

/// Encoders under the name of a model, by kind of item. One that reads text beside an item is for workers of ours, and so are
/// towers that read the same item.
fn announced(encoders: &[Known], served: &Served) -> BTreeMap<Modality, BTreeSet<Announced>> {
    let mut found: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    let models = encoders.iter().flat_map(|known| &known.models);
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
                encoder: Some(*fingerprint).filter(|encoder| foreign.own().get(id) != Some(encoder)),
                has_bytes: foreign.reads_bytes(id.modality),
            }));
        }
    }
    found
}

#[cfg(test)]
mod tests;
