//! The output of a response from the deltas of an answer: items in the order in which they begin, and the events that tell of
//! them. Both forms of a response come from here, so a stream ends with what the whole object would have been.

use super::super::token_logprob::TokenLogprob;
use super::schema::{Event, EventFields, OutputItem, Part, Place, Status};
use triptych_proto::v1;

/// Writes the output.
#[derive(Debug)]
pub(super) struct OutputWriter {
    /// Id of the response, without its prefix: a part of the ids of items.
    id: String,
    items: Vec<OutputItem>,
    /// True while the last item goes on.
    is_open: bool,
    /// Log-probabilities of tokens whose text is not written yet.
    pending: Vec<TokenLogprob>,
    is_cut: bool,
    n_reasoning_tokens: u32,
}

/// A complete output.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) items: Vec<OutputItem>,
    /// True if the largest number of tokens cut it.
    pub(super) is_cut: bool,
    pub(super) n_reasoning_tokens: u32,
}

impl OutputWriter {
    /// An output without items; `id` is that of the response.
    pub(super) fn new(id: &str) -> Self {
        let id = id.strip_prefix("resp_").unwrap_or(id).to_owned();
        let (items, pending) = (Vec::new(), Vec::new());
        Self { id, items, is_open: false, pending, is_cut: false, n_reasoning_tokens: 0 }
    }

    /// Adds a delta; the events that tell of it, in order.
    pub(super) fn push(&mut self, delta: v1::Delta) -> Vec<Event> {
        let mut events = Vec::new();
        self.pending.extend(delta.logprobs.into_iter().map(TokenLogprob::from));
        if !delta.reasoning.is_empty() {
            if delta.text.is_empty() && delta.tool_calls.is_empty() {
                let n = u32::try_from(delta.token_ids.len()).unwrap_or(u32::MAX);
                self.n_reasoning_tokens = self.n_reasoning_tokens.saturating_add(n);
            }
            self.add_reasoning(delta.reasoning, &mut events);
        }
        if !delta.text.is_empty() {
            self.add_text(delta.text, &mut events);
        }
        for call in delta.tool_calls {
            self.add_call(call, &mut events);
        }
        self.is_cut |= delta.finish_reason == i32::from(v1::FinishReason::Length);
        events
    }

    /// The complete output, and the events that end it. An answer without anything is an empty message.
    pub(super) fn finish(mut self) -> (Output, Vec<Event>) {
        let mut events = Vec::new();
        if self.items.is_empty() {
            self.open_message(&mut events);
        }
        let status = if self.is_cut { Status::Incomplete } else { Status::Completed };
        self.close(status, &mut events);
        let Self { items, is_cut, n_reasoning_tokens, .. } = self;
        (Output { items, is_cut, n_reasoning_tokens }, events)
    }

    /// The items so far, of an answer that failed.
    pub(super) fn into_items(self) -> Vec<OutputItem> {
        self.items
    }

    fn add_reasoning(&mut self, delta: String, events: &mut Vec<Event>) {
        // Log-probabilities are of the text alone.
        self.pending.clear();
        if !(self.is_open && matches!(self.items.last(), Some(OutputItem::Reasoning { .. }))) {
            let id = self.next_id("rs");
            let (summary, content, encrypted_content) = ([], Vec::new(), None);
            let status = Status::InProgress;
            let item = OutputItem::Reasoning { id, summary, content, encrypted_content, status };
            self.open(item, Some(Part::ReasoningText { text: String::new() }), events);
        }
        let place = self.place();
        if let Some(Part::ReasoningText { text }) = self.items.last_mut().and_then(OutputItem::part) {
            text.push_str(&delta);
        }
        events.push(event("response.reasoning_text.delta", EventFields::ReasoningDelta { place, delta }));
    }

    fn add_text(&mut self, delta: String, events: &mut Vec<Event>) {
        if !(self.is_open && matches!(self.items.last(), Some(OutputItem::Message { .. }))) {
            self.open_message(events);
        }
        let place = self.place();
        let added = std::mem::take(&mut self.pending);
        if let Some(Part::OutputText { text, logprobs, .. }) =
            self.items.last_mut().and_then(OutputItem::part)
        {
            text.push_str(&delta);
            logprobs.extend(added.iter().cloned());
        }
        let fields = EventFields::TextDelta { place, delta, logprobs: added };
        events.push(event("response.output_text.delta", fields));
    }

    fn add_call(&mut self, call: v1::ToolCallDelta, events: &mut Vec<Event>) {
        self.pending.clear();
        // The first piece of a call alone has its id.
        if !call.id.is_empty() {
            let item = OutputItem::FunctionCall {
                id: self.next_id("fc"),
                call_id: call.id,
                name: call.name,
                arguments: String::new(),
                status: Status::InProgress,
            };
            self.open(item, None, events);
        }
        if call.arguments.is_empty() {
            return;
        }
        let Place { item_id, output_index, .. } = self.place();
        if let Some(OutputItem::FunctionCall { arguments, .. }) = self.items.last_mut() {
            arguments.push_str(&call.arguments);
            let fields = EventFields::ArgumentsDelta { item_id, output_index, delta: call.arguments };
            events.push(event("response.function_call_arguments.delta", fields));
        }
    }

    fn open_message(&mut self, events: &mut Vec<Event>) {
        let (id, status) = (self.next_id("msg"), Status::InProgress);
        let item = OutputItem::Message { id, status, role: "assistant", content: Vec::new() };
        let part = Part::OutputText { text: String::new(), annotations: [], logprobs: Vec::new() };
        self.open(item, Some(part), events);
    }

    /// Begins an item after the one before has ended.
    fn open(&mut self, item: OutputItem, part: Option<Part>, events: &mut Vec<Event>) {
        self.close(Status::Completed, events);
        let output_index = self.items.len();
        let fields = EventFields::Item { output_index, item: item.clone() };
        events.push(event("response.output_item.added", fields));
        self.items.push(item);
        self.is_open = true;
        let Some(part) = part else { return };
        if let Some(content) = self.items.last_mut().and_then(OutputItem::content) {
            content.push(part.clone());
        }
        events.push(event("response.content_part.added", EventFields::Part { place: self.place(), part }));
    }

    /// Ends the item that goes on.
    fn close(&mut self, end: Status, events: &mut Vec<Event>) {
        if !std::mem::replace(&mut self.is_open, false) {
            return;
        }
        let place = self.place();
        let output_index = place.output_index;
        let Some(item) = self.items.last_mut() else { return };
        match item.part().cloned() {
            Some(Part::OutputText { text, logprobs, annotations }) => {
                let fields = EventFields::TextDone {
                    place: place.clone(),
                    text: text.clone(),
                    logprobs: logprobs.clone(),
                };
                events.push(event("response.output_text.done", fields));
                let part = Part::OutputText { text, logprobs, annotations };
                events.push(event("response.content_part.done", EventFields::Part { place, part }));
            }
            Some(Part::ReasoningText { text }) => {
                let fields = EventFields::ReasoningDone { place: place.clone(), text: text.clone() };
                events.push(event("response.reasoning_text.done", fields));
                let part = Part::ReasoningText { text };
                events.push(event("response.content_part.done", EventFields::Part { place, part }));
            }
            None => {}
        }
        if let OutputItem::FunctionCall { id, name, arguments, .. } = item {
            let (item_id, name, arguments) = (id.clone(), name.clone(), arguments.clone());
            let fields = EventFields::ArgumentsDone { item_id, output_index, name, arguments };
            events.push(event("response.function_call_arguments.done", fields));
        }
        *item.status() = end;
        events
            .push(event("response.output_item.done", EventFields::Item { output_index, item: item.clone() }));
    }

    fn next_id(&self, prefix: &str) -> String {
        format!("{prefix}_{}_{}", self.id, self.items.len())
    }

    /// Place of the only part of the last item.
    fn place(&self) -> Place {
        let item_id = self.items.last().map(|item| item.id().to_owned()).unwrap_or_default();
        Place { item_id, output_index: self.items.len().saturating_sub(1), content_index: 0 }
    }
}

fn event(kind: &'static str, fields: EventFields) -> Event {
    Event { kind, fields }
}

impl OutputItem {
    fn id(&self) -> &str {
        match self {
            Self::Reasoning { id, .. } | Self::Message { id, .. } | Self::FunctionCall { id, .. } => id,
        }
    }

    fn status(&mut self) -> &mut Status {
        match self {
            Self::Reasoning { status, .. }
            | Self::Message { status, .. }
            | Self::FunctionCall { status, .. } => status,
        }
    }

    fn content(&mut self) -> Option<&mut Vec<Part>> {
        match self {
            Self::Reasoning { content, .. } | Self::Message { content, .. } => Some(content),
            Self::FunctionCall { .. } => None,
        }
    }

    fn part(&mut self) -> Option<&mut Part> {
        self.content()?.last_mut()
    }
}
