//! Element type of the encoder outputs of each model.

use crate::DType;
use std::collections::BTreeMap;
use std::str::FromStr;
use thiserror::Error;

/// The element types of encoder outputs. Encoders and PD workers must agree on them: they are in the fingerprint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowTypes {
    default: DType,
    by_model: BTreeMap<String, DType>,
}

/// One setting: a type, for all models or for one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowType {
    /// The served name; `None`: all that have no setting of their own.
    pub model: Option<String>,
    /// The type.
    pub dtype: DType,
}

/// A text that is no setting.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{found:?} is no element type, allowed are f32, bf16, f16, int8 and f8, after NAME= for one model")]
pub struct NotARowType {
    found: String,
}

impl RowTypes {
    /// `default` for all models, then the settings in their order.
    pub fn new(default: DType, settings: &[RowType]) -> Self {
        let mut types = Self::from(default);
        for setting in settings {
            match &setting.model {
                None => types.default = setting.dtype,
                Some(model) => {
                    types.by_model.insert(model.clone(), setting.dtype);
                }
            }
        }
        types
    }

    /// The type of a model's rows.
    pub fn of(&self, model: &str) -> DType {
        self.by_model.get(model).copied().unwrap_or(self.default)
    }
}

impl From<DType> for RowTypes {
    fn from(default: DType) -> Self {
        Self { default, by_model: BTreeMap::new() }
    }
}

impl FromStr for RowType {
    type Err = NotARowType;

    fn from_str(text: &str) -> Result<Self, NotARowType> {
        let (model, word) = match text.rsplit_once('=') {
            Some((model, word)) => (Some(model.to_owned()), word),
            None => (None, text),
        };
        let dtype = match word.to_ascii_lowercase().as_str() {
            "int8" => Some(DType::I8),
            "f8" => Some(DType::F8),
            other => DType::parse(other),
        };
        let dtype = dtype.ok_or_else(|| NotARowType { found: word.to_owned() })?;
        Ok(Self { model, dtype })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_has_its_own_type_or_the_default() {
        let settings: Vec<RowType> = ["bf16", "org/speech=int8", "x=F8"].map(|t| t.parse().unwrap()).into();
        let types = RowTypes::new(DType::F32, &settings);
        assert_eq!(["org/speech", "x", "other"].map(|m| types.of(m)), [DType::I8, DType::F8, DType::Bf16]);
        assert_eq!(RowTypes::new(DType::F16, &[]).of("any"), DType::F16);
        let refused = "speech=int4".parse::<RowType>().unwrap_err().to_string();
        assert!(refused.contains("\"int4\"") && refused.contains("int8 and f8"), "{refused}");
    }
}
