//! Events of a session, under OpenAI's names.

use super::super::error::ErrorBody;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use triptych_core::Failure;

/// Name under which a commit of too little audio is refused.
pub(super) const EMPTY_COMMIT: &str = "input_audio_buffer_commit_empty";
/// Longest id that is repeated to a client, in bytes.
const MAX_ID: usize = 256;

/// An event of a client.
#[derive(Debug, Deserialize)]
#[serde(tag = "type")]
pub(super) enum ClientEvent {
    /// Settings change.
    #[serde(rename = "session.update")]
    Update {
        #[serde(default)]
        session: Value,
    },
    /// Audio arrives, as base64.
    #[serde(rename = "input_audio_buffer.append")]
    Append { audio: String },
    /// The audio so far is an item.
    #[serde(rename = "input_audio_buffer.commit")]
    Commit,
    /// The audio that is not committed goes.
    #[serde(rename = "input_audio_buffer.clear")]
    Clear,
}

/// An event of a client, and its id if it has one.
pub(super) struct Received {
    pub(super) event: Result<ClientEvent, Failure>,
    pub(super) id: Option<String>,
}

impl Received {
    /// Reads a message.
    pub(super) fn read(text: &str) -> Self {
        #[derive(Deserialize)]
        struct Head {
            event_id: Option<String>,
        }
        let head = serde_json::from_str::<Head>(text).ok();
        let id = head.and_then(|head| head.event_id).filter(|id| id.len() <= MAX_ID);
        let event = serde_json::from_str(text).map_err(|e| {
            let message = format!(
                "the event cannot be read ({e}); a session takes session.update, input_audio_buffer.append, .commit and .clear"
            );
            Failure::invalid(message)
        });
        Self { event, id }
    }
}

/// An event of the server.
#[derive(Debug, Serialize)]
#[serde(tag = "type")]
pub(super) enum ServerEvent {
    #[serde(rename = "session.created")]
    Created { session: Value },
    #[serde(rename = "session.updated")]
    Updated { session: Value },
    #[serde(rename = "input_audio_buffer.committed")]
    Committed { item_id: String, previous_item_id: Option<String> },
    #[serde(rename = "input_audio_buffer.cleared")]
    Cleared,
    #[serde(rename = "conversation.item.added")]
    Added { item: Value, previous_item_id: Option<String> },
    #[serde(rename = "conversation.item.input_audio_transcription.delta")]
    Delta { item_id: String, content_index: u32, delta: String },
    #[serde(rename = "conversation.item.input_audio_transcription.completed")]
    Completed { item_id: String, content_index: u32, transcript: String, usage: Value },
    #[serde(rename = "conversation.item.input_audio_transcription.failed")]
    Failed { item_id: String, content_index: u32, error: Value },
    #[serde(rename = "error")]
    Error { error: Value },
}

impl ServerEvent {
    /// An error; `event_id`: the event of the client that it is of.
    pub(super) fn error(failure: &Failure, event_id: Option<String>) -> Self {
        let mut error = error_object(failure);
        error["event_id"] = json!(event_id);
        Self::Error { error }
    }

    /// The end of an item that cannot be transcribed.
    pub(super) fn failed(item_id: String, failure: &Failure) -> Self {
        Self::Failed { item_id, content_index: 0, error: error_object(failure) }
    }

    /// The item of committed audio.
    pub(super) fn added(item_id: &str, previous_item_id: Option<String>) -> Self {
        let content = json!([{"type": "input_audio", "transcript": null}]);
        let item = json!({
            "id": item_id, "object": "realtime.item", "type": "message", "status": "completed", "role": "user",
            "content": content,
        });
        Self::Added { item, previous_item_id }
    }

    /// The event as it is sent, with its number as its id.
    pub(super) fn text(&self, number: u64) -> String {
        #[derive(Serialize)]
        struct Sent<'a> {
            event_id: String,
            #[serde(flatten)]
            event: &'a ServerEvent,
        }
        let sent = Sent { event_id: format!("event_{number}"), event: self };
        serde_json::to_string(&sent).unwrap_or_default()
    }
}

fn error_object(failure: &Failure) -> Value {
    let body = serde_json::to_value(ErrorBody::from(failure)).unwrap_or_default();
    let mut error = body.get("error").cloned().unwrap_or_default();
    if let (true, Some(param)) = (error["code"].is_null(), failure.param.as_deref()) {
        // OpenAI's code for a commit of too little audio.
        if param == EMPTY_COMMIT {
            error["code"] = json!(EMPTY_COMMIT);
            error["param"] = Value::Null;
        }
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_and_what_is_none_is_refused_with_its_id() {
        let read = |text: &str| Received::read(text);
        assert!(matches!(
            read(r#"{"type": "input_audio_buffer.append", "audio": "AAA=", "event_id": "e"}"#).event,
            Ok(ClientEvent::Append { audio }) if audio == "AAA="
        ));
        assert!(matches!(read(r#"{"type": "input_audio_buffer.commit"}"#).event, Ok(ClientEvent::Commit)));
        let other = read(r#"{"type": "response.create", "event_id": "e7"}"#);
        assert_eq!(other.id.as_deref(), Some("e7"));
        let failure = other.event.unwrap_err();
        assert!(failure.message.contains("response.create"), "{failure}");
        for text in ["", "[]", "{}", "{\"type\": 7}", "{\"type\": \"input_audio_buffer.append\"}"] {
            assert!(read(text).event.is_err(), "{text}");
        }
    }

    #[test]
    fn events_have_a_type_and_an_id() {
        let event = ServerEvent::error(&Failure::invalid("no").with_param("session.type"), Some("e".into()));
        let expect = json!({
            "type": "error", "event_id": "event_3",
            "error": {"type": "invalid_request_error", "code": null, "message": "no", "param": "session.type", "event_id": "e"},
        });
        assert_eq!(serde_json::from_str::<Value>(&event.text(3)).unwrap(), expect);
        let cleared = serde_json::from_str::<Value>(&ServerEvent::Cleared.text(0)).unwrap();
        assert_eq!(cleared, json!({"type": "input_audio_buffer.cleared", "event_id": "event_0"}));
    }
}
