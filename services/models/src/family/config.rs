//! Typed reads of a JSON configuration, with errors that name the key.

use crate::error::ModelError;
use serde_json::Value;
use triptych_kernels::ops::Activation;

/// Sizes over this are refused: products of three of them still fit 64 bits.
const MAX_SIZE: u64 = 1 << 20;

/// An object of a configuration file. A key is looked up in each of `objects`, and the first that has it,
/// other than null, wins: this is how two generations of a file are read as one.
#[derive(Clone, Debug)]
pub struct Config<'a> {
    file: &'static str,
    // Prefix of the keys in messages: empty, or a name with a dot.
    path: &'static str,
    objects: Vec<&'a Value>,
}

impl<'a> Config<'a> {
    /// The top of a file.
    pub fn new(file: &'static str, root: &'a Value) -> Self {
        Self { file, path: "", objects: vec![root] }
    }

    /// The object under `key` only; `path` is `key` with a dot.
    ///
    /// # Errors
    /// [`ModelError::Config`] if it is missing.
    pub fn section(&self, key: &'static str, path: &'static str) -> Result<Self, ModelError> {
        let object = self.get(key).filter(|v| v.is_object());
        let object = object.ok_or_else(|| ModelError::missing_key(self.file, key, "an object"))?;
        Ok(Self { file: self.file, path, objects: vec![object] })
    }

    /// This object, with the keys of the first section of `keys` that exists before its own.
    pub fn or_section(&self, keys: &[&str]) -> Self {
        let section = keys.iter().find_map(|key| self.get(key)).filter(|v| v.is_object());
        let objects = section.into_iter().chain(self.objects.iter().copied()).collect();
        Self { file: self.file, path: self.path, objects }
    }

    /// This object, with values for keys that it does not have.
    #[must_use]
    pub fn with_defaults(&self, defaults: &'a Value) -> Self {
        let objects = self.objects.iter().copied().chain([defaults]).collect();
        Self { file: self.file, path: self.path, objects }
    }

    /// The value of a key; null is absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.objects.iter().find_map(|o| o.get(key).filter(|v| !v.is_null()))
    }

    /// True for a key that is there and null.
    pub fn is_null(&self, key: &str) -> bool {
        self.get(key).is_none() && self.objects.iter().any(|o| o.get(key).is_some())
    }

    /// The value of a key that must be there.
    ///
    /// # Errors
    /// [`ModelError::Config`] if it is missing.
    pub fn required(&self, key: &str) -> Result<&'a Value, ModelError> {
        self.get(key).ok_or_else(|| self.missing(key, "a value"))
    }

    /// A size: an integer from 1 to 2²⁰.
    ///
    /// # Errors
    /// [`ModelError::Config`] if missing or not such a number.
    pub fn size(&self, key: &str) -> Result<usize, ModelError> {
        let expected = "an integer from 1";
        let value = self.get(key).ok_or_else(|| self.missing(key, expected))?;
        match value.as_u64() {
            Some(n @ 1..=MAX_SIZE) => Ok(n as usize),
            _ => Err(self.unsupported(key, value, expected)),
        }
    }

    /// As [`Self::size`], with a default when the key is missing.
    ///
    /// # Errors
    /// [`ModelError::Config`] if it is there and not such a number.
    pub fn size_or(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        if self.get(key).is_some() { self.size(key) } else { Ok(default) }
    }

    /// A list of sizes; 0 is allowed.
    ///
    /// # Errors
    /// [`ModelError::Config`] if missing or not such a list.
    pub fn sizes(&self, key: &str) -> Result<Vec<usize>, ModelError> {
        let expected = "a list of integers";
        let value = self.get(key).ok_or_else(|| self.missing(key, expected))?;
        let item = |v: &Value| v.as_u64().filter(|n| *n <= MAX_SIZE).map(|n| n as usize);
        let list = value.as_array().and_then(|list| list.iter().map(item).collect());
        list.ok_or_else(|| self.unsupported(key, value, expected))
    }

    /// A positive number.
    ///
    /// # Errors
    /// [`ModelError::Config`] if missing or not such a number.
    pub fn number(&self, key: &str) -> Result<f32, ModelError> {
        let expected = "a positive number";
        let value = self.get(key).ok_or_else(|| self.missing(key, expected))?;
        let number = value.as_f64().map(|n| n as f32).filter(|n| n.is_finite() && *n > 0.0);
        number.ok_or_else(|| self.unsupported(key, value, expected))
    }

    /// A text.
    ///
    /// # Errors
    /// [`ModelError::Config`] if missing or not a text.
    pub fn text(&self, key: &str) -> Result<&'a str, ModelError> {
        let value = self.get(key).ok_or_else(|| self.missing(key, "a text"))?;
        value.as_str().ok_or_else(|| self.unsupported(key, value, "a text"))
    }

    /// An activation by the name that transformers knows it by; `default` when the key is missing.
    ///
    /// # Errors
    /// [`ModelError::Config`] for one that is not built.
    pub fn activation(&self, key: &str, default: &str) -> Result<Activation, ModelError> {
        let name = if self.get(key).is_some() { self.text(key)? } else { default };
        activation(name).ok_or_else(|| self.unsupported(key, name, ACTIVATIONS))
    }

    /// A boolean; `default` when the key is missing.
    ///
    /// # Errors
    /// [`ModelError::Config`] if it is there and neither true nor false.
    pub fn flag_or(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.unsupported(key, value, "true or false"))
    }

    /// Refuses a key that is true.
    ///
    /// # Errors
    /// [`ModelError::Config`] if it is.
    pub fn must_be_off(&self, key: &str) -> Result<(), ModelError> {
        if self.flag_or(key, false)? { Err(self.unsupported(key, true, "false")) } else { Ok(()) }
    }

    /// `whole / n`, refused if there is a remainder.
    ///
    /// # Errors
    /// [`ModelError::Config`] for a remainder.
    pub fn share(&self, key: &str, whole: usize, n: usize) -> Result<usize, ModelError> {
        match whole.is_multiple_of(n) {
            true => Ok(whole / n),
            false => Err(self.unsupported(key, n, format!("a divisor of {whole}"))),
        }
    }

    /// A size that is the number at `key` times `n`, truncated.
    ///
    /// # Errors
    /// [`ModelError::Config`] if the key is missing or not a positive number, or the product no size.
    pub fn scaled_size(&self, key: &str, n: usize) -> Result<usize, ModelError> {
        let ratio = self.number(key)?;
        let size = (f64::from(ratio) * n as f64) as u64;
        match size {
            1..=MAX_SIZE => Ok(size as usize),
            _ => Err(self.unsupported(key, ratio, format!("a ratio that makes {n} at least 1"))),
        }
    }

    /// The error for a value that is not supported.
    pub fn unsupported(&self, key: &str, actual: impl ToString, expected: impl Into<String>) -> ModelError {
        let key = format!("{}{key}", self.path);
        ModelError::Config { file: self.file, key, actual: actual.to_string(), expected: expected.into() }
    }

    fn missing(&self, key: &str, expected: &str) -> ModelError {
        ModelError::missing_key(self.file, format!("{}{key}", self.path), expected)
    }
}

const ACTIVATIONS: &str = "gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, quick_gelu, relu, silu or swish";

/// The activation that transformers calls `name`.
pub(super) fn activation(name: &str) -> Option<Activation> {
    Some(match name {
        "gelu" => Activation::Gelu,
        // Three spellings of one formula; they differ in rounding only.
        "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Activation::GeluTanh,
        "quick_gelu" => Activation::QuickGelu,
        "relu" => Activation::Relu,
        "silu" | "swish" => Activation::Silu,
        _ => return None,
    })
}
