//! Conversations: messages, the tools that their model may call, and the format in which a model calls them.
//!
//! JSON stays text here: its keys keep the order that the client gave them, which a chat template shows to the model.

use crate::ItemIdx;

/// Author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The application's instructions.
    System,
    /// The user.
    User,
    /// The model, in an earlier turn.
    Assistant,
    /// A tool, with the result of a call.
    Tool,
}

impl Role {
    /// The name that chat templates use.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One part of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessagePart {
    /// Text.
    Text(String),
    /// The item with this index.
    Item(ItemIdx),
    /// Reasoning of the model before its answer, in an earlier turn.
    Reasoning(String),
    /// A call that the model made in an earlier turn.
    ToolCall(ToolCall),
    /// The call whose result the message of a tool holds.
    ResultOf(CallReference),
}

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Author.
    pub role: Role,
    /// Content, in order.
    pub parts: Vec<MessagePart>,
}

/// A call of a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCall {
    /// Id by which the result refers to it; empty where the client has none.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// Arguments: a JSON object.
    pub arguments: String,
}

/// The call that a result is of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallReference {
    /// Its id; empty where the client has none.
    pub id: String,
    /// Name of the tool; empty where the client gave none.
    pub name: String,
}

/// A tool that the model may call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// Its purpose, for the model.
    pub description: Option<String>,
    /// JSON schema of its arguments; `None`: an object without fields.
    pub parameters: Option<String>,
    /// True if calls must fit the schema.
    pub is_strict: bool,
}

/// Calls that an answer may or must make.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model chooses.
    #[default]
    Auto,
    /// None is made of the answer: it is text.
    None,
    /// At least one.
    Required,
    /// One call of this tool.
    Named(String),
}

/// End of a rendered conversation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChatEnding {
    /// The header of the assistant's next message (`add_generation_prompt`).
    #[default]
    GenerationPrompt,
    /// The last message, complete.
    LastMessage,
    /// The last message without what ends it: the model goes on with it (`continue_final_message`).
    OpenMessage,
}

/// A conversation, and the ways in which it is rendered and answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chat {
    /// The messages, at least one.
    pub messages: Vec<Message>,
    /// Tools that the model may call.
    pub tools: Vec<Tool>,
    /// Calls that the answer may or must make.
    pub tool_choice: ToolChoice,
    /// True if the answer makes one call at most, where calls are constrained.
    pub has_single_call: bool,
    /// True if reasoning is left out of the answer.
    pub hides_reasoning: bool,
    /// End of the rendered text.
    pub ending: ChatEnding,
    /// Documents for the template: a JSON list.
    pub documents: Option<String>,
    /// Variables for the template: a JSON object.
    pub template_kwargs: Option<String>,
    /// Template in the place of the model's.
    pub template: Option<String>,
}

impl From<Vec<Message>> for Chat {
    fn from(messages: Vec<Message>) -> Self {
        Self { messages, ..Self::default() }
    }
}

/// Syntax in which a model writes calls of tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolSyntax {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen.
    Hermes,
    /// `{"name": …, "parameters": …}`, after `<|python_tag|>` or bare: Llama 3.
    Llama3Json,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}]`, or `[TOOL_CALLS]name[ARGS]{…}`: Mistral.
    Mistral,
    /// `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder.
    Qwen3Coder,
    /// `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM-4.5 and later.
    Glm45,
}

impl ToolSyntax {
    /// Every syntax.
    pub const ALL: [Self; 5] = [Self::Hermes, Self::Llama3Json, Self::Mistral, Self::Qwen3Coder, Self::Glm45];

    /// True if arguments stand in tags, and not in JSON.
    pub const fn is_tagged(self) -> bool {
        matches!(self, Self::Qwen3Coder | Self::Glm45)
    }

    /// The name of its parser, as in vLLM.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Llama3Json => "llama3_json",
            Self::Mistral => "mistral",
            Self::Qwen3Coder => "qwen3_coder",
            Self::Glm45 => "glm45",
        }
    }
}

/// The format of a model's conversations, by its chat template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChatFormat {
    /// True if the template shows tools to the model.
    pub reads_tools: bool,
    /// True if the template shows documents to the model.
    pub reads_documents: bool,
    /// Syntax of calls, where one is known.
    pub tool_syntax: Option<ToolSyntax>,
    /// True if each call names its tool before `[ARGS]`, as Mistral's do from version 11 on.
    pub has_named_args: bool,
    /// Marks around the model's reasoning; `None`: it writes none.
    pub reasoning: Option<ReasoningSyntax>,
}

/// Marks around a model's reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningSyntax {
    /// `<think>` and `</think>`: DeepSeek-R1, Qwen3 and most others.
    ThinkTags,
    /// `[THINK]` and `[/THINK]`: Magistral.
    Mistral,
}

impl ReasoningSyntax {
    /// The marks that begin and end reasoning.
    pub const fn marks(self) -> [&'static str; 2] {
        match self {
            Self::ThinkTags => ["<think>", "</think>"],
            Self::Mistral => ["[THINK]", "[/THINK]"],
        }
    }
}
