//! Triptych's gRPC API: exact token counts, stage times, and the source of each item.

use super::models::ListedModel;
use super::sse::shortened;
use super::tokens::{TokenMessage, times};
use super::{Clock, ContentSource, PreparedRequest, Reply, StageTimes, Target};
use crate::offered::{ItemShape, Offered};
use crate::outcome::End;
use crate::prompt::{Message, messages};
use crate::result::ItemSources;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Status};
use triptych_proto::convert::modality;
use triptych_proto::v1;
use triptych_proto::v1::generate_response::Kind;
use triptych_proto::v1::prompt::Kind as PromptKind;
use triptych_proto::v1::triptych_client::TriptychClient;

/// Largest message either way.
const MAX_MESSAGE: usize = 1 << 30;

/// A proxy's gRPC address.
#[derive(Clone, Debug)]
pub struct GrpcTarget {
    address: String,
    model: String,
    api_key: Option<MetadataValue<Ascii>>,
    channels: Arc<[Channel]>,
    next: Arc<AtomicUsize>,
}

impl GrpcTarget {
    /// Over these channels in turn: one connection's flow control is not what is measured.
    ///
    /// # Errors
    /// An error if the key cannot be a header value.
    pub fn new(
        address: &str,
        channels: Vec<Channel>,
        model: String,
        api_key: Option<&str>,
    ) -> Result<Self, tonic::metadata::errors::InvalidMetadataValue> {
        let api_key = api_key.map(|key| format!("Bearer {}", key.trim()).parse()).transpose()?;
        Ok(Self {
            address: address.to_owned(),
            model,
            api_key,
            channels: channels.into(),
            next: Arc::default(),
        })
    }

    /// Models that the server lists, with the items that they take.
    ///
    /// # Errors
    /// The status of a server that does not answer.
    pub async fn models(&self) -> Result<Vec<ListedModel>, Status> {
        let mut request = tonic::Request::new(v1::ListModelsRequest {});
        if let Some(key) = &self.api_key {
            request.metadata_mut().insert("authorization", key.clone());
        }
        let listed = self.client().list_models(request).await?.into_inner().models;
        let model = |model: v1::list_models_response::Model| ListedModel {
            modalities: Some(model.modalities.iter().filter_map(|m| modality(*m).ok()).collect()),
            name: model.name,
        };
        Ok(listed.into_iter().map(model).collect())
    }

    /// The target with another model.
    pub fn with_model(self, model: String) -> Self {
        Self { model, ..self }
    }

    fn client(&self) -> TriptychClient<Channel> {
        let i = self.next.fetch_add(1, Ordering::Relaxed) % self.channels.len().max(1);
        TriptychClient::new(self.channels[i].clone())
            .max_encoding_message_size(MAX_MESSAGE)
            .max_decoding_message_size(MAX_MESSAGE)
    }
}

impl Target for GrpcTarget {
    fn prepare(&self, offered: &Offered, content: &ContentSource) -> PreparedRequest {
        let message = request(&self.model, offered, content);
        let target = self.clone();
        let asked = offered.output_tokens;
        Box::new(move |clock| Box::pin(async move { target.send(message, asked, clock).await }))
    }

    fn name(&self) -> String {
        self.address.clone()
    }

    fn model(&self) -> String {
        self.model.clone()
    }
}

impl GrpcTarget {
    async fn send(&self, message: v1::GenerateRequest, asked: u32, clock: Clock) -> Reply {
        let mut request = tonic::Request::new(message);
        if let Some(key) = &self.api_key {
            request.metadata_mut().insert("authorization", key.clone());
        }
        let mut pieces = Vec::new();
        let mut summary = None;
        let ended = async {
            let mut stream = self.client().generate(request).await?.into_inner();
            while let Some(message) = stream.message().await? {
                match message.kind {
                    Some(Kind::Delta(delta)) => pieces.push(piece(&delta, clock.now())),
                    Some(Kind::Summary(s)) => summary = Some(s),
                    Some(Kind::Accepted(_)) | None => {}
                }
            }
            Ok(())
        };
        let ended: Result<(), Status> = ended.await;
        let now = clock.now();
        let usage = summary.as_ref().and_then(|s| s.usage);
        let tokens = times(&pieces, usage.map(|u| u.completion_tokens));
        let end = match (ended, &summary) {
            (Err(status), _) => end_of(&status),
            (Ok(()), None) => End::Failed("the stream ended without a summary".to_owned()),
            (Ok(()), Some(_)) if tokens.len() < asked.max(1) as usize => End::Short,
            (Ok(()), Some(_)) => End::Whole,
        };
        Reply {
            tokens,
            prompt_tokens: usage.map(|u| u.prompt_tokens),
            stages: summary.as_ref().and_then(|s| s.times).map(stages),
            sources: summary.as_ref().map(sources),
            ..Reply::without_tokens(end, now)
        }
    }
}

fn piece(delta: &v1::Delta, at: Duration) -> TokenMessage {
    // Pieces of settled windows of speech have text and no tokens.
    let n = u32::try_from(delta.token_ids.len()).ok().filter(|n| *n > 0);
    TokenMessage { at, n_tokens: n, has_text: !delta.text.is_empty() }
}

fn end_of(status: &Status) -> End {
    match status.code() {
        Code::ResourceExhausted => End::Refused,
        code => End::Failed(format!("{code:?}: {}", shortened(status.message()))),
    }
}

fn stages(times: v1::StageTimes) -> StageTimes {
    StageTimes {
        queue: Duration::from_micros(times.queue_us),
        encode: Duration::from_micros(times.encode_us),
        publish: Duration::from_micros(times.publish_us),
        load: Duration::from_micros(times.load_us),
        prefill: Duration::from_micros(times.prefill_us),
    }
}

fn sources(summary: &v1::Summary) -> ItemSources {
    let mut sources = ItemSources::default();
    for source in summary.item_sources() {
        match source {
            v1::ItemSource::Encoded => sources.encoded += 1,
            v1::ItemSource::Shared => sources.shared += 1,
            v1::ItemSource::Cached => sources.cached += 1,
            v1::ItemSource::Unspecified => {}
        }
    }
    sources
}

/// A conversation, or a transcription for an audio clip without text.
fn request(model: &str, offered: &Offered, content: &ContentSource) -> v1::GenerateRequest {
    let lone_sound = offered.text_tokens == 0
        && matches!(offered.items[..], [item] if matches!(item.shape, ItemShape::Audio { .. }));
    let kind = if lone_sound {
        PromptKind::Speech(v1::SpeechTask::default())
    } else {
        let messages = messages(offered, &content.wording, content.seed);
        PromptKind::Chat(v1::prompt::Chat {
            messages: messages.into_iter().map(message).collect(),
            ..Default::default()
        })
    };
    let item = |item: &crate::offered::OfferedItem| v1::Item {
        modality: match item.shape {
            ItemShape::Image { .. } => v1::Modality::Image,
            ItemShape::Audio { .. } => v1::Modality::Audio,
        }
        .into(),
        source: Some(v1::item::Source::Data(content.media.file(item))),
        options: None,
    };
    v1::GenerateRequest {
        model: model.to_owned(),
        prompt: Some(v1::Prompt { kind: Some(kind) }),
        items: offered.items.iter().map(item).collect(),
        sampling: Some(v1::Sampling {
            max_tokens: Some(offered.output_tokens),
            min_tokens: Some(offered.output_tokens),
            ignore_eos: true,
            temperature: Some(0.0),
            ..v1::Sampling::default()
        }),
        ..v1::GenerateRequest::default()
    }
}

fn message(message: Message) -> v1::Message {
    let part = |kind| v1::Part { kind: Some(kind) };
    // A request has a few items.
    let mut parts: Vec<v1::Part> = message.items.map(|i| part(v1::part::Kind::Item(i as u32))).collect();
    if !message.text.is_empty() {
        parts.push(part(v1::part::Kind::Text(message.text)));
    }
    let role = if message.is_answer { v1::Role::Assistant } else { v1::Role::User };
    v1::Message { role: role.into(), parts }
}

#[cfg(test)]
mod tests;
