//! A model directory as the builders of tokenizers read it.

use super::special::{NamedToken, SpecialTokens};
use crate::error::ModelError;
use crate::files::JsonFile;
use std::path::{Path, PathBuf};

/// Files and settings of a directory that the builders of tokenizers read.
pub(super) struct TokenizerDir<'a> {
    pub(super) path: &'a Path,
    /// `tokenizer_config.json`, or nothing.
    pub(super) config: JsonFile,
    /// The name of the tokenizer's class, without `Tokenizer` and `Fast`.
    pub(super) class: String,
    pub(super) specials: SpecialTokens,
}

impl TokenizerDir<'_> {
    pub(super) fn has(&self, name: &str) -> bool {
        self.path.join(name).is_file()
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// A file of this directory is not what it should be.
    pub(super) fn wrong(&self, name: &str, message: impl Into<String>) -> ModelError {
        ModelError::Format { path: self.file(name), message: message.into() }
    }

    /// A token with a role that the family cannot do without.
    pub(super) fn role(&self, role: &str, default: &str) -> NamedToken {
        self.specials.role(role, default).unwrap_or_else(|| NamedToken::special(default))
    }
}
