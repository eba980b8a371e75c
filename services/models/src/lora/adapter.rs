//! An adapter's directory: its settings, its tensors by module, and its identity.

use super::config::{LoraConfig, refused};
use super::pairs::{LowRankPair, sum_of_pairs};
use crate::checkpoint::check_pointer;
use crate::error::ModelError;
use crate::layers::{LinearSite, LoadedAdapter};
use crate::weights::{StoredWeights, WeightFormat};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use triptych_core::AdapterId;
use triptych_kernels::Backend;

/// Start of every name of a tensor.
const PREFIX: &str = "base_model.model.";

/// Weights, by the format they are in; the first that exists is read.
const WEIGHTS: [(&str, WeightFormat); 2] =
    [("adapter_model.safetensors", WeightFormat::Safetensors), ("adapter_model.bin", WeightFormat::Torch)];

/// An adapter whose files were read and checked, but not its values.
#[derive(Debug)]
pub struct LoraAdapter {
    dir: PathBuf,
    id: AdapterId,
    weights: Arc<StoredWeights>,
    // By the name of the module.
    pairs: BTreeMap<String, LowRankPair>,
}

/// One of the two tensors of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    A,
    B,
}

impl LoraAdapter {
    /// Reads the settings and the headers of an adapter, and hashes its values.
    ///
    /// # Errors
    /// [`ModelError`] for files that are missing or not whole, settings that are not served, and ranks above `max_rank`.
    pub fn open(dir: &Path, max_rank: usize) -> Result<Self, ModelError> {
        let config = LoraConfig::read(dir)?;
        let weights = open_weights(dir)?;
        let pairs = pairs_of(dir, &weights, &config, max_rank)?;
        let id = AdapterId::of(id_parts(&weights, &pairs).iter().map(Vec::as_slice));
        Ok(Self { dir: dir.to_owned(), id, weights: Arc::new(weights), pairs })
    }

    /// The part of the modules that `takes` has, if it has any, and the rest. The part has an identity of its own, the rest that
    /// of the whole.
    pub(super) fn part(self, takes: impl Fn(&str) -> bool) -> (Option<Self>, Self) {
        let (taken, pairs): (BTreeMap<_, _>, _) =
            self.pairs.into_iter().partition(|(module, _)| takes(module));
        let rest = Self { pairs, ..self };
        if taken.is_empty() {
            return (None, rest);
        }
        let id = AdapterId::of(id_parts(&rest.weights, &taken).iter().map(Vec::as_slice));
        let (dir, weights) = (rest.dir.clone(), rest.weights.clone());
        (Some(Self { dir, id, weights, pairs: taken }), rest)
    }

    /// Its identity: what its layers compute depends on.
    pub fn id(&self) -> AdapterId {
        self.id
    }

    /// The directory it was read from.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The highest rank of its pairs.
    pub fn max_rank(&self) -> usize {
        self.pairs.values().map(|pair| pair.rank).max().unwrap_or(0)
    }

    /// Modules that it targets.
    pub fn n_modules(&self) -> usize {
        self.pairs.len()
    }

    /// Takes its pairs to a back end, for layers that were loaded there.
    ///
    /// # Errors
    /// [`ModelError::Config`] for a module that none of the layers has, [`ModelError::TensorShape`] for a pair of another
    /// shape than its layer.
    pub(crate) fn load<B: Backend>(
        &self,
        backend: &B,
        sites: &[LinearSite],
    ) -> Result<LoadedAdapter<B>, ModelError> {
        let mut taken = BTreeSet::new();
        let mut layers = Vec::with_capacity(sites.len());
        for site in sites {
            let found = site.parts.iter().map(|part| self.pair(&part.modules)).collect::<Vec<_>>();
            taken.extend(found.iter().flatten().map(|(module, _)| *module));
            layers.push(sum_of_pairs(&self.weights, backend, site, &found)?);
        }
        match self.pairs.keys().find(|module| !taken.contains(module.as_str())) {
            None => Ok(LoadedAdapter::new(layers)),
            Some(module) => Err(refused(
                "target_modules",
                module.clone(),
                "linear layers of attention, cross-attention, feed-forward and projector (no embeddings, no head, no experts, no convolutions, no tower of stages or tiles)",
            )),
        }
    }

    /// The pair of a module, by the names that it may have.
    fn pair(&self, modules: &[String]) -> Option<(&str, &LowRankPair)> {
        let (module, pair) = modules.iter().find_map(|name| self.pairs.get_key_value(name))?;
        Some((module, pair))
    }
}

fn open_weights(dir: &Path) -> Result<StoredWeights, ModelError> {
    let Some((name, format)) = WEIGHTS.into_iter().find(|(name, _)| dir.join(name).exists()) else {
        return Err(ModelError::Checkpoint {
            path: dir.to_owned(),
            found: "has neither adapter_model.safetensors nor adapter_model.bin".into(),
            cure: "name the directory that PEFT's save_pretrained wrote".into(),
        });
    };
    let file = dir.join(name);
    check_pointer(&file)?;
    StoredWeights::of_file(&file, format)
}

/// The pairs of the stored tensors, each of which is one half of one.
fn pairs_of(
    dir: &Path,
    weights: &StoredWeights,
    config: &LoraConfig,
    max_rank: usize,
) -> Result<BTreeMap<String, LowRankPair>, ModelError> {
    let broken = |message| ModelError::Format { path: dir.to_owned(), message };
    let mut halves: BTreeMap<String, [Option<String>; 2]> = BTreeMap::new();
    for (name, ..) in weights.stored() {
        let (module, half) = module_of(name)
            .ok_or_else(|| broken(format!("tensor {name} is neither lora_A nor lora_B of a linear layer")))?;
        halves.entry(module.to_owned()).or_default()[half as usize] = Some(name.to_owned());
    }
    if halves.is_empty() {
        return Err(broken("the adapter has no tensors".into()));
    }
    let pair = |(module, halves): (String, [Option<String>; 2])| {
        let [Some(a), Some(b)] = halves else {
            return Err(broken(format!("module {module} has one of lora_A and lora_B, expected both")));
        };
        let shape = |name: &str| weights.get(name).map_or(Vec::new(), |tensor| tensor.shape.to_vec());
        let (Some([rank, n_in]), Some([n_out, inner])) = (matrix(&shape(&a)), matrix(&shape(&b))) else {
            return Err(refused("target_modules", module, "linear layers (no convolutions)"));
        };
        let expected = config.rank(&module);
        if rank != expected || inner != expected || n_in == 0 || n_out == 0 {
            return Err(ModelError::TensorShape {
                name: a,
                expected: vec![expected, n_in, n_out, expected],
                actual: vec![rank, n_in, n_out, inner],
            });
        }
        if rank > max_rank {
            let text = format!("at most {max_rank}, the limit of --max-lora-rank");
            return Err(refused("r", format!("{rank} for {module}"), &text));
        }
        let scale = config.scale(&module);
        Ok((module, LowRankPair { names: [a, b], rank, n_in, n_out, scale }))
    };
    halves.into_iter().map(pair).collect()
}

/// Dimensions of a matrix.
fn matrix(shape: &[usize]) -> Option<[usize; 2]> {
    shape.try_into().ok()
}

/// The module that a tensor belongs to, and its half of the pair. Older versions wrote the adapter's own name before `weight`.
fn module_of(name: &str) -> Option<(&str, Half)> {
    let name = name.strip_prefix(PREFIX)?.strip_suffix(".weight")?;
    let name = name.strip_suffix(".default").unwrap_or(name);
    let a = name.strip_suffix(".lora_A").map(|module| (module, Half::A));
    a.or_else(|| name.strip_suffix(".lora_B").map(|module| (module, Half::B)))
}

/// All that the layers of an adapter depend on.
fn id_parts(weights: &StoredWeights, pairs: &BTreeMap<String, LowRankPair>) -> Vec<Vec<u8>> {
    let mut parts = Vec::new();
    for (module, pair) in pairs {
        parts.extend([module.clone().into_bytes(), pair.scale.to_le_bytes().to_vec()]);
        for tensor in pair.names.iter().filter_map(|name| weights.get(name)) {
            parts.push(format!("{:?} {:?}", tensor.dtype, tensor.shape).into_bytes());
            parts.push(tensor.hash().as_bytes().to_vec());
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_halves_of_modules() {
        let check = |name, expect| assert_eq!(module_of(name), expect, "{name}");
        check(
            "base_model.model.model.layers.0.q_proj.lora_A.weight",
            Some(("model.layers.0.q_proj", Half::A)),
        );
        check("base_model.model.layers.0.q_proj.lora_B.default.weight", Some(("layers.0.q_proj", Half::B)));
        check("base_model.model.model.embed_tokens.lora_embedding_A", None);
        check("base_model.model.lm_head.weight", None);
        check("base_model.model.q.lora_magnitude_vector.weight", None);
        check("model.layers.0.q_proj.lora_A.weight", None);
    }
}
