//! `truncate_prompt_tokens`: of a prompt that is too long, its last tokens are kept, as in vLLM.
//!
//! Of prompts of text alone: an item's rows, an encoder's text and a transcript's task tokens have no part that could be left
//! out. A text is tokenized with its special tokens first, so that what is cut off begins with those.

use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::{EncodedItem, Failure};
use triptych_models::prompt::{PreparedSequence, PromptBuilder};
use triptych_models::tokenization::Tokenizer;

const FIELD: &str = "truncate_prompt_tokens";

/// Most tokens that are kept of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncation(usize);

/// Tokens that there is room for.
#[derive(Clone, Copy, Debug)]
pub struct TruncationRoom {
    /// Most tokens of prompt and answer.
    pub max_context: usize,
    /// Most tokens of the answer, if the request says so.
    pub max_tokens: Option<u32>,
}

impl Truncation {
    /// Truncation to `n` tokens; -1: to as many as leave room for the answer, at least for one token.
    ///
    /// # Errors
    /// A number that is neither -1 nor from 1 to the context.
    pub fn new(n: i32, room: TruncationRoom) -> Result<Self, Failure> {
        let TruncationRoom { max_context, max_tokens } = room;
        let n_kept = match usize::try_from(n) {
            Ok(n_kept) => n_kept,
            Err(_) if n == -1 => max_context.saturating_sub(max_tokens.unwrap_or(1).max(1) as usize).max(1),
            Err(_) => 0,
        };
        if (1..=max_context).contains(&n_kept) {
            return Ok(Self(n_kept));
        }
        let message = format!("{FIELD} is {n}, allowed are -1 and 1 to {max_context}");
        Err(Failure::invalid(message).with_param(FIELD))
    }

    /// The sequence of a truncated prompt.
    ///
    /// # Errors
    /// A prompt that is not of text alone; those of the builder.
    pub fn prepare(
        self,
        prompts: &dyn PromptBuilder,
        tokenizer: &Tokenizer,
        prompt: &Prompt,
        items: &[EncodedItem],
    ) -> Result<Vec<PreparedSequence>, Failure> {
        let refused = || {
            let message =
                format!("{FIELD} is for prompts of text alone, of a model without an encoder for it");
            Failure::invalid(message).with_param(FIELD)
        };
        let mut tokens = match prompt {
            _ if !items.is_empty() => return Err(refused()),
            Prompt::Singleton(TextOrTokens::Text(text)) => tokenizer.encode_input(text)?,
            Prompt::Singleton(TextOrTokens::Tokens(ids)) => ids.clone(),
            Prompt::Chat(chat) => prompts.chat_tokens(chat)?.ok_or_else(refused)?,
            Prompt::Explicit { .. } | Prompt::Speech(_) => return Err(refused()),
        };
        tokens.drain(..tokens.len().saturating_sub(self.0));
        Ok(prompts.prepare(&Prompt::Singleton(TextOrTokens::Tokens(tokens)), &[])?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_tokens_are_kept_as_are_asked_for_or_leave_room() {
        let kept = |n, max_tokens| Truncation::new(n, TruncationRoom { max_context: 10, max_tokens });
        for (n, max_tokens, expect) in
            [(1, None, 1), (10, Some(5), 10), (-1, None, 9), (-1, Some(4), 6), (-1, Some(100), 1)]
        {
            assert_eq!(kept(n, max_tokens), Ok(Truncation(expect)), "{n}");
        }
        for n in [0, 11, -2, i32::MIN, i32::MAX] {
            let refused = kept(n, None).unwrap_err();
            assert_eq!(refused.param.as_deref(), Some(FIELD));
            assert!(refused.message.contains("1 to 10"), "{refused}");
        }
    }
}
