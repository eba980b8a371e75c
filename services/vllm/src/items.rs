//! Items as parts of vLLM's messages: with their bytes, or by the metadata of an encoder output that vLLM's EC connector loads.
//!
//! Every item has a `uuid`, which is its identifier in vLLM's caches and in EC stores. It has the content key, so that tenants do
//! not share items that the proxy keeps apart.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use triptych_core::{EncodedItem, Extent, Failure, Fingerprint, ItemForm, ItemOptions, Modality};
use triptych_proto::v1::worker_model::ItemsByMetadata;
use triptych_proto::{convert, v1};

/// Families whose model files in vLLM declare embeddings apart from their metadata, so that a consumer of encoder outputs reads
/// an item by metadata alone, and the kind of the items. Videos are left out where positions depend on the times of frames, which
/// are no metadata there.
const BY_METADATA: [(&str, Modality); 5] = [
    ("qwen2_vl", Modality::Image),
    ("qwen2_vl", Modality::Video),
    ("qwen2_5_vl", Modality::Image),
    ("qwen3_vl", Modality::Image),
    ("qwen3_vl_moe", Modality::Image),
];

/// The table as it is announced.
pub(crate) fn by_metadata() -> Vec<ItemsByMetadata> {
    let announced = |(family, modality): (&str, Modality)| ItemsByMetadata {
        family: family.into(),
        modality: v1::Modality::from(modality).into(),
    };
    BY_METADATA.map(announced).into()
}

/// The encoder of a model whose items are encoded where they are read.
pub(crate) fn own_encoder(model: &str) -> Fingerprint {
    Fingerprint::of([b"vLLM, which encodes what it reads".as_slice(), model.as_bytes()])
}

/// The encoder of a vLLM instance that only encodes. Its connector keys outputs by weights and settings of its own.
pub(crate) fn encoder_instance(model: &str) -> Fingerprint {
    Fingerprint::of([b"vLLM encoder instance".as_slice(), model.as_bytes()])
}

/// An item of a request.
#[derive(Debug)]
pub(crate) struct AskedItem {
    /// Its encoder output, or what stands for it.
    pub(crate) output: EncodedItem,
    /// Its bytes and their options.
    pub(crate) original: v1::OriginalItem,
}

impl AskedItem {
    /// True if vLLM is given its metadata alone.
    pub(crate) fn is_metadata(&self) -> bool {
        self.original.data.is_empty()
    }

    /// Its identifier in vLLM, for a model. An output of an encoder of ours is named as the EC connector `triptych-ec` finds it.
    fn uuid(&self, model: &str) -> String {
        let EncodedItem { key, fingerprint, .. } = &self.output;
        match [own_encoder(model), encoder_instance(model)].contains(fingerprint) {
            true => format!("item-{key}"),
            false => format!("triptych-{key}"),
        }
    }

    /// The part of a message.
    ///
    /// # Errors
    /// InvalidArgument for an option that vLLM has no field for, or a kind of bytes that it does not read.
    pub(crate) fn part(&self, model: &str) -> Result<Value, Failure> {
        let uuid = self.uuid(model);
        if self.is_metadata() {
            return self.metadata(&uuid);
        }
        let form = if self.original.is_embeddings { ItemForm::Embeddings } else { ItemForm::Plain };
        let options = convert::options(self.original.options.clone().unwrap_or_default(), form)?;
        check(self.output.modality, &options, &self.original.data)?;
        let (name, media) = match self.output.modality {
            Modality::Image => ("image_url", image_type(&self.original.data)),
            Modality::Audio => ("audio_url", "audio/wav"),
            Modality::Video => ("video_url", "video/mp4"),
            Modality::Text => return Err(Failure::internal("an encoder text for a vLLM server")),
        };
        let url = format!("data:{media};base64,{}", BASE64_STANDARD.encode(&self.original.data));
        Ok(json!({"type": name, name: {"url": url}, "uuid": uuid}))
    }

    fn metadata(&self, uuid: &str) -> Result<Value, Failure> {
        match &self.output.extent {
            Extent::Grid { t, h, w } => Ok(
                json!({"type": "image_embeds", "image_embeds": {"image_grid_thw": [t, h, w]}, "uuid": uuid}),
            ),
            Extent::Video { t, h, w, .. } => Ok(
                json!({"type": "video_embeds", "video_embeds": {"video_grid_thw": [t, h, w]}, "uuid": uuid}),
            ),
            _ => {
                Err(Failure::invalid("vLLM workers need the item itself, not the name of its encoder output"))
            }
        }
    }
}

/// Refuses what a vLLM server cannot be asked for.
///
/// # Errors
/// InvalidArgument that names it.
pub(crate) fn check(modality: Modality, options: &ItemOptions, data: &[u8]) -> Result<(), Failure> {
    let given: Vec<_> = options.given().collect();
    if !given.is_empty() {
        let message =
            format!("vLLM workers take no options of an item, the request has {}", given.join(", "));
        return Err(Failure::invalid(message));
    }
    if modality == Modality::Video && data.starts_with(&[0xff, 0xd8]) {
        return Err(Failure::invalid("vLLM workers take a video as a file, not as frames one after another"));
    }
    Ok(())
}

/// Media type of an image, by its first bytes.
fn image_type(data: &[u8]) -> &'static str {
    match data {
        [0x89, b'P', b'N', b'G', ..] => "image/png",
        [0xff, 0xd8, ..] => "image/jpeg",
        [b'G', b'I', b'F', b'8', ..] => "image/gif",
        [b'B', b'M', ..] => "image/bmp",
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => "image/webp",
        _ => "application/octet-stream",
    }
}
