//! The adapters of a decoder, and the rows of a step that have one.

use crate::decoder::{StepInput, no_adapter};
use crate::error::ModelError;
use crate::layers::{AdapterGroup, LinearSite, LoadedAdapter};
use crate::lora::LoraAdapter;
use std::collections::HashMap;
use triptych_core::AdapterId;
use triptych_kernels::ops::{Indices, StageBuilder};
use triptych_kernels::{Backend, KernelError};

/// The loaded adapters, by their identity.
pub(super) struct Adapters<B: Backend> {
    sites: Vec<LinearSite>,
    loaded: HashMap<AdapterId, LoadedAdapter<B>>,
}

/// Rows of a step by their adapters.
#[derive(Default)]
pub(super) struct StagedAdapters(Vec<(AdapterId, Indices)>);

/// The refusal of adapters for a decoder whose layers, or some of their weights, some rows skip.
pub(super) fn refused() -> ModelError {
    ModelError::Config {
        file: "config.json",
        key: "model_type".into(),
        actual: "a decoder with layers, or a visual expert, that some tokens skip".into(),
        expected: "a decoder of which every token goes through all weights, for LoRA adapters".into(),
    }
}

impl StagedAdapters {
    /// Adds the rows of a checked step.
    pub fn stage(builder: &mut StageBuilder, step: &StepInput<'_>) -> Result<Self, KernelError> {
        let staged = step.adapters.iter().map(|group| Ok((group.adapter, builder.indices(group.rows)?)));
        staged.collect::<Result<_, _>>().map(Self)
    }
}

impl<B: Backend> Adapters<B> {
    /// No adapters, for layers that were loaded.
    pub fn new(sites: Vec<LinearSite>) -> Self {
        Self { sites, loaded: HashMap::new() }
    }

    /// Loads an adapter, unless it is loaded.
    pub fn load(&mut self, backend: &B, adapter: &LoraAdapter) -> Result<(), ModelError> {
        if !self.loaded.contains_key(&adapter.id()) {
            let loaded = adapter.load(backend, &self.sites)?;
            self.loaded.insert(adapter.id(), loaded);
        }
        Ok(())
    }

    /// Drops an adapter.
    pub fn unload(&mut self, id: AdapterId) {
        self.loaded.remove(&id);
    }

    /// The groups of a step.
    pub fn groups(&self, staged: &StagedAdapters) -> Result<Vec<AdapterGroup<'_, B>>, ModelError> {
        let group = |(id, rows): &(AdapterId, Indices)| self.group(*id, Some(*rows));
        staged.0.iter().map(group).collect()
    }

    /// All rows as one group, or none.
    pub fn of_all(&self, id: Option<AdapterId>) -> Result<Vec<AdapterGroup<'_, B>>, ModelError> {
        id.into_iter().map(|id| self.group(id, None)).collect()
    }

    fn group(&self, id: AdapterId, rows: Option<Indices>) -> Result<AdapterGroup<'_, B>, ModelError> {
        let adapter = self.loaded.get(&id).ok_or_else(|| no_adapter(id))?;
        Ok(AdapterGroup { rows, adapter })
    }
}
