//! An image and a text for one encoder, as transformers' `Florence2Processor` prepares them.
//!
//! The text is what the item's options carry. A task's token stands for a question
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/florence2/processing_florence2.py>);
//! any other text is taken as it is. The image's rows come first, then the start token, the text, the end token.

use super::{CanvasProcessor, EncoderInput, Features, Preprocess};
use crate::error::{ItemError, ModelError, PromptError};
use crate::files::JsonFile;
use crate::spec::CaptionedSpec;
use crate::tokenization::Tokenizer;
use std::path::Path;
use std::sync::Arc;
use triptych_core::limits::Limits;
use triptych_core::{ItemOptions, Modality};

/// Tasks that are the whole text, with what they ask.
const TASKS: [(&str, &str); 8] = [
    ("<OCR>", "What is the text in the image?"),
    ("<OCR_WITH_REGION>", "What is the text in the image, with regions?"),
    ("<CAPTION>", "What does the image describe?"),
    ("<DETAILED_CAPTION>", "Describe in detail what is shown in the image."),
    ("<MORE_DETAILED_CAPTION>", "Describe with a paragraph what is shown in the image."),
    ("<OD>", "Locate the objects with category name in the image."),
    ("<DENSE_REGION_CAPTION>", "Locate the objects in the image, with their descriptions."),
    ("<REGION_PROPOSAL>", "Locate the region proposals in the image."),
];

/// Tasks about a text, with what comes before and after it.
const TASKS_WITH_TEXT: [(&str, [&str; 2]); 7] = [
    ("<CAPTION_TO_PHRASE_GROUNDING>", ["Locate the phrases in the caption: ", ""]),
    ("<REFERRING_EXPRESSION_SEGMENTATION>", ["Locate ", " in the image with mask"]),
    ("<REGION_TO_SEGMENTATION>", ["What is the polygon mask of region ", ""]),
    ("<OPEN_VOCABULARY_DETECTION>", ["Locate ", " in the image."]),
    ("<REGION_TO_CATEGORY>", ["What is the region ", "?"]),
    ("<REGION_TO_DESCRIPTION>", ["What does the region ", " describe?"]),
    ("<REGION_TO_OCR>", ["What text is in the region ", "?"]),
];

/// Prepares an image with a text for one model.
#[derive(Debug)]
pub struct CaptionProcessor {
    canvas: CanvasProcessor,
    tokenizer: Arc<Tokenizer>,
    // Start and end token.
    around: [u32; 2],
    max_rows: usize,
}

impl CaptionProcessor {
    /// Reads the tokens around a text from `config.json`; `tokenizer` is the one of the same directory.
    ///
    /// # Errors
    /// [`ModelError`] for a token that is missing or not in the model's table.
    pub fn from_dir(
        dir: &Path,
        canvas: CanvasProcessor,
        tokenizer: Arc<Tokenizer>,
        spec: &CaptionedSpec,
    ) -> Result<Self, ModelError> {
        let file = JsonFile::read(dir, "config.json")?;
        let token = |key: &str| -> Result<u32, ModelError> {
            let nested = format!("text_config.{key}");
            let id = match file.u32(&nested)? {
                Some(id) => Some(id),
                None => file.u32(key)?,
            };
            let expected = format!("a token below {}", spec.vocab);
            id.filter(|id| (*id as usize) < spec.vocab).ok_or_else(|| file.wrong(&nested, &expected))
        };
        let around = [token("bos_token_id")?, token("eos_token_id")?];
        Ok(Self { canvas, tokenizer, around, max_rows: spec.max_rows })
    }

    /// The tokens of a text, with those around it.
    fn tokens(&self, text: &str) -> Result<Vec<u32>, ItemError> {
        let unreadable = |e: PromptError| ItemError::Unsupported(e.to_string());
        let mut tokens = vec![self.around[0]];
        tokens.extend(self.tokenizer.encode(&question(text)?).map_err(unreadable)?);
        tokens.push(self.around[1]);
        Ok(tokens)
    }
}

/// The question of a task token, or the text itself.
fn question(text: &str) -> Result<String, ItemError> {
    if let Some((task, question)) = TASKS.iter().find(|(task, _)| text.contains(task)) {
        return match text == *task {
            true => Ok((*question).to_owned()),
            false => Err(ItemError::Unsupported(format!("the task {task} must be the only text"))),
        };
    }
    let task = TASKS_WITH_TEXT.iter().find(|(task, _)| text.contains(task));
    Ok(task.map_or_else(
        || text.to_owned(),
        |(task, [before, after])| format!("{before}{}{after}", text.replace(task, "").trim()),
    ))
}

impl Preprocess for CaptionProcessor {
    fn modalities(&self) -> &[Modality] {
        self.canvas.modalities()
    }

    fn takes_prompt(&self) -> bool {
        true
    }

    fn max_rows(&self) -> Option<usize> {
        Some(self.max_rows)
    }

    fn preprocess(
        &self,
        modality: Modality,
        bytes: &[u8],
        options: &ItemOptions,
        limits: &Limits,
    ) -> Result<EncoderInput, ItemError> {
        super::check_options(options, &["prompt"])?;
        let text = options.prompt.as_deref().unwrap_or_default();
        if text.len() > limits.max_item_bytes {
            return Err(ItemError::TooLarge {
                what: "the prompt of the item",
                actual: format!("{} bytes", text.len()),
                limit: format!("{} bytes", limits.max_item_bytes),
            });
        }
        let tokens = self.tokens(text)?;
        let input = self.canvas.preprocess(modality, bytes, &ItemOptions::default(), limits)?;
        let n_rows = input.n_tokens as usize + tokens.len();
        if n_rows > self.max_rows {
            let what = "the image with its prompt";
            return Err(ItemError::TooLong { what, actual: n_rows, limit: self.max_rows });
        }
        let Features::Patches(patches) = input.features else {
            return Err(ItemError::Unsupported(format!("this model reads image items, not {modality}")));
        };
        // Bounded by `max_rows`, which fits.
        Ok(EncoderInput {
            n_tokens: n_rows as u32,
            features: Features::Captioned { patches, tokens },
            ..input
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_stands_for_its_question() {
        let check = |text: &str, expect: &str| assert_eq!(question(text).expect("a question"), expect);
        check("<OD>", "Locate the objects with category name in the image.");
        check("<OCR_WITH_REGION>", "What is the text in the image, with regions?");
        check(" <REGION_TO_OCR> <loc_1><loc_2> ", "What text is in the region <loc_1><loc_2>?");
        check("<OPEN_VOCABULARY_DETECTION>a cat", "Locate a cat in the image.");
        check("What is this?", "What is this?");
        check("", "");
        let error = question("<CAPTION> of a cat").expect_err("more than the task");
        assert_eq!(error.to_string(), "the task <CAPTION> must be the only text");
    }
}
