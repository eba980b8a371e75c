//! The models that a worker serves, by name, which change while it runs.

use crate::adapters::ServedAdapter;
use crate::state::ServedDecoder;
use parking_lot::RwLock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use triptych_core::{Failure, FailureClass};

/// Models by served name.
#[derive(Default)]
pub struct ServedModels(RwLock<Names>);

#[derive(Default)]
struct Names {
    served: BTreeMap<String, Arc<ServedDecoder>>,
    /// Names of models that were served before: a request for one may be served elsewhere.
    before: BTreeSet<String>,
}

impl ServedModels {
    /// A model by its own name.
    pub fn get(&self, name: &str) -> Option<Arc<ServedDecoder>> {
        self.0.read().served.get(name).cloned()
    }

    /// All of them, in the order of their names.
    pub fn all(&self) -> Vec<(String, Arc<ServedDecoder>)> {
        self.0.read().served.iter().map(|(name, model)| (name.clone(), Arc::clone(model))).collect()
    }

    /// A model by its name or that of one of its adapters.
    pub fn find(&self, name: &str) -> Option<(Arc<ServedDecoder>, Option<ServedAdapter>)> {
        if let Some(model) = self.get(name) {
            return Some((model, None));
        }
        let models = self.0.read();
        let of_adapter =
            |model: &Arc<ServedDecoder>| Some((Arc::clone(model), Some(model.adapters.get(name)?)));
        models.served.values().find_map(of_adapter)
    }

    /// Serves a model.
    pub fn insert(&self, name: String, model: ServedDecoder) {
        let mut names = self.0.write();
        names.before.remove(&name);
        names.served.insert(name, Arc::new(model));
    }

    /// Takes a model from requests to come.
    pub fn remove(&self, name: &str) -> Option<Arc<ServedDecoder>> {
        let mut names = self.0.write();
        let removed = names.served.remove(name)?;
        names.before.insert(name.to_owned());
        Some(removed)
    }

    /// The failure of a request for a name that is not served. One that was is to be tried elsewhere.
    pub fn missing(&self, name: &str) -> Failure {
        if self.0.read().before.contains(name) {
            return Failure::unavailable(format!("model {name:?} was unloaded from this worker"));
        }
        let message = format!("model {name:?} is not served by this worker");
        Failure::new(FailureClass::NotFound, message).with_param("model")
    }
}
