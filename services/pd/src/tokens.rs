//! Tokens of prompts and texts of tokens, for clients that count or look at them. No engine runs.

use crate::state::PdWorkerState;
use std::sync::Arc;
use triptych_core::Failure;
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_models::prompt::PromptBuilder;
use triptych_models::tokenization::Tokenizer;
use triptych_proto::v1;

impl PdWorkerState {
    /// Reads a prompt as tokens.
    ///
    /// # Errors
    /// Invalid for a prompt that the model does not take; overloaded as any request.
    pub(crate) async fn tokenize(
        &self,
        request: v1::TokenizeRequest,
    ) -> Result<v1::TokenizeResponse, Failure> {
        let work = self.blocking_work()?;
        let (model, _) = self.model(&request.model)?;
        let missing = || Failure::invalid("prompt is missing").with_param("prompt");
        let prompt = Prompt::try_from(request.prompt.ok_or_else(missing)?)?;
        let (prompts, tokenizer) = (Arc::clone(&model.prompts), Arc::clone(&model.tokenizer));
        let max_context = u32::try_from(model.max_context).unwrap_or(u32::MAX);
        let read = move || {
            let token_ids = if request.without_special_tokens {
                without_special_tokens(&prompt, &tokenizer, &*prompts)?
            } else {
                tokens(&prompt, &tokenizer, &*prompts)?
            };
            let texts = match request.with_texts {
                true => token_ids.iter().map(|id| tokenizer.token_text(*id)).collect(),
                false => Vec::new(),
            };
            Ok(v1::TokenizeResponse { token_ids, texts, max_context })
        };
        work.run("tokenizing a prompt", read).await
    }

    /// Reads tokens as text.
    ///
    /// # Errors
    /// Invalid for a token that the model does not have; overloaded as any request.
    pub(crate) async fn detokenize(
        &self,
        request: v1::DetokenizeRequest,
    ) -> Result<v1::DetokenizeResponse, Failure> {
        let work = self.blocking_work()?;
        let tokenizer = Arc::clone(&self.model(&request.model)?.0.tokenizer);
        let read = move || {
            let n_tokens = tokenizer.vocab_size();
            if let Some(id) = request.token_ids.iter().find(|id| **id as usize >= n_tokens) {
                let message = format!("token {id} is not one of the tokenizer's {n_tokens}");
                return Err(Failure::invalid(message).with_param("tokens"));
            }
            Ok(v1::DetokenizeResponse { text: tokenizer.decode_all(&request.token_ids) })
        };
        work.run("reading tokens", read).await
    }
}

fn tokens(prompt: &Prompt, tokenizer: &Tokenizer, prompts: &dyn PromptBuilder) -> Result<Vec<u32>, Failure> {
    match prompt {
        Prompt::Singleton(TextOrTokens::Text(text)) => Ok(tokenizer.encode_input(text)?),
        Prompt::Singleton(TextOrTokens::Tokens(ids)) => Ok(ids.clone()),
        Prompt::Chat(_) => {
            let first = prompts.prepare(prompt, &[])?.into_iter().next();
            Ok(first.map(|sequence| sequence.tokens).unwrap_or_default())
        }
        Prompt::Explicit { .. } | Prompt::Speech(_) => {
            Err(Failure::invalid("the prompt is neither a text nor a conversation").with_param("prompt"))
        }
    }
}

fn without_special_tokens(
    prompt: &Prompt,
    tokenizer: &Tokenizer,
    prompts: &dyn PromptBuilder,
) -> Result<Vec<u32>, Failure> {
    match prompt {
        Prompt::Singleton(TextOrTokens::Text(text)) => Ok(tokenizer.encode(text)?),
        other => tokens(other, tokenizer, prompts),
    }
}
