//! A request as the HTTP and gRPC APIs hand it over: parsed, not yet trusted.
//!
//! [`Request::check`] holds it against the limits by what it *declares*, before anything is fetched or decoded.
//! Each item remembers the name its sender knows it by, so that an error names the sender's own field.

mod chat;
mod item;
mod output_name;
mod prompt;

pub use item::{Item, Source, check_len, item_of_param, param_of_item, too_large};
pub use output_name::OutputName;

use crate::auth::Caller;
use crate::auth::keys::PRIORITIES;
use std::collections::BTreeSet;
use tokio::time::Instant;
use triptych_core::limits::Limits;
use triptych_core::prompt::{LongForm, Message, MessagePart, Prompt, SpeechTask, TextOrTokens};
use triptych_core::sampling::SamplingParams;
use triptych_core::{Failure, Modality, ModelName, RequestId};
use triptych_proto::convert::sampling_from_wire;
use triptych_proto::v1;

/// A client's request.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its name in logs, spans and answers.
    pub id: RequestId,
    /// The API that it came over.
    pub api: Api,
    /// Time of its arrival.
    pub arrived: Instant,
    /// Time at which its answer must be complete.
    pub deadline: Instant,
    /// The model asked for; `None`: the one that fits.
    pub model: Option<ModelName>,
    /// The prompt of the decoder.
    pub prompt: Prompt,
    /// Images and audio clips, in the order that parts name them.
    pub items: Vec<Item>,
    /// Sampling settings. Those that are open stay open: the defaults are the model's, and the PD worker knows them.
    pub sampling: v1::Sampling,
    /// The caller.
    pub caller: Caller,
    /// Smaller runs first.
    pub priority: i32,
    /// The prompt of the encoder, once it is known to be for an encoder.
    pub encoder_prompt: Option<TextOrTokens>,
    /// Language of the prompt's text, for an encoder that is told it. Taken by the item that the text becomes.
    pub src_lang: Option<String>,
    /// The fate of its stream when the worker that writes it goes away.
    pub resumption: Resumption,
}

/// An API that requests come over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// OpenAI's, over HTTP.
    Http,
    /// gRPC.
    Grpc,
}

impl Api {
    /// Its name in logs and spans.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
        }
    }
}

/// The fate of a stream when the worker that writes it goes away in the middle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Resumption {
    /// Another worker goes on where it stopped.
    #[default]
    GoOn,
    /// It ends with a failure.
    Never,
}

impl Request {
    /// The task, if it is an audio clip to be read in sequence.
    pub fn in_sequence(&self) -> Option<&SpeechTask> {
        match &self.prompt {
            Prompt::Speech(task) if task.long_form == LongForm::Sequential => Some(task),
            _ => None,
        }
    }

    /// The first window of an audio clip that is read in sequence is asked for by its start.
    pub fn start_sequence(&mut self) {
        if self.in_sequence().is_some() {
            for item in &mut self.items {
                item.options.start_ms = item.options.start_ms.or(Some(0));
            }
        }
    }

    /// Holds the request against the limits and against itself, without reading an item.
    ///
    /// # Errors
    /// [`Failure`] that names the field, its value, and what is allowed.
    pub fn check(&self, limits: &Limits) -> Result<(), Failure> {
        sampling_from_wire(self.sampling.clone(), &SamplingParams::default())?;
        self.check_place()?;
        let n_items = self.items.len();
        if n_items > limits.max_items {
            let message = format!("the request has {n_items} items, the limit is {}", limits.max_items);
            return Err(Failure::invalid(message).with_param("items"));
        }
        self.items.iter().try_for_each(|item| item.check(limits))?;
        prompt::check(&self.prompt, &self.items)
    }

    /// Its place in the queue.
    fn check_place(&self) -> Result<(), Failure> {
        if !PRIORITIES.contains(&self.priority) {
            let message = format!("priority is {}, allowed is -100 to 100", self.priority);
            return Err(Failure::invalid(message).with_param("priority"));
        }
        Ok(())
    }

    /// The kinds of items it has.
    pub fn modalities(&self) -> BTreeSet<Modality> {
        self.items.iter().map(|item| item.modality).collect()
    }

    /// True if an encoder may have to read an item of it. Text that an encoder reads is no such item.
    pub fn has_items_to_encode(&self) -> bool {
        let is_read =
            |item: &Item| item.modality != Modality::Text && !matches!(item.source, Source::Output(_));
        self.items.iter().any(is_read)
    }

    /// Answers asked for.
    pub fn n_choices(&self) -> u32 {
        self.sampling.n.unwrap_or(1)
    }

    /// For a model whose encoder reads text together with an item: the text of the prompt goes to the encoder, unless
    /// the prompt says which side each part is for.
    ///
    /// # Errors
    /// [`Failure`] for token ids, which such an encoder does not read, or for several items.
    pub fn move_text_to_the_item(&mut self) -> Result<(), Failure> {
        let start = || TextOrTokens::Tokens(Vec::new());
        let (text, decoder) = match &self.prompt {
            Prompt::Chat(chat) => (TextOrTokens::Text(only_text(&chat.messages)?), start()),
            Prompt::Singleton(text) => (text.clone(), start()),
            Prompt::Explicit { encoder: Some(text), decoder } => (text.clone(), decoder.clone()),
            Prompt::Explicit { encoder: None, .. } | Prompt::Speech(_) => return Ok(()),
        };
        let invalid = |message: &str| Err(Failure::invalid(message).with_param("prompt"));
        let [item] = self.items.as_mut_slice() else {
            return invalid("this model's encoder reads one item with its text");
        };
        match text {
            TextOrTokens::Text(text) => item.options.prompt = Some(text).filter(|t| !t.is_empty()),
            TextOrTokens::Tokens(ids) if ids.is_empty() => {}
            TextOrTokens::Tokens(_) => {
                return invalid("this model's encoder reads text with an item, not token ids");
            }
        }
        self.encoder_prompt = item.options.prompt.clone().map(TextOrTokens::Text);
        self.prompt = Prompt::Explicit { encoder: None, decoder };
        Ok(())
    }

    /// For a model that encodes text: the text meant for the encoder becomes an item, and so is encoded, cached and
    /// shared as any other.
    ///
    /// # Errors
    /// [`Failure`] for a conversation: such a model reads one text, and has no layout for several.
    pub fn move_encoder_text_to_items(&mut self) -> Result<(), Failure> {
        let (text, decoder) = match &mut self.prompt {
            Prompt::Chat(chat) if self.items.is_empty() => {
                (TextOrTokens::Text(only_text(&chat.messages)?), TextOrTokens::Tokens(Vec::new()))
            }
            Prompt::Singleton(text) if self.items.is_empty() => {
                (text.clone(), TextOrTokens::Tokens(Vec::new()))
            }
            Prompt::Explicit { encoder: Some(text), decoder } => (text.clone(), decoder.clone()),
            _ => return Ok(()),
        };
        self.encoder_prompt = Some(text.clone());
        let mut item = Item::of_text(text, "prompt");
        item.options.src_lang = self.src_lang.take();
        self.items.push(item);
        self.prompt = Prompt::Explicit { encoder: None, decoder };
        Ok(())
    }

    /// The secret that sets the request's tenant apart, under that of this cluster. Nothing but the secret for the tenant
    /// that all share.
    pub fn tenant_secret(&self, salt: &[u8]) -> Vec<u8> {
        let (tenant, generation) = (&self.caller.tenant, self.caller.generation.as_deref());
        if tenant.is_empty() && generation.is_none() {
            return salt.to_vec();
        }
        let mut secret = [&(salt.len() as u64).to_le_bytes(), salt, tenant.as_bytes()].concat();
        if let Some(generation) = generation {
            // A byte that no text has parts the two.
            secret.push(0xff);
            secret.extend_from_slice(generation.as_bytes());
        }
        secret
    }

    /// Puts the sender's name of an item in the place of the cluster's `items[i]`, and that of a conversation in the place of
    /// `prompt`.
    pub fn localise(&self, failure: Failure) -> Failure {
        if matches!(self.prompt, Prompt::Chat(_)) && failure.param.as_deref() == Some("prompt") {
            return failure.with_param("messages");
        }
        let item =
            failure.param.as_deref().and_then(item_of_param).and_then(|i| self.items.get(i.0 as usize));
        match item {
            Some(item) => failure.with_param(item.param.clone()),
            None => failure,
        }
    }
}

/// The text of a conversation of one message.
fn only_text(messages: &[Message]) -> Result<String, Failure> {
    let [message] = messages else {
        let n = messages.len();
        let text =
            format!("this model's encoder reads one text, the conversation has {n} messages; send one");
        return Err(Failure::invalid(text).with_param("messages"));
    };
    let texts = message.parts.iter().filter_map(|part| match part {
        MessagePart::Text(text) => Some(text.as_str()),
        _ => None,
    });
    Ok(texts.collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::{Account, Quota};
    use std::sync::Arc;
    use triptych_core::prompt::Role;
    use triptych_core::{ItemForm, ItemIdx, ItemOptions};

    fn request(items: Vec<Item>) -> Request {
        let now = Instant::now();
        Request {
            id: RequestId::from_bits(1),
            api: Api::Grpc,
            arrived: now,
            deadline: now,
            model: None,
            prompt: Prompt::Singleton(TextOrTokens::Text("x".into())),
            items,
            sampling: v1::Sampling::default(),
            caller: Caller::new(String::new(), Arc::new(Account::new(Quota::default(), 64 << 20))),
            priority: 0,
            encoder_prompt: None,
            src_lang: None,
            resumption: Resumption::GoOn,
        }
    }

    fn image(source: Source) -> Item {
        Item { modality: Modality::Image, source, options: ItemOptions::default(), param: "here".into() }
    }

    #[test]
    fn declared_sizes_are_held_before_anything_is_read() {
        let limits = Limits { max_item_bytes: 30, max_items: 2, ..Limits::default() };
        let bytes = |n: usize| image(Source::Bytes(vec![0; n].into()));
        let base64 = |n: usize| image(Source::Base64(vec![b'A'; n].into()));
        let cases = [
            (vec![bytes(30)], None),
            (vec![bytes(31)], Some("the item has 31 bytes or more, the limit is 30")),
            (vec![bytes(0)], Some("the item is empty: it has 0 bytes")),
            (vec![base64(40)], None),
            (vec![base64(44)], Some("the item has 33 bytes or more, the limit is 30")),
            (vec![bytes(1), bytes(1), bytes(1)], Some("the request has 3 items, the limit is 2")),
            (vec![image(Source::Url("x".repeat(9000)))], Some("the URL has 9000 bytes, the limit is 8192")),
        ];
        for (items, expect) in cases {
            let found = request(items).check(&limits).err().map(|f| f.message);
            assert_eq!(found.as_deref(), expect);
        }
    }

    #[test]
    fn an_item_is_named_as_its_sender_names_it() {
        let request = request(vec![image(Source::Url("http://a".into()))]);
        let named = |param: &str| request.localise(Failure::invalid("x").with_param(param)).param.unwrap();
        assert_eq!(named("items[0]"), "here");
        assert_eq!(named("items[1]"), "items[1]");
        assert_eq!(named("top_p"), "top_p");
        assert_eq!(item_of_param(&param_of_item(ItemIdx(7))), Some(ItemIdx(7)));
    }

    #[test]
    fn text_for_the_encoder_becomes_an_item() {
        let mut one = request(vec![]);
        one.move_encoder_text_to_items().unwrap();
        assert_eq!(one.items[0].modality, Modality::Text);
        assert!(matches!(one.prompt, Prompt::Explicit { encoder: None, .. }));
        let mut tokens = request(vec![]);
        tokens.prompt = Prompt::Singleton(TextOrTokens::Tokens(vec![1, 258]));
        tokens.move_encoder_text_to_items().unwrap();
        assert_eq!(tokens.items[0].options.form, ItemForm::TokenIds);
        let message = || Message { role: Role::User, parts: vec![MessagePart::Text("hi".into())] };
        let mut chat = request(vec![]);
        chat.prompt = Prompt::Chat(vec![message()].into());
        chat.move_encoder_text_to_items().unwrap();
        assert!(matches!(&chat.items[0].source, Source::Bytes(b) if b == "hi"));
        let mut long = request(vec![]);
        long.prompt = Prompt::Chat(vec![message(), message()].into());
        assert_eq!(long.move_encoder_text_to_items().unwrap_err().param.as_deref(), Some("messages"));
        assert!(matches!(&tokens.items[0].source, Source::Bytes(b) if **b == [1, 0, 0, 0, 2, 1, 0, 0]));
    }
}
