//! The answer, the stage times, and the source of each item.

use serde_json::{Value, json};
use triptych_proto::v1::generate_response::Accepted;
use triptych_proto::v1::{Delta, FinishReason, ItemSource, StageTimes, Summary};

/// The received part of an answer.
#[derive(Debug, Default)]
pub struct ReceivedAnswer {
    /// Its text. Speech models begin with a space, which is left out.
    pub text: String,
    /// Names of the items that were sent, in order.
    items: Vec<String>,
    accepted: Accepted,
    finish: FinishReason,
    summary: Option<Summary>,
}

impl ReceivedAnswer {
    /// An empty answer.
    pub fn new(items: Vec<String>) -> Self {
        Self { items, ..Self::default() }
    }

    /// Records that the request was admitted.
    pub fn accept(&mut self, accepted: Accepted) {
        self.accepted = accepted;
    }

    /// New text as it is to be shown.
    pub fn next_piece<'a>(&self, text: &'a str) -> &'a str {
        if self.text.is_empty() { text.trim_start() } else { text }
    }

    /// Appends text.
    pub fn add(&mut self, delta: &Delta) {
        let piece = self.next_piece(&delta.text);
        self.text.push_str(piece);
        if delta.finish_reason() != FinishReason::Unspecified {
            self.finish = delta.finish_reason();
        }
    }

    /// Sets the summary at the end.
    pub fn end(&mut self, summary: Summary) {
        self.summary = Some(summary);
    }

    /// One line: the stages, each item's source, the tokens.
    pub fn to_line(&self) -> String {
        let Some(summary) = &self.summary else { return "the stream ended without a summary".into() };
        let mut parts: Vec<_> = stages(&summary.times.unwrap_or_default())
            .iter()
            .map(|(name, us)| format!("{name} {}", time(*us)))
            .collect();
        parts.extend(self.sources(summary).map(|(name, source)| format!("{name} {source}")));
        let usage = summary.usage.unwrap_or_default();
        parts.push(format!("{} + {} tokens", usage.prompt_tokens, usage.completion_tokens));
        if self.finish == FinishReason::Length {
            parts.push("cut off at the token limit".into());
        }
        parts.join(" · ")
    }

    /// The answer as JSON.
    pub fn to_json(&self) -> Value {
        let summary = self.summary.clone().unwrap_or_default();
        let usage = summary.usage.unwrap_or_default();
        let times: serde_json::Map<_, _> = stages(&summary.times.unwrap_or_default())
            .into_iter()
            .map(|(name, us)| (format!("{}_ms", name.replace(' ', "_")), json!(us as f64 / 1e3)))
            .collect();
        let sources = self.sources(&summary);
        json!({
            "text": self.text,
            "model": self.accepted.model,
            "request_id": self.accepted.request_id,
            "finish_reason": match self.finish {
                FinishReason::Stop => Some("stop"),
                FinishReason::Length => Some("length"),
                FinishReason::ToolCalls => Some("tool_calls"),
                FinishReason::Unspecified => None,
            },
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "times": times,
            "items": sources.map(|(name, source)| json!({"name": name, "source": source})).collect::<Vec<_>>(),
        })
    }

    fn sources<'a>(&'a self, summary: &'a Summary) -> impl Iterator<Item = (&'a str, &'static str)> {
        self.items.iter().map(String::as_str).zip(summary.item_sources().map(source))
    }
}

fn source(source: ItemSource) -> &'static str {
    match source {
        ItemSource::Encoded => "encoded",
        ItemSource::Shared => "shared",
        ItemSource::Cached => "cached",
        ItemSource::Unspecified => "of unknown source",
    }
}

/// Names and microseconds, in the order of a request's way.
fn stages(times: &StageTimes) -> [(&'static str, u64); 7] {
    [
        ("queue", times.queue_us),
        ("encode", times.encode_us),
        ("publish", times.publish_us),
        ("load", times.load_us),
        ("prefill", times.prefill_us),
        ("first token", times.first_token_us),
        ("per token", times.per_token_us),
    ]
}

fn time(us: u64) -> String {
    match us {
        0..10_000 => format!("{:.1} ms", us as f64 / 1e3),
        10_000..10_000_000 => format!("{} ms", us / 1000),
        _ => format!("{:.1} s", us as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_proto::v1::Usage;

    fn answer() -> ReceivedAnswer {
        let mut answer = ReceivedAnswer::new(vec!["a.png".into(), "b.png".into()]);
        for text in [" ", " 4", " 2"] {
            answer.add(&Delta { text: text.into(), ..Delta::default() });
        }
        answer.add(&Delta { finish_reason: FinishReason::Stop.into(), ..Delta::default() });
        answer.end(Summary {
            usage: Some(Usage { prompt_tokens: 7, completion_tokens: 2, ..Usage::default() }),
            times: Some(StageTimes { encode_us: 12_345, first_token_us: 900, ..StageTimes::default() }),
            item_sources: vec![ItemSource::Encoded.into(), ItemSource::Cached.into()],
            ..Summary::default()
        });
        answer
    }

    #[test]
    fn the_line_has_every_stage_and_every_item() {
        assert_eq!(
            answer().to_line(),
            "queue 0.0 ms · encode 12 ms · publish 0.0 ms · load 0.0 ms · prefill 0.0 ms · first token 0.9 ms · \
             per token 0.0 ms · a.png encoded · b.png cached · 7 + 2 tokens"
        );
    }

    #[test]
    fn the_object_has_the_same() {
        let object = answer().to_json();
        assert_eq!(object["text"], "4 2");
        assert_eq!(object["finish_reason"], "stop");
        assert_eq!(object["times"]["first_token_ms"], 0.9);
        assert_eq!(object["items"][1], json!({"name": "b.png", "source": "cached"}));
    }
}
