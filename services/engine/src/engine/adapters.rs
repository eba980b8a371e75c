//! Adapters that come and go while the engine runs. One that is to go stays until no sequence, alignment or step under way
//! needs it; new requests for it are refused from the first moment.

use super::Engine;
use super::adapter_states::AdapterState;
use crate::request::SequenceRequest;
use crate::scheduler::AdapterLoad;
use triptych_core::{AdapterId, Failure, FailureClass};
use triptych_models::ModelError;
use triptych_models::lora::LoraAdapter;

impl Engine {
    /// Loads an adapter; one that is about to go stays.
    ///
    /// # Errors
    /// [`ModelError`] for an adapter that does not fit the decoder.
    pub fn load_adapter(&mut self, adapter: &LoraAdapter) -> Result<(), ModelError> {
        self.runner.load_adapter(adapter)?;
        self.adapters.0.insert(adapter.id(), AdapterState::Serving);
        Ok(())
    }

    /// Refuses new sequences of an adapter, and drops it when the last one has ended.
    pub fn unload_adapter(&mut self, id: AdapterId) {
        if let Some(state) = self.adapters.0.get_mut(&id) {
            *state = AdapterState::Leaving;
        }
        self.drop_unused_adapters();
    }

    /// Loaded adapters with their sequences, those that are about to go included.
    pub fn adapter_loads(&self) -> Vec<(AdapterId, AdapterLoad)> {
        if self.adapters.0.is_empty() {
            return Vec::new();
        }
        let loads = self.scheduler.adapter_loads();
        self.adapters.0.keys().map(|id| (*id, loads.get(id).copied().unwrap_or_default())).collect()
    }

    /// Refuses a sequence whose adapter is not loaded, or about to go.
    pub(super) fn check_adapter(&self, request: &SequenceRequest) -> Result<(), Failure> {
        match request.adapter {
            Some(id) if self.adapters.0.get(&id) != Some(&AdapterState::Serving) => {
                let failure = Failure::new(FailureClass::NotFound, "the adapter is not loaded any more");
                Err(failure.with_param("model").with_detail(format!("{id:?}")))
            }
            _ => Ok(()),
        }
    }

    /// Drops adapters that are to go and that nothing needs.
    pub(super) fn drop_unused_adapters(&mut self) {
        let leaving = self.adapters.0.iter().filter(|(_, state)| **state == AdapterState::Leaving);
        let unused: Vec<AdapterId> = leaving.map(|(id, _)| *id).filter(|id| !self.needs(*id)).collect();
        for id in unused {
            self.adapters.0.remove(&id);
            self.runner.unload_adapter(id);
        }
    }

    fn needs(&self, id: AdapterId) -> bool {
        self.scheduler.adapter_loads().contains_key(&id)
            || self.alignments.uses(id)
            || self.in_flight.as_ref().is_some_and(|step| step.plan.uses(id))
    }
}
