//! Digests of a model's tower, for families whose rows vLLM publishes for PD workers of ours (`services/ec/python`).
//!
//! The same digests are made there from the same files, so each step is of a form that both languages have: objects in the order
//! of their keys, numbers as integers or as the bits of the nearest f32.

use super::{CONFIG, Model};
use crate::error::ModelError;
use crate::family::Family;
use crate::files::{ItemProcessor, JsonFile};
use crate::weights::{WeightFormat, Weights};
use serde_json::Value;
use std::fmt::Write;
use triptych_core::{Fingerprint, Modality, Tower};

/// Families whose towers give the same rows in vLLM, layout and levels included (`services/ec/python/tests/test_rows.py`).
const FAMILIES: [Family; 4] = [Family::Qwen2Vl, Family::Qwen25Vl, Family::Qwen3Vl, Family::Qwen3VlMoe];

impl Model {
    /// The tower of a modality; `None` of one whose rows are not taken from vLLM: another family or modality, weights that are
    /// random, quantized, or in another format than safetensors.
    ///
    /// # Errors
    /// As [`Self::fingerprint_in`].
    pub fn tower(&self, modality: Modality) -> Result<Option<Tower>, ModelError> {
        if modality != Modality::Image || !FAMILIES.contains(&self.family) {
            return Ok(None);
        }
        let dir = &self.source.dir;
        let Weights::Stored(stored) = Weights::open(dir, self.source.format)? else { return Ok(None) };
        if stored.quantization().is_some() || stored.format() != WeightFormat::Safetensors {
            return Ok(None);
        }
        let config = JsonFile::read(dir, CONFIG)?;
        let Some(vision) = config.get("vision_config") else { return Ok(None) };
        let processor = JsonFile::processor(dir, ItemProcessor::Image)?;
        let tensors = self.tensor_hashes(self.encoder_of(modality.into())?, &stored)?;
        let tensors: Vec<[&[u8]; 2]> =
            tensors.iter().map(|(described, hash)| [described.as_bytes(), hash.as_slice()]).collect();
        Ok(Some(Tower {
            configuration: Fingerprint::of([self.family().as_bytes(), canonical(vision).as_bytes()]),
            processor: Fingerprint::of([canonical(processor.value()).as_bytes()]),
            weights: Fingerprint::of(tensors.as_flattened().iter().copied()),
        }))
    }
}

/// A value as text that depends on nothing but the value.
fn canonical(value: &Value) -> String {
    let mut text = String::new();
    write(value, &mut text);
    text
}

/// Recurses no deeper than the parser of the file allows.
fn write(value: &Value, text: &mut String) {
    match value {
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            // Writing to a string never fails.
            (Some(n), _) => _ = write!(text, "{n}"),
            (None, Some(n)) => _ = write!(text, "{n}"),
            (None, None) => {
                let bits = (number.as_f64().unwrap_or_default() as f32).to_bits();
                _ = write!(text, "f{bits:08x}");
            }
        },
        Value::Array(values) => {
            text.push('[');
            for value in values {
                write(value, text);
                text.push(',');
            }
            text.push(']');
        }
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().collect();
            fields.sort_by_key(|(name, _)| *name);
            text.push('{');
            for (name, value) in fields {
                _ = write!(text, "{}:", Value::from(name.as_str()));
                write(value, text);
                text.push(',');
            }
            text.push('}');
        }
        Value::Null | Value::Bool(_) | Value::String(_) => _ = write!(text, "{value}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_values_are_those_of_the_python_side() {
        // `services/ec/python/tests/test_tower.py` has the same.
        let value = r#"{"b": [1, -2, 1.0, 0.00392156862745098, 1e-06, 18446744073709551615],
            "a": {"ü\n\"\u0001": null, "t": true}, "é": ""}"#;
        let value: Value = serde_json::from_str(value).unwrap();
        assert_eq!(
            canonical(&value),
            "{\"a\":{\"t\":true,\"ü\\n\\\"\\u0001\":null,},\
             \"b\":[1,-2,f3f800000,f3b808081,f358637bd,18446744073709551615,],\"é\":\"\",}"
        );
    }
}
