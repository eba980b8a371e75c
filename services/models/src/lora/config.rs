//! `adapter_config.json` of PEFT: the rank and the scale of each module. Settings that would change what the adapter computes and
//! are not served are refused by name; so are keys that are not known, unless they are off.

use crate::error::ModelError;
use crate::files::JsonFile;
use serde_json::Value;
use std::path::Path;

/// The settings of an adapter.
pub(super) const CONFIG: &str = "adapter_config.json";

/// Keys that say where an adapter comes from, how it was trained, or what the tensors show anyway.
const WITHOUT_EFFECT: [&str; 26] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "peft_type",
    "use_rslora",
    "bias",
];

/// Starting values of `init_lora_weights` that leave the base model as it is.
const INITS: [&str; 4] = ["gaussian", "eva", "orthogonal", "lora_ga"];

/// Ranks above this are no adapter.
const MAX_RANK: u64 = 1 << 14;

/// Ranks and scales of an adapter.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LoraConfig {
    rank: usize,
    alpha: f64,
    // True: the scale is `alpha / sqrt(rank)`, else `alpha / rank`.
    uses_rslora: bool,
    ranks: Vec<(ModulePattern, usize)>,
    alphas: Vec<(ModulePattern, f64)>,
}

/// The end of a module's name, or all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ModulePattern {
    name: String,
    is_whole: bool,
}

impl ModulePattern {
    /// Reads a key of a pattern: a name, which PEFT takes as a regular expression. Those that are more than a name with
    /// anchors and dots are refused.
    fn parse(key: &str, pattern: &str) -> Result<Self, ModelError> {
        let rest = pattern.strip_prefix('^');
        let is_whole = rest.is_some();
        let name = rest.unwrap_or(pattern).trim_end_matches('$').replace("\\.", ".");
        match name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.')) && !name.is_empty() {
            true => Ok(Self { name, is_whole }),
            false => Err(refused(key, pattern, "names of modules, of letters, digits, dots and underscores")),
        }
    }

    fn is_of(&self, module: &str) -> bool {
        match module.strip_suffix(&self.name) {
            Some("") => true,
            Some(before) => !self.is_whole && before.ends_with('.'),
            None => false,
        }
    }
}

impl LoraConfig {
    /// Reads and checks the settings of an adapter.
    pub fn read(dir: &Path) -> Result<Self, ModelError> {
        Self::of(&JsonFile::read(dir, CONFIG)?)
    }

    fn of(file: &JsonFile) -> Result<Self, ModelError> {
        let has = |key: &str, allowed: &[&str]| match file.get(key).map(|v| v.as_str().unwrap_or_default()) {
            None => Ok(()),
            Some(value) if allowed.contains(&value) => Ok(()),
            Some(_) => Err(file.wrong(key, &allowed.join(" or "))),
        };
        if file.get("peft_type").and_then(Value::as_str) != Some("LORA") {
            return Err(file.wrong("peft_type", "LORA"));
        }
        has("bias", &["none"])?;
        check_targets(file)?;
        check_init(file)?;
        check_others(file)?;
        let rank = match file.get("r").and_then(rank_of) {
            Some(rank) => rank,
            None => return Err(file.wrong("r", &format!("an integer from 1 to {MAX_RANK}"))),
        };
        let alpha = file.get("lora_alpha").and_then(Value::as_f64).filter(|alpha| alpha.is_finite());
        let alpha = alpha.ok_or_else(|| file.wrong("lora_alpha", "a number"))?;
        Ok(Self {
            rank,
            alpha,
            uses_rslora: file.bool("use_rslora")?.unwrap_or(false),
            ranks: patterns(file, "rank_pattern", rank_of)?,
            alphas: patterns(file, "alpha_pattern", |v| v.as_f64().filter(|alpha| alpha.is_finite()))?,
        })
    }

    /// Rank of a module's pair.
    pub fn rank(&self, module: &str) -> usize {
        of_module(&self.ranks, module).unwrap_or(self.rank)
    }

    /// Factor of a module's product.
    pub fn scale(&self, module: &str) -> f32 {
        let alpha = of_module(&self.alphas, module).unwrap_or(self.alpha);
        let rank = self.rank(module) as f64;
        (alpha / if self.uses_rslora { rank.sqrt() } else { rank }) as f32
    }
}

/// The refusal of a setting.
pub(super) fn refused(key: &str, actual: impl Into<String>, expected: &str) -> ModelError {
    ModelError::Config { file: CONFIG, key: key.into(), actual: actual.into(), expected: expected.into() }
}

/// The value of the first pattern that a module has.
fn of_module<T: Copy>(patterns: &[(ModulePattern, T)], module: &str) -> Option<T> {
    patterns.iter().find(|(pattern, _)| pattern.is_of(module)).map(|(_, value)| *value)
}

fn rank_of(value: &Value) -> Option<usize> {
    let rank = value.as_u64().filter(|rank| (1..=MAX_RANK).contains(rank))?;
    usize::try_from(rank).ok()
}

fn patterns<T>(
    file: &JsonFile,
    key: &str,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<Vec<(ModulePattern, T)>, ModelError> {
    let Some(value) = file.get(key) else { return Ok(Vec::new()) };
    let wrong = || file.wrong(key, "an object of numbers by names of modules");
    let patterns = value.as_object().ok_or_else(wrong)?.iter();
    patterns.map(|(name, v)| Ok((ModulePattern::parse(key, name)?, read(v).ok_or_else(wrong)?))).collect()
}

/// `target_modules` has a type that PEFT writes. Its content is not needed: the tensors show what is adapted.
fn check_targets(file: &JsonFile) -> Result<(), ModelError> {
    let is_known = match file.get("target_modules") {
        None | Some(Value::String(_)) => true,
        Some(Value::Array(names)) => names.iter().all(Value::is_string),
        Some(_) => false,
    };
    if is_known { Ok(()) } else { Err(file.wrong("target_modules", "a list of names or a pattern")) }
}

/// Pairs that began as a part of the base model's weights are for a base model without that part.
fn check_init(file: &JsonFile) -> Result<(), ModelError> {
    match file.get("init_lora_weights") {
        None | Some(Value::Bool(_)) => Ok(()),
        Some(Value::String(name)) if INITS.contains(&name.as_str()) => Ok(()),
        Some(_) => {
            let expected = format!("true, false, {} (others change the base model)", INITS.join(", "));
            Err(file.wrong("init_lora_weights", &expected))
        }
    }
}

/// Keys of which only the value that is off is served.
fn check_others(file: &JsonFile) -> Result<(), ModelError> {
    let known = |key: &str| WITHOUT_EFFECT.contains(&key) || key == "init_lora_weights";
    let keys = file.value().as_object().into_iter().flatten();
    match keys.filter(|(key, _)| !known(key)).find(|(_, value)| !is_off(value)) {
        None => Ok(()),
        Some((key, value)) => Err(refused(key, value.to_string(), "null, false or empty")),
    }
}

fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Number(_) | Value::Bool(true) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(change: impl FnOnce(&mut Value)) -> Result<LoraConfig, ModelError> {
        let mut value = json!({
            "peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"],
            "modules_to_save": null, "use_dora": false, "fan_in_fan_out": false, "rank_pattern": {}
        });
        change(&mut value);
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join(CONFIG), value.to_string()).expect("a file");
        LoraConfig::read(dir.path())
    }

    #[test]
    fn ranks_and_scales_follow_their_patterns() {
        let config = read(|v| {
            v["rank_pattern"] = json!({"^model.layers.1.q_proj": 16, "k_proj": 2});
            v["alpha_pattern"] = json!({"layers\\.0\\.k_proj$": 6});
        });
        let config = config.expect("settings that are served");
        let check = |module: &str, rank: usize, scale: f32| {
            assert_eq!((config.rank(module), config.scale(module)), (rank, scale), "{module}");
        };
        check("model.layers.0.q_proj", 4, 2.0);
        check("model.layers.1.q_proj", 16, 0.5);
        check("vision.model.layers.1.q_proj", 4, 2.0);
        check("model.layers.0.k_proj", 2, 3.0);
        check("model.layers.1.k_proj", 2, 4.0);
        check("model.layers.1.back_proj", 4, 2.0);
        let rooted = read(|v| v["use_rslora"] = json!(true)).expect("settings that are served");
        assert_eq!(rooted.scale("any"), 4.0);
    }

    #[test]
    fn settings_that_change_the_product_are_refused_by_name() {
        let cases = [
            ("peft_type", json!("LOHA")),
            ("r", json!(0)),
            ("r", json!(1_000_000)),
            ("lora_alpha", json!("8")),
            ("bias", json!("all")),
            ("use_dora", json!(true)),
            ("fan_in_fan_out", json!(true)),
            ("lora_bias", json!(true)),
            ("modules_to_save", json!(["lm_head"])),
            ("target_modules", json!(3)),
            ("target_parameters", json!(["experts.gate_up_proj"])),
            ("layer_replication", json!([[0, 2]])),
            ("init_lora_weights", json!("pissa")),
            ("rank_pattern", json!({".*q_proj": 3})),
            ("alpha_pattern", json!({"q_proj": "x"})),
            ("alora_invocation_tokens", json!([1, 2])),
            ("a_key_of_tomorrow", json!(0.5)),
        ];
        for (name, value) in cases {
            match read(|v| v[name] = value.clone()) {
                Err(ModelError::Config { key, .. }) => assert_eq!(key, name),
                other => panic!("{name} {value}: {other:?}"),
            }
        }
    }
}
