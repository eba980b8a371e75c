//! Encoders from their directories to threads of their own. Loading blocks: the caller gives it a thread.

use crate::adapters::ServedAdapters;
use crate::batcher::{Batcher, BatcherConfig};
use crate::bound::{BoundedEncoder, Forecast};
use crate::error::EncoderError;
use crate::meters::{EncoderLabels, EncoderMeters};
use crate::served::{ServedEncoder, ServedTower};
use crate::slot::{EncoderSlot, LazyEncoder, LoadEncoder};
use crate::towers::TowerChoice;
use crate::warm::warm_up;
use crate::weights::{LazyRules, LazyWeights, WeightsPolicy};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;
use triptych_core::{DType, EncoderId, Fingerprint, RowTypes, TowerIdx};
use triptych_models::compute::{Compute, ComputeConfig, Precision};
use triptych_models::encoder::{Encoder, EncoderGraphConfig};
use triptych_models::lora::{EncoderModules, LoraAdapter, LoraSettings, StageAdapters};
use triptych_models::model::{EncoderInventory, MemoryForecast};
use triptych_models::{Model, ModelError, ModelSource};

/// A model with loaded weights, before its threads are started.
pub struct LoadedModel {
    source: ModelSource,
    model: Model,
    /// The towers that are held here; one, where no others read the same items.
    towers: Vec<LoadedTower>,
    dtype: DType,
    /// Layers that adapters may be of.
    modules: EncoderModules,
    /// Adapters of the start, by name.
    adapters: Vec<(String, StageAdapters)>,
}

/// A tower, with its weights or the means to load them.
struct LoadedTower {
    /// Its name; empty: there are no others.
    name: &'static str,
    /// Its identity for each kind of items.
    fingerprints: Vec<(EncoderId, Fingerprint)>,
    weights: TowerWeights,
    /// Forecast of its forwards, if they are to be foretold.
    forecast: Option<Forecast>,
}

/// Weights of a tower.
enum TowerWeights {
    Loaded(Box<dyn Encoder>),
    Lazy(LazyTower),
}

/// A tower whose weights come and go.
struct LazyTower {
    rules: LazyRules,
    load: LoadEncoder,
    /// Width of its rows.
    hidden: usize,
    /// Bytes of its weights and of a forward's activations.
    n_bytes: u64,
}

/// Treatment of a model that has no encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WithoutEncoder {
    /// An error: an encoder worker has nothing to do for it.
    Refused,
    /// Left to the engine beside the encoders.
    LeftOut,
}

/// Settings of loading.
#[derive(Clone)]
pub struct LoadSettings {
    /// Computation.
    pub compute: ComputeConfig,
    /// Element types of published rows.
    pub dtype: RowTypes,
    /// Forwards that a GPU captures as graphs; `None`: none.
    pub graphs: Option<EncoderGraphConfig>,
    /// Treatment of models without an encoder.
    pub without: WithoutEncoder,
    /// Adapters, and limits on them.
    pub lora: LoraSettings,
    /// Towers to hold, of models in which several read the same item.
    pub towers: TowerChoice,
    /// True if what forwards take is to be foretold.
    pub is_bounded: bool,
    /// Presence of weights.
    pub weights: WeightsPolicy,
}

impl LoadSettings {
    /// The same for models that are loaded while others are served: adapters are those that name theirs.
    #[must_use]
    pub fn of_named_models(mut self) -> Self {
        self.lora.adapters.retain(|adapter| adapter.model.is_some());
        self
    }

    /// Loads models.
    ///
    /// # Errors
    /// [`EncoderError`] for the first that cannot be served.
    pub fn load_all(&self, sources: &[ModelSource]) -> Result<Vec<LoadedModel>, EncoderError> {
        let failed = |source: &ModelSource| {
            let dir = source.dir.display().to_string();
            move |source| EncoderError::Model { dir, source }
        };
        let mut loaded = Vec::new();
        for source in sources {
            let Some(model) = self.load(source).map_err(failed(source))? else { continue };
            loaded.push(self.with_adapters(model)?);
        }
        Ok(loaded)
    }

    /// `None` for a model without an encoder that is left out.
    fn load(&self, source: &ModelSource) -> Result<Option<LoadedModel>, ModelError> {
        let compute = Compute::new(self.compute)?;
        let model = Model::open(source)?;
        if model.modalities().is_empty() {
            return match self.without {
                WithoutEncoder::LeftOut => Ok(None),
                WithoutEncoder::Refused => Err(no_encoder(&model, source)),
            };
        }
        let dtype = self.dtype.of(model.name().as_str());
        // Looks at all tensors, so that what cannot be loaded later is refused here.
        let inventory = match self.weights {
            WeightsPolicy::Eager => None,
            WeightsPolicy::Lazy(_) => model.inventory()?.encoder,
        };
        let mut towers = Vec::new();
        for (tower, name) in self.towers.of(&model)? {
            let ids = model.encoders().filter(|(id, _)| id.tower == tower);
            let fingerprint = |(id, _)| Ok((id, model.fingerprint_in(id, dtype, compute.precision())?));
            let fingerprints = ids.map(fingerprint).collect::<Result<Vec<_>, ModelError>>()?;
            let Some((id, fingerprint)) = fingerprints.first().copied() else { continue };
            let weights = match (&self.weights, &inventory) {
                (WeightsPolicy::Lazy(rules), Some(inventory)) => {
                    let (hidden, n_bytes) = sizes(inventory, tower, compute.precision());
                    let load = self.load_later(source.clone(), id, (dtype, fingerprint));
                    TowerWeights::Lazy(LazyTower { rules: rules.clone(), load, hidden, n_bytes })
                }
                _ => TowerWeights::Loaded(self.load_warm_tower(&model, &compute, id)?),
            };
            let forecast = self.forecast(&model, tower, compute.precision())?;
            towers.push(LoadedTower { name, fingerprints, weights, forecast });
        }
        let modules = if self.lora.is_used() { model.encoder_modules()? } else { EncoderModules::default() };
        let source = source.clone();
        Ok(Some(LoadedModel { source, model, towers, dtype, modules, adapters: Vec::new() }))
    }

    /// Forecast of a tower's forwards, if they are to be foretold.
    fn forecast(
        &self,
        model: &Model,
        tower: TowerIdx,
        precision: Precision,
    ) -> Result<Option<Forecast>, ModelError> {
        let foretold = self.is_bounded.then(|| model.memory_forecast(tower, precision)).transpose()?;
        let boxed =
            |mut memory: MemoryForecast| -> Forecast { Box::new(move |input| memory.item_bytes(input)) };
        Ok(foretold.flatten().map(boxed))
    }

    /// Loads an encoder.
    fn load_tower(
        &self,
        model: &Model,
        compute: &Compute,
        id: EncoderId,
    ) -> Result<Box<dyn Encoder>, ModelError> {
        let mut encoder = compute.load_encoder(model, id)?;
        if let Some(graphs) = &self.graphs {
            encoder.use_graphs(graphs);
        }
        Ok(encoder)
    }

    /// Loads an encoder and lets it run once.
    fn load_warm_tower(
        &self,
        model: &Model,
        compute: &Compute,
        id: EncoderId,
    ) -> Result<Box<dyn Encoder>, ModelError> {
        let mut encoder = self.load_tower(model, compute, id)?;
        if let Some((_, processor)) = model.encoders().find(|(known, _)| *known == id) {
            warm_up(&mut *encoder, &**processor, id.modality);
        }
        Ok(encoder)
    }

    /// The load of an encoder while the worker serves. Files that changed meanwhile are another encoder's, and refused: its rows
    /// would have the keys of this one's. The first forward is that of the job that waits.
    fn load_later(
        &self,
        source: ModelSource,
        id: EncoderId,
        (dtype, fingerprint): (DType, Fingerprint),
    ) -> LoadEncoder {
        let settings = self.clone();
        Box::new(move || {
            let compute = Compute::new(settings.compute)?;
            let model = Model::open(&source)?;
            let found = model.fingerprint_in(id, dtype, compute.precision())?;
            if found != fingerprint {
                return Err(changed(&source, found, fingerprint));
            }
            settings.load_tower(&model, &compute, id)
        })
    }

    /// Opens the adapters of a model.
    fn with_adapters(&self, mut model: LoadedModel) -> Result<LoadedModel, EncoderError> {
        let name = model.model.name().clone();
        for source in self.lora.adapters.iter().filter(|source| source.is_of(name.as_str())) {
            let adapter = LoraAdapter::open(&source.dir, self.lora.max_rank)
                .map_err(|error| EncoderError::Adapter { name: source.name.clone(), source: error })?;
            model.adapters.push((source.name.clone(), model.modules.split(adapter)));
        }
        Ok(model)
    }
}

/// Width of a tower's rows, and bytes of its weights with a forward's activations.
fn sizes(inventory: &EncoderInventory, tower: TowerIdx, precision: Precision) -> (usize, u64) {
    let own = inventory.towers.get(usize::from(tower.0));
    let (row, stage) = own.map_or((inventory.row, &inventory.stage), |own| (own.row, &own.stage));
    let n_bytes =
        stage.loaded.in_precision(precision).saturating_add(inventory.activations.in_precision(precision));
    (row.f32 / size_of::<f32>(), u64::try_from(n_bytes).unwrap_or(u64::MAX))
}

fn changed(source: &ModelSource, found: Fingerprint, expected: Fingerprint) -> ModelError {
    ModelError::Checkpoint {
        path: source.dir.clone(),
        found: format!("is encoder {found} by now, the worker serves {expected}"),
        cure: "put the files of the start back, or restart the worker".into(),
    }
}

fn no_encoder(model: &Model, source: &ModelSource) -> ModelError {
    ModelError::Checkpoint {
        path: source.dir.clone(),
        found: format!(
            "has no encoder: a model of type {} reads the text of its prompt alone",
            model.family()
        ),
        cure: "serve it with PD workers, and leave it out of the encoder workers' --model".into(),
    }
}

impl TowerWeights {
    fn slot(self, labels: EncoderLabels, meters: &Arc<EncoderMeters>) -> EncoderSlot {
        match self {
            Self::Loaded(encoder) => {
                meters.weights_present(&labels);
                EncoderSlot::Held(encoder)
            }
            Self::Lazy(LazyTower { rules, load, hidden, n_bytes }) => {
                let weights = Arc::new(LazyWeights::new(rules, n_bytes, labels, Arc::clone(meters)));
                EncoderSlot::Lazy(LazyEncoder { hidden, load, weights, encoder: None })
            }
        }
    }
}

impl LoadedModel {
    /// Starts a thread for each tower; returns the model with its name.
    ///
    /// # Errors
    /// [`EncoderError`] for an adapter that cannot be loaded.
    pub async fn start(
        self,
        batcher: &BatcherConfig,
        meters: &Arc<EncoderMeters>,
    ) -> Result<(String, ServedEncoder), EncoderError> {
        let name = self.model.name().to_string();
        let mut encoders = BTreeMap::new();
        for LoadedTower { name: tower, fingerprints, weights, forecast } in self.towers {
            let kinds = fingerprints.iter().map(|(id, _)| id.modality.as_str());
            let kinds: Vec<&str> = kinds.chain(Some(tower).filter(|tower| !tower.is_empty())).collect();
            let labels = EncoderLabels { model: name.clone(), encoder: kinds.join("-") };
            let label = format!("{name}-{}", labels.encoder);
            let encoder = BoundedEncoder { slot: weights.slot(labels, meters), forecast };
            let batcher = Batcher::spawn(label, encoder, batcher.clone(), meters.clone());
            for (id, fingerprint) in fingerprints {
                let Some((_, preprocess)) = self.model.encoders().find(|(known, _)| *known == id) else {
                    continue;
                };
                let preprocess = Arc::clone(preprocess);
                encoders.insert(id, ServedTower { fingerprint, batcher: batcher.clone(), preprocess });
            }
        }
        let served = ServedEncoder {
            source: self.source,
            family: self.model.family().to_owned(),
            tower_names: self.model.towers().map(|(_, name)| name).collect(),
            encoders,
            dtype: self.dtype,
            adapters: ServedAdapters::new(self.modules),
            created: SystemTime::now(),
        };
        for (adapter, parts) in self.adapters {
            let loaded = served.load_adapter(&adapter, parts).await;
            loaded.map_err(|failure| EncoderError::AdapterOfEncoder {
                name: adapter,
                message: failure.message,
            })?;
        }
        Ok((name, served))
    }
}

#[cfg(test)]
mod tests;
