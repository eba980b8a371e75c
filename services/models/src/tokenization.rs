//! Text to tokens and back, over a model's own `tokenizer.json`, or over the files that came before it.
//!
//! There are two ways to read text. [`Tokenizer::encode`] recognises control tokens (`<|im_end|>`) wherever
//! they are spelled, as the reference does: for text of the model's own files. [`Tokenizer::encode_plain`]
//! never makes one: for text that a client wrote. It knows nothing of prompts.

mod added;
mod characters;
mod decode;
mod detokenizer;
mod files;
mod id_map;
mod languages;
mod scan;
mod spelling;

pub use added::MoreTokens;
pub use detokenizer::Detokenizer;
pub use languages::LanguageTokens;
pub use scan::ControlTokenGuard;

use crate::error::{ModelError, PromptError};
use added::{AddedTokenIds, AddedTokens};
use base64::Engine as _;
use characters::InvalidBytes;
use id_map::IdMap;
use scan::ControlTokens;
use serde_json::{Map, Value, json};
use spelling::Spelling;
use std::collections::HashSet;
use std::path::Path;
use tokenizers::AddedToken;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::models::wordpiece::WordPiece;

/// A tokenizer. Cheap to share behind an `Arc`; every method takes `&self`.
pub struct Tokenizer {
    /// The tokenizer as published.
    full: tokenizers::Tokenizer,
    /// The same, blind to control tokens.
    plain: tokenizers::Tokenizer,
    /// The model's ids, where they differ from the library's.
    id_map: Option<IdMap>,
    /// Tokenizer of whole encoder inputs, where they have a vocabulary or a model of their own.
    input: Option<(tokenizers::Tokenizer, IdMap)>,
    controls: ControlTokens,
    /// Tokens that are no part of a text: special ones and times.
    silent: HashSet<u32>,
    /// The bytes of its tokens.
    spelling: Spelling,
    /// Treatment of bytes that are no character.
    invalid_bytes: InvalidBytes,
    /// Tokens whose spelling is their text, unlike the others'.
    verbatim: HashSet<u32>,
    /// BLAKE3 of everything that decides the tokens of a text.
    digest: blake3::Hash,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a model directory or, where there is none, what the family's own code read
    /// before: a sentencepiece model, a vocabulary with merges, or for ByT5 nothing but the name of its class.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`] or [`ModelError::Config`]; if there is nothing to make a
    /// tokenizer of, the message names the files that were looked for.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        Self::with_more(dir, &MoreTokens::default())
    }

    /// The same with more control tokens behind those of `tokenizer.json`.
    ///
    /// # Errors
    /// As [`Self::from_dir`].
    pub fn with_more(dir: &Path, more: &MoreTokens) -> Result<Self, ModelError> {
        let path = dir.join("tokenizer.json");
        match std::fs::read(&path) {
            Ok(bytes) => {
                Self::from_bytes_with(&bytes, more).map_err(|message| ModelError::Format { path, message })
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                let built = files::build(dir)?;
                Self::from_built(built)
                    .map_err(|message| ModelError::Format { path: dir.to_owned(), message })
            }
            Err(source) => Err(ModelError::File { path, source }),
        }
    }

    /// Reads the contents of a `tokenizer.json`.
    ///
    /// # Errors
    /// A description of the defect.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        Self::from_bytes_with(bytes, &MoreTokens::default())
    }

    fn from_bytes_with(bytes: &[u8], more: &MoreTokens) -> Result<Self, String> {
        let json: Value = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        let Value::Object(mut file) = json else { return Err("is no JSON object".into()) };
        check_charsmaps(file.get("normalizer").unwrap_or(&Value::Null))?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(bytes);
        for token in more.append(&mut file) {
            hasher.update(token.as_bytes());
        }
        Self::from_json(file, None, hasher.finalize())
    }

    fn from_built(built: files::BuiltTokenizers) -> Result<Self, String> {
        let mut hasher = blake3::Hasher::new();
        for side in [Some(&built.output), built.input.as_ref()].into_iter().flatten() {
            hasher.update(&serde_json::to_vec(&side.json).map_err(|e| e.to_string())?);
            for id in side.id_map.ids() {
                hasher.update(&id.to_le_bytes());
            }
        }
        let json = built.output.json;
        let id_map = built.output.id_map;
        let mut tokenizer = Self::from_json(json, Some(id_map), hasher.finalize())?;
        tokenizer.invalid_bytes = built.invalid_bytes;
        if let Some(mut input) = built.input {
            tokenizer.input = Some((read(&mut input.json)?, input.id_map));
        }
        Ok(tokenizer)
    }

    fn from_json(
        mut file: Map<String, Value>,
        id_map: Option<IdMap>,
        digest: blake3::Hash,
    ) -> Result<Self, String> {
        // Truncation and padding that were set when the file was saved are not the model's.
        for setting in ["truncation", "padding"] {
            file.insert(setting.to_owned(), Value::Null);
        }
        let spelling = Spelling::of_decoder(file.get("decoder"));
        let added = AddedTokens::mark(&mut file);
        let full = read(&mut file)?;
        // A large vocabulary takes seconds to read, so it is read twice only where the two differ.
        let mut plain = if added.spare(&mut file) { read(&mut file)? } else { full.clone() };
        plain.set_encode_special_tokens(true);
        let numbered = added.numbered(|content| match &id_map {
            Some(id_map) => id_map.vocabulary().id(content),
            None => full.token_to_id(content),
        });
        let AddedTokenIds { controls, silent, verbatim } = numbered;
        let controls = ControlTokens::new(controls);
        let invalid_bytes = InvalidBytes::default();
        let input = None;
        Ok(Self { full, plain, id_map, input, controls, silent, spelling, invalid_bytes, verbatim, digest })
    }

    /// Tokens of text from the model's own files: control tokens are recognised, none is added around them.
    ///
    /// # Errors
    /// [`PromptError::Invalid`] if the model's rules have no token for the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        self.tokens(&self.full, text, false)
    }

    /// Tokens of a whole input of an encoder: control tokens are recognised (`<mask>`, `<extra_id_0>` are there
    /// to be written), and those that the model's post-processor adds stand around it.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_input(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        match &self.input {
            None => self.tokens(&self.full, text, true),
            Some((library, id_map)) => {
                let encoding = library.encode_fast(text, true).map_err(refused)?;
                Ok(id_map.apply(encoding.get_ids()))
            }
        }
    }

    /// Tokens that the model's post-processor puts before a text.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn prefix(&self) -> Result<Vec<u32>, PromptError> {
        const SOME_TEXT: &str = "a";
        let bare = self.encode(SOME_TEXT)?;
        let mut whole = self.encode_input(SOME_TEXT)?;
        let place = whole.windows(bare.len().max(1)).position(|window| window == bare);
        whole.truncate(place.unwrap_or(0));
        Ok(whole)
    }

    /// Tokens of `ids` that are what the post-processor puts before a text: all of that, or none.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn n_prefix(&self, ids: &[u32]) -> Result<usize, PromptError> {
        let prefix = self.prefix()?;
        Ok(if ids.starts_with(&prefix) { prefix.len() } else { 0 })
    }

    /// Tokens of a text by a tokenizer of the library, in the model's ids.
    fn tokens(
        &self,
        library: &tokenizers::Tokenizer,
        text: &str,
        around: bool,
    ) -> Result<Vec<u32>, PromptError> {
        let encoding = library.encode_fast(text, around).map_err(refused)?;
        let ids = encoding.get_ids();
        Ok(self.id_map.as_ref().map_or_else(|| ids.to_vec(), |id_map| id_map.apply(ids)))
    }

    /// Tokens of text from a client: never a control token, whatever it spells.
    ///
    /// For text that spells none, the same as [`Self::encode`].
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        let mut ids = self.tokens(&self.plain, text, false)?;
        // A vocabulary may hold a control token as an ordinary entry, which its model could then choose.
        ids.retain(|id| !self.controls.contains(*id));
        Ok(ids)
    }

    /// A guard for texts of clients that are to be mixed with text of the model's files, then read by
    /// [`Self::encode_guarded`]. `texts` are all the clients' texts that will be in the mix.
    ///
    /// # Errors
    /// [`PromptError::Invalid`] if the texts use up every character that could mark them.
    pub fn guard<'a>(
        &self,
        texts: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<ControlTokenGuard, PromptError> {
        self.controls
            .guard(texts)
            .ok_or_else(|| PromptError::Invalid("the text holds too many Unicode noncharacters".into()))
    }

    /// Tokens of a mix: control tokens are recognised except where `guard` marked them.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_guarded(&self, mixed: &str, guard: &ControlTokenGuard) -> Result<Vec<u32>, PromptError> {
        let mut ids = Vec::new();
        for span in self.controls.split(mixed) {
            match span {
                scan::MixedSpan::Control(id) => ids.push(id),
                scan::MixedSpan::Text(text) => ids.extend(self.encode_plain(&guard.remove(text))?),
            }
        }
        Ok(ids)
    }

    /// Spelling and id of every control token, in no order.
    pub fn controls(&self) -> impl Iterator<Item = (String, u32)> {
        self.controls.iter().map(|token| (token.content.clone(), token.id))
    }

    /// BLAKE3 of everything in its files that decides the tokens of a text.
    pub fn digest(&self) -> blake3::Hash {
        self.digest
    }

    /// The id of a token by its exact spelling.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        match &self.id_map {
            Some(id_map) => id_map.vocabulary().id(token),
            None => self.full.token_to_id(token),
        }
    }

    /// The spelling of a token in the vocabulary, which for byte-level models is not its text.
    pub fn token(&self, id: u32) -> Option<String> {
        match &self.id_map {
            Some(id_map) => id_map.vocabulary().name(id).map(str::to_owned),
            None => self.full.id_to_token(id),
        }
    }

    /// Tokens in the vocabulary, added ones included. A model's logits may be wider.
    ///
    /// Ids that the family leaves unused count too: every id is below this.
    pub fn vocab_size(&self) -> usize {
        match &self.id_map {
            Some(id_map) => id_map.vocabulary().end() as usize,
            None => self.full.get_vocab_size(true),
        }
    }

    /// True for tokens that are no part of the text: special tokens and times.
    pub fn is_silent(&self, id: u32) -> bool {
        self.silent.contains(&id)
    }
}

/// Refuses a precompiled normalizer that would lead the library out of bounds.
fn check_charsmaps(normalizer: &Value) -> Result<(), String> {
    if let Some(map) = normalizer.get("precompiled_charsmap").and_then(Value::as_str) {
        let bytes = base64::engine::general_purpose::STANDARD
            .decode(map)
            .map_err(|e| format!("precompiled_charsmap is no base64: {e}"))?;
        files::check_charsmap(&bytes)?;
    }
    normalizer
        .get("normalizers")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .try_for_each(check_charsmaps)
}

/// Reads the contents of a file. Its model is taken out of it where it is not read again: the library copies a
/// vocabulary three times on its way from bytes to a model, and all else of a file is small.
fn read(file: &mut Map<String, Value>) -> Result<tokenizers::Tokenizer, String> {
    let Some(model) = take_model(file).transpose().map_err(|e| e.to_string())? else {
        return read_whole(file);
    };
    let added = file.insert("added_tokens".to_owned(), Value::Array(Vec::new()));
    file.insert("model".to_owned(), json!({"type": "WordLevel", "vocab": {}, "unk_token": ""}));
    let mut tokenizer = read_whole(file)?;
    file.remove("model");
    // They have their ids from the model, so they come after it.
    let added = added.map_or_else(|| Ok(Vec::new()), serde_json::from_value::<Vec<AddedToken>>);
    tokenizer.with_model(model);
    tokenizer.add_tokens(added.map_err(|e| e.to_string())?).map_err(|e| e.to_string())?;
    Ok(tokenizer)
}

/// Takes a model out of a file. Stays: a unigram model, which may be changed and read again ([`AddedTokens::spare`]), and
/// one without a type, which the library detects.
fn take_model(file: &mut Map<String, Value>) -> Option<serde_json::Result<ModelWrapper>> {
    let read: fn(Value) -> serde_json::Result<ModelWrapper> =
        match file.get("model")?.get("type")?.as_str()? {
            "BPE" => |model| serde_json::from_value::<BPE>(model).map(Into::into),
            "WordPiece" => |model| serde_json::from_value::<WordPiece>(model).map(Into::into),
            "WordLevel" => |model| serde_json::from_value::<WordLevel>(model).map(Into::into),
            _ => return None,
        };
    let mut model = file.remove("model")?;
    model.as_object_mut()?.remove("type");
    Some(read(model))
}

fn read_whole(file: &Map<String, Value>) -> Result<tokenizers::Tokenizer, String> {
    let bytes = serde_json::to_vec(file).map_err(|e| e.to_string())?;
    tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| e.to_string())
}

fn refused(e: tokenizers::Error) -> PromptError {
    PromptError::Invalid(format!("the text cannot be turned into tokens: {e}"))
}
