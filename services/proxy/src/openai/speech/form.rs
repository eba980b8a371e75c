//! The form of a speech request (`multipart/form-data`), field by field as it streams in.

use super::super::api::{AdmittedCall, HttpApi};
use super::super::body::{BodyError, check_declared, pieces};
use super::super::error::{HttpError, invalid_field};
use super::options::{self, SpeechOptions};
use axum::extract::Request;
use axum::http::header;
use bytes::{Bytes, BytesMut};
use multer::{Field, Multipart};
use std::collections::HashMap;
use std::error::Error;
use std::str::FromStr;
use triptych_core::{Failure, FailureClass};

/// Longest field that is not the file, in bytes.
const MAX_FIELD_BYTES: usize = 64 << 10;
/// Largest number of fields in a form.
const MAX_FIELDS: usize = 64;

/// A speech request, as the form gives it.
#[derive(Debug)]
pub(super) struct SpeechForm {
    pub(super) file: Bytes,
    pub(super) model: Option<String>,
    pub(super) language: Option<String>,
    pub(super) prompt: Option<String>,
    pub(super) format: TranscriptFormat,
    pub(super) temperature: Option<f32>,
    pub(super) stream: bool,
    /// True if the log-probability of each token is reported.
    pub(super) logprobs: bool,
    pub(super) options: SpeechOptions,
}

/// Format of the response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum TranscriptFormat {
    /// An object with the text.
    #[default]
    Json,
    /// The text.
    Text,
    /// An object with the text, its segments and their times.
    VerboseJson,
    /// SubRip subtitles.
    Srt,
    /// WebVTT subtitles.
    Vtt,
}

impl TranscriptFormat {
    /// True if the response has times.
    pub(super) fn has_times(self) -> bool {
        matches!(self, Self::VerboseJson | Self::Srt | Self::Vtt)
    }
}

impl FromStr for TranscriptFormat {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Ok(match text {
            "json" => Self::Json,
            "text" => Self::Text,
            "verbose_json" => Self::VerboseJson,
            "srt" => Self::Srt,
            "vtt" => Self::Vtt,
            _ => return Err(()),
        })
    }
}

/// Fields, as parsed so far.
#[derive(Debug, Default)]
struct Fields {
    file: Option<Bytes>,
    model: Option<String>,
    language: Option<String>,
    prompt: Option<String>,
    response_format: Option<String>,
    temperature: Option<String>,
    stream: Option<String>,
    granularities: Vec<String>,
    includes: Vec<String>,
    /// Values of [`options::FIELDS`], by name.
    options: HashMap<String, String>,
}

/// Reads the form.
pub(super) async fn read(
    api: &HttpApi,
    call: &AdmittedCall,
    request: Request,
) -> Result<SpeechForm, HttpError> {
    let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok());
    let boundary = multer::parse_boundary(content_type.unwrap_or_default()).map_err(|_| {
        Failure::invalid("the body must be multipart/form-data with a boundary, and a field named file")
    })?;
    check_declared(request.headers(), api.limits.max_body_bytes)?;
    call.with_items()?;
    let mut form = Multipart::new(pieces(api, call, request.into_body()), boundary);
    let mut fields = Fields::default();
    for _ in 0..MAX_FIELDS {
        match form.next_field().await.map_err(unreadable)? {
            Some(field) => fields.add(field, api.limits.max_item_bytes).await?,
            None => return Ok(fields.into_form()?),
        }
    }
    Err(Failure::invalid(format!("the form has more than {MAX_FIELDS} fields")).into())
}

impl Fields {
    async fn add(&mut self, field: Field<'_>, max_file_bytes: usize) -> Result<(), HttpError> {
        let name = field.name().unwrap_or_default().to_owned();
        let target = match &*name {
            "file" => {
                self.file = Some(bytes_of(field, max_file_bytes).await?);
                return Ok(());
            }
            "model" => &mut self.model,
            "language" => &mut self.language,
            "prompt" => &mut self.prompt,
            "response_format" => &mut self.response_format,
            "temperature" => &mut self.temperature,
            "stream" => &mut self.stream,
            "timestamp_granularities[]" | "timestamp_granularities" => {
                self.granularities.push(text_of(field).await?);
                return Ok(());
            }
            option if options::FIELDS.contains(&option) => {
                let text = text_of(field).await?;
                if !text.is_empty() {
                    self.options.insert(name, text);
                }
                return Ok(());
            }
            "include[]" | "include" => {
                self.includes.push(text_of(field).await?);
                return Ok(());
            }
            "known_speaker_names[]" | "known_speaker_references[]" | "keywords[]" | "languages[]" => {
                let message = format!("{name} is not supported by this server");
                return Err(Failure::invalid(message).with_param(name).into());
            }
            // Multer skips the data of a field that is dropped.
            _ => return Ok(()),
        };
        *target = Some(text_of(field).await?).filter(|text| !text.is_empty());
        Ok(())
    }

    fn into_form(self) -> Result<SpeechForm, Failure> {
        let file = self.file.ok_or_else(|| Failure::invalid("the form has no file").with_param("file"))?;
        let format = match self.response_format {
            None => TranscriptFormat::default(),
            Some(text) => text.parse().map_err(|()| {
                let allowed = "json, text, verbose_json, srt and vtt";
                invalid_field("response_format", &text, allowed)
            })?,
        };
        if let Some(other) = self.granularities.iter().find(|g| !["segment", "word"].contains(&g.as_str())) {
            return Err(invalid_field("timestamp_granularities[]", other, "segment and word"));
        }
        let words = self.granularities.iter().any(|g| g == "word");
        if words && format != TranscriptFormat::VerboseJson {
            let message = "only verbose_json has word times: response_format must be verbose_json";
            return Err(Failure::invalid(message).with_param("response_format"));
        }
        let temperature = self.temperature.map(|text| {
            let number = text.trim().parse::<f32>();
            number.map_err(|_| invalid_field("temperature", &text, "a number from 0 to 1"))
        });
        let stream = match self.stream.as_deref() {
            None | Some("false" | "False" | "0") => false,
            Some("true" | "True" | "1") => true,
            Some(other) => return Err(invalid_field("stream", other, "true and false")),
        };
        if stream && !matches!(format, TranscriptFormat::Json | TranscriptFormat::Text) {
            let message = "a stream has no times: with stream, response_format must be json or text";
            return Err(Failure::invalid(message).with_param("response_format"));
        }
        let logprobs = logprobs(&self.includes, format)?;
        let temperature = temperature.transpose()?;
        // Checking a window delays a stream by that window, so a stream has it only when a threshold is given.
        let with_fallback = !stream && temperature.is_none_or(|t| t == 0.0);
        let options = SpeechOptions { words, ..SpeechOptions::read(&self.options, with_fallback)? };
        Ok(SpeechForm {
            file,
            model: self.model,
            language: self.language,
            prompt: self.prompt,
            format,
            temperature,
            stream,
            logprobs,
            options,
        })
    }
}

/// True if log-probabilities are asked for, of a format that has room for them.
fn logprobs(includes: &[String], format: TranscriptFormat) -> Result<bool, Failure> {
    if let Some(other) = includes.iter().find(|include| *include != "logprobs") {
        return Err(invalid_field("include[]", other, "logprobs"));
    }
    if !includes.is_empty() && format != TranscriptFormat::Json {
        let message = "only json has log-probabilities: with include[], response_format must be json";
        return Err(Failure::invalid(message).with_param("response_format"));
    }
    Ok(!includes.is_empty())
}

async fn bytes_of(mut field: Field<'_>, limit: usize) -> Result<Bytes, HttpError> {
    let name = field.name().unwrap_or_default().to_owned();
    let mut bytes = BytesMut::new();
    while let Some(piece) = field.chunk().await.map_err(unreadable)? {
        let len = bytes.len() + piece.len();
        if len > limit {
            let message = format!("the field has {len} bytes or more, the limit is {limit}");
            // The length of a text is a mistake of the request; that of a file is a limit of this server.
            let class = if name == "file" { FailureClass::TooLarge } else { FailureClass::InvalidArgument };
            let failure = Failure::new(class, message).with_param(name);
            return Err(HttpError { closes: true, ..failure.into() });
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes.freeze())
}

async fn text_of(field: Field<'_>) -> Result<String, HttpError> {
    let name = field.name().unwrap_or_default().to_owned();
    let bytes = bytes_of(field, MAX_FIELD_BYTES).await?;
    let text = String::from_utf8(bytes.into());
    Ok(text.map_err(|_| Failure::invalid(format!("{name} is not UTF-8")).with_param(name))?)
}

/// The cause of multer's error: a body that was too long or too slow is reported as such.
fn unreadable(e: multer::Error) -> HttpError {
    let mut cause: Option<&(dyn Error + 'static)> = Some(&e);
    while let Some(error) = cause {
        if let Some(body) = error.downcast_ref::<BodyError>() {
            return (*body).into();
        }
        cause = error.source();
    }
    Failure::invalid(format!("the form cannot be read: {e}")).into()
}
