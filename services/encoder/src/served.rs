//! The models that an encoder worker serves, by name, which change while it runs.

use crate::adapters::ServedAdapters;
use crate::batcher::Batcher;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;
use triptych_core::{DType, EncoderId, Fingerprint};
use triptych_models::ModelSource;
use triptych_models::preprocess::Preprocess;
use triptych_runtime::model_table::ModelTable;

/// A model that this worker serves.
pub struct ServedEncoder {
    /// Hugging Face's `model_type`.
    pub family: String,
    /// Its directory.
    pub source: ModelSource,
    /// Its encoders that are here.
    pub encoders: BTreeMap<EncoderId, ServedTower>,
    /// Names of all towers that read an item, with those that are not here.
    pub tower_names: Vec<&'static str>,
    /// Element type of its published rows.
    pub dtype: DType,
    /// Adapters of the encoder.
    pub adapters: ServedAdapters,
    /// Load time.
    pub created: SystemTime,
}

/// An encoder, or one of the towers that read the same item.
#[derive(Clone)]
pub struct ServedTower {
    /// Its identity.
    pub fingerprint: Fingerprint,
    /// Its thread.
    pub batcher: Batcher,
    /// Preprocessor.
    pub preprocess: Arc<dyn Preprocess>,
}

impl ServedEncoder {
    /// True if several towers read an item, here or elsewhere.
    pub fn has_towers(&self) -> bool {
        self.tower_names.len() > 1
    }

    /// Name of a tower; empty: there are no others.
    pub fn tower_name(&self, id: EncoderId) -> &'static str {
        self.tower_names.get(usize::from(id.tower.0)).copied().unwrap_or_default()
    }
}

/// Models by served name.
pub type ServedEncoders = ModelTable<ServedEncoder>;
