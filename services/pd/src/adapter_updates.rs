//! Adapters that requests load and unload while the worker serves.
//!
//! An adapter that is unloaded is refused at once; the engine drops it when the last running sequence has ended. Directories
//! that a request names must lie below one that the operator allows.

use crate::state::{PdWorkerState, ServedDecoder};
use std::path::{Path, PathBuf};
use tokio::task::spawn_blocking;
use triptych_core::{AdapterId, Failure, FailureClass};
use triptych_models::ModelError;
use triptych_models::lora::LoraAdapter;
use triptych_proto::v1;

/// Most bytes of an adapter's name.
const MAX_NAME: usize = 256;

impl PdWorkerState {
    /// A model, or the base model of an adapter and that adapter.
    ///
    /// # Errors
    /// NotFound.
    pub(crate) fn model(&self, name: &str) -> Result<(&ServedDecoder, Option<AdapterId>), Failure> {
        self.find(name).ok_or_else(|| {
            let message = format!("model {name:?} is not served by this worker");
            Failure::new(FailureClass::NotFound, message).with_param("model")
        })
    }

    /// As [`Self::model`]; `None` for a name that is neither.
    pub(crate) fn find(&self, name: &str) -> Option<(&ServedDecoder, Option<AdapterId>)> {
        if let Some(model) = self.models.get(name) {
            return Some((model, None));
        }
        self.models.values().find_map(|model| Some((model, Some(model.adapters.get(name)?.id))))
    }

    /// Loads an adapter and lets requests use it. One that has the name already and is the same stays.
    ///
    /// # Errors
    /// Invalid for a worker that allows no such requests, a name that is taken, a path outside the allowed directory, or an
    /// adapter that cannot be served; NotFound for an unknown model.
    pub(crate) async fn load_adapter(
        &self,
        request: v1::LoadAdapterRequest,
    ) -> Result<v1::LoadAdapterResponse, Failure> {
        let root = self.updates_allowed()?.to_owned();
        let _one_at_a_time = self.adapter_updates.lock().await;
        let v1::LoadAdapterRequest { model, name, path } = request;
        self.check_name(&name)?;
        let served = match self.models.get(&model) {
            Some(served) => served,
            None => {
                let message = format!("model {model:?} is not served by this worker");
                return Err(Failure::new(FailureClass::NotFound, message).with_param("base_model_name"));
            }
        };
        let (named, max_rank) = (PathBuf::from(path), self.lora.max_rank);
        let open = move || LoraAdapter::open(&below(&root, &named)?, max_rank).map_err(|e| refused(&e));
        let adapter = spawn_blocking(open).await.map_err(Failure::internal)??;
        let id = adapter.id();
        let response = v1::LoadAdapterResponse { adapter: id.as_bytes().to_vec().into() };
        if let Some(known) = self.find(&name).and_then(|(_, id)| id) {
            if known == id && served.adapters.get(&name).is_some() {
                return Ok(response);
            }
            let message = format!("an adapter called {name:?} is loaded; unload it first");
            return Err(Failure::invalid(message).with_param("lora_name"));
        }
        let n_loaded = served.adapters.all().len();
        if n_loaded >= self.lora.max_loaded {
            let message = format!("{n_loaded} adapters are loaded, which is the limit; unload one first");
            return Err(Failure::invalid(message).with_param("lora_name"));
        }
        served.driver.load_adapter(&name, adapter).await?.map_err(|e| refused(&e))?;
        served.adapters.insert(name.clone(), id);
        tracing::info!(%model, adapter = %name, ?id, "adapter loaded");
        Ok(response)
    }

    /// Takes an adapter from requests; it goes when the last running one has ended.
    ///
    /// # Errors
    /// Invalid for a worker that allows no such requests, NotFound for an unknown name.
    pub(crate) async fn unload_adapter(&self, name: &str) -> Result<(), Failure> {
        self.updates_allowed()?;
        let _one_at_a_time = self.adapter_updates.lock().await;
        let Some(served) = self.models.values().find(|model| model.adapters.get(name).is_some()) else {
            let message = format!("no adapter is called {name:?}");
            return Err(Failure::new(FailureClass::NotFound, message).with_param("lora_name"));
        };
        if let Some(id) = served.adapters.remove(name) {
            served.driver.unload_adapter(id);
        }
        tracing::info!(adapter = %name, "adapter unloaded");
        Ok(())
    }

    fn updates_allowed(&self) -> Result<&Path, Failure> {
        self.lora.updates.as_deref().ok_or_else(|| {
            Failure::invalid("adapters are not loaded or unloaded by requests here; --lora-updates allows it")
        })
    }

    fn check_name(&self, name: &str) -> Result<(), Failure> {
        let refuse = |text: String| Err(Failure::invalid(text).with_param("lora_name"));
        match name.len() {
            1..=MAX_NAME if self.models.contains_key(name) => {
                refuse(format!("{name:?} is the name of a model"))
            }
            1..=MAX_NAME => Ok(()),
            n => refuse(format!("lora_name has {n} bytes, allowed are 1 to {MAX_NAME}")),
        }
    }
}

/// The directory that a request names, which lies below `root` whatever links it has.
fn below(root: &Path, named: &Path) -> Result<PathBuf, Failure> {
    let refuse = |text: String| Failure::invalid(text).with_param("lora_path");
    let root = root.canonicalize().map_err(|e| Failure::internal(format!("--lora-updates: {e}")))?;
    let outside = || refuse("lora_path names no directory below the one of --lora-updates".into());
    let dir = root.join(named).canonicalize().map_err(|_| outside())?;
    if dir.starts_with(&root) && dir.is_dir() { Ok(dir) } else { Err(outside()) }
}

fn refused(error: &ModelError) -> Failure {
    match error {
        ModelError::Kernel(error) => Failure::internal(error),
        // Paths are for the operator's log.
        ModelError::File { source, .. } => Failure::invalid(format!("a file of the adapter: {source}"))
            .with_param("lora_path")
            .with_detail(error.to_string()),
        other => Failure::invalid(other.to_string()).with_param("lora_path"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_outside_the_allowed_one_are_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let (root, other) = (dir.path().join("root"), dir.path().join("other"));
        for made in [root.join("a/b"), other.clone()] {
            std::fs::create_dir_all(made).expect("a directory");
        }
        std::fs::write(root.join("file"), "x").expect("a file");
        std::os::unix::fs::symlink(&other, root.join("link")).expect("a link");
        let check = |named: &str, is_allowed: bool| {
            assert_eq!(below(&root, Path::new(named)).is_ok(), is_allowed, "{named}");
        };
        check("a", true);
        check("a/b/../b", true);
        check(root.join("a").to_str().expect("a path"), true);
        check("..", false);
        check("../other", false);
        check("a/../../other", false);
        check("link", false);
        check("file", false);
        check("missing", false);
        check(other.to_str().expect("a path"), false);
    }
}
