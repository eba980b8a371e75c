//! The models that a worker serves, by name, which change while it runs. Both kinds of workers have one.

use parking_lot::RwLock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use triptych_core::{Failure, FailureClass};

/// Models by served name.
pub struct ModelTable<T> {
    /// The worker in failures: `encoder` or `worker`.
    worker: &'static str,
    names: RwLock<Names<T>>,
}

struct Names<T> {
    served: BTreeMap<String, Arc<T>>,
    /// Names of models that were served before: a request for one may be served elsewhere.
    before: BTreeSet<String>,
}

impl<T> ModelTable<T> {
    /// An empty table; `worker` names who has it in failures.
    pub fn of(worker: &'static str) -> Self {
        let names = Names { served: BTreeMap::new(), before: BTreeSet::new() };
        Self { worker, names: RwLock::new(names) }
    }

    /// A model by its own name.
    pub fn get(&self, name: &str) -> Option<Arc<T>> {
        self.names.read().served.get(name).cloned()
    }

    /// All of them, in the order of their names.
    pub fn all(&self) -> Vec<(String, Arc<T>)> {
        self.names.read().served.iter().map(|(name, model)| (name.clone(), Arc::clone(model))).collect()
    }

    /// The first for which there is something to find, with that.
    pub fn find_map<U>(&self, find: impl Fn(&T) -> Option<U>) -> Option<(Arc<T>, U)> {
        let names = self.names.read();
        names.served.values().find_map(|model| Some((Arc::clone(model), find(model)?)))
    }

    /// Serves a model.
    pub fn insert(&self, name: String, model: Arc<T>) {
        let mut names = self.names.write();
        names.before.remove(&name);
        names.served.insert(name, model);
    }

    /// Takes a model from requests to come.
    pub fn remove(&self, name: &str) -> Option<Arc<T>> {
        let mut names = self.names.write();
        let removed = names.served.remove(name)?;
        names.before.insert(name.to_owned());
        Some(removed)
    }

    /// The failure of a request for a name that is not served. One that was is to be tried elsewhere.
    pub fn missing(&self, name: &str) -> Failure {
        let worker = self.worker;
        if self.names.read().before.contains(name) {
            return Failure::unavailable(format!("model {name:?} was unloaded from this {worker}"));
        }
        let message = format!("model {name:?} is not served by this {worker}");
        Failure::new(FailureClass::NotFound, message).with_param("model")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_was_served_is_to_be_tried_elsewhere_and_another_is_not_found() {
        let table = ModelTable::of("encoder");
        table.insert("a".to_owned(), Arc::new(1));
        table.insert("b".to_owned(), Arc::new(2));
        assert_eq!(table.find_map(|n| (*n == 2).then_some("two")), Some((Arc::new(2), "two")));
        assert_eq!((table.remove("a"), table.remove("a")), (Some(Arc::new(1)), None));
        assert_eq!(table.all(), [("b".to_owned(), Arc::new(2))]);
        let (before, never) = (table.missing("a"), table.missing("c"));
        assert_eq!((before.class, never.class), (FailureClass::Unavailable, FailureClass::NotFound));
        assert!(before.message.contains("was unloaded from this encoder"), "{before}");
        table.insert("a".to_owned(), Arc::new(3));
        assert_eq!(table.get("a"), Some(Arc::new(3)));
    }
}
