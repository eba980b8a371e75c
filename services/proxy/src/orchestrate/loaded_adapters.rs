//! The adapters that requests loaded through this proxy, and the worker processes that have each.
//!
//! A process that had an adapter and has it no more was told to drop it, through another proxy: then the adapter is forgotten here
//! and nobody gets it again. What was loaded is in this process's memory alone: a proxy that restarts knows nothing of it, and
//! adapters that must always be there belong to `--lora`.

use crate::fleet::catalog::{Catalog, Health, Known};
use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use triptych_core::{ModelName, WorkerId};
use triptych_proto::v1;
use triptych_runtime::discovery::Role;

/// The adapters that were loaded, by name.
#[derive(Debug, Default)]
pub struct LoadedAdapters(Mutex<BTreeMap<String, LoadedAdapter>>);

/// An adapter that was loaded, and the processes that have it.
#[derive(Debug)]
struct LoadedAdapter {
    base: ModelName,
    path: String,
    adapts_encoder: bool,
    /// The process of each worker that was seen with it.
    held: HashMap<WorkerId, Bytes>,
    /// The process of each worker that was asked to load it again.
    asked: HashMap<WorkerId, Bytes>,
}

/// Need of a worker that serves the base model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    Nothing,
    Load,
    /// Nobody shall have the adapter any more.
    Forget,
}

impl LoadedAdapters {
    /// Notes an adapter that all workers have loaded.
    pub(super) fn insert(&self, asked: &v1::LoadAdapterRequest, adapts_encoder: bool) {
        let loaded = LoadedAdapter {
            base: ModelName::new(asked.model.as_str()),
            path: asked.path.clone(),
            adapts_encoder,
            held: HashMap::new(),
            asked: HashMap::new(),
        };
        self.0.lock().insert(asked.name.clone(), loaded);
    }

    /// Forgets an adapter that is unloaded.
    pub(super) fn remove(&self, name: &str) {
        self.0.lock().remove(name);
    }

    /// Workers that need an adapter, by its name: all that change between two calls is seen by the second.
    pub(super) fn needs(&self, catalog: &Catalog) -> Vec<(v1::LoadAdapterRequest, Known)> {
        let mut needs = Vec::new();
        self.0.lock().retain(|name, adapter| {
            for known in &catalog.workers {
                if !adapter.is_for(known) {
                    continue;
                }
                let has_it = known.models.iter().any(|model| model.name.as_str() == name);
                match adapter.need(&known.id, known.instance.clone(), has_it) {
                    Need::Nothing => {}
                    Need::Load => needs.push((adapter.request(name), known.clone())),
                    Need::Forget => {
                        tracing::info!(adapter = %name, "unloaded elsewhere");
                        return false;
                    }
                }
            }
            true
        });
        needs
    }

    /// Lets a worker be asked again.
    pub(super) fn ask_again(&self, name: &str, worker: &WorkerId) {
        if let Some(adapter) = self.0.lock().get_mut(name) {
            adapter.asked.remove(worker);
        }
    }
}

impl LoadedAdapter {
    fn is_for(&self, known: &Known) -> bool {
        let has_half = known.role == Role::Pd || self.adapts_encoder;
        // Processes without a name cannot be told apart.
        let is_known = known.health != Health::Down && !known.instance.is_empty();
        has_half && is_known && known.models.iter().any(|m| m.name == self.base)
    }

    fn need(&mut self, worker: &WorkerId, instance: Bytes, has_it: bool) -> Need {
        if has_it {
            self.held.insert(worker.clone(), instance);
            return Need::Nothing;
        }
        if self.held.get(worker) == Some(&instance) {
            return Need::Forget;
        }
        match self.asked.insert(worker.clone(), instance.clone()) {
            Some(before) if before == instance => Need::Nothing,
            _ => Need::Load,
        }
    }

    fn request(&self, name: &str) -> v1::LoadAdapterRequest {
        v1::LoadAdapterRequest {
            model: self.base.to_string(),
            name: name.to_owned(),
            path: self.path.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_process_gets_the_adapter_and_one_that_lost_it_ends_it() {
        let adapters = LoadedAdapters::default();
        let asked = v1::LoadAdapterRequest { model: "base".into(), name: "late".into(), path: "dir".into() };
        adapters.insert(&asked, false);
        let mut names = adapters.0.lock();
        let adapter = names.get_mut("late").unwrap();
        let [a, b] = ["a", "b"].map(WorkerId::new);
        let [first, second] = ["1", "2"].map(|text| Bytes::from_static(text.as_bytes()));
        assert_eq!(adapter.need(&a, first.clone(), true), Need::Nothing);
        assert_eq!(adapter.need(&a, second.clone(), false), Need::Load, "it has restarted");
        assert_eq!(adapter.need(&a, second.clone(), false), Need::Nothing, "it was asked");
        assert_eq!(adapter.need(&b, first.clone(), false), Need::Load, "it has joined");
        assert_eq!(adapter.need(&a, second.clone(), true), Need::Nothing);
        assert_eq!(adapter.need(&a, second, false), Need::Forget, "another proxy had it dropped");
    }
}
