//! JSON files of a model directory, read with errors that name the file and the key.
//!
//! It knows no key by name: each reader asks for its own.

use crate::error::ModelError;
use serde_json::Value;
use std::path::Path;

/// One JSON object of a model directory: a file, or an object in one.
#[derive(Clone, Debug)]
pub(crate) struct JsonFile {
    name: &'static str,
    /// Key of the object in the file; `None`: it is the file.
    part: Option<&'static str>,
    value: Value,
}

/// The file of a directory's only processor.
const WHOLE: &str = "preprocessor_config.json";

/// An item processor of a model directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ItemProcessor {
    /// Of images.
    Image,
    /// Of audio.
    Audio,
    /// Of videos.
    Video,
}

impl ItemProcessor {
    /// Keys that it has in `processor_config.json`.
    fn parts(self) -> &'static [&'static str] {
        match self {
            Self::Image => &["image_processor"],
            Self::Audio => &["feature_extractor", "audio_processor"],
            Self::Video => &["video_processor"],
        }
    }

    /// Files that hold it alone, in the order they are tried.
    fn files(self) -> &'static [&'static str] {
        match self {
            Self::Image | Self::Audio => &[WHOLE],
            Self::Video => &["video_preprocessor_config.json", WHOLE],
        }
    }
}

impl JsonFile {
    /// Reads `dir/name`.
    pub(crate) fn read(dir: &Path, name: &'static str) -> Result<Self, ModelError> {
        let path = dir.join(name);
        let bytes = std::fs::read(&path).map_err(|source| ModelError::File { path: path.clone(), source })?;
        let value: Value = serde_json::from_slice(&bytes)
            .map_err(|e| ModelError::Format { path: path.clone(), message: e.to_string() })?;
        if !value.is_object() {
            return Err(ModelError::Format { path, message: "is no JSON object".into() });
        }
        Ok(Self { name, part: None, value })
    }

    /// Reads `dir/name`; a missing file is an empty object.
    pub(crate) fn read_or_empty(dir: &Path, name: &'static str) -> Result<Self, ModelError> {
        match Self::read(dir, name) {
            Err(ModelError::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                Ok(Self { name, part: None, value: Value::Object(serde_json::Map::new()) })
            }
            other => other,
        }
    }

    /// Reads an item processor of a model directory: its object in `processor_config.json`, which is all that
    /// `save_pretrained` of transformers 5 writes, or else the whole of `preprocessor_config.json`, for videos of
    /// `video_preprocessor_config.json` where it exists. Where a directory has both, the object wins, as in transformers
    /// (<https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/image_processing_base.py>).
    pub(crate) fn processor(dir: &Path, processor: ItemProcessor) -> Result<Self, ModelError> {
        const NESTED: &str = "processor_config.json";
        let nested = Self::read_or_empty(dir, NESTED)?;
        let parts = processor.parts();
        if let Some((part, value)) = parts.iter().find_map(|part| Some((*part, nested.get(part)?))) {
            return match value.is_object() {
                true => Ok(Self { name: NESTED, part: Some(part), value: value.clone() }),
                false => Err(nested.wrong(part, "an object")),
            };
        }
        let files = processor.files();
        let whole = files.iter().find(|file| dir.join(file).exists()).copied().unwrap_or(WHOLE);
        match Self::read(dir, whole) {
            Err(ModelError::File { source, .. })
                if source.kind() == std::io::ErrorKind::NotFound && dir.join(NESTED).exists() =>
            {
                Err(nested.wrong(parts[0], &format!("an object, or {WHOLE} beside it")))
            }
            other => other,
        }
    }

    /// The whole object.
    pub(crate) fn value(&self) -> &Value {
        &self.value
    }

    /// The value at a dotted key; `null` counts as absent.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        key.split('.').try_fold(&self.value, |v, part| v.get(part)).filter(|v| !v.is_null())
    }

    /// The error for a value that a reader cannot use.
    pub(crate) fn wrong(&self, key: &str, expected: &str) -> ModelError {
        self.refused(key, self.get(key).map_or_else(|| "missing".to_owned(), short), expected)
    }

    /// The error for a value that a reader made of a key.
    pub(crate) fn refused(&self, key: &str, actual: String, expected: &str) -> ModelError {
        let key = self.part.map_or_else(|| key.to_owned(), |part| format!("{part}.{key}"));
        ModelError::Config { file: self.name, key, actual, expected: expected.to_owned() }
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| self.wrong(key, expected)),
        }
    }

    /// An integer below 2³².
    pub(crate) fn u32(&self, key: &str) -> Result<Option<u32>, ModelError> {
        self.typed(key, "an integer below 2^32", as_u32)
    }

    /// A number.
    pub(crate) fn f64(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// A boolean.
    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// A list of numbers.
    pub(crate) fn f64s(&self, key: &str) -> Result<Option<Vec<f64>>, ModelError> {
        self.typed(key, "a list of numbers", |v| v.as_array()?.iter().map(Value::as_f64).collect())
    }

    /// Token ids: one, or a list. Negative ones, which mean "none" in some published files, are left out.
    pub(crate) fn ids(&self, key: &str) -> Result<Option<Vec<u32>>, ModelError> {
        let all = |v: &Value| -> Option<Vec<u32>> {
            let list = v.as_array().map_or(std::slice::from_ref(v), Vec::as_slice);
            let signed: Option<Vec<i64>> = list.iter().map(Value::as_i64).collect();
            signed?.into_iter().filter(|id| *id >= 0).map(|id| u32::try_from(id).ok()).collect()
        };
        self.typed(key, "a token id or a list of them", all)
    }

    /// Lists of token ids, none of them empty.
    pub(crate) fn id_lists(&self, key: &str) -> Result<Option<Vec<Vec<u32>>>, ModelError> {
        let list = |v: &Value| -> Option<Vec<u32>> {
            let ids: Option<Vec<u32>> = v.as_array()?.iter().map(as_u32).collect();
            ids.filter(|ids| !ids.is_empty())
        };
        self.typed(key, "lists of token ids", |v| v.as_array()?.iter().map(list).collect())
    }

    /// Names with their token ids.
    pub(crate) fn named_ids(&self, key: &str) -> Result<Option<Vec<(String, u32)>>, ModelError> {
        self.typed(key, "names with token ids", |v| {
            v.as_object()?.iter().map(|(name, id)| Some((name.clone(), as_u32(id)?))).collect()
        })
    }
}

fn as_u32(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

/// The start of a value as text: errors stay one line.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
