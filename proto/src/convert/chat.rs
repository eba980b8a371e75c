//! Conversations, their tools, and the format of a model's conversations.

use super::{WireError, required};
use crate::v1;
use triptych_core::ItemIdx;
use triptych_core::prompt::{
    CallReference, Chat, ChatEnding, ChatFormat, Message, MessagePart, ReasoningSyntax, Role, Tool, ToolCall,
    ToolChoice, ToolSyntax,
};

impl From<MessagePart> for v1::Part {
    fn from(part: MessagePart) -> Self {
        use v1::part::Kind;
        let kind = match part {
            MessagePart::Text(text) => Kind::Text(text),
            MessagePart::Item(ItemIdx(i)) => Kind::Item(i),
            MessagePart::Reasoning(text) => Kind::Reasoning(text),
            MessagePart::ToolCall(ToolCall { id, name, arguments }) => {
                Kind::ToolCall(v1::ToolCall { id, name, arguments })
            }
            MessagePart::ResultOf(CallReference { id, name }) => {
                Kind::ResultOf(v1::CallReference { id, name })
            }
        };
        Self { kind: Some(kind) }
    }
}

impl TryFrom<v1::Part> for MessagePart {
    type Error = WireError;

    fn try_from(part: v1::Part) -> Result<Self, WireError> {
        use v1::part::Kind;
        Ok(match required(part.kind, "part")? {
            Kind::Text(text) => Self::Text(text),
            Kind::Item(i) => Self::Item(ItemIdx(i)),
            Kind::Reasoning(text) => Self::Reasoning(text),
            Kind::ToolCall(v1::ToolCall { id, name, arguments }) => {
                Self::ToolCall(ToolCall { id, name, arguments })
            }
            Kind::ResultOf(v1::CallReference { id, name }) => Self::ResultOf(CallReference { id, name }),
        })
    }
}

impl From<Message> for v1::Message {
    fn from(m: Message) -> Self {
        let role = match m.role {
            Role::System => v1::Role::System,
            Role::User => v1::Role::User,
            Role::Assistant => v1::Role::Assistant,
            Role::Tool => v1::Role::Tool,
        };
        Self { role: role.into(), parts: m.parts.into_iter().map(Into::into).collect() }
    }
}

impl TryFrom<v1::Message> for Message {
    type Error = WireError;

    fn try_from(m: v1::Message) -> Result<Self, WireError> {
        let role = match v1::Role::try_from(m.role) {
            Ok(v1::Role::System) => Role::System,
            Ok(v1::Role::User) => Role::User,
            Ok(v1::Role::Assistant) => Role::Assistant,
            Ok(v1::Role::Tool) => Role::Tool,
            Ok(v1::Role::Unspecified) | Err(_) => {
                return Err(WireError::Enum { field: "role", value: m.role, set: "Role" });
            }
        };
        Ok(Self { role, parts: m.parts.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()? })
    }
}

impl From<Tool> for v1::Tool {
    fn from(t: Tool) -> Self {
        Self { name: t.name, description: t.description, parameters: t.parameters, strict: t.is_strict }
    }
}

impl From<v1::Tool> for Tool {
    fn from(t: v1::Tool) -> Self {
        Self { name: t.name, description: t.description, parameters: t.parameters, is_strict: t.strict }
    }
}

impl From<Chat> for v1::prompt::Chat {
    fn from(chat: Chat) -> Self {
        let (tool_choice, tool_name) = match chat.tool_choice {
            ToolChoice::Auto => (v1::ToolChoice::Unspecified, String::new()),
            ToolChoice::None => (v1::ToolChoice::None, String::new()),
            ToolChoice::Required => (v1::ToolChoice::Required, String::new()),
            ToolChoice::Named(name) => (v1::ToolChoice::Named, name),
        };
        let ending = match chat.ending {
            ChatEnding::GenerationPrompt => v1::ChatEnding::Unspecified,
            ChatEnding::LastMessage => v1::ChatEnding::LastMessage,
            ChatEnding::OpenMessage => v1::ChatEnding::OpenMessage,
        };
        Self {
            messages: chat.messages.into_iter().map(Into::into).collect(),
            tools: chat.tools.into_iter().map(Into::into).collect(),
            tool_choice: tool_choice.into(),
            tool_name,
            single_call: chat.has_single_call,
            hide_reasoning: chat.hides_reasoning,
            ending: ending.into(),
            documents: chat.documents,
            template_kwargs: chat.template_kwargs,
            chat_template: chat.template,
        }
    }
}

impl TryFrom<v1::prompt::Chat> for Chat {
    type Error = WireError;

    fn try_from(chat: v1::prompt::Chat) -> Result<Self, WireError> {
        let tool_choice = match v1::ToolChoice::try_from(chat.tool_choice) {
            Ok(v1::ToolChoice::Unspecified | v1::ToolChoice::Auto) => ToolChoice::Auto,
            Ok(v1::ToolChoice::None) => ToolChoice::None,
            Ok(v1::ToolChoice::Required) => ToolChoice::Required,
            Ok(v1::ToolChoice::Named) => ToolChoice::Named(chat.tool_name),
            Err(_) => {
                let (field, value) = ("tool_choice", chat.tool_choice);
                return Err(WireError::Enum { field, value, set: "ToolChoice" });
            }
        };
        let ending = match v1::ChatEnding::try_from(chat.ending) {
            Ok(v1::ChatEnding::Unspecified | v1::ChatEnding::GenerationPrompt) => {
                ChatEnding::GenerationPrompt
            }
            Ok(v1::ChatEnding::LastMessage) => ChatEnding::LastMessage,
            Ok(v1::ChatEnding::OpenMessage) => ChatEnding::OpenMessage,
            Err(_) => {
                return Err(WireError::Enum { field: "ending", value: chat.ending, set: "ChatEnding" });
            }
        };
        Ok(Self {
            messages: chat.messages.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
            tools: chat.tools.into_iter().map(Into::into).collect(),
            tool_choice,
            has_single_call: chat.single_call,
            hides_reasoning: chat.hide_reasoning,
            ending,
            documents: chat.documents,
            template_kwargs: chat.template_kwargs,
            template: chat.chat_template,
        })
    }
}

impl From<ChatFormat> for v1::ChatFormat {
    fn from(f: ChatFormat) -> Self {
        let tool_syntax = match f.tool_syntax {
            None => v1::ToolSyntax::Unspecified,
            Some(ToolSyntax::Hermes) => v1::ToolSyntax::Hermes,
            Some(ToolSyntax::Llama3Json) => v1::ToolSyntax::Llama3Json,
            Some(ToolSyntax::Mistral) => v1::ToolSyntax::Mistral,
            Some(ToolSyntax::Qwen3Coder) => v1::ToolSyntax::Qwen3Coder,
            Some(ToolSyntax::Glm45) => v1::ToolSyntax::Glm45,
        };
        let reasoning = match f.reasoning {
            None => v1::ReasoningSyntax::Unspecified,
            Some(ReasoningSyntax::ThinkTags) => v1::ReasoningSyntax::ThinkTags,
            Some(ReasoningSyntax::Mistral) => v1::ReasoningSyntax::Mistral,
        };
        Self {
            reads_tools: f.reads_tools,
            reads_documents: f.reads_documents,
            tool_syntax: tool_syntax.into(),
            has_named_args: f.has_named_args,
            reasoning: reasoning.into(),
        }
    }
}

impl From<v1::ChatFormat> for ChatFormat {
    /// A syntax that only a newer worker knows is none.
    fn from(f: v1::ChatFormat) -> Self {
        let tool_syntax = match v1::ToolSyntax::try_from(f.tool_syntax) {
            Ok(v1::ToolSyntax::Hermes) => Some(ToolSyntax::Hermes),
            Ok(v1::ToolSyntax::Llama3Json) => Some(ToolSyntax::Llama3Json),
            Ok(v1::ToolSyntax::Mistral) => Some(ToolSyntax::Mistral),
            Ok(v1::ToolSyntax::Qwen3Coder) => Some(ToolSyntax::Qwen3Coder),
            Ok(v1::ToolSyntax::Glm45) => Some(ToolSyntax::Glm45),
            Ok(v1::ToolSyntax::Unspecified) | Err(_) => None,
        };
        let reasoning = match v1::ReasoningSyntax::try_from(f.reasoning) {
            Ok(v1::ReasoningSyntax::ThinkTags) => Some(ReasoningSyntax::ThinkTags),
            Ok(v1::ReasoningSyntax::Mistral) => Some(ReasoningSyntax::Mistral),
            Ok(v1::ReasoningSyntax::Unspecified) | Err(_) => None,
        };
        Self {
            reads_tools: f.reads_tools,
            reads_documents: f.reads_documents,
            tool_syntax,
            has_named_args: f.has_named_args,
            reasoning,
        }
    }
}
