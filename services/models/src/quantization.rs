//! Quantized checkpoints: the method that a configuration states, if its weights are read.
//!
//! What is read is dequantized tensor by tensor as a layer is loaded, and held in the precision that is served; a method
//! decides nothing else here. Activations are not quantized, whatever a configuration says of them. Methods that are not read
//! are refused by name. It knows keys of configurations and names of tensors, and reads no tensor.

use crate::error::ModelError;
use crate::files::JsonFile;
use serde_json::Value;
use std::fmt;
use std::path::Path;

/// Codes of four bits in a 32-bit word of `qweight`, `qzeros` and `weight_packed`.
pub(crate) const CODES_PER_WORD: usize = 8;

/// Places of a method in a configuration.
const KEYS: [&str; 4] = [
    "quantization_config",
    "text_config.quantization_config",
    "compression_config",
    "text_config.compression_config",
];

/// Files that state a method where the configuration does not, each with the method.
const FILES: [(&str, &str); 2] = [("quantize_config.json", "gptq"), ("quant_config.json", "awq")];

const CURE: &str = "read are fp8 (E4M3); gptq and awq of 4 bits; compressed-tensors that are float-quantized, int-quantized \
                    (8 bits) or pack-quantized (4 bits). Or serve the checkpoint that it was made from, with --precision \
                    int8 or int4 to have its weights quantized here";

/// Ends of the names of tensors that stand for a weight, and the parameters that an element of each counts as.
const PARTS: [(&str, usize); 13] = [
    (".qweight", CODES_PER_WORD),
    (".weight_packed", CODES_PER_WORD),
    (".qzeros", 0),
    (".scales", 0),
    (".g_idx", 0),
    (".weight_scale", 0),
    (".weight_scale_inv", 0),
    (".weight_zero_point", 0),
    (".weight_shape", 0),
    (".weight_g_idx", 0),
    (".input_scale", 0),
    (".k_scale", 0),
    (".v_scale", 0),
];

/// Method of a quantized checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// E4M3 with scales for blocks `[outputs, inputs]`, as DeepSeek and Qwen publish, or for a tensor.
    Fp8 {
        /// Outputs and inputs that share a scale; `None`: all do.
        block: Option<[usize; 2]>,
    },
    /// GPTQ (<https://arxiv.org/abs/2210.17323>), 4 bits.
    Gptq {
        /// Inputs that share a scale and a zero; `None`: all do.
        group_size: Option<usize>,
        /// Form of the zeros.
        zeros: GptqZeros,
    },
    /// AWQ (<https://arxiv.org/abs/2306.00978>), 4 bits, in the order of its GEMM kernels.
    Awq {
        /// Inputs that share a scale and a zero; `None`: all do.
        group_size: Option<usize>,
    },
    /// compressed-tensors (<https://github.com/vllm-project/compressed-tensors>).
    CompressedTensors {
        /// Form of the weights.
        format: CompressedFormat,
        /// Outputs and inputs that share a scale, where scales are of blocks.
        block: Option<[usize; 2]>,
    },
}

/// Form of the zeros of GPTQ, by `checkpoint_format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GptqZeros {
    /// `gptq`: stored less one, modulo 16.
    LessOne,
    /// `gptq_v2`: as they are.
    Plain,
}

/// Form of the weights of compressed-tensors, by `format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompressedFormat {
    /// `float-quantized`: E4M3.
    Float,
    /// `int-quantized`: 8 bits.
    Int,
    /// `naive-quantized`: either of these.
    Naive,
    /// `pack-quantized`: 4 bits, eight in a word.
    Pack,
}

impl CompressedFormat {
    const ALL: [Self; 4] = [Self::Float, Self::Int, Self::Naive, Self::Pack];

    fn as_str(self) -> &'static str {
        match self {
            Self::Float => "float-quantized",
            Self::Int => "int-quantized",
            Self::Naive => "naive-quantized",
            Self::Pack => "pack-quantized",
        }
    }

    /// Types and bits of weights that are read in this form.
    fn types(self) -> &'static [(&'static str, u64)] {
        match self {
            Self::Float => &[("float", 8)],
            Self::Int => &[("int", 8)],
            Self::Naive => &[("float", 8), ("int", 8)],
            Self::Pack => &[("int", 4)],
        }
    }
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blocks = |f: &mut fmt::Formatter<'_>, block: &Option<[usize; 2]>| match block {
            Some([n_out, n_in]) => write!(f, ", blocks of {n_out}x{n_in}"),
            None => Ok(()),
        };
        let groups = |f: &mut fmt::Formatter<'_>, size: &Option<usize>| match size {
            Some(n) => write!(f, ", 4 bits, groups of {n}"),
            None => write!(f, ", 4 bits, a group for each output"),
        };
        match self {
            Self::Fp8 { block } => {
                f.write_str("fp8")?;
                blocks(f, block)
            }
            Self::Gptq { group_size, zeros } => {
                f.write_str(match zeros {
                    GptqZeros::LessOne => "gptq",
                    GptqZeros::Plain => "gptq_v2",
                })?;
                groups(f, group_size)
            }
            Self::Awq { group_size } => {
                f.write_str("awq")?;
                groups(f, group_size)
            }
            Self::CompressedTensors { format, block } => {
                write!(f, "compressed-tensors, {}", format.as_str())?;
                blocks(f, block)
            }
        }
    }
}

impl Quantization {
    /// The method of a model directory; `None`: it is not quantized.
    ///
    /// # Errors
    /// [`ModelError::Checkpoint`] for a method, or a form of one, that is not read; else as reading the configuration.
    pub fn of(dir: &Path) -> Result<Option<Self>, ModelError> {
        let config = JsonFile::read_or_empty(dir, "config.json")?;
        let by_config = KEYS.iter().find_map(|key| Some((*key, config.get(key)?.clone())));
        let stated = match by_config {
            Some(stated) => Some(stated),
            None => by_file(dir)?,
        };
        let Some((key, settings)) = stated else { return Ok(None) };
        Self::read(&settings).map(Some).map_err(|reason| ModelError::Checkpoint {
            path: dir.to_owned(),
            found: format!(
                "is a quantized checkpoint ({key}: {}), which is not read: {reason}",
                method(&settings)
            ),
            cure: CURE.into(),
        })
    }

    /// The method of an object of settings, or the reason for which it is not read.
    fn read(settings: &Value) -> Result<Self, String> {
        let stated = settings["quant_method"].as_str();
        // Before it had a method, compressed-tensors had a format.
        let method = stated.or_else(|| settings.get("config_groups").map(|_| "compressed-tensors"));
        match method.map(str::to_lowercase).as_deref() {
            Some("fp8") => fp8(settings),
            Some("gptq") => gptq(settings),
            Some("awq") => awq(settings),
            Some("compressed-tensors") => compressed_tensors(settings),
            Some(other) => Err(format!("quant_method is {other}")),
            None => Err("it has no quant_method".into()),
        }
    }

    /// Parameters that a stored tensor of `n_elements` stands for.
    pub(crate) fn n_parameters(name: &str, n_elements: usize) -> usize {
        let part = PARTS.iter().find(|(end, _)| name.ends_with(end));
        part.map_or(n_elements, |(_, factor)| n_elements.saturating_mul(*factor))
    }
}

/// The settings of a file beside the configuration, with the method that its name stands for.
fn by_file(dir: &Path) -> Result<Option<(&'static str, Value)>, ModelError> {
    let Some((name, method)) = FILES.into_iter().find(|(name, _)| dir.join(name).exists()) else {
        return Ok(None);
    };
    let mut settings = JsonFile::read(dir, name)?.value().clone();
    settings["quant_method"] = method.into();
    Ok(Some((name, settings)))
}

/// A method by its name and its bits, as far as they are stated.
fn method(settings: &Value) -> String {
    let known = ["load_in_4bit", "load_in_8bit"].into_iter().find(|key| settings[*key] == true);
    let named = settings["quant_method"].as_str().or(settings["format"].as_str());
    let bits = settings["bits"].as_u64().or(settings["w_bit"].as_u64()).map(|n| format!("{n} bits"));
    let parts: Vec<String> =
        [named.map(str::to_owned), known.map(str::to_owned), bits].into_iter().flatten().collect();
    if parts.is_empty() { "of a method it does not name".into() } else { parts.join(", ") }
}

/// The value of a key, if it is neither missing nor null.
fn set<'a>(settings: &'a Value, key: &str) -> Option<&'a Value> {
    settings.get(key).filter(|value| !value.is_null())
}

/// Refuses a text that is set to something else than one of `expected`.
fn check_text(settings: &Value, key: &str, expected: &[&str]) -> Result<(), String> {
    match set(settings, key) {
        None => Ok(()),
        Some(value) if value.as_str().is_some_and(|text| expected.contains(&&*text.to_lowercase())) => Ok(()),
        Some(value) => Err(format!("{key} is {value}, expected {}", expected.join(" or "))),
    }
}

/// A pair of counts from 1: outputs and inputs of a block.
fn block(settings: &Value, key: &str) -> Result<Option<[usize; 2]>, String> {
    let Some(value) = set(settings, key) else { return Ok(None) };
    let count = |v: &Value| v.as_u64().filter(|n| *n > 0).and_then(|n| usize::try_from(n).ok());
    let counts: Option<Vec<usize>> = value.as_array().and_then(|list| list.iter().map(count).collect());
    let pair = counts.and_then(|counts| <[usize; 2]>::try_from(counts).ok());
    pair.map(Some).ok_or_else(|| format!("{key} is {value}, expected two counts"))
}

/// Refuses other than four bits, by the first of `keys` that is set.
fn check_four_bits(settings: &Value, keys: [&str; 2]) -> Result<(), String> {
    let bits = keys.iter().find_map(|key| set(settings, key));
    match bits.map(|bits| bits.as_u64()) {
        Some(Some(4)) => Ok(()),
        _ => Err(format!(
            "{} is {}, expected 4",
            keys[0],
            bits.map_or_else(|| "missing".into(), Value::to_string)
        )),
    }
}

/// Inputs of a group, by the first of `keys` that is set; -1 and none: all inputs.
fn group_size(settings: &Value, keys: [&str; 2]) -> Result<Option<usize>, String> {
    let Some(value) = keys.iter().find_map(|key| set(settings, key)) else { return Ok(None) };
    match value.as_i64() {
        Some(-1) => Ok(None),
        Some(n @ 1..) => Ok(usize::try_from(n).ok()),
        _ => Err(format!("{} is {value}, expected a count or -1", keys[0])),
    }
}

fn fp8(settings: &Value) -> Result<Quantization, String> {
    check_text(settings, "fmt", &["e4m3", "float8_e4m3fn"])?;
    check_text(settings, "scale_fmt", &["float"])?;
    check_text(settings, "expert_dtype", &["fp8"])?;
    Ok(Quantization::Fp8 { block: block(settings, "weight_block_size")? })
}

fn gptq(settings: &Value) -> Result<Quantization, String> {
    check_four_bits(settings, ["bits", "w_bit"])?;
    for key in ["checkpoint_format", "format"] {
        check_text(settings, key, &["gptq", "gptq_v2"])?;
    }
    if settings["is_marlin_format"] == true {
        return Err("is_marlin_format is true, expected false".into());
    }
    let format = set(settings, "checkpoint_format").or_else(|| set(settings, "format"));
    let is_v2 = format.is_some_and(|format| format == "gptq_v2");
    Ok(Quantization::Gptq {
        group_size: group_size(settings, ["group_size", "q_group_size"])?,
        zeros: if is_v2 { GptqZeros::Plain } else { GptqZeros::LessOne },
    })
}

fn awq(settings: &Value) -> Result<Quantization, String> {
    check_four_bits(settings, ["bits", "w_bit"])?;
    for key in ["version", "format"] {
        check_text(settings, key, &["gemm"])?;
    }
    check_text(settings, "backend", &["auto", "autoawq"])?;
    if settings["zero_point"] == false {
        return Err("zero_point is false, expected true".into());
    }
    Ok(Quantization::Awq { group_size: group_size(settings, ["group_size", "q_group_size"])? })
}

fn compressed_tensors(settings: &Value) -> Result<Quantization, String> {
    let stated = settings["format"].as_str().unwrap_or("missing");
    let format = CompressedFormat::ALL.into_iter().find(|format| format.as_str() == stated);
    let format = format.ok_or_else(|| {
        format!(
            "format is {stated}, expected {}",
            CompressedFormat::ALL.map(CompressedFormat::as_str).join(" or ")
        )
    })?;
    if let Some(sparsity) = set(settings, "sparsity_config") {
        check_text(sparsity, "format", &["dense"]).map_err(|reason| format!("sparsity_config.{reason}"))?;
    }
    if set(settings, "transform_config")
        .is_some_and(|c| set(c, "config_groups").is_some_and(|g| g != &Value::Object(serde_json::Map::new())))
    {
        return Err("transform_config is set: weights are rotated, and activations would have to be".into());
    }
    let groups = settings["config_groups"].as_object().ok_or("config_groups is missing or not an object")?;
    let mut scale_block = None;
    for (name, group) in groups {
        check_text(group, "format", &[format.as_str()])
            .map_err(|reason| format!("config_groups.{name}.{reason}"))?;
        let Some(weights) = set(group, "weights") else { continue };
        let of_group = compressed_weights(weights, format)
            .map_err(|reason| format!("config_groups.{name}.weights.{reason}"))?;
        scale_block = scale_block.or(of_group);
    }
    Ok(Quantization::CompressedTensors { format, block: scale_block })
}

/// The block of a group's scales; `None` if they are of tensors, outputs, or groups of inputs.
fn compressed_weights(weights: &Value, format: CompressedFormat) -> Result<Option<[usize; 2]>, String> {
    let bits = weights["num_bits"].as_u64().unwrap_or(8);
    let kind = weights["type"].as_str().unwrap_or("int");
    if !format.types().contains(&(kind, bits)) {
        let expected: Vec<String> =
            format.types().iter().map(|(kind, bits)| format!("{kind} of {bits}")).collect();
        return Err(format!("type is {kind} of {bits} bits, expected {}", expected.join(" or ")));
    }
    check_text(weights, "strategy", &["tensor", "channel", "group", "block"])?;
    if weights["symmetric"] == false && format != CompressedFormat::Pack {
        return Err("symmetric is false, expected true".into());
    }
    if weights["dynamic"].as_bool() == Some(true) {
        return Err("dynamic is true, expected false".into());
    }
    block(weights, "block_structure")
}
