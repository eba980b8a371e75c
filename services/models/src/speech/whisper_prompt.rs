//! Prompts of Whisper: a speech task as the tokens that its decoder was trained to continue.
//!
//! `<|startofprev|> earlier text <|startoftranscript|> <|language|> <|task|> <|notimestamps|>`, for each window
//! of the audio. A language that the request leaves open is detected by the model: the first generated token may then be any
//! language, and what must follow it is forced
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/whisper/generation_whisper.py>).

mod tokens;

use super::info::SpeechInfo;
use super::timestamps::{NoSpeech, TimestampRule};
use crate::error::{ModelError, PromptError};
use crate::prompt::generation::GenerationFiles;
use crate::prompt::{CrossInput, OutputKind, PreparedSequence, PromptBuilder, SamplingDefaults, check_ids};
use crate::rules::LogitRules;
use crate::tokenization::Tokenizer;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use tokens::WhisperTokens;
use triptych_core::prompt::{LongForm, Message, MessagePart, Prompt, SpeechKind, SpeechTask, TextOrTokens};
use triptych_core::{EncodedItem, Extent, ItemIdx, Modality, WindowSpan};

/// Milliseconds of audio in an encoder row.
const ROW_MS: u64 = 20;

/// Lays out speech tasks.
#[derive(Debug)]
pub struct WhisperPrompt {
    tokenizer: Arc<Tokenizer>,
    special: WhisperTokens,
    /// Rules that every task shares.
    rules: LogitRules,
    max_initial_timestamp: Option<u32>,
    end_tokens: Vec<u32>,
    /// Encoder rows of a window.
    rows_per_window: u32,
    max_context: usize,
    vocab: u32,
    defaults: SamplingDefaults,
    alignment_heads: Arc<[(u32, u32)]>,
    median: usize,
}

/// Decoder tokens of a task, the same for every window.
struct TaskPrompt {
    tokens: Vec<u32>,
    steps: Vec<Arc<[u32]>>,
    timestamps: bool,
    /// Index of the generated token whose logits hold the probability of "no speech".
    no_speech_step: usize,
}

/// Heads that follow the audio, as `[layer, head]`; published files name them, others may not.
fn alignment_heads(files: &GenerationFiles) -> Result<Arc<[(u32, u32)]>, ModelError> {
    const KEY: &str = "alignment_heads";
    let Some(value) = files.generation.get(KEY) else { return Ok(Arc::default()) };
    let sizes = [files.text_u32("decoder_layers")?, files.text_u32("decoder_attention_heads")?];
    let head = |pair: &serde_json::Value| {
        let pair = pair.as_array().filter(|pair| pair.len() == 2)?;
        let at = |i: usize| pair[i].as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| *n < sizes[i]);
        Some((at(0)?, at(1)?))
    };
    let heads = value.as_array().and_then(|all| all.iter().map(head).collect::<Option<Arc<[_]>>>());
    heads.ok_or_else(|| {
        let allowed = format!("pairs of a layer below {} and a head below {}", sizes[0], sizes[1]);
        files.generation.wrong(KEY, &allowed)
    })
}

/// Rules on logits. Directories of before `generation_config.json` have Whisper's lists in `config.json`.
fn base_rules(files: &GenerationFiles) -> Result<LogitRules, ModelError> {
    let rules = files.logit_rules()?;
    let or_config = |key: &str, found: &[u32]| -> Result<Arc<[u32]>, ModelError> {
        let more = match files.generation.ids(key)? {
            Some(_) => Vec::new(),
            None => files.config.ids(key)?.unwrap_or_default(),
        };
        let all: BTreeSet<u32> = found.iter().copied().chain(more).collect();
        Ok(all.into_iter().collect())
    };
    Ok(LogitRules {
        suppress: or_config("suppress_tokens", &rules.suppress)?,
        begin_suppress: or_config("begin_suppress_tokens", &rules.begin_suppress)?,
        ..rules
    })
}

/// Width of the median filter; the default is that of transformers' configuration.
fn median(files: &GenerationFiles) -> Result<usize, ModelError> {
    const KEY: &str = "median_filter_width";
    let width = files.config.u32(KEY)?.unwrap_or(7);
    if width % 2 == 1 && width < 1000 {
        return Ok(width as usize);
    }
    Err(files.config.wrong(KEY, "an odd number below 1000"))
}

/// Tokens of earlier text that a prompt holds at most.
pub fn max_previous(max_context: usize) -> usize {
    (max_context / 2).saturating_sub(1)
}

impl WhisperPrompt {
    /// Reads a model directory; `tokenizer` is the one of the same directory.
    ///
    /// # Errors
    /// [`ModelError`] for a file or key that is missing or not supported.
    pub fn from_dir(dir: &Path, tokenizer: Arc<Tokenizer>) -> Result<Self, ModelError> {
        let files = GenerationFiles::read(dir)?;
        let rows_per_window = files.text_u32("max_source_positions")?;
        if rows_per_window == 0 {
            return Err(files.config.wrong("max_source_positions", "1 or more"));
        }
        let vocab = files.text_u32("vocab_size")?;
        Ok(Self {
            special: WhisperTokens::read(&files, &tokenizer, vocab)?,
            rules: base_rules(&files)?,
            max_initial_timestamp: files.generation.u32("max_initial_timestamp_index")?,
            end_tokens: files.end_tokens()?,
            rows_per_window,
            max_context: files.text_u32("max_target_positions")? as usize,
            vocab,
            defaults: files.sampling_defaults()?,
            alignment_heads: alignment_heads(&files)?,
            median: median(&files)?,
            tokenizer,
        })
    }

    /// True for a model of more than one language.
    pub fn is_multilingual(&self) -> bool {
        !self.special.languages.is_empty()
    }

    /// The start for a task.
    fn task(&self, task: &SpeechTask) -> Result<TaskPrompt, PromptError> {
        let mut tokens = self.earlier(task)?;
        tokens.push(self.special.start);
        let language = self.language_token(task)?;
        let mut follow = Vec::new();
        if self.is_multilingual() {
            follow.push(match task.kind {
                SpeechKind::Transcribe => self.special.transcribe,
                SpeechKind::Translate => self.special.translate,
            });
        } else if task.kind == SpeechKind::Translate {
            return Err(PromptError::Invalid("this model knows English only and does not translate".into()));
        }
        let timestamps = task.timestamps || task.long_form == LongForm::Sequential;
        match self.special.no_timestamps {
            Some(id) if !timestamps => follow.push(Some(id)),
            None if timestamps => {
                return Err(PromptError::Invalid("this model has no timestamps".into()));
            }
            _ => {}
        }
        let prefix = self.transcript(task.prefix.as_ref())?;
        let follow = follow.into_iter().flatten().chain(prefix);
        let mut steps: Vec<Arc<[u32]>> = Vec::new();
        let judged = task.fallback.as_ref().is_some_and(|f| f.no_speech.is_some());
        let detect = self.is_multilingual() && language.is_none();
        if detect {
            // A language of the directory is the only one that can be found.
            steps.push(match self.special.default_language {
                Some(token) => Arc::from([token]),
                None => self.special.languages.tokens().collect(),
            });
            steps.extend(follow.map(|id| Arc::from([id])));
        } else if judged {
            // The model predicts "no speech" right after its start token, so the tokens after it are forced, not prompted.
            steps.extend(language.into_iter().chain(follow).map(|id| Arc::from([id])));
        } else {
            tokens.extend(language);
            tokens.extend(follow);
        }
        let no_speech_step = if judged { 0 } else { steps.len() };
        Ok(TaskPrompt { tokens, steps, timestamps, no_speech_step })
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
        self.special.languages.token(&code).map(Some).ok_or_else(|| {
            let allowed: Vec<&str> = self.special.languages.codes().collect();
            PromptError::Invalid(format!("language {code:?} is not one of {}", allowed.join(", ")))
        })
    }

    /// `<|startofprev|>` and the end of the previous transcript, as much as leaves half of the context free.
    fn earlier(&self, task: &SpeechTask) -> Result<Vec<u32>, PromptError> {
        let written = task.resume.as_ref().filter(|r| task.condition_on_previous && r.conditioned);
        let ids = match written {
            Some(resume) => {
                check_ids(&resume.previous, self.vocab)?;
                resume.previous.clone()
            }
            None => self.transcript(task.prompt.as_ref())?,
        };
        let Some(start) = self.special.start_of_previous.filter(|_| !ids.is_empty()) else {
            return Ok(Vec::new());
        };
        let kept = ids.len().min(max_previous(self.max_context));
        let mut tokens = vec![start];
        tokens.extend_from_slice(&ids[ids.len() - kept..]);
        Ok(tokens)
    }

    /// Tokens of a transcript that a client gave.
    fn transcript(&self, text: Option<&TextOrTokens>) -> Result<Vec<u32>, PromptError> {
        match text {
            None => Ok(Vec::new()),
            Some(TextOrTokens::Text(text)) if text.trim().is_empty() => Ok(Vec::new()),
            Some(TextOrTokens::Text(text)) => {
                Ok(self.tokenizer.encode_plain(&format!(" {}", text.trim()))?)
            }
            Some(TextOrTokens::Tokens(ids)) => {
                check_ids(ids, self.vocab)?;
                Ok(ids.clone())
            }
        }
    }

    /// The start that a client wrote itself; an empty one is the plain task.
    fn raw(&self, prompt: &TextOrTokens) -> Result<TaskPrompt, PromptError> {
        let mut tokens = match prompt {
            TextOrTokens::Text(text) => self.tokenizer.encode(text)?,
            TextOrTokens::Tokens(ids) => ids.clone(),
        };
        if tokens.is_empty() {
            return self.task(&SpeechTask::default());
        }
        check_ids(&tokens, self.vocab)?;
        if !tokens.contains(&self.special.start) {
            tokens.insert(0, self.special.start);
        }
        // Times are wanted where the task is complete and does not say that they are not.
        let says_none = self.special.no_timestamps.is_none_or(|id| tokens.contains(&id));
        let is_task = |id: &u32| Some(*id) == self.special.transcribe || Some(*id) == self.special.translate;
        let complete = !self.is_multilingual() || tokens.iter().any(is_task);
        Ok(TaskPrompt { tokens, steps: Vec::new(), timestamps: complete && !says_none, no_speech_step: 0 })
    }

    /// A conversation about one audio item: its texts are the previous transcript.
    fn chat(&self, messages: &[Message]) -> Result<TaskPrompt, PromptError> {
        let mut texts = Vec::new();
        let mut n_items = 0;
        for part in messages.iter().flat_map(|m| &m.parts) {
            match part {
                MessagePart::Text(text) => texts.push(text.as_str()),
                MessagePart::Item(ItemIdx(0)) => n_items += 1,
                MessagePart::Item(ItemIdx(idx)) => {
                    let text = format!("a message names item {idx}, this model reads one");
                    return Err(PromptError::Invalid(text));
                }
                MessagePart::Reasoning(_) | MessagePart::ToolCall(_) | MessagePart::ResultOf(_) => {
                    let text = "this model reads no reasoning and no calls of tools";
                    return Err(PromptError::Invalid(text.into()));
                }
            }
        }
        if n_items != 1 {
            let text = format!("the messages name {n_items} audio items, this model reads one");
            return Err(PromptError::Invalid(text));
        }
        let prompt = Some(TextOrTokens::Text(texts.join("\n")));
        self.task(&SpeechTask { prompt, ..SpeechTask::default() })
    }

    /// Spans of the windows of the one item.
    fn windows(&self, items: &[EncodedItem]) -> Result<Vec<WindowSpan>, PromptError> {
        let [item] = items else {
            let text = format!("the request has {} items, this model reads one audio item", items.len());
            return Err(PromptError::Invalid(text));
        };
        if item.modality != Modality::Audio {
            let text = format!("item 0 is {}, this model reads audio items", item.modality);
            return Err(PromptError::Invalid(text));
        }
        let Extent::Windows { n_windows, duration_ms, spans } = &item.extent else {
            return Err(PromptError::Invalid("item 0 is audio without windows".into()));
        };
        let n_windows = *n_windows;
        let duration_ms = *duration_ms;
        if n_windows == 0 || n_windows.checked_mul(self.rows_per_window) != Some(item.n_tokens) {
            return Err(PromptError::Invalid(format!(
                "item 0 has {} rows in {n_windows} windows, a window of this model has {}",
                item.n_tokens, self.rows_per_window
            )));
        }
        if !spans.is_empty() {
            return Ok(spans.to_vec());
        }
        let window_ms = u64::from(self.rows_per_window) * ROW_MS;
        let ms = |ms: u64| u32::try_from(ms).unwrap_or(u32::MAX);
        let span = |window: u32| {
            let start = u64::from(window) * window_ms;
            let end = (start + window_ms).min(duration_ms).max(start);
            WindowSpan { start_ms: ms(start), end_ms: ms(end) }
        };
        Ok((0..n_windows).map(span).collect())
    }

    fn rules(&self, start: &TaskPrompt) -> LogitRules {
        let times = self.special.no_timestamps.filter(|_| start.timestamps);
        LogitRules {
            steps: start.steps.clone(),
            timestamps: times.map(|no_timestamps| TimestampRule {
                first: no_timestamps + 1,
                no_timestamps,
                end: self.end_tokens[0],
                max_initial: self.max_initial_timestamp,
            }),
            no_speech: self.special.no_speech.map(|token| NoSpeech { token, step: start.no_speech_step }),
            ..self.rules.clone()
        }
    }

    /// The sequence of a window.
    fn sequence(&self, start: &TaskPrompt, window: u32, span: WindowSpan) -> PreparedSequence {
        let n = start.tokens.len() as u32;
        PreparedSequence {
            tokens: start.tokens.clone(),
            positions: (0..n).map(|p| [p; 3]).collect(),
            next_position: n,
            spans: Vec::new(),
            cross: vec![CrossInput {
                item: ItemIdx(0),
                first_row: window * self.rows_per_window,
                n_rows: self.rows_per_window,
                first_token: 0,
            }],
            rules: self.rules(start),
            end_tokens: self.end_tokens.clone(),
            output: OutputKind::Speech {
                offset_s: f64::from(span.start_ms) / 1000.0,
                end_s: f64::from(span.end_ms) / 1000.0,
                timestamps: start.timestamps,
            },
        }
    }
}

impl PromptBuilder for WhisperPrompt {
    fn prepare(&self, prompt: &Prompt, items: &[EncodedItem]) -> Result<Vec<PreparedSequence>, PromptError> {
        let spans = self.windows(items)?;
        let start = match prompt {
            Prompt::Speech(task) => self.task(task)?,
            Prompt::Chat(chat) => self.chat(&chat.messages)?,
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
        Ok((0..).zip(spans).map(|(window, span)| self.sequence(&start, window, span)).collect())
    }

    fn transcribes(&self) -> bool {
        true
    }

    fn sampling_defaults(&self) -> SamplingDefaults {
        self.defaults
    }

    fn speech(&self) -> Option<SpeechInfo> {
        Some(SpeechInfo {
            first_time: self.special.no_timestamps.map(|id| id + 1),
            window_ms: self.rows_per_window.saturating_mul(ROW_MS as u32),
            row_ms: ROW_MS as u32,
            max_previous: max_previous(self.max_context),
            vocab: self.vocab as usize,
            alignment_heads: Arc::clone(&self.alignment_heads),
            median: self.median,
        })
    }

    fn language(&self, token: u32) -> Option<&str> {
        self.special.languages.code(token)
    }
}
