//! The adapters of a stage on a back end, by their identity.

use super::LoraAdapter;
use crate::error::ModelError;
use crate::layers::{AdapterGroup, LinearSite, LoadedAdapter};
use std::collections::HashMap;
use triptych_core::AdapterId;
use triptych_kernels::ops::Indices;
use triptych_kernels::{Backend, KernelError};

/// The loaded adapters of a stage, and the layers that they are added to.
pub(crate) struct Adapters<B: Backend> {
    sites: Vec<LinearSite>,
    loaded: HashMap<AdapterId, LoadedAdapter<B>>,
}

/// The refusal of an adapter that is not loaded.
pub(crate) fn no_adapter(id: AdapterId) -> ModelError {
    KernelError::Library { op: "adapter", message: format!("{id} is not loaded") }.into()
}

impl<B: Backend> Adapters<B> {
    /// No adapters, for layers that were loaded.
    pub fn new(sites: Vec<LinearSite>) -> Self {
        Self { sites, loaded: HashMap::new() }
    }

    /// The layers that adapters can be added to.
    pub fn sites(&self) -> &[LinearSite] {
        &self.sites
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

    /// All rows as one group, or none.
    pub fn of_all(&self, id: Option<AdapterId>) -> Result<Vec<AdapterGroup<'_, B>>, ModelError> {
        id.into_iter().map(|id| self.group(id, None)).collect()
    }

    /// Rows of an adapter; `None`: all.
    pub fn group(&self, id: AdapterId, rows: Option<Indices>) -> Result<AdapterGroup<'_, B>, ModelError> {
        let adapter = self.loaded.get(&id).ok_or_else(|| no_adapter(id))?;
        Ok(AdapterGroup { rows, adapter })
    }
}
