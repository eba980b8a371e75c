//! Prompts and messages.

use super::{WireError, required};
use crate::v1;
use triptych_core::ItemIdx;
use triptych_core::prompt::{Message, Part, Prompt, Role, SpeechKind, SpeechTask, TextOrTokens};

impl From<TextOrTokens> for v1::TextOrTokens {
    fn from(t: TextOrTokens) -> Self {
        use v1::text_or_tokens::Kind;
        Self {
            kind: Some(match t {
                TextOrTokens::Text(text) => Kind::Text(text),
                TextOrTokens::Tokens(ids) => Kind::Tokens(v1::TokenIds { ids }),
            }),
        }
    }
}

impl TryFrom<v1::TextOrTokens> for TextOrTokens {
    type Error = WireError;

    fn try_from(t: v1::TextOrTokens) -> Result<Self, WireError> {
        use v1::text_or_tokens::Kind;
        Ok(match required(t.kind, "text or tokens")? {
            Kind::Text(text) => Self::Text(text),
            Kind::Tokens(v1::TokenIds { ids }) => Self::Tokens(ids),
        })
    }
}

impl From<Message> for v1::Message {
    fn from(m: Message) -> Self {
        use v1::part::Kind;
        let part = |p| v1::Part {
            kind: Some(match p {
                Part::Text(text) => Kind::Text(text),
                Part::Item(ItemIdx(i)) => Kind::Item(i),
            }),
        };
        let role = match m.role {
            Role::System => v1::Role::System,
            Role::User => v1::Role::User,
            Role::Assistant => v1::Role::Assistant,
        };
        Self { role: role.into(), parts: m.parts.into_iter().map(part).collect() }
    }
}

impl TryFrom<v1::Message> for Message {
    type Error = WireError;

    fn try_from(m: v1::Message) -> Result<Self, WireError> {
        use v1::part::Kind;
        let role = match v1::Role::try_from(m.role) {
            Ok(v1::Role::System) => Role::System,
            Ok(v1::Role::User) => Role::User,
            Ok(v1::Role::Assistant) => Role::Assistant,
            Ok(v1::Role::Unspecified) | Err(_) => {
                return Err(WireError::Enum { field: "role", value: m.role, set: "Role" });
            }
        };
        let part = |p: v1::Part| {
            Ok(match required(p.kind, "part")? {
                Kind::Text(text) => Part::Text(text),
                Kind::Item(i) => Part::Item(ItemIdx(i)),
            })
        };
        Ok(Self { role, parts: m.parts.into_iter().map(part).collect::<Result<_, _>>()? })
    }
}

impl From<Prompt> for v1::Prompt {
    fn from(p: Prompt) -> Self {
        use v1::prompt::{Chat, Explicit, Kind};
        let kind = match p {
            Prompt::Chat(messages) => {
                Kind::Chat(Chat { messages: messages.into_iter().map(Into::into).collect() })
            }
            Prompt::Singleton(t) => Kind::Singleton(t.into()),
            Prompt::Explicit { encoder, decoder } => {
                Kind::Explicit(Explicit { encoder: encoder.map(Into::into), decoder: Some(decoder.into()) })
            }
            Prompt::Speech(task) => Kind::Speech(task.into()),
        };
        Self { kind: Some(kind) }
    }
}

impl TryFrom<v1::Prompt> for Prompt {
    type Error = WireError;

    fn try_from(p: v1::Prompt) -> Result<Self, WireError> {
        use v1::prompt::Kind;
        Ok(match required(p.kind, "prompt")? {
            Kind::Chat(chat) => {
                Self::Chat(chat.messages.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?)
            }
            Kind::Singleton(t) => Self::Singleton(t.try_into()?),
            Kind::Explicit(e) => Self::Explicit {
                encoder: e.encoder.map(TryInto::try_into).transpose()?,
                decoder: required(e.decoder, "prompt.explicit.decoder")?.try_into()?,
            },
            Kind::Speech(task) => Self::Speech(task.try_into()?),
        })
    }
}

impl From<SpeechTask> for v1::SpeechTask {
    fn from(t: SpeechTask) -> Self {
        let kind = match t.kind {
            SpeechKind::Transcribe => v1::SpeechKind::Transcribe,
            SpeechKind::Translate => v1::SpeechKind::Translate,
        };
        Self { kind: kind.into(), language: t.language, prompt: t.prompt, timestamps: t.timestamps }
    }
}

impl TryFrom<v1::SpeechTask> for SpeechTask {
    type Error = WireError;

    fn try_from(t: v1::SpeechTask) -> Result<Self, WireError> {
        let kind = match v1::SpeechKind::try_from(t.kind) {
            Ok(v1::SpeechKind::Unspecified | v1::SpeechKind::Transcribe) => SpeechKind::Transcribe,
            Ok(v1::SpeechKind::Translate) => SpeechKind::Translate,
            Err(_) => return Err(WireError::Enum { field: "speech.kind", value: t.kind, set: "SpeechKind" }),
        };
        Ok(Self { kind, language: t.language, prompt: t.prompt, timestamps: t.timestamps })
    }
}
