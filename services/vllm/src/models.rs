//! A vLLM server's description of itself as a worker's (docs.vllm.ai: `/v1/models`).

use crate::address::VllmAddress;
use crate::failure::CallError;
use crate::items::{by_metadata, encoder_instance, own_encoder};
use crate::metrics::PublishedEncoder;
use serde::Deserialize;
use triptych_core::prompt::ChatFormat;
use triptych_core::{AdapterId, Fingerprint, Modality};
use triptych_proto::v1;
use triptych_proto::v1::worker_model::{Encoder, ForeignEncoders};

/// Most models of a server, adapters among them.
const MAX_MODELS: usize = 1024;

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ModelCard>,
}

/// A model as vLLM lists it. Its time of creation is that of the answer.
#[derive(Deserialize)]
struct ModelCard {
    id: String,
    #[serde(default)]
    root: Option<String>,
    /// Of a LoRA adapter.
    #[serde(default)]
    parent: Option<String>,
    #[serde(default)]
    max_model_len: Option<u32>,
}

/// Role in which a server is described.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Described {
    /// An instance that only encodes, and what it publishes under the proxy's keys.
    Encoder(Option<PublishedEncoder>),
    /// One that prefills and decodes.
    Pd,
}

/// The models of a server.
///
/// # Errors
/// [`CallError::Unreadable`].
pub(crate) fn read(
    list: &[u8],
    address: &VllmAddress,
    role: Described,
) -> Result<Vec<v1::WorkerModel>, CallError> {
    let unreadable = |e: serde_json::Error| CallError::Unreadable(format!("/v1/models: {e}"));
    let list: ModelList = serde_json::from_slice(list).map_err(unreadable)?;
    let is_served = |card: &ModelCard| role == Described::Pd || card.parent.is_none();
    let cards = list.data.into_iter().take(MAX_MODELS).filter(is_served);
    Ok(cards.map(|card| model(card, address, role)).collect())
}

fn model(card: ModelCard, address: &VllmAddress, role: Described) -> v1::WorkerModel {
    let ModelCard { id, root, parent, max_model_len } = card;
    let base = parent.as_deref().unwrap_or(&id);
    let fingerprint = match role {
        Described::Encoder(_) => encoder_instance(base),
        Described::Pd => own_encoder(base),
    };
    let published = match role {
        Described::Encoder(published) => published,
        Described::Pd => None,
    };
    let adapter = parent.as_ref().map(|_| {
        let parts = [id.as_bytes(), root.as_deref().unwrap_or_default().as_bytes()];
        AdapterId::of(parts).as_bytes().to_vec()
    });
    v1::WorkerModel {
        encoders: encoders(address, fingerprint, published),
        max_context: max_model_len.unwrap_or_default(),
        chat: (role == Described::Pd).then(|| chat_format(address).into()),
        adapter: adapter.unwrap_or_default().into(),
        parent: parent.unwrap_or_default(),
        foreign_encoders: (role == Described::Pd).then(|| ForeignEncoders { by_metadata: by_metadata() }),
        not_resumable: true,
        name: id,
        ..v1::WorkerModel::default()
    }
}

fn encoders(
    address: &VllmAddress,
    fingerprint: Fingerprint,
    published: Option<PublishedEncoder>,
) -> Vec<Encoder> {
    let encoder = |modality: &Modality| {
        let published = published.filter(|_| *modality == Modality::Image);
        let fingerprint = published.map_or(fingerprint, |published| published.fingerprint);
        Encoder {
            modality: v1::Modality::from(*modality).into(),
            fingerprint: fingerprint.as_bytes().to_vec().into(),
            tower: published.map(|published| (&published.tower).into()),
            ..Encoder::default()
        }
    };
    address.items.iter().map(encoder).collect()
}

/// The format of conversations, as far as an address tells it; the template itself is the server's.
fn chat_format(address: &VllmAddress) -> ChatFormat {
    ChatFormat {
        reads_tools: address.tools.is_some(),
        reads_documents: true,
        tool_syntax: address.tools,
        has_named_args: false,
        reasoning: address.reasoning,
    }
}
