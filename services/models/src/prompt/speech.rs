//! Prompts of Whisper: a speech task as the tokens that the decoder was taught to go on from.
//!
//! `<|startofprev|> earlier text <|startoftranscript|> <|language|> <|task|> <|notimestamps|>`, for each window
//! of the sound. A language that nobody gave is left to the model: the first generated token may then be any
//! language, and what must follow it is forced
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/whisper/generation_whisper.py>).

mod vocabulary;

use super::generation::GenerationFiles;
use super::{CrossInput, OutputKind, PreparedSequence, PromptBuilder, SamplingDefaults, check_ids};
use crate::error::{ModelError, PromptError};
use crate::rules::{LogitRules, TimestampRule};
use crate::tokenization::Tokenizer;
use std::path::Path;
use std::sync::Arc;
use triptych_core::prompt::{Message, Part, Prompt, SpeechKind, SpeechTask, TextOrTokens};
use triptych_core::{EncodedItem, Extent, ItemIdx, Modality};
use vocabulary::Vocabulary;

/// Milliseconds of sound in an encoder row.
const ROW_MS: u64 = 20;

/// Lays out speech tasks.
#[derive(Debug)]
pub struct SpeechPrompt {
    tokenizer: Arc<Tokenizer>,
    words: Vocabulary,
    suppress: Arc<[u32]>,
    begin_suppress: Arc<[u32]>,
    max_initial_timestamp: Option<u32>,
    end_tokens: Vec<u32>,
    /// Encoder rows of a window.
    rows_per_window: u32,
    max_context: usize,
    vocab: u32,
    defaults: SamplingDefaults,
}

/// Decoder tokens of a window, before they are placed.
struct Start {
    tokens: Vec<u32>,
    steps: Vec<Arc<[u32]>>,
    timestamps: bool,
}

impl SpeechPrompt {
    /// Reads a model directory; `tokenizer` is the one of the same directory.
    ///
    /// # Errors
    /// [`ModelError`] for a file or key that is missing or not supported.
    pub fn from_dir(dir: &Path, tokenizer: Arc<Tokenizer>) -> Result<Self, ModelError> {
        let files = GenerationFiles::read(dir)?;
        let ids = |key: &str| -> Result<Arc<[u32]>, ModelError> {
            let found = match files.generation.ids(key)? {
                Some(ids) => Some(ids),
                None => files.config.ids(key)?,
            };
            Ok(found.unwrap_or_default().into())
        };
        let rows_per_window = files.text_u32("max_source_positions")?;
        if rows_per_window == 0 {
            return Err(files.config.wrong("max_source_positions", "1 or more"));
        }
        let vocab = files.text_u32("vocab_size")?;
        Ok(Self {
            words: Vocabulary::read(&files, &tokenizer, vocab)?,
            suppress: ids("suppress_tokens")?,
            begin_suppress: ids("begin_suppress_tokens")?,
            max_initial_timestamp: files.generation.u32("max_initial_timestamp_index")?,
            end_tokens: files.end_tokens()?,
            rows_per_window,
            max_context: files.text_u32("max_target_positions")? as usize,
            vocab,
            defaults: files.sampling_defaults()?,
            tokenizer,
        })
    }

    /// Whether the model knows more than one language.
    pub fn is_multilingual(&self) -> bool {
        !self.words.languages.is_empty()
    }

    /// The start for a task.
    fn task(&self, task: &SpeechTask) -> Result<Start, PromptError> {
        let mut tokens = self.earlier(task.prompt.as_deref().unwrap_or_default())?;
        tokens.push(self.words.start);
        let language = self.language_token(task)?;
        let mut follow = Vec::new();
        if self.is_multilingual() {
            follow.push(match task.kind {
                SpeechKind::Transcribe => self.words.transcribe,
                SpeechKind::Translate => self.words.translate,
            });
        } else if task.kind == SpeechKind::Translate {
            return Err(PromptError::Invalid("this model knows English only and does not translate".into()));
        }
        match self.words.no_timestamps {
            Some(id) if !task.timestamps => follow.push(Some(id)),
            None if task.timestamps => {
                return Err(PromptError::Invalid("this model has no timestamps".into()));
            }
            _ => {}
        }
        let follow = follow.into_iter().flatten();
        let mut steps = Vec::new();
        if self.is_multilingual() && language.is_none() {
            steps.push(self.words.languages.tokens().collect());
            steps.extend(follow.map(|id| Arc::from([id])));
        } else {
            tokens.extend(language);
            tokens.extend(follow);
        }
        Ok(Start { tokens, steps, timestamps: task.timestamps })
    }

    /// The token of the task's language; `None` if it is the model's to find, or its only one.
    fn language_token(&self, task: &SpeechTask) -> Result<Option<u32>, PromptError> {
        let Some(code) = &task.language else { return Ok(None) };
        let code = code.to_ascii_lowercase();
        if !self.is_multilingual() {
            let english = code == "en";
            let text = format!("this model knows English only (en), not {code:?}");
            return if english { Ok(None) } else { Err(PromptError::Invalid(text)) };
        }
        self.words.languages.token(&code).map(Some).ok_or_else(|| {
            let allowed: Vec<&str> = self.words.languages.codes().collect();
            PromptError::Invalid(format!("language {code:?} is not one of {}", allowed.join(", ")))
        })
    }

    /// `<|startofprev|>` and the end of the text, as much as leaves half of the context free.
    fn earlier(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        let text = text.trim();
        let Some(start) = self.words.start_of_previous.filter(|_| !text.is_empty()) else {
            return Ok(Vec::new());
        };
        let ids = self.tokenizer.encode_plain(&format!(" {text}"))?;
        let kept = ids.len().min((self.max_context / 2).saturating_sub(1));
        let mut tokens = vec![start];
        tokens.extend_from_slice(&ids[ids.len() - kept..]);
        Ok(tokens)
    }

    /// The start that a client wrote itself; nothing at all is the plain task.
    fn raw(&self, prompt: &TextOrTokens) -> Result<Start, PromptError> {
        let mut tokens = match prompt {
            TextOrTokens::Text(text) => self.tokenizer.encode(text)?,
            TextOrTokens::Tokens(ids) => ids.clone(),
        };
        if tokens.is_empty() {
            return self.task(&SpeechTask::default());
        }
        check_ids(&tokens, self.vocab)?;
        if !tokens.contains(&self.words.start) {
            tokens.insert(0, self.words.start);
        }
        // Times are wanted where the task is complete and does not say that they are not.
        let says_none = self.words.no_timestamps.is_none_or(|id| tokens.contains(&id));
        let is_task = |id: &u32| Some(*id) == self.words.transcribe || Some(*id) == self.words.translate;
        let complete = !self.is_multilingual() || tokens.iter().any(is_task);
        Ok(Start { tokens, steps: Vec::new(), timestamps: complete && !says_none })
    }

    /// A conversation about one sound: its texts are what was said before.
    fn chat(&self, messages: &[Message]) -> Result<Start, PromptError> {
        let mut texts = Vec::new();
        let mut n_items = 0;
        for part in messages.iter().flat_map(|m| &m.parts) {
            match part {
                Part::Text(text) => texts.push(text.as_str()),
                Part::Item(ItemIdx(0)) => n_items += 1,
                Part::Item(ItemIdx(idx)) => {
                    let text = format!("a message names item {idx}, this model reads one");
                    return Err(PromptError::Invalid(text));
                }
            }
        }
        if n_items != 1 {
            let text = format!("the messages name {n_items} audio items, this model reads one");
            return Err(PromptError::Invalid(text));
        }
        self.task(&SpeechTask { prompt: Some(texts.join("\n")), ..SpeechTask::default() })
    }

    /// Windows and length in milliseconds of the one item.
    fn windows(&self, items: &[EncodedItem]) -> Result<(u32, u64), PromptError> {
        let [item] = items else {
            let text = format!("the request has {} items, this model reads one audio item", items.len());
            return Err(PromptError::Invalid(text));
        };
        if item.modality != Modality::Audio {
            let text = format!("item 0 is {}, this model reads audio items", item.modality);
            return Err(PromptError::Invalid(text));
        }
        let Extent::Windows { n_windows, duration_ms } = item.extent else {
            return Err(PromptError::Invalid("item 0 is audio without windows".into()));
        };
        if n_windows == 0 || n_windows.checked_mul(self.rows_per_window) != Some(item.n_tokens) {
            return Err(PromptError::Invalid(format!(
                "item 0 has {} rows in {n_windows} windows, a window of this model has {}",
                item.n_tokens, self.rows_per_window
            )));
        }
        Ok((n_windows, duration_ms))
    }

    fn rules(&self, start: &Start) -> LogitRules {
        let times = self.words.no_timestamps.filter(|_| start.timestamps);
        LogitRules {
            suppress: Arc::clone(&self.suppress),
            begin_suppress: Arc::clone(&self.begin_suppress),
            steps: start.steps.clone(),
            timestamps: times.map(|no_timestamps| TimestampRule {
                first: no_timestamps + 1,
                no_timestamps,
                end: self.end_tokens[0],
                max_initial: self.max_initial_timestamp,
            }),
            no_speech: self.words.no_speech,
        }
    }

    /// The sequence of a window.
    fn place(&self, start: &Start, window: u32, duration_ms: u64) -> PreparedSequence {
        let window_ms = u64::from(self.rows_per_window) * ROW_MS;
        let offset_ms = u64::from(window) * window_ms;
        let end_ms = (offset_ms + window_ms).min(duration_ms).max(offset_ms);
        let n = start.tokens.len() as u32;
        PreparedSequence {
            tokens: start.tokens.clone(),
            positions: (0..n).map(|p| [p; 3]).collect(),
            next_position: n,
            spans: Vec::new(),
            cross: Some(CrossInput {
                item: ItemIdx(0),
                first_row: window * self.rows_per_window,
                n_rows: self.rows_per_window,
                first_token: 0,
            }),
            rules: self.rules(start),
            end_tokens: self.end_tokens.clone(),
            output: OutputKind::Speech {
                offset_s: offset_ms as f64 / 1000.0,
                end_s: end_ms as f64 / 1000.0,
                timestamps: start.timestamps,
            },
        }
    }
}

impl PromptBuilder for SpeechPrompt {
    fn prepare(&self, prompt: &Prompt, items: &[EncodedItem]) -> Result<Vec<PreparedSequence>, PromptError> {
        let (n_windows, duration_ms) = self.windows(items)?;
        let start = match prompt {
            Prompt::Speech(task) => self.task(task)?,
            Prompt::Chat(messages) => self.chat(messages)?,
            Prompt::Singleton(prompt) | Prompt::Explicit { encoder: None, decoder: prompt } => {
                self.raw(prompt)?
            }
            Prompt::Explicit { encoder: Some(_), .. } => {
                let text = "this model's encoder reads audio items, not an encoder prompt";
                return Err(PromptError::Invalid(text.into()));
            }
        };
        let n_tokens = start.tokens.len() + start.steps.len();
        if n_tokens > self.max_context {
            return Err(PromptError::TooLong { actual: n_tokens, limit: self.max_context });
        }
        Ok((0..n_windows).map(|window| self.place(&start, window, duration_ms)).collect())
    }

    fn sampling_defaults(&self) -> SamplingDefaults {
        self.defaults
    }

    fn language(&self, token: u32) -> Option<&str> {
        self.words.languages.code(token)
    }
}
