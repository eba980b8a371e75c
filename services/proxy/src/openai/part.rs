//! Parts of a message: text, images, videos and audio clips.

use super::error::quoted;
use crate::request::{Item, OutputName, Source};
use bytes::Bytes;
use serde::Deserialize;
use triptych_core::prompt::MessagePart;
use triptych_core::{Failure, ItemForm, ItemIdx, ItemOptions, Modality};

/// Accepted values of `format`. The encoder detects the container from the bytes.
const AUDIO_FORMATS: [&str; 9] = ["wav", "mp3", "flac", "ogg", "oga", "m4a", "mp4", "aac", "webm"];

/// A part, as parsed.
#[derive(Debug, Deserialize)]
pub(super) struct RawPart {
    #[serde(rename = "type")]
    kind: Option<String>,
    text: Option<String>,
    /// Text of a `refusal`.
    refusal: Option<String>,
    /// Of an `input_image`, beside its URL.
    detail: Option<String>,
    image_url: Option<ItemUrl>,
    video_url: Option<ItemUrl>,
    audio_url: Option<ItemUrl>,
    input_audio: Option<InputAudio>,
    encoder_output: Option<OutputReference>,
    image_embeds: Option<ImageEmbeds>,
}

/// An object with a URL; some clients send a bare URL.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "an object with a url")]
enum ItemUrl {
    Object { url: String, detail: Option<String> },
    Bare(String),
}

#[derive(Debug, Deserialize)]
struct InputAudio {
    data: Option<String>,
    format: Option<String>,
}

/// Base64 of a tensor, or of it and of its grid, as vLLM has both.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "base64 of a tensor, or an object with image_embeds and image_grid_thw")]
enum ImageEmbeds {
    Bare(String),
    WithGrid { image_embeds: String, image_grid_thw: Option<String> },
}

#[derive(Debug, Deserialize)]
struct OutputReference {
    id: String,
}

/// The items of a completion request, which has no messages.
pub(super) fn items_of(parts: Vec<RawPart>) -> Result<Vec<Item>, Failure> {
    let mut items = Vec::new();
    for (i, part) in parts.into_iter().enumerate() {
        let at = format!("items[{i}]");
        if let MessagePart::Text(_) = part.into_part(&at, &mut items)? {
            let message = "type is text, allowed are image_url, video_url, audio_url and input_audio; text goes into the prompts";
            return Err(Failure::invalid(message).with_param(format!("{at}.type")));
        }
    }
    Ok(items)
}

impl RawPart {
    /// Its text, if it has any, whatever its type.
    pub(super) fn into_text(self) -> Option<String> {
        self.text
    }

    /// The part of a message; its item joins `items`. `at` is its path in the body.
    pub(super) fn into_part(self, at: &str, items: &mut Vec<Item>) -> Result<MessagePart, Failure> {
        let missing = |field: &str| {
            Failure::invalid(format!("a part of this type needs {field}")).with_param(format!("{at}.{field}"))
        };
        let mut form = ItemForm::Plain;
        let (modality, source, param) = match self.kind.as_deref() {
            Some("text" | "input_text" | "output_text") => {
                return Ok(MessagePart::Text(self.text.ok_or_else(|| missing("text"))?));
            }
            Some("refusal") => {
                return Ok(MessagePart::Text(self.refusal.ok_or_else(|| missing("refusal"))?));
            }
            // The second is its name in `/v1/responses`, which has the URL as a text.
            Some("image_url" | "input_image") => {
                check_detail(self.detail.as_deref()).map_err(|f| f.with_param(format!("{at}.detail")))?;
                let url = self.image_url.ok_or_else(|| missing("image_url"))?;
                let param = format!("{at}.image_url");
                let source = url_source(url, "image/").map_err(|f| f.with_param(&*param))?;
                (Modality::Image, source, param)
            }
            Some("video_url") => {
                let url = self.video_url.ok_or_else(|| missing("video_url"))?;
                let param = format!("{at}.video_url");
                let source = video_source(url).map_err(|f| f.with_param(&*param))?;
                (Modality::Video, source, param)
            }
            Some("audio_url") => {
                let url = self.audio_url.ok_or_else(|| missing("audio_url"))?;
                let param = format!("{at}.audio_url");
                let source = url_source(url, "audio/").map_err(|f| f.with_param(&*param))?;
                (Modality::Audio, source, param)
            }
            Some("input_audio") => {
                let param = format!("{at}.input_audio");
                let audio = self.input_audio.ok_or_else(|| missing("input_audio"))?;
                let source = audio_source(audio).map_err(|f| f.with_param(&*param))?;
                (Modality::Audio, source, param)
            }
            Some("image_embeds") => {
                let param = format!("{at}.image_embeds");
                let given = self.image_embeds.ok_or_else(|| missing("image_embeds"))?;
                form = ItemForm::Embeddings;
                (Modality::Image, embeds_source(given), param)
            }
            Some("encoder_output") => {
                let param = format!("{at}.encoder_output");
                let OutputReference { id } = self.encoder_output.ok_or_else(|| missing("encoder_output"))?;
                let name: OutputName = id.parse().map_err(|()| {
                    let message = format!("id is {}, allowed is one of /v1/encoder_outputs", quoted(&id));
                    Failure::invalid(message).with_param(&*param)
                })?;
                (name.modality, Source::Output(name), param)
            }
            other => {
                let what = other.map_or("missing".to_owned(), |kind| format!("{kind:?}"));
                let message = format!(
                    "type is {what}, allowed are text, image_url, video_url, audio_url, input_audio, image_embeds and encoder_output"
                );
                return Err(Failure::invalid(message).with_param(format!("{at}.type")));
            }
        };
        let idx = ItemIdx(u32::try_from(items.len()).unwrap_or(u32::MAX));
        items.push(Item { modality, source, options: ItemOptions { form, ..ItemOptions::default() }, param });
        Ok(MessagePart::Item(idx))
    }
}

/// The source of rows that the client computed.
fn embeds_source(given: ImageEmbeds) -> Source {
    let (rows, grid) = match given {
        ImageEmbeds::Bare(rows) => (rows, None),
        ImageEmbeds::WithGrid { image_embeds, image_grid_thw } => (image_embeds, image_grid_thw),
    };
    Source::Embeddings { rows: rows.into(), grid: grid.unwrap_or_default().into() }
}

/// The source behind a URL; `expected` begins the type of a data URL.
fn url_source(url: ItemUrl, expected: &str) -> Result<Source, Failure> {
    let url = match url {
        ItemUrl::Bare(url) => url,
        ItemUrl::Object { url, detail } => {
            check_detail(detail.as_deref())?;
            url
        }
    };
    if is_data_url(&url) { data_url(url, expected) } else { Ok(Source::Url(url)) }
}

/// Images are read as their model was published to read them, which is as much as there is.
fn check_detail(detail: Option<&str>) -> Result<(), Failure> {
    match detail {
        None | Some("auto" | "high") => Ok(()),
        Some(other) => Err(Failure::invalid(format!(
            "detail is {other:?}, allowed are auto and high: the model decides how an image is read"
        ))),
    }
}

/// The source of a video: a file, or with the type `video/jpeg` a list of frames, as vLLM reads it.
fn video_source(url: ItemUrl) -> Result<Source, Failure> {
    let (ItemUrl::Object { url, .. } | ItemUrl::Bare(url)) = url;
    if !is_data_url(&url) {
        return Ok(Source::Url(url));
    }
    let is_list = url.get(5..15).is_some_and(|kind| kind.eq_ignore_ascii_case("video/jpeg"));
    match data_url_of(url, &["video/", "image/gif", "image/webp"])? {
        Source::Base64(frames) if is_list => Ok(Source::Base64Frames(frames)),
        source => Ok(source),
    }
}

fn audio_source(audio: InputAudio) -> Result<Source, Failure> {
    let data = audio.data.ok_or_else(|| Failure::invalid("input_audio needs data"))?;
    if let Some(format) = audio.format.map(|f| f.to_ascii_lowercase())
        && !AUDIO_FORMATS.contains(&&*format)
    {
        let allowed = AUDIO_FORMATS.join(", ");
        return Err(Failure::invalid(format!("format is {format:?}, allowed are {allowed}")));
    }
    if is_data_url(&data) { data_url(data, "audio/") } else { Ok(Source::Base64(data.into())) }
}

fn is_data_url(text: &str) -> bool {
    text.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:"))
}

/// As [`data_url_of`], of one kind.
fn data_url(url: String, expected: &str) -> Result<Source, Failure> {
    data_url_of(url, &[expected])
}

/// The base64 of `data:[type][;parameters];base64,…` (RFC 2397), still encoded.
fn data_url_of(url: String, expected: &[&str]) -> Result<Source, Failure> {
    let Some((head, _)) = url.split_once(',') else {
        return Err(Failure::invalid("the data URL has no comma before its data"));
    };
    let at = head.len() + 1;
    let head = head[5..].to_ascii_lowercase();
    let Some(media_type) = head.strip_suffix(";base64") else {
        return Err(Failure::invalid("the data URL is not base64: it must read `data:TYPE;base64,DATA`"));
    };
    let essence = media_type.split(';').next().unwrap_or_default();
    let is_plain = essence.is_empty() || essence == "application/octet-stream";
    if !is_plain && !expected.iter().any(|kind| essence.starts_with(kind)) {
        let expected = expected.join("*, ");
        return Err(Failure::invalid(format!("the data URL has type {essence:?}, expected is {expected}*")));
    }
    Ok(Source::Base64(Bytes::from(url).slice(at..)))
}
