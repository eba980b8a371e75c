//! Prompts of models whose one image is both among the tokens and cross-attended to: CogAgent.
//!
//! The image comes first, after the start token; its patches share one position
//! (<https://huggingface.co/zai-org/cogagent-chat-hf>, `build_conversation_input_ids` and `build_position_ids`). There is no chat
//! template: `template_version` of `config.json` names one of those that the code has. Every prompt has an image, for without
//! one there is nothing to cross-attend to.

use super::conversation::RenderedChat;
use super::generation::GenerationFiles;
use super::{
    ChatTemplate, ContentFormat, CrossInput, ItemSpan, OutputKind, PreparedSequence, PromptBuilder,
    PromptLimits, SamplingDefaults, check_ids,
};
use crate::error::{ModelError, PromptError};
use crate::rules::LogitRules;
use crate::tokenization::Tokenizer;
use std::path::Path;
use std::sync::Arc;
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::{EncodedItem, ItemIdx, Modality};

const CHAT: &str = "{% for message in messages %}{% if message.role == 'user' %} [INST] {{ message.content }} [/INST] \
    {% elif message.role == 'assistant' %}{{ message.content }}\
    {% else %}{{ raise_exception('this model knows messages of user and assistant alone') }}{% endif %}{% endfor %}";
const CHAT_OLD: &str = "<EOI>{% for message in messages %}{% if message.role == 'user' %}\
    Question: {{ message.content }} Answer:{% elif message.role == 'assistant' %} {{ message.content }}{{ '\n' }}\
    {% else %}{{ raise_exception('this model knows messages of user and assistant alone') }}{% endif %}{% endfor %}";
const VQA: &str = "{% if messages | length != 1 or messages[0].role != 'user' %}\
    {{ raise_exception('this model answers one question: send one message of the user') }}{% endif %}\
    <EOI>Question: {{ messages[0].content }} Short answer:";
const BASE: &str = "{% if messages | length != 1 or messages[0].role != 'user' %}\
    {{ raise_exception('this model goes on from one text: send one message of the user') }}{% endif %}\
    {{ messages[0].content }}";

/// Rows of an image's two encoder outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TowerRows {
    /// Rows of the first tower, which stand among the tokens: a row before the patches, the patches, a row behind them.
    pub n_tokens: u32,
    /// Rows of the second tower, which are cross-attended to.
    pub n_cross: u32,
}

/// Lays out conversations about one image.
#[derive(Debug)]
pub struct ChatTowers {
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    rows: TowerRows,
    /// The first token of every prompt.
    start: u32,
    /// The token in the place of the image's rows.
    placeholder: u32,
    limits: PromptLimits,
    end_tokens: Vec<u32>,
    rules: LogitRules,
    defaults: SamplingDefaults,
}

impl ChatTowers {
    /// Reads a model directory; `tokenizer` is the one of the same directory.
    ///
    /// # Errors
    /// [`ModelError`] for a file or key that is missing or not supported.
    pub fn from_dir(
        dir: &Path,
        tokenizer: Arc<Tokenizer>,
        rows: TowerRows,
        limits: PromptLimits,
    ) -> Result<Self, ModelError> {
        const VERSION: &str = "template_version";
        let files = GenerationFiles::read(dir)?;
        let token = |key: &str| -> Result<u32, ModelError> {
            let known = files.config.u32(key)?.filter(|id| (*id as usize) < limits.vocab);
            known.ok_or_else(|| files.config.wrong(key, &format!("a token id below {}", limits.vocab)))
        };
        let source = match files.config.get(VERSION).map(|version| version.as_str().unwrap_or_default()) {
            None | Some("chat") => CHAT,
            Some("chat_old") => CHAT_OLD,
            Some("vqa") => VQA,
            Some("base") => BASE,
            Some(_) => return Err(files.config.wrong(VERSION, "chat, chat_old, vqa or base")),
        };
        Ok(Self {
            template: ChatTemplate::of_code(source, dir)?.with_contents(ContentFormat::String),
            rows,
            start: token("bos_token_id")?,
            placeholder: token("pad_token_id")?,
            limits,
            end_tokens: files.end_tokens()?,
            rules: files.logit_rules()?,
            defaults: files.sampling_defaults()?,
            tokenizer,
        })
    }

    /// Tokens of a prompt without a template, the start token left out.
    fn raw(&self, prompt: &TextOrTokens) -> Result<Vec<u32>, PromptError> {
        let mut ids = match prompt {
            TextOrTokens::Text(text) => self.tokenizer.encode(text)?,
            TextOrTokens::Tokens(ids) => {
                check_ids(ids, u32::try_from(self.limits.vocab).unwrap_or(u32::MAX))?;
                ids.clone()
            }
        };
        if ids.first() == Some(&self.start) {
            ids.remove(0);
        }
        Ok(ids)
    }

    /// Checks the one image, of which each tower has an output.
    fn check_items(&self, items: &[EncodedItem]) -> Result<(), PromptError> {
        let [low, high] = items else {
            let text = format!(
                "the request has {} items, this model reads one image with every prompt",
                items.len().div_ceil(2)
            );
            return Err(PromptError::Invalid(text));
        };
        if let Some(item) = items.iter().find(|item| item.modality != Modality::Image) {
            let text = format!("item 0 is {}, this model reads image items", item.modality);
            return Err(PromptError::Invalid(text));
        }
        let found = [low.n_tokens, high.n_tokens];
        match [self.rows.n_tokens, self.rows.n_cross] {
            known if known == found => Ok(()),
            known => {
                let text =
                    format!("item 0 has {found:?} rows of its towers, an image of this model has {known:?}");
                Err(PromptError::Invalid(text))
            }
        }
    }

    /// A sequence of the start token, the image, and text.
    fn sequence(&self, text: &[u32]) -> Result<PreparedSequence, PromptError> {
        let n_image = self.rows.n_tokens;
        let n_tokens = 1 + n_image as usize + text.len();
        if n_tokens > self.limits.max_context {
            return Err(PromptError::TooLong { actual: n_tokens, limit: self.limits.max_context });
        }
        let image = std::iter::repeat_n(self.placeholder, n_image as usize);
        let tokens: Vec<u32> = std::iter::once(self.start).chain(image).chain(text.iter().copied()).collect();
        // The start token, the row before the patches, all patches, the row behind them.
        let of_image = (0..n_image).map(|row| match row {
            0 => 1,
            row if row + 1 == n_image => 3,
            _ => 2,
        });
        // Bounded by the context, which fits.
        let next_position = 4 + text.len() as u32;
        let positions = std::iter::once(0).chain(of_image).chain(4..next_position).map(|p| [p; 3]).collect();
        // Outputs of the first tower and of the second.
        let [low, high] = [0, 1].map(ItemIdx);
        Ok(PreparedSequence {
            tokens,
            positions,
            next_position,
            spans: vec![ItemSpan { item: low, first_row: 0, first_token: 1, n_tokens: n_image }],
            cross: vec![CrossInput { item: high, first_row: 0, n_rows: self.rows.n_cross, first_token: 0 }],
            rules: self.rules.clone(),
            end_tokens: self.end_tokens.clone(),
            output: OutputKind::Text,
        })
    }
}

impl PromptBuilder for ChatTowers {
    fn prepare(&self, prompt: &Prompt, items: &[EncodedItem]) -> Result<Vec<PreparedSequence>, PromptError> {
        self.check_items(items)?;
        let text = match prompt {
            Prompt::Chat(chat) => {
                let chat = RenderedChat::new(&self.tokenizer, &self.template, (chat, &|_| Modality::Image))?;
                if chat.order != [ItemIdx(0)] {
                    let text =
                        format!("messages name {} items, this model reads one image", chat.order.len());
                    return Err(PromptError::Invalid(text));
                }
                chat.template_tokens(&self.tokenizer)?
            }
            Prompt::Singleton(prompt) | Prompt::Explicit { encoder: None, decoder: prompt } => {
                self.raw(prompt)?
            }
            Prompt::Explicit { encoder: Some(_), .. } => {
                let text = "this model has no encoder for text: send one prompt, not one for each side";
                return Err(PromptError::Invalid(text.into()));
            }
            Prompt::Speech(_) => {
                return Err(PromptError::Invalid("this model reads images, not speech".into()));
            }
        };
        Ok(vec![self.sequence(&text)?])
    }

    fn sampling_defaults(&self) -> SamplingDefaults {
        self.defaults
    }

    fn chat_template(&self) -> Option<&ChatTemplate> {
        Some(&self.template)
    }
}
