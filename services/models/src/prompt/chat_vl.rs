//! Prompts of models whose image or audio rows are among the tokens, by a [`PlaceholderSpec`].
//!
//! In a conversation, control tokens come from the chat template alone: a client's text never makes one. A prompt without a template is the client's own layout, and is read as the reference reads it.

use super::conversation::RenderedChat;
use super::generation::GenerationFiles;
use super::positions::{GridSpan, positions};
use super::{
    ChatTemplate, ContentFormat, ItemSpan, LineLayout, OutputKind, PlaceholderSpec, PreparedSequence,
    PromptBuilder, RowPositions, SamplingDefaults, TileLayout, TokenName, TranscriptionSpec, check_ids,
};
use crate::error::{ModelError, PromptError};
use crate::rules::LogitRules;
use crate::tokenization::Tokenizer;
use std::path::Path;
use std::sync::Arc;
use triptych_core::prompt::{Prompt, SpeechTask, TextOrTokens};
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
    transcription: Option<TranscriptionSpec>,
    limits: PromptLimits,
    end_tokens: Vec<u32>,
    rules: LogitRules,
    defaults: SamplingDefaults,
}

/// Layout of an item's rows.
#[derive(Clone, Copy, Debug)]
enum ItemLayout {
    Rows,
    /// Between two texts.
    Between([&'static str; 2]),
    /// Patches on a side of the square that becomes one row.
    Grid {
        merge_size: u32,
    },
    Tiles(TileLayout),
    Lines(LineLayout),
}

/// An item whose metadata were checked.
#[derive(Clone, Copy, Debug)]
struct ImageRows {
    item: ItemIdx,
    n_tokens: u32,
    shape: ImageShape,
}

/// Arrangement of an item's rows.
#[derive(Clone, Copy, Debug)]
enum ImageShape {
    /// One after another.
    Rows,
    /// By frame, down, across.
    Grid([u32; 3]),
    /// Tiles down and across, and the whole image; `[0, 0]`: that alone.
    Tiles([u32; 2]),
    /// Lines, and rows of a line.
    Lines([u32; 2]),
}

/// Rows of an item in the place of one placeholder.
#[derive(Clone, Copy, Debug)]
struct RowRun {
    item: ItemIdx,
    first_row: u32,
    n_rows: u32,
    grid: Option<[u32; 3]>,
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
        let layout = match spec.positions {
            RowPositions::Text => ItemLayout::Rows,
            RowPositions::Between(around) => ItemLayout::Between(around),
            RowPositions::Tiles(tiles) => ItemLayout::Tiles(tiles),
            RowPositions::Lines(lines) => {
                for name in [lines.end_of_line, lines.end_of_image] {
                    if tokenizer.token_id(name).is_none() {
                        return Err(ModelError::missing_key("tokenizer.json", name, "a token"));
                    }
                }
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
        Ok(Self {
            template: ChatTemplate::from_dir(dir)?,
            modality: spec.modality,
            image: token(spec.image)?,
            image_text: spec.image.text,
            written: token(written)?,
            written_text: written.text,
            around,
            layout,
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
    fn raw(&self, prompt: &TextOrTokens, images: &[ImageRows]) -> Result<Vec<u32>, PromptError> {
        let mut ids = match prompt {
            TextOrTokens::Text(text) if text.contains(self.written_text) => {
                self.tokenizer.encode_input(&self.written_out(text.clone(), images)?)?
            }
            TextOrTokens::Text(text) => self.tokenizer.encode_input(text)?,
            TextOrTokens::Tokens(ids) => ids.clone(),
        };
        check_ids(&ids, u32::try_from(self.limits.vocab).unwrap_or(u32::MAX))?;
        let is_written = matches!(prompt, TextOrTokens::Text(_)) && ids.contains(&self.image);
        if is_written || images.is_empty() {
            return Ok(ids);
        }
        if !ids.contains(&self.written) {
            let first = self.tokenizer.n_prefix(&ids)?;
            let mut all = Vec::new();
            for image in images {
                let [before, after] = self.around.map_or([None; 2], |around| around.map(Some));
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
            match waiting.as_slice().first().filter(|_| id == self.written) {
                Some(image) => {
                    all.extend(self.tokens_of(image)?);
                    waiting.next();
                }
                None => all.push(id),
            }
        }
        Ok(all)
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
        self.tokenizer.encode(&spec.text(task, self.image_text)?)
    }

    /// Tokens of an item, one placeholder for each run of rows.
    fn tokens_of(&self, image: &ImageRows) -> Result<Vec<u32>, PromptError> {
        match self.text_of(image) {
            Some(text) => self.tokenizer.encode(&text),
            None => Ok(vec![self.image]),
        }
    }

    /// Text of an item, one placeholder for each run of rows; `None` if it is the placeholder.
    fn text_of(&self, image: &ImageRows) -> Option<String> {
        let rows = self.image_text;
        match (self.layout, image.shape) {
            (ItemLayout::Between([before, after]), _) => Some(format!("{before}{rows}{after}")),
            (ItemLayout::Tiles(layout), ImageShape::Tiles(tiles)) => Some(layout.text.of(tiles, rows)),
            (ItemLayout::Lines(lines), ImageShape::Lines([n_lines, _])) => {
                let LineLayout { end_of_line, end_of_image, .. } = lines;
                let first = format!("{rows}{end_of_line}").repeat(n_lines.saturating_sub(1) as usize);
                Some(format!("{first}{rows}{end_of_image}"))
            }
            _ => None,
        }
    }

    /// A text whose placeholders, one for each item, are written out as the items are.
    fn written_out(&self, text: String, images: &[ImageRows]) -> Result<String, PromptError> {
        if let ItemLayout::Rows | ItemLayout::Grid { .. } = self.layout {
            return Ok(text);
        }
        let n_placeholders = text.matches(self.written_text).count();
        check_placeholders(self.modality, [n_placeholders, images.len()])?;
        let mut parts = text.split(self.written_text);
        let mut out = parts.next().unwrap_or_default().to_owned();
        for (part, image) in parts.zip(images) {
            out.push_str(&self.text_of(image).unwrap_or_default());
            out.push_str(part);
        }
        Ok(out)
    }

    /// Checks what is known of an item against this model.
    fn image_rows(&self, idx: usize, item: &EncodedItem) -> Result<ImageRows, PromptError> {
        if item.modality != self.modality {
            let (found, read) = (item.modality, self.modality);
            return Err(PromptError::Invalid(format!(
                "item {idx} is {found}, this model reads {read} items"
            )));
        }
        let [t, h, w] = match item.extent {
            Extent::Grid { t, h, w } if self.modality == Modality::Image => [t, h, w],
            Extent::Windows { n_windows, .. } if self.modality == Modality::Audio => [1, 1, n_windows],
            _ => {
                let text = format!("item {idx} has not the extent of an item of kind {}", self.modality);
                return Err(PromptError::Invalid(text));
            }
        };
        let shape = match self.layout {
            ItemLayout::Rows | ItemLayout::Between(_) => (item.n_tokens > 0).then_some(ImageShape::Rows),
            ItemLayout::Grid { merge_size } => merged([t, h, w], merge_size, item).map(ImageShape::Grid),
            ItemLayout::Lines(LineLayout { merge_size, .. }) => {
                let grid = merged([t, h, w], merge_size, item).filter(|_| t == 1);
                grid.map(|[_, lines, columns]| ImageShape::Lines([lines, columns]))
            }
            ItemLayout::Tiles(TileLayout { grid, n_rows, .. }) => {
                let tiles = [h / grid[0].max(1), w / grid[1].max(1)];
                let n = tiles[0].checked_mul(tiles[1]);
                let cut = n.filter(|n| *n > 1).and_then(|n| n.checked_add(1)?.checked_mul(n_rows));
                match (n, cut) {
                    (Some(1), _) if item.n_tokens == n_rows => Some(ImageShape::Tiles([0, 0])),
                    (_, Some(all)) if all == item.n_tokens => Some(ImageShape::Tiles(tiles)),
                    _ => None,
                }
            }
        };
        let shape = shape.ok_or_else(|| {
            PromptError::Invalid(format!(
                "item {idx} has {} rows, which is not what a grid of {t}x{h}x{w} patches makes",
                item.n_tokens
            ))
        })?;
        Ok(ImageRows { item: ItemIdx(idx as u32), n_tokens: item.n_tokens, shape })
    }

    /// Runs of rows of an item, in the order of its placeholders.
    fn runs(&self, image: &ImageRows) -> Vec<RowRun> {
        let item = image.item;
        let all = |grid| vec![RowRun { item, first_row: 0, n_rows: image.n_tokens, grid }];
        match (image.shape, self.layout) {
            (ImageShape::Tiles(_), ItemLayout::Tiles(TileLayout { n_rows, .. })) => (0..image.n_tokens)
                .step_by(n_rows.max(1) as usize)
                .map(|first_row| RowRun { item, first_row, n_rows, grid: None })
                .collect(),
            (ImageShape::Lines([lines, n_rows]), _) => {
                (0..lines).map(|line| RowRun { item, first_row: line * n_rows, n_rows, grid: None }).collect()
            }
            (ImageShape::Grid(thw), _) => all(Some(thw)),
            _ => all(None),
        }
    }

    /// Repeats each placeholder as often as it stands for rows.
    fn expand(&self, ids: &[u32], images: &[ImageRows]) -> Result<PreparedSequence, PromptError> {
        let runs: Vec<RowRun> = images.iter().flat_map(|image| self.runs(image)).collect();
        let n_placeholders = ids.iter().filter(|id| **id == self.image).count();
        check_placeholders(self.modality, [n_placeholders, runs.len()])?;
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
            let Some(run) = waiting.as_slice().first().filter(|_| *id == self.image) else {
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
            grids.extend(run.grid.map(|thw| GridSpan { first_token, thw }));
            tokens.extend(std::iter::repeat_n(self.image, run.n_rows as usize));
        }
        let (positions, next_position) = positions(tokens.len(), &grids);
        Ok(PreparedSequence {
            tokens,
            positions,
            next_position,
            spans,
            cross: None,
            rules: self.rules.clone(),
            end_tokens: self.end_tokens.clone(),
            output: OutputKind::Text,
        })
    }
}

/// Rows of a grid of patches whose squares of `side` a side become one row each, as (frames, down, across); `None` if it does not
/// make the item's.
fn merged([t, h, w]: [u32; 3], side: u32, item: &EncodedItem) -> Option<[u32; 3]> {
    let thw = [t, h.checked_div(side)?, w.checked_div(side)?];
    let n = thw.iter().try_fold(1_u32, |n, side| n.checked_mul(*side));
    let whole = h.is_multiple_of(side) && w.is_multiple_of(side);
    (n == Some(item.n_tokens) && item.n_tokens > 0 && whole).then_some(thw)
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
        let rows: Vec<ImageRows> =
            items.iter().enumerate().map(|(i, item)| self.image_rows(i, item)).collect::<Result<_, _>>()?;
        let of = |order: &[ItemIdx]| -> Result<Vec<ImageRows>, PromptError> {
            check_order(order, rows.len())?;
            Ok(order.iter().filter_map(|i| rows.get(i.0 as usize).copied()).collect())
        };
        let (ids, images) = match prompt {
            Prompt::Chat(chat) => {
                let chat = RenderedChat::new(&self.tokenizer, &self.template, (chat, self.modality))?;
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

/// Checks that every item is named exactly once.
fn check_order(order: &[ItemIdx], n_items: usize) -> Result<(), PromptError> {
    let mut named = vec![0_u32; n_items];
    for item in order {
        match named.get_mut(item.0 as usize) {
            Some(n) => *n += 1,
            None => {
                let text = format!("a message names item {}, the request has {n_items} items", item.0);
                return Err(PromptError::Invalid(text));
            }
        }
    }
    match named.iter().position(|n| *n != 1) {
        Some(idx) => Err(PromptError::Invalid(format!(
            "item {idx} is named {} times by the messages; once is right",
            named[idx]
        ))),
        None => Ok(()),
    }
}
