//! Prompts of Moonshine and other speech models of one language and no tasks: the start token alone.
//!
//! Options that such a model lacks are refused by name rather than ignored
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/moonshine/modeling_moonshine.py>).
//! A transcript with times has one segment for each window, from the window's start to its end.

use super::info::SpeechInfo;
use crate::error::{ModelError, PromptError};
use crate::prompt::generation::GenerationFiles;
use crate::prompt::{CrossInput, OutputKind, PreparedSequence, PromptBuilder, SamplingDefaults, check_ids};
use crate::rules::LogitRules;
use crate::spec::WaveSpec;
use crate::tokenization::Tokenizer;
use std::path::Path;
use std::sync::Arc;
use triptych_core::prompt::{LongForm, Message, MessagePart, Prompt, SpeechKind, SpeechTask, TextOrTokens};
use triptych_core::{EncodedItem, Extent, ItemIdx, Modality};

/// Language of the published models. Nothing in a directory names another one.
const LANGUAGE: &str = "en";

/// Lays out transcriptions.
#[derive(Debug)]
pub struct MoonshinePrompt {
    tokenizer: Arc<Tokenizer>,
    start: u32,
    end_tokens: Vec<u32>,
    /// Encoder rows of a full window; the last window may have fewer.
    rows_per_window: u32,
    window_ms: u64,
    row_ms: u32,
    max_context: usize,
    vocab: u32,
    rules: LogitRules,
    forced_first: Option<u32>,
    defaults: SamplingDefaults,
}

/// A window as it is cross-attended to.
#[derive(Clone, Copy)]
struct AudioWindow {
    first_row: u32,
    n_rows: u32,
    offset_ms: u64,
    end_ms: u64,
}

impl MoonshinePrompt {
    /// Reads a model directory; `tokenizer` is the one of the same directory, `wave` the stem of its encoder.
    ///
    /// # Errors
    /// [`ModelError`] for a file or key that is missing or not supported.
    pub fn from_dir(dir: &Path, tokenizer: Arc<Tokenizer>, wave: WaveSpec) -> Result<Self, ModelError> {
        const START: &str = "decoder_start_token_id";
        let files = GenerationFiles::read(dir)?;
        let vocab = files.text_u32("vocab_size")?;
        let start = match files.generation.u32(START)? {
            Some(id) => Some(id),
            None => files.config.u32(START)?,
        };
        let expected = format!("a token id below vocab_size {vocab}");
        Ok(Self {
            start: start.filter(|id| *id < vocab).ok_or_else(|| files.generation.wrong(START, &expected))?,
            end_tokens: files.end_tokens()?,
            rules: files.logit_rules()?,
            forced_first: files.source().u32("forced_bos_token_id")?,
            rows_per_window: wave.n_rows(wave.window) as u32,
            window_ms: wave.window as u64 * 1000 / u64::from(wave.rate),
            row_ms: wave.samples_per_row() as u32 * 1000 / wave.rate,
            max_context: files.text_u32("max_position_embeddings")? as usize,
            vocab,
            defaults: files.sampling_defaults()?,
            tokenizer,
        })
    }

    /// Decoder tokens of a task.
    fn task(&self, task: &SpeechTask) -> Result<Vec<u32>, PromptError> {
        let SpeechTask { kind, language, prompt, prefix, .. } = task;
        if let Some(language) = language.as_deref().filter(|code| !code.eq_ignore_ascii_case(LANGUAGE)) {
            let text = format!(
                "language is {language:?}, this model knows the one that it was trained on: allowed is \
                 {LANGUAGE:?}, or none"
            );
            return Err(PromptError::Invalid(text));
        }
        let refused = [
            (*kind == SpeechKind::Translate, "does not translate"),
            (prompt.is_some(), "reads no prompt with audio"),
            (task.word_timestamps, "has no times of words"),
            (task.long_form == LongForm::Sequential, "reads long audio in independent windows only"),
            (task.condition_on_previous, "does not condition on previous text"),
            (task.resume.is_some(), "does not resume in the middle of the audio"),
        ];
        if let Some((_, why)) = refused.iter().find(|(asked, _)| *asked) {
            return Err(PromptError::Invalid(format!("this model {why}")));
        }
        let mut tokens = vec![self.start];
        match prefix {
            None => {}
            Some(TextOrTokens::Text(text)) => tokens.extend(self.tokenizer.encode_plain(text.trim())?),
            Some(TextOrTokens::Tokens(ids)) => {
                check_ids(ids, self.vocab)?;
                tokens.extend(ids);
            }
        }
        Ok(tokens)
    }

    /// The start that a client wrote itself; an empty one is the plain task.
    fn raw(&self, prompt: &TextOrTokens) -> Result<Vec<u32>, PromptError> {
        let mut tokens = match prompt {
            TextOrTokens::Text(text) => self.tokenizer.encode(text)?,
            TextOrTokens::Tokens(ids) => ids.clone(),
        };
        check_ids(&tokens, self.vocab)?;
        if tokens.first() != Some(&self.start) {
            tokens.insert(0, self.start);
        }
        Ok(tokens)
    }

    /// A conversation that is one audio item.
    fn chat(&self, messages: &[Message]) -> Result<Vec<u32>, PromptError> {
        let mut n_items = 0;
        for part in messages.iter().flat_map(|m| &m.parts) {
            match part {
                MessagePart::Item(ItemIdx(0)) => n_items += 1,
                MessagePart::Item(ItemIdx(idx)) => {
                    let text = format!("a message names item {idx}, this model reads one");
                    return Err(PromptError::Invalid(text));
                }
                MessagePart::Text(text) if text.trim().is_empty() => {}
                MessagePart::Text(_)
                | MessagePart::Reasoning(_)
                | MessagePart::ToolCall(_)
                | MessagePart::ResultOf(_) => {
                    let text = "this model reads no text with audio";
                    return Err(PromptError::Invalid(text.into()));
                }
            }
        }
        match n_items {
            1 => self.task(&SpeechTask::default()),
            n => {
                Err(PromptError::Invalid(format!("the messages name {n} audio items, this model reads one")))
            }
        }
    }

    /// The windows of the one item.
    fn windows(&self, items: &[EncodedItem]) -> Result<Vec<AudioWindow>, PromptError> {
        let [item] = items else {
            let text = format!("the request has {} items, this model reads one audio item", items.len());
            return Err(PromptError::Invalid(text));
        };
        if item.modality != Modality::Audio {
            let text = format!("item 0 is {}, this model reads audio items", item.modality);
            return Err(PromptError::Invalid(text));
        }
        let &Extent::Windows { n_windows, duration_ms, .. } = &item.extent else {
            return Err(PromptError::Invalid("item 0 is audio without windows".into()));
        };
        let full = n_windows.checked_sub(1).and_then(|n| n.checked_mul(self.rows_per_window));
        let last = full.and_then(|full| item.n_tokens.checked_sub(full));
        let Some(last) = last.filter(|n| (1..=self.rows_per_window).contains(n)) else {
            return Err(PromptError::Invalid(format!(
                "item 0 has {} rows in {n_windows} windows, a window of this model has up to {}",
                item.n_tokens, self.rows_per_window
            )));
        };
        let window = |i: u32| {
            let offset_ms = u64::from(i) * self.window_ms;
            AudioWindow {
                first_row: i * self.rows_per_window,
                n_rows: if i + 1 == n_windows { last } else { self.rows_per_window },
                offset_ms,
                end_ms: (offset_ms + self.window_ms).min(duration_ms).max(offset_ms),
            }
        };
        Ok((0..n_windows).map(window).collect())
    }

    /// Rules after a prompt of `n_prompt` tokens: the first token is forced after the start token alone.
    fn rules(&self, n_prompt: usize) -> LogitRules {
        let first = self.forced_first.filter(|_| n_prompt == 1);
        LogitRules { steps: first.map(|id| Arc::from([id])).into_iter().collect(), ..self.rules.clone() }
    }

    fn sequence(&self, tokens: &[u32], window: AudioWindow) -> PreparedSequence {
        let n = tokens.len() as u32;
        PreparedSequence {
            tokens: tokens.to_vec(),
            positions: (0..n).map(|p| [p; 3]).collect(),
            next_position: n,
            spans: Vec::new(),
            cross: vec![CrossInput {
                item: ItemIdx(0),
                first_row: window.first_row,
                n_rows: window.n_rows,
                first_token: 0,
            }],
            rules: self.rules(tokens.len()),
            end_tokens: self.end_tokens.clone(),
            output: OutputKind::Speech {
                offset_s: window.offset_ms as f64 / 1000.0,
                end_s: window.end_ms as f64 / 1000.0,
                timestamps: false,
            },
        }
    }
}

impl PromptBuilder for MoonshinePrompt {
    fn prepare(&self, prompt: &Prompt, items: &[EncodedItem]) -> Result<Vec<PreparedSequence>, PromptError> {
        let windows = self.windows(items)?;
        let tokens = match prompt {
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
        if tokens.len() > self.max_context {
            return Err(PromptError::TooLong { actual: tokens.len(), limit: self.max_context });
        }
        Ok(windows.into_iter().map(|window| self.sequence(&tokens, window)).collect())
    }

    fn transcribes(&self) -> bool {
        true
    }

    fn sampling_defaults(&self) -> SamplingDefaults {
        self.defaults
    }

    fn speech(&self) -> Option<SpeechInfo> {
        Some(SpeechInfo {
            first_time: None,
            window_ms: self.window_ms as u32,
            row_ms: self.row_ms,
            max_previous: 0,
            vocab: self.vocab as usize,
            alignment_heads: Arc::default(),
            median: 1,
        })
    }
}
