//! Prompts of models whose image, video or audio rows are among the tokens, by a [`PlaceholderSpec`].
//!
//! In a conversation, control tokens come from the chat template alone: a client's text never makes one. A prompt without a template is the client's own layout, and is read as the reference reads it.

use super::conversation::{RenderedChat, check_order};
use super::generation::GenerationFiles;
use super::item_rows::{ItemLayout, ItemRows, RowGrid, RowRun, RowShape, VideoTokens};
use super::positions::{GridSpan, positions};
use super::{
    ChatTemplate, ContentFormat, ItemSpan, LineLayout, OutputKind, PlaceholderSpec, PreparedSequence,
    PromptBuilder, RowPositions, SamplingDefaults, TokenName, TranscriptionSpec, VideoPlaceholder, check_ids,
};
use crate::error::{ModelError, PromptError};
use crate::rules::LogitRules;
use crate::tokenization::Tokenizer;
use std::path::Path;
use std::sync::Arc;
use triptych_core::prompt::{Chat, Prompt, SpeechTask, TextOrTokens};
use triptych_core::{EncodedItem, Extent, ItemIdx, Modality};

/// Sizes of a model that bound its prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLimits {
    /// Tokens of the decoder's vocabulary.
    pub vocab: usize,
    /// Tokens the decoder's context holds.
    pub max_context: usize,
}

/// Lays out conversations with images.
#[derive(Debug)]
pub struct ChatVl {
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    modality: Modality,
    /// The token of a row.
    image: u32,
    /// Spelling of it.
    image_text: &'static str,
    /// The token that stands for a whole item, which may be that of a row.
    written: u32,
    /// Spelling of it.
    written_text: &'static str,
    around: Option<[u32; 2]>,
    layout: ItemLayout,
    /// `None`: it reads no videos.
    video: Option<VideoTokens>,
    transcription: Option<TranscriptionSpec>,
    limits: PromptLimits,
    end_tokens: Vec<u32>,
    rules: LogitRules,
    defaults: SamplingDefaults,
}

impl ChatVl {
    /// Reads a model directory; `tokenizer` is the one of the same directory.
    ///
    /// # Errors
    /// [`ModelError`] for a file or key that is missing or not supported.
    pub fn from_dir(
        dir: &Path,
        tokenizer: Arc<Tokenizer>,
        spec: &PlaceholderSpec,
        limits: PromptLimits,
    ) -> Result<Self, ModelError> {
        let files = GenerationFiles::read(dir)?;
        let token = |name: TokenName| -> Result<u32, ModelError> {
            for key in name.keys {
                if let Some(id) = files.config.u32(key)? {
                    return Ok(id);
                }
            }
            tokenizer.token_id(name.text).ok_or_else(|| {
                let key = name.keys.first().copied().unwrap_or_default();
                files.config.wrong(key, &format!("a token id, or {} in the tokenizer", name.text))
            })
        };
        const MERGE: &str = "vision_config.spatial_merge_size";
        const PER_SECOND: &str = "vision_config.tokens_per_second";
        let layout = match spec.positions {
            RowPositions::Text => ItemLayout::Rows,
            RowPositions::Between(around) => ItemLayout::Between(around),
            RowPositions::Tiles(tiles) => ItemLayout::Tiles(tiles),
            RowPositions::Parts(parts) => {
                check_known(&tokenizer, &parts.tokens())?;
                ItemLayout::Parts(parts)
            }
            RowPositions::Lines(lines) => {
                check_known(&tokenizer, &[lines.end_of_line, lines.end_of_image])?;
                ItemLayout::Lines(lines)
            }
            RowPositions::Grid => match files.config.u32(MERGE)?.unwrap_or(2) {
                0 => return Err(files.config.wrong(MERGE, "1 or more")),
                merge_size => ItemLayout::Grid { merge_size },
            },
        };
        let around = match spec.around {
            Some([before, after]) => Some([token(before)?, token(after)?]),
            None => None,
        };
        let written = spec.written.unwrap_or(spec.image);
        let video = match spec.video {
            None => None,
            Some(VideoPlaceholder { row, times }) => Some(VideoTokens {
                row: token(row)?,
                row_text: row.text,
                around: spec.around.map_or([""; 2], |around| around.map(|name| name.text)),
                times,
                tokens_per_second: files.config.f64(PER_SECOND)?.unwrap_or(4.0) as f32,
            }),
        };
        Ok(Self {
            template: ChatTemplate::from_dir(dir)?,
            modality: spec.modality,
            image: token(spec.image)?,
            image_text: spec.image.text,
            written: token(written)?,
            written_text: written.text,
            around,
            layout,
            video,
            transcription: spec.transcription,
            limits,
            end_tokens: files.end_tokens()?,
            rules: files.logit_rules()?,
            defaults: files.sampling_defaults()?,
            tokenizer,
        })
    }

    /// The same, with contents of messages as strings, in which an item is the token of a row.
    #[must_use]
    pub fn with_string_contents(self) -> Self {
        let format = ContentFormat::StringWithItems(self.image_text);
        Self { template: self.template.with_contents(format), ..self }
    }

    /// Tokens of a prompt without a template. Items that it has no placeholder for go before it.
    fn raw(&self, prompt: &TextOrTokens, images: &[ItemRows]) -> Result<Vec<u32>, PromptError> {
        let mut ids = match prompt {
            TextOrTokens::Text(text) if self.has_placeholder(text) => {
                self.tokenizer.encode_input(&self.written_out(text.clone(), images)?)?
            }
            TextOrTokens::Text(text) => self.tokenizer.encode_input(text)?,
            TextOrTokens::Tokens(ids) => ids.clone(),
        };
        check_ids(&ids, u32::try_from(self.limits.vocab).unwrap_or(u32::MAX))?;
        let is_row = |id: &u32| self.kind_of_row(*id).is_some();
        let is_written = matches!(prompt, TextOrTokens::Text(_)) && ids.iter().any(is_row);
        if is_written || images.is_empty() {
            return Ok(ids);
        }
        if !ids.iter().any(|id| *id == self.written || is_row(id)) {
            let first = self.tokenizer.n_prefix(&ids)?;
            let mut all = Vec::new();
            for image in images {
                let around = self.around.filter(|_| !matches!(image.shape, RowShape::TimedFrames { .. }));
                let [before, after] = around.map_or([None; 2], |around| around.map(Some));
                all.extend(before);
                all.extend(self.tokens_of(image)?);
                all.extend(after);
            }
            ids.splice(first..first, all);
            return Ok(ids);
        }
        let mut waiting = images.iter();
        let mut all = Vec::with_capacity(ids.len());
        for id in ids {
            let written = |image: &&ItemRows| id == self.written_of(image.modality);
            match waiting.as_slice().first().filter(written) {
                Some(image) => {
                    all.extend(self.tokens_of(image)?);
                    waiting.next();
                }
                None => all.push(id),
            }
        }
        Ok(all)
    }

    /// The kind of items whose rows have this token; `None` for a token of text.
    fn kind_of_row(&self, id: u32) -> Option<Modality> {
        match self.video {
            Some(video) if id == video.row => Some(Modality::Video),
            _ => (id == self.image).then_some(self.modality),
        }
    }

    /// The token of an item's rows.
    fn row_of(&self, modality: Modality) -> u32 {
        self.video.filter(|_| modality == Modality::Video).map_or(self.image, |video| video.row)
    }

    /// The token that stands for a whole item.
    fn written_of(&self, modality: Modality) -> u32 {
        self.video.filter(|_| modality == Modality::Video).map_or(self.written, |video| video.row)
    }

    /// Tokens of a transcription of the one item.
    fn transcript(&self, task: &SpeechTask, n_items: usize) -> Result<Vec<u32>, PromptError> {
        let Some(spec) = &self.transcription else {
            let text = match self.modality {
                Modality::Image => "this model reads images, not speech",
                _ => {
                    "this model has no prompt of its own for transcripts: send a conversation with the audio"
                }
            };
            return Err(PromptError::Invalid(text.into()));
        };
        check_placeholders(self.modality, [1, n_items])?;
        match spec {
            TranscriptionSpec::Tokens(tokens) => self.tokenizer.encode(&tokens.text(task, self.image_text)?),
            TranscriptionSpec::Chat(chat) => {
                let (chat, start) = chat.chat(task)?;
                let kind = |_: ItemIdx| self.modality;
                let chat = RenderedChat::new(&self.tokenizer, &self.template, (&chat, &kind))?;
                chat.tokens(&self.tokenizer, |text| Ok(text + &start))
            }
        }
    }

    /// Tokens of an item, one placeholder for each run of rows.
    fn tokens_of(&self, image: &ItemRows) -> Result<Vec<u32>, PromptError> {
        match self.text_of(image) {
            Some(text) => self.tokenizer.encode(&text),
            None => Ok(vec![self.row_of(image.modality)]),
        }
    }

    /// Text of an item, one placeholder for each run of rows; `None` if it is the placeholder.
    fn text_of(&self, image: &ItemRows) -> Option<String> {
        let rows = self.image_text;
        match (self.layout, &image.shape) {
            (_, RowShape::TimedFrames { times, .. }) => self.video.map(|video| video.timed(times)),
            (ItemLayout::Between([before, after]), _) => Some(format!("{before}{rows}{after}")),
            (ItemLayout::Tiles(layout), RowShape::Tiles(tiles)) => Some(layout.text.of(*tiles, rows)),
            (ItemLayout::Parts(layout), RowShape::Tiles(parts)) => Some(layout.text(*parts, rows)),
            (ItemLayout::Lines(lines), RowShape::Lines([n_lines, _])) => {
                let LineLayout { end_of_line, end_of_image, .. } = lines;
                let first = format!("{rows}{end_of_line}").repeat(n_lines.saturating_sub(1) as usize);
                Some(format!("{first}{rows}{end_of_image}"))
            }
            _ => None,
        }
    }

    /// True if a text has a placeholder of some kind of items.
    fn has_placeholder(&self, text: &str) -> bool {
        text.contains(self.written_text) || self.video.is_some_and(|video| text.contains(video.row_text))
    }

    /// A text whose placeholders, one for each item, are written out as the items are.
    fn written_out(&self, text: String, images: &[ItemRows]) -> Result<String, PromptError> {
        let is_plain = matches!(self.layout, ItemLayout::Rows | ItemLayout::Grid { .. });
        if is_plain && !images.iter().any(|image| matches!(image.shape, RowShape::TimedFrames { .. })) {
            return Ok(text);
        }
        let mut found: Vec<(usize, &str)> = text.match_indices(self.written_text).collect();
        if let Some(video) = &self.video {
            found.extend(text.match_indices(video.row_text));
            found.sort_unstable();
        }
        check_placeholders(self.modality, [found.len(), images.len()])?;
        let mut out = String::with_capacity(text.len());
        let mut rest = 0;
        for ((at, placeholder), image) in found.into_iter().zip(images) {
            let (mut start, mut end) = (at, at + placeholder.len());
            if let (RowShape::TimedFrames { .. }, Some(video)) = (&image.shape, &self.video) {
                // Each frame has its own tokens around it, in the place of those around the video.
                let [before, after] = video.around;
                if text[rest..at].ends_with(before) && text[end..].starts_with(after) {
                    (start, end) = (at - before.len(), end + after.len());
                }
            }
            out.push_str(&text[rest..start]);
            match self.text_of(image) {
                Some(written) => out.push_str(&written),
                None => out.push_str(placeholder),
            }
            rest = end;
        }
        out.push_str(&text[rest..]);
        Ok(out)
    }

    /// Checks what is known of an item against this model.
    fn item_rows(&self, idx: usize, item: &EncodedItem) -> Result<ItemRows, PromptError> {
        let invalid = |text: String| Err(PromptError::Invalid(text));
        let modality = item.modality;
        let video = self.video.as_ref().filter(|_| modality == Modality::Video);
        if modality != self.modality && video.is_none() {
            let reads = if self.video.is_some() { "image and video" } else { self.modality.as_str() };
            return invalid(format!("item {idx} is {modality}, this model reads {reads} items"));
        }
        let [t, h, w] = match item.extent {
            Extent::Grid { t, h, w } if modality == Modality::Image => [t, h, w],
            Extent::Windows { n_windows, .. } if modality == Modality::Audio => [1, 1, n_windows],
            Extent::Video { t, h, w, .. } if modality == Modality::Video => [t, h, w],
            _ => return invalid(format!("item {idx} has not the extent of an item of kind {modality}")),
        };
        let shape = match video {
            Some(video) => video.shape(item, self.layout),
            None => self.layout.shape(item, [t, h, w]),
        };
        match shape {
            Some(shape) => {
                Ok(ItemRows { item: ItemIdx(idx as u32), n_tokens: item.n_tokens, modality, shape })
            }
            None => invalid(format!(
                "item {idx} has {} rows, which is not what a grid of {t}x{h}x{w} patches makes",
                item.n_tokens
            )),
        }
    }

    /// Repeats each placeholder as often as it stands for rows.
    fn expand(&self, ids: &[u32], images: &[ItemRows]) -> Result<PreparedSequence, PromptError> {
        let runs: Vec<RowRun> = images.iter().flat_map(|image| image.runs(self.layout)).collect();
        let kinds: Vec<Modality> = ids.iter().filter_map(|id| self.kind_of_row(*id)).collect();
        let n_placeholders = kinds.len();
        check_placeholders(self.modality, [n_placeholders, runs.len()])?;
        if let Some((kind, run)) = kinds.iter().zip(&runs).find(|(kind, run)| **kind != run.modality) {
            let text = format!(
                "the prompt has a placeholder of kind {kind} where item {} is {}",
                run.item.0, run.modality
            );
            return Err(PromptError::Invalid(text));
        }
        let n_rows: u64 = runs.iter().map(|run| u64::from(run.n_rows)).sum();
        let n_tokens = (ids.len() - n_placeholders) as u64 + n_rows;
        if n_tokens > self.limits.max_context as u64 {
            return Err(PromptError::TooLong { actual: n_tokens as usize, limit: self.limits.max_context });
        }
        let mut tokens = Vec::with_capacity(n_tokens as usize);
        let mut spans = Vec::with_capacity(runs.len());
        let mut grids = Vec::new();
        let mut waiting = runs.iter();
        for id in ids {
            let Some(run) = waiting.as_slice().first().filter(|_| self.kind_of_row(*id).is_some()) else {
                tokens.push(*id);
                continue;
            };
            waiting.next();
            let first_token = tokens.len();
            spans.push(ItemSpan {
                item: run.item,
                first_row: run.first_row,
                first_token: first_token as u32,
                n_tokens: run.n_rows,
            });
            let span = |RowGrid { thw, frame_step }| GridSpan { first_token, thw, frame_step };
            grids.extend(run.grid.map(span));
            tokens.extend(std::iter::repeat_n(*id, run.n_rows as usize));
        }
        let (positions, next_position) = positions(tokens.len(), &grids);
        Ok(PreparedSequence {
            tokens,
            positions,
            next_position,
            spans,
            cross: Vec::new(),
            rules: self.rules.clone(),
            end_tokens: self.end_tokens.clone(),
            output: OutputKind::Text,
        })
    }
}

/// Checks that the tokenizer has these tokens.
fn check_known(tokenizer: &Tokenizer, names: &[&'static str]) -> Result<(), ModelError> {
    match names.iter().find(|name| tokenizer.token_id(name).is_none()) {
        Some(name) => Err(ModelError::missing_key("tokenizer.json", *name, "a token")),
        None => Ok(()),
    }
}

/// Checks that there is a placeholder for each item: numbers of placeholders and of items.
fn check_placeholders(modality: Modality, [n_placeholders, n_items]: [usize; 2]) -> Result<(), PromptError> {
    if n_placeholders == n_items {
        return Ok(());
    }
    Err(PromptError::Invalid(format!(
        "the prompt has {n_placeholders} {modality} placeholders, the request {n_items} {modality} items"
    )))
}

impl PromptBuilder for ChatVl {
    fn prepare(&self, prompt: &Prompt, items: &[EncodedItem]) -> Result<Vec<PreparedSequence>, PromptError> {
        let rows: Vec<ItemRows> =
            items.iter().enumerate().map(|(i, item)| self.item_rows(i, item)).collect::<Result<_, _>>()?;
        let of = |order: &[ItemIdx]| -> Result<Vec<ItemRows>, PromptError> {
            check_order(order, rows.len())?;
            Ok(order.iter().filter_map(|i| rows.get(i.0 as usize).cloned()).collect())
        };
        let (ids, images) = match prompt {
            Prompt::Chat(chat) => {
                let kind =
                    |item: ItemIdx| rows.get(item.0 as usize).map_or(self.modality, |rows| rows.modality);
                let chat = RenderedChat::new(&self.tokenizer, &self.template, (chat, &kind))?;
                let images = of(&chat.order)?;
                (chat.tokens(&self.tokenizer, |text| self.written_out(text, &images))?, images)
            }
            Prompt::Singleton(prompt) => (self.raw(prompt, &rows)?, rows),
            Prompt::Explicit { .. } => {
                let text = "this model has no encoder for text: send one prompt, not one for each side";
                return Err(PromptError::Invalid(text.into()));
            }
            Prompt::Speech(task) => (self.transcript(task, rows.len())?, rows),
        };
        if ids.is_empty() {
            return Err(PromptError::Invalid("the prompt is empty".into()));
        }
        Ok(vec![self.expand(&ids, &images)?])
    }

    fn chat_tokens(&self, chat: &Chat) -> Result<Option<Vec<u32>>, PromptError> {
        let chat = RenderedChat::new(&self.tokenizer, &self.template, (chat, &|_| self.modality))?;
        check_order(&chat.order, 0)?;
        chat.tokens(&self.tokenizer, Ok).map(Some)
    }

    fn transcribes(&self) -> bool {
        self.transcription.is_some()
    }

    fn sampling_defaults(&self) -> SamplingDefaults {
        self.defaults
    }

    fn chat_template(&self) -> Option<&ChatTemplate> {
        Some(&self.template)
    }
}
