//! Text to tokens and back, over a model's own `tokenizer.json`.
//!
//! There are two ways to read text. [`Tokenizer::encode`] recognises control tokens (`<|im_end|>`) wherever
//! they are spelled, as the reference does: for text of the model's own files. [`Tokenizer::encode_plain`]
//! never makes one: for text that a client wrote. It knows nothing of prompts.

mod detokenizer;
mod scan;
mod spelling;

pub use detokenizer::Detokenizer;
pub use scan::Guard;

use crate::error::{ModelError, PromptError};
use scan::ControlTokens;
use spelling::Spelling;
use std::collections::HashSet;
use std::path::Path;

/// A tokenizer. Cheap to share behind an `Arc`; every method takes `&self`.
pub struct Tokenizer {
    /// As published.
    full: tokenizers::Tokenizer,
    /// The same, blind to control tokens.
    plain: tokenizers::Tokenizer,
    controls: ControlTokens,
    /// Tokens that are no part of a text: special ones and times.
    silent: HashSet<u32>,
    /// What bytes its tokens stand for.
    spelling: Spelling,
    /// Tokens that are spelled as they read, whatever the others do.
    verbatim: HashSet<u32>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a model directory.
    ///
    /// # Errors
    /// [`ModelError::File`] or [`ModelError::Format`].
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("tokenizer.json");
        let bytes = std::fs::read(&path).map_err(|source| ModelError::File { path: path.clone(), source })?;
        Self::from_bytes(&bytes).map_err(|message| ModelError::Format { path, message })
    }

    /// Reads the contents of a `tokenizer.json`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let mut json: serde_json::Value = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        let file = json.as_object_mut().ok_or("is no JSON object")?;
        // Cuts and fillings that were set when the file was saved are not the model's.
        for setting in ["truncation", "padding"] {
            file.insert(setting.to_owned(), serde_json::Value::Null);
        }
        let full = read(file)?;
        let mut controls = Vec::new();
        let mut silent = HashSet::new();
        let mut verbatim = HashSet::new();
        let added = file.get_mut("added_tokens").and_then(serde_json::Value::as_array_mut);
        for token in added.into_iter().flatten().filter_map(serde_json::Value::as_object_mut) {
            let flag = |name: &str| token.get(name).and_then(serde_json::Value::as_bool).unwrap_or(false);
            let (special, strips_left, strips_right) = (flag("special"), flag("lstrip"), flag("rstrip"));
            let Some(content) = token.get("content").and_then(|c| c.as_str()).map(str::to_owned) else {
                continue;
            };
            let Some(id) = full.token_to_id(&content) else { continue };
            verbatim.insert(id);
            if special || is_time(&content) {
                silent.insert(id);
            }
            let control = content.chars().count() > 1 && (special || is_bracketed(&content));
            token.insert("special".to_owned(), control.into());
            if control {
                controls.push(scan::ControlToken { id, content, strips_left, strips_right });
            }
        }
        let mut plain = read(file)?;
        plain.set_encode_special_tokens(true);
        let spelling = Spelling::of_decoder(file.get("decoder"));
        Ok(Self { full, plain, controls: ControlTokens::new(controls), silent, spelling, verbatim })
    }

    /// Tokens of text from the model's own files: control tokens are recognised, none is added around them.
    ///
    /// # Errors
    /// [`PromptError::Invalid`] if the model's rules have no token for the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        let encoding = self.full.encode_fast(text, false).map_err(refused)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Tokens of a whole input of an encoder: control tokens are recognised (`<mask>`, `<extra_id_0>` are there
    /// to be written), and those that the model's post-processor adds stand around it.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_input(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        let encoding = self.full.encode_fast(text, true).map_err(refused)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Tokens of text from a client: never a control token, whatever it spells.
    ///
    /// For text that spells none, the same as [`Self::encode`].
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        let encoding = self.plain.encode_fast(text, false).map_err(refused)?;
        // A vocabulary may hold a control token as an ordinary entry, which its model could then choose.
        Ok(encoding.get_ids().iter().copied().filter(|id| !self.controls.contains(*id)).collect())
    }

    /// A guard for texts of clients that are to be mixed with text of the model's files, then read by
    /// [`Self::encode_guarded`]. `texts` are all the clients' texts that will be in the mix.
    ///
    /// # Errors
    /// [`PromptError::Invalid`] if the texts use up every character that could mark them.
    pub fn guard<'a>(&self, texts: impl Iterator<Item = &'a str> + Clone) -> Result<Guard, PromptError> {
        self.controls
            .guard(texts)
            .ok_or_else(|| PromptError::Invalid("the text holds too many Unicode noncharacters".into()))
    }

    /// Tokens of a mix: control tokens are recognised except where `guard` marked them.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_guarded(&self, mixed: &str, guard: &Guard) -> Result<Vec<u32>, PromptError> {
        let mut ids = Vec::new();
        for piece in self.controls.split(mixed) {
            match piece {
                scan::Piece::Control(id) => ids.push(id),
                scan::Piece::Text(text) => ids.extend(self.encode_plain(&guard.remove(text))?),
            }
        }
        Ok(ids)
    }

    /// The id of a token by its exact spelling.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.full.token_to_id(token)
    }

    /// The spelling of a token in the vocabulary, which for byte-level models is not its text.
    pub fn token(&self, id: u32) -> Option<String> {
        self.full.id_to_token(id)
    }

    /// Tokens in the vocabulary, added ones included. A model's logits may be wider.
    pub fn vocab_size(&self) -> usize {
        self.full.get_vocab_size(true)
    }

    /// Whether a token is no part of the text: a special token, or a time.
    pub fn is_silent(&self, id: u32) -> bool {
        self.silent.contains(&id)
    }

    /// The text of tokens, silent ones left out. Bytes that are no whole character are replaced.
    pub fn decode(&self, ids: &[u32]) -> String {
        let heard: Vec<u32> = ids.iter().copied().filter(|id| !self.is_silent(*id)).collect();
        self.decode_all(&heard)
    }

    /// The text of one token by itself, silent or not, as log-probabilities report it.
    pub fn token_text(&self, id: u32) -> String {
        let text = self.decode_all(&[id]);
        // Sentencepiece-style decoders drop the space that begins a text; here it is part of the token.
        let spaced = self.full.id_to_token(id).is_some_and(|t| t.starts_with('▁'));
        if spaced && !text.starts_with(' ') { format!(" {text}") } else { text }
    }

    /// The bytes that a token adds in the middle of a text. `None` for tokens that are no part of a text (see
    /// [`Self::is_silent`]) and for ids without a token.
    ///
    /// The bytes of an answer's tokens, one after another, are its text, but for the first space where
    /// [`Self::drops_first_space`]. They need not be whole characters.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        if self.is_silent(id) {
            return None;
        }
        let token = self.token(id)?;
        let bytes =
            if self.verbatim.contains(&id) { token.into_bytes() } else { self.spelling.bytes(&token) };
        Some(bytes)
    }

    /// Whether the decoder drops the space that begins a text: sentencepiece writes a space before the first
    /// word as before any other.
    pub fn drops_first_space(&self) -> bool {
        !matches!(self.spelling, Spelling::ByteLevel)
    }

    /// Every token's text. Ids without a token, as in the padding of a wide vocabulary, have none.
    fn decode_all(&self, ids: &[u32]) -> String {
        self.full.decode(ids, false).unwrap_or_default()
    }
}

fn read(file: &serde_json::Map<String, serde_json::Value>) -> Result<tokenizers::Tokenizer, String> {
    let bytes = serde_json::to_vec(file).map_err(|e| e.to_string())?;
    tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| e.to_string())
}

fn refused(e: tokenizers::Error) -> PromptError {
    PromptError::Invalid(format!("the text cannot be turned into tokens: {e}"))
}

/// `<…>`: how families spell tokens that steer the model, whether or not their file calls them special.
fn is_bracketed(content: &str) -> bool {
    content.starts_with('<') && content.ends_with('>')
}

/// `<|1.20|>`.
fn is_time(content: &str) -> bool {
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    content
        .strip_prefix("<|")
        .and_then(|rest| rest.strip_suffix("|>"))
        .and_then(|number| number.split_once('.'))
        .is_some_and(|(whole, part)| digits(whole) && digits(part))
}
