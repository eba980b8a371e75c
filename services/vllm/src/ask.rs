//! A request to a PD worker as a request to vLLM, field by field. What vLLM has no field for is refused by name.

mod chat;
mod sampling;

use crate::address::VllmAddress;
use crate::failure::no_field;
use crate::items::AskedItem;
use serde_json::{Map, Value, json};
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::{EncodedItem, Failure, TenantId};
use triptych_proto::v1;

/// A request to vLLM.
#[derive(Debug)]
pub(crate) struct Ask {
    /// Path of the API.
    pub(crate) path: &'static str,
    /// JSON.
    pub(crate) body: Map<String, Value>,
    /// Its items.
    pub(crate) items: Vec<AskedItem>,
    /// Answers that are asked for.
    pub(crate) n_choices: u32,
}

impl Ask {
    /// Reads a request to a PD worker.
    ///
    /// # Errors
    /// InvalidArgument that names what vLLM cannot be asked for.
    pub(crate) fn read(request: v1::PdGenerateRequest, address: &VllmAddress) -> Result<Self, Failure> {
        if !request.resume.is_empty() {
            return Err(Failure::unavailable("a vLLM worker cannot go on with another's answer"));
        }
        let items = items(request.items, request.originals)?;
        let prompt =
            request.prompt.ok_or_else(|| Failure::invalid("prompt is missing").with_param("prompt"))?;
        let sampling = request.sampling.unwrap_or_default();
        let n_choices = sampling.n.unwrap_or(1);
        let mut body = Map::new();
        body.insert("model".into(), request.model.clone().into());
        body.insert("stream".into(), true.into());
        body.insert("stream_options".into(), json!({"include_usage": true}));
        body.insert("return_token_ids".into(), true.into());
        let is_chat = matches!(&prompt.kind, Some(v1::prompt::Kind::Chat(_)));
        sampling::put(sampling, is_chat, &mut body)?;
        match Prompt::try_from(prompt)? {
            Prompt::Chat(chat) => chat::put(chat, (&request.model, &items), &mut body)?,
            Prompt::Singleton(prompt) if items.is_empty() => {
                body.insert("prompt".into(), text_or_tokens(prompt));
            }
            Prompt::Singleton(_) => {
                return Err(no_field("prompt", "items beside a prompt that is no conversation"));
            }
            Prompt::Explicit { .. } => return Err(no_field("encoder_prompt", "prompts of two sides")),
            Prompt::Speech(_) => return Err(no_field("model", "transcriptions")),
        }
        if let Some(tenant) =
            TenantId::from_slice(&request.tenant).filter(|tenant| *tenant != TenantId::SHARED)
        {
            // Cached prompts are found under the same salt alone.
            body.insert("cache_salt".into(), tenant.to_string().into());
        }
        if address.has_priorities && request.priority != 0 {
            body.insert("priority".into(), request.priority.into());
        }
        let path = if is_chat { "/v1/chat/completions" } else { "/v1/completions" };
        Ok(Self { path, body, items, n_choices })
    }
}

/// The items with their bytes, in their order.
fn items(outputs: Vec<v1::EncodedItem>, originals: Vec<v1::OriginalItem>) -> Result<Vec<AskedItem>, Failure> {
    let originals = originals.into_iter().map(Some).chain(std::iter::repeat(None));
    let item = |(output, original): (v1::EncodedItem, Option<v1::OriginalItem>)| {
        Ok(AskedItem { output: EncodedItem::try_from(output)?, original: original.unwrap_or_default() })
    };
    outputs.into_iter().zip(originals).map(item).collect()
}

/// A text, or a list of token ids.
pub(crate) fn text_or_tokens(prompt: TextOrTokens) -> Value {
    match prompt {
        TextOrTokens::Text(text) => text.into(),
        TextOrTokens::Tokens(ids) => ids.into(),
    }
}

/// A body to be read as tokens, and its path is `/tokenize`.
///
/// # Errors
/// InvalidArgument for a prompt that vLLM cannot be asked for.
pub(crate) fn tokenize(request: v1::TokenizeRequest) -> Result<Map<String, Value>, Failure> {
    let prompt = request.prompt.ok_or_else(|| Failure::invalid("prompt is missing").with_param("prompt"))?;
    let mut body = Map::new();
    body.insert("model".into(), request.model.clone().into());
    body.insert("return_token_strs".into(), request.with_texts.into());
    match Prompt::try_from(prompt)? {
        Prompt::Chat(chat) => chat::put(chat, (&request.model, &[]), &mut body)?,
        Prompt::Singleton(TextOrTokens::Text(text)) => {
            body.insert("prompt".into(), text.into());
            body.insert("add_special_tokens".into(), (!request.without_special_tokens).into());
        }
        _ => return Err(no_field("prompt", "tokens of such a prompt")),
    }
    body.remove("tool_choice");
    Ok(body)
}

#[cfg(test)]
mod tests;
