//! Mixtures of experts of the Qwen, Mistral and DeepSeek lines: which layers have them, their sizes and their names.

use super::Config;
use crate::error::ModelError;
use crate::spec::*;
use triptych_kernels::ops::{Activation, RouterScores, Routing};

/// A kind of mixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpertsKind {
    /// Mixtral.
    Mixtral,
    /// Qwen1.5-MoE and Qwen2-MoE.
    Qwen2,
    /// Qwen3-MoE.
    Qwen3,
    /// Qwen3-VL-MoE.
    Qwen3Vl,
    /// Qwen3.5 with experts.
    Qwen35,
    /// DeepSeek-OCR-2.
    Deepseek,
}

/// Factor on the weights of experts.
const SCALE: &str = "routed_scaling_factor";

/// Values that a class has where a configuration is silent.
struct Defaults {
    n_experts: usize,
    top_k: usize,
    width: usize,
}

static MIXTRAL: ExpertsNames = ExpertsNames {
    router: "block_sparse_moe.gate",
    storage: ExpertStorage::List { list: "block_sparse_moe.experts", parts: ["w1", "w3", "w2"] },
    shared: None,
};
const QWEN_LIST: ExpertStorage =
    ExpertStorage::List { list: "mlp.experts", parts: ["gate_proj", "up_proj", "down_proj"] };
static QWEN_2: ExpertsNames = ExpertsNames {
    router: "mlp.gate",
    storage: QWEN_LIST,
    shared: Some(SharedExpertNames {
        gate: Some("mlp.shared_expert_gate"),
        parts: ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"],
    }),
};
static QWEN_3: ExpertsNames = ExpertsNames { router: "mlp.gate", storage: QWEN_LIST, shared: None };
static QWEN_3_VL: ExpertsNames = ExpertsNames {
    router: "mlp.gate",
    storage: ExpertStorage::Stacked { gate_up: "mlp.experts.gate_up_proj", down: "mlp.experts.down_proj" },
    shared: None,
};
static QWEN_3_5: ExpertsNames = ExpertsNames {
    storage: ExpertStorage::StackedOrList {
        gate_up: "mlp.experts.gate_up_proj",
        down: "mlp.experts.down_proj",
        list: "mlp.experts",
        parts: ["gate_proj", "up_proj", "down_proj"],
    },
    ..QWEN_2
};

static DEEPSEEK: ExpertsNames = ExpertsNames {
    router: "mlp.gate",
    storage: QWEN_LIST,
    shared: Some(SharedExpertNames {
        gate: None,
        parts: ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"],
    }),
};

impl ExpertsKind {
    fn defaults(self) -> Defaults {
        match self {
            Self::Mixtral => Defaults { n_experts: 8, top_k: 2, width: 14_336 },
            Self::Qwen2 | Self::Qwen3Vl => Defaults { n_experts: 60, top_k: 4, width: 1408 },
            Self::Qwen3 => Defaults { n_experts: 128, top_k: 8, width: 768 },
            Self::Qwen35 => Defaults { n_experts: 256, top_k: 8, width: 512 },
            Self::Deepseek => Defaults { n_experts: 64, top_k: 6, width: 1407 },
        }
    }

    fn names(self) -> &'static ExpertsNames {
        match self {
            Self::Mixtral => &MIXTRAL,
            Self::Qwen2 => &QWEN_2,
            Self::Qwen3 => &QWEN_3,
            Self::Qwen3Vl => &QWEN_3_VL,
            Self::Qwen35 => &QWEN_3_5,
            Self::Deepseek => &DEEPSEEK,
        }
    }

    /// The experts of a layer that has them, with the activation of their gates.
    ///
    /// # Errors
    /// [`ModelError::Config`] for a key that is missing or not supported.
    pub(super) fn spec(self, config: &Config<'_>, activation: Activation) -> Result<ExpertsSpec, ModelError> {
        let defaults = self.defaults();
        // Newer files have the key of Mixtral, whose width has no key of its own.
        let by_any = |keys: [&str; 2], default| {
            let key = keys.into_iter().find(|key| config.get(key).is_some()).unwrap_or(keys[0]);
            config.size_or(key, default)
        };
        let n_experts = match self {
            Self::Deepseek => by_any(["n_routed_experts", "num_experts"], defaults.n_experts)?,
            _ => by_any(["num_local_experts", "num_experts"], defaults.n_experts)?,
        };
        let width_key = if self == Self::Mixtral { "intermediate_size" } else { "moe_intermediate_size" };
        let top_k = config.size_or("num_experts_per_tok", defaults.top_k)?;
        if top_k > n_experts.min(Routing::MAX_TOP_K) {
            let expected = format!("{} or less", n_experts.min(Routing::MAX_TOP_K));
            return Err(config.unsupported("num_experts_per_tok", top_k, expected));
        }
        let renormalize = match self {
            Self::Mixtral | Self::Qwen3Vl | Self::Qwen35 => true,
            Self::Deepseek => false,
            Self::Qwen2 | Self::Qwen3 => config.flag_or("norm_topk_prob", false)?,
        };
        let width = config.size_or(width_key, defaults.width)?;
        let scale = match self {
            Self::Deepseek if config.get(SCALE).is_some() => config.number(SCALE)?,
            _ => 1.0,
        };
        Ok(ExpertsSpec {
            n_experts,
            width,
            routing: Routing { top_k, scores: RouterScores::Softmax, renormalize, scale },
            activation,
            shared_width: match self {
                Self::Deepseek => Some(width * config.size_or("n_shared_experts", 2)?),
                Self::Qwen2 => Some(config.size_or("shared_expert_intermediate_size", 5632)?),
                Self::Qwen35 => Some(config.size_or("shared_expert_intermediate_size", 512)?),
                Self::Mixtral | Self::Qwen3 | Self::Qwen3Vl => None,
            },
            names: self.names(),
        })
    }

    /// The layers that have experts.
    ///
    /// # Errors
    /// [`ModelError::Config`] for numbers that are none of layers.
    pub(super) fn layers(self, config: &Config<'_>, n_layers: usize) -> Result<Vec<bool>, ModelError> {
        const DENSE: &str = "mlp_only_layers";
        match self {
            Self::Mixtral => return Ok(vec![true; n_layers]),
            Self::Qwen35 => match config.get(DENSE) {
                Some(dense) if dense.as_array().is_none_or(|list| !list.is_empty()) => {
                    return Err(config.unsupported(DENSE, dense, "none"));
                }
                _ => return Ok(vec![true; n_layers]),
            },
            Self::Deepseek => return listed(config, n_layers),
            Self::Qwen2 | Self::Qwen3 | Self::Qwen3Vl => {}
        }
        let step = config.size_or("decoder_sparse_step", 1)?;
        let dense = if config.get(DENSE).is_some() { config.sizes(DENSE)? } else { Vec::new() };
        Ok((0..n_layers).map(|layer| (layer + 1) % step == 0 && !dense.contains(&layer)).collect())
    }
}

/// The layers that a list of kinds has experts in.
fn listed(config: &Config<'_>, n_layers: usize) -> Result<Vec<bool>, ModelError> {
    const KEY: &str = "mlp_layer_types";
    let list = config.required(KEY)?;
    let kind = |kind: &serde_json::Value| match kind.as_str() {
        Some("sparse") => Some(true),
        Some("dense") => Some(false),
        _ => None,
    };
    let kinds: Option<Vec<bool>> = list.as_array().and_then(|list| list.iter().map(kind).collect());
    kinds
        .filter(|kinds| kinds.len() == n_layers)
        .ok_or_else(|| config.unsupported(KEY, list, format!("{n_layers} of dense and sparse")))
}
